import pytest
import torch
from rollouts import rollout_of
from tiny import in_double, lora_model, tiny_model
from torch import nn
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from trl.models.packed_attention import KEYWORD
from trl.models.scorer import Scorer
from trl.models.value_model import (
    ValueReader,
    add_value_model,
    load_values,
    save_values,
    split_state,
    value_reader,
    without_values,
)
from trl.models.weights import full_weights
from trl.types import Rows


@pytest.mark.parametrize("make", [tiny_model, lora_model], ids=["plain", "adapter"])
def test_it_is_a_part_of_the_policy_that_engines_do_not_see(make, tmp_path):
    policy = make()
    before = {name: weight.clone() for name, weight in full_weights(policy)}
    add_value_model(policy, None, torch.device("cpu"))
    assert all(p.requires_grad for n, p in policy.named_parameters() if "value_model" in n)
    assert {name: weight.shape for name, weight in full_weights(policy)} == {
        name: weight.shape for name, weight in before.items()
    }
    own, values = split_state(policy.state_dict())
    assert set(values) == {"weight", "bias"}
    with without_values(policy):
        assert set(own) == set(policy.state_dict())
    assert not any(p.any() for p in value_reader(policy).module.parameters())
    torch.nn.init.ones_(value_reader(policy).module.weight)
    save_values(policy, split_state(policy.state_dict())[1], tmp_path)
    torch.nn.init.zeros_(value_reader(policy).module.weight)
    load_values(policy, tmp_path)
    assert value_reader(policy).module.weight.min() == 1.0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_its_own_attention_sees_the_layout(attention):
    """Also where that is not what the policy attends with."""
    policy = tiny_model()
    classifier = LlamaForSequenceClassification(tiny_model(seed=1, num_labels=1).config)
    classifier.set_attn_implementation(attention)
    torch.nn.init.normal_(classifier.score.weight)
    add_value_model(policy, classifier, torch.device("cpu"))
    prompt = [20, 21, 22]
    batch = rollout_of([(prompt, [30, 31, 32]), (prompt, [40, 41, 42])])
    found = {}
    for shared in (True, False):
        options = {"temperature": 1.0, "device": torch.device("cpu"), "shared_prefix": shared}
        scorer = Scorer(pad_id=0, **options)
        found[shared] = scorer(policy, batch, value_reader=value_reader(policy)).values
        assert value_reader(policy).can_pack
    assert (found[True] - found[False]).abs().max() < 1e-5


def test_what_gives_no_value(tmp_path):
    policy = tiny_model()
    with pytest.raises(TypeError, match="must be a sequence classifier .* not LlamaForCausalLM"):
        add_value_model(policy, tiny_model(), torch.device("cpu"))
    add_value_model(policy, None, torch.device("cpu"))
    with pytest.raises(ValueError, match="has no value_model"):
        load_values(policy, tmp_path)


# --- Values, and several readers of one forward, against forwards of one row at a time ---

ROWS = [
    *(([8, 9, 10], ids) for ids in ([20, 21, 22, 1], [20, 21, 23], [20], [])),
    ([11], [24, 25, 1]),
    *(([], ids) for ids in ([26, 27, 28, 1], [29], [])),
    ([12, 13], []),
]
WIDTH = 4


def with_value_head(model, bias=True):
    """A policy and its value head on one decoder."""
    torch.manual_seed(1)
    model.value_head = nn.Linear(32, 1, bias=bias).to(next(model.parameters()).dtype)
    return model


def scorer(**options) -> Scorer:
    return Scorer(pad_id=0, temperature=0.7, device=torch.device("cpu"), **options)


def alone(model, head, temperature=0.7):
    """Log-probabilities and values (B, C) and values at the end (B,), a row at a time."""
    dtype = next(model.parameters()).dtype
    logps, values = (torch.zeros(len(ROWS), WIDTH, dtype=dtype) for _ in range(2))
    ends = torch.zeros(len(ROWS), dtype=dtype)
    for row, (prompt, completion) in enumerate(ROWS):
        if not prompt + completion:
            continue
        hidden = model.model(torch.tensor([prompt + completion])).last_hidden_state[0]
        every, found = hidden, head(hidden)[:, 0]
        if hasattr(model, "lm_head"):
            every = (model.lm_head(hidden) / temperature).log_softmax(-1)
        ends[row] = found[-1]
        for place in range(len(completion)):
            before = len(prompt) + place - 1
            if before >= 0:
                values[row, place] = found[before]
                if hasattr(model, "lm_head"):
                    logps[row, place] = every[before, completion[place]]
    return logps, values, ends


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_close(model, found, wanted, bounds):
    """Values within the first bound, gradients of a weighted sum within the second."""
    losses = []
    for one in (found, wanted):
        weights = [torch.linspace(-1, 1, x.numel()).view(x.shape) for x in one]
        losses.append(sum((x * w).sum() for x, w in zip(one, weights, strict=True)))
    assert all((x - y).abs().max() < bounds[0] for x, y in zip(found, wanted, strict=True))
    ours, theirs = gradient(model, losses[0]), gradient(model, losses[1])
    assert (ours - theirs).norm() / theirs.norm() < bounds[1]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("dtype", "bounds"), [(torch.float64, (1e-10,) * 2), (None, (1e-5, 5e-6))])
def test_policy_and_values_from_one_forward(shared, dtype, bounds):
    """Both heads have gradients, and the decoder runs once."""
    model = tiny_model()
    model = with_value_head(model if dtype is None else in_double(model))
    rows, score = Rows.of(ROWS), scorer(shared_prefix=shared)
    calls = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(KEYWORD in kwargs), with_kwargs=True
    )
    readers = [
        score.token_reader(model),
        ValueReader(model.value_head),
        ValueReader(model.value_head, at_last_token=True),
    ]
    score.read(model, rows, readers)  # with the check
    calls.clear()
    ((logps, *_), (values,), (ends,)), aux_loss = score.read(model, rows, readers)
    assert calls == [shared] and aux_loss is None
    assert_close(model, (logps, values, ends), alone(model, model.value_head), bounds)
    assert values.shape == logps.shape == (len(ROWS), WIDTH) and ends.shape == (len(ROWS),)
    assert ends[7] == 0 and values[5, 0] == 0, "no token, and nothing before the first"


@pytest.mark.parametrize("shared", [True, False])
def test_a_reward_model_scores_the_last_tokens(shared):
    """A classifier of one label, which has no output projection at all."""
    torch.manual_seed(0)
    config = tiny_model().config
    config.num_labels, config.pad_token_id = 1, 0
    model = LlamaForSequenceClassification(config)
    score = scorer(shared_prefix=shared)
    reader = ValueReader(model.score, at_last_token=True)
    ((found,),), _ = score.read(model, Rows.of(ROWS), [reader])
    ends = [
        model(torch.tensor([prompt + ids])).logits[0, 0] if prompt + ids else torch.zeros(())
        for prompt, ids in ROWS
    ]
    assert score.check.enabled == shared
    assert_close(model, (found,), (torch.stack(ends),), (1e-5, 5e-6))


def test_values_do_not_share_the_rounding_of_autocast():
    """The layers below round; the head multiplies what they return in its own precision."""
    model = with_value_head(tiny_model(), bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        ((found,),), _ = scorer().read(
            model, Rows.of(ROWS[:1]), [ValueReader(model.value_head, at_last_token=True)]
        )
    _, _, ends = alone(model, model.value_head)
    assert found.dtype == torch.float32 and not torch.equal(found, found.bfloat16().float())
    assert (found - ends[:1]).abs().max() < 0.05


def test_values_beside_logits_that_cannot_be_reproduced():
    class Unusual(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = 2 * torch.sin(output.logits)
            return output

    torch.manual_seed(0)
    model = with_value_head(Unusual(tiny_model().config))
    score, rows = scorer(), Rows.of(ROWS)
    readers = [score.token_reader(model), ValueReader(model.value_head)]
    ((logps, *_), (values,)), _ = score.read(model, rows, readers)
    assert torch.equal(logps, score(model, rows).logps)
    assert_close(model, (values,), alone(model, model.value_head)[1:2], (1e-5, 5e-6))


def without_layout(kwargs):
    rest = {name: value for name, value in kwargs.items() if name != KEYWORD}
    return rest | {"attention_mask": None}


def test_values_of_a_model_that_ignores_the_layout_are_found_out(caplog):
    """The check compares values by their size: these are small."""
    model = with_value_head(tiny_model())
    with torch.no_grad():
        model.value_head.weight.mul_(1e-4)
        model.value_head.bias.zero_()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (
                args,
                {
                    k: None if k == "attention_mask" else v
                    for k, v in kwargs.items()
                    if k != KEYWORD
                },
            ),
            with_kwargs=True,
        )
    score = scorer()
    rows = Rows.of([([8, 9, 10], [20, 21, 22]), ([8, 9, 10], [23, 24, 25])])
    score.read(model, rows, [ValueReader(model.value_head)])
    assert not score.check.enabled


def test_rollouts_are_rows_too():
    model = with_value_head(tiny_model())
    rows = [row for row in ROWS if row[0]]
    readers = [ValueReader(model.value_head)]
    ((values,),), _ = scorer().read(model, rollout_of(rows), readers)
    ((expected,),), _ = scorer().read(model, Rows.of(rows), readers)
    assert torch.equal(values, expected)


# --- Others behind the prompts of a forward ---

BEHIND = [[8, 9, 10]] * 3 + [[11, 12, 13, 14, 15]] * 2 + [[16, 17]]
OWN = [[20, 21, 1], [22, 23, 24, 25, 1], [26], [27, 28, 1], [29, 30, 31, 1], [32, 33, 34]]
OTHERS = [[40 + i, *ids[:1], 1] for i, ids in enumerate(OWN)]


def behind_scorer(**options) -> Scorer:
    return Scorer(pad_id=0, temperature=0.8, device=torch.device("cpu"), **options)


def answers(completions) -> Rows:
    return Rows.of(list(zip(BEHIND, completions, strict=True)))


@pytest.mark.parametrize("changes", [{}, {"kind": "qwen3"}])
def test_other_completions_lie_behind_the_prompts_of_a_forward(changes):
    """Without gradient: what is trained on has not a bit another one."""
    model = tiny_model(**changes).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    own, others = answers(OWN), answers([*OTHERS[:2], [7], *OTHERS[3:]])
    expected = behind_scorer().logps(model, others)
    weights = torch.rand(6, 5)
    seen, gradients, found = [], [], []
    model.base_model.register_forward_pre_hook(
        lambda module, args, given: seen.append(given["input_ids"].numel()), with_kwargs=True
    )
    for with_others in (False, True):
        model.zero_grad()
        scoring = behind_scorer()
        scoring.packs(model, own, [scoring.token_reader(model)])
        seen.clear()
        if with_others:
            scores, apart = scoring.with_others(model, own, others)
        else:
            scores = scoring(model, own)
        (scores.logps * weights).sum().backward()
        found.append(scores.logps)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*found) and torch.equal(*gradients)
    assert (apart - expected).abs().max() <= 2e-6 and not apart.requires_grad
    assert seen[1] == sum(len(ids) - 1 for ids in others.completion_ids) and model.training
    plain, again = behind_scorer(shared_prefix=False).with_others(model, own, others)
    assert (again - expected).abs().max() <= 2e-6 and plain.logps.requires_grad

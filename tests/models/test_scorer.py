import copy
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rollouts import rollout_of, token_mask
from slow_support import kept_mass
from tiny import SIZES, in_double, tiny_model
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from trl.models import packed_layout as passes
from trl.models.lm_head import cast_head_to_float32
from trl.models.packed_attention import KEYWORD
from trl.models.scorer import Scorer
from trl.ops.logit_statistics import Support
from trl.types import Rows

PROMPTS = [[8, 9, 10], [11, 12], [13, 14, 15, 16, 17]]
COMPLETIONS = [[20, 21, 1], [22], [23, 24, 25, 26, 1]]


def rollout(prompts=PROMPTS, completions=COMPLETIONS) -> Rows:
    return rollout_of(list(zip(prompts, completions, strict=True)))


def scorer(pad_id=0, temperature=1.0, **options) -> Scorer:
    return Scorer(pad_id=pad_id, temperature=temperature, device=torch.device("cpu"), **options)


def row_by_row(model, batch, temperature=1.0):
    """The definition: one unpadded row at a time, from full logits in one forward."""
    shape = len(batch), max(map(len, batch.completion_ids))
    logps = torch.zeros(shape, dtype=next(model.parameters()).dtype)
    entropies = torch.zeros_like(logps)
    rows = zip(batch.prompt_ids, batch.completion_ids, strict=True)
    for row, (prompt, completion) in enumerate(rows):
        if not prompt + completion:
            continue
        logits = model(torch.tensor([prompt + completion])).logits[0] / temperature
        for place, token in enumerate(completion):
            if place + len(prompt) == 0:  # nothing predicts the first token of a document
                continue
            every = logits[len(prompt) + place - 1].log_softmax(-1)
            logps[row, place] = every[token]
            entropies[row, place] = -(every.exp() * every).sum()
    return logps, entropies


def row_masses(model, batch, temperature):
    """What top-p leaves at each token, as logarithms."""
    masses = torch.zeros(token_mask(batch).shape)
    rows = zip(batch.prompt_ids, batch.completion_ids, strict=True)
    for row, (prompt, completion) in enumerate(rows):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0] / temperature
        for place, token in enumerate(completion):
            values = logits[len(prompt) + place - 1].tolist()
            masses[row, place] = math.log(kept_mass(values, token, top_p=0.8))
    return masses


def gradient(model, values):
    model.zero_grad()
    values.backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(grads).clone()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("pad_id", [0, 1, 50])
@pytest.mark.parametrize("multiple", [None, 8])
def test_padded_rows_equal_single_rows(kind, pad_id, multiple):
    model, batch = tiny_model(kind), rollout()
    weights = torch.linspace(-1, 1, token_mask(batch).numel()).view(token_mask(batch).shape)
    expected, expected_entropies = row_by_row(model, batch, temperature=0.7)
    reference = gradient(model, (expected * weights * token_mask(batch)).sum())
    score = scorer(pad_id, 0.7, pad_multiple=multiple)
    scores = score(model, batch, with_entropy=True)
    assert (scores.logps - expected).abs().max() < 1e-5
    assert (scores.entropies - expected_entropies).abs().max() < 1e-5
    ours = gradient(model, (scores.logps * weights * token_mask(batch)).sum())
    assert (ours - reference).norm() / reference.norm() < 5e-6


def test_places_beyond_the_end_are_zero():
    scores = scorer()(tiny_model(), rollout(), with_entropy=True)
    beyond = ~token_mask(rollout())
    assert (scores.logps[beyond] == 0).all() and (scores.entropies[beyond] == 0).all()
    assert (scores.logps[~beyond] < 0).all()


def test_a_row_does_not_depend_on_the_others():
    model = tiny_model()
    together = scorer()(model, rollout()).logps
    alone = scorer()(model, rollout().select([1])).logps
    assert (together[1, :1] - alone[0]).abs().max() < 1e-6


def test_double_precision_padding_has_no_nan():
    model = tiny_model().double()
    scores = scorer()(model, rollout())
    expected, _ = row_by_row(model, rollout())
    # Rotary tables are float32, so padding moves float64 results at that level.
    assert (scores.logps - expected).abs().max() < 1e-5
    assert gradient(model, scores.logps.sum()).isfinite().all()


def test_empty_completion_scores_nothing():
    batch = rollout(PROMPTS, [[], [22], [23]])
    scores = scorer()(tiny_model(), batch)
    assert scores.logps.shape == (3, 1)
    assert scores.logps[0] == 0
    nothing = scorer()(tiny_model(), rollout([[8]], [[]]))
    assert nothing.logps.shape == (1, 0)


def test_scoring_without_gradient_is_in_evaluation_mode():
    model, batch = tiny_model(attention_dropout=0.5).train(), rollout()
    whole = scorer()(model.eval(), batch).logps
    model.train()
    found = scorer().logps(model, batch)
    assert not found.requires_grad and model.training
    assert (found - whole).abs().max() < 1e-6


# --- Groups that share a prompt ---

GROUPS = (
    [[8, 9, 10, 11]] * 4 + [[12, 13]] * 3 + [[14]] * 2,
    [
        *([20, 21, 22, 1], [20, 21, 23, 24, 25, 1], [20, 21], [20, 21, 22, 26]),
        *([30, 1], [], [31, 32, 33, 34, 35, 36, 37, 1]),
        *([40], [41]),
    ],
)
# Prompts of 4, 2 and 1 tokens, a common beginning of 1, and what stands behind it.
TOKENS = 4 + 2 + 1 + 1 + (2 + 4 + 0 + 2) + (1 + 0 + 7)


def packed_forwards(model):
    """Note for each forward of a decoder how many tokens it has, and whether they are packed."""
    calls = []

    def note(module, args, kwargs):
        if "input_ids" in kwargs:
            calls.append((KEYWORD in kwargs, kwargs["input_ids"].shape))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return calls


def check_scores(model, score, reference=None, bound=5e-6):
    """Values and gradients against one row at a time, from the model's own logits."""
    batch = rollout(*GROUPS)
    weights = torch.linspace(-1, 1, token_mask(batch).numel()).view(token_mask(batch).shape)
    weights = weights * token_mask(batch)
    source = model if reference is None else reference
    expected, expected_entropies = row_by_row(source, batch, score.temperature)
    wanted = gradient(source, (expected * weights + 0.1 * expected_entropies).sum())
    masses = row_masses(source, batch, score.temperature)
    scores = score(model, batch, with_entropy=True, statistic=Support(top_p=0.8))
    assert (scores.log_mass - masses).abs().max() < 1e-4 and masses.min() < -0.1
    assert (scores.logps - expected).abs().max() < 1e-5
    assert (scores.entropies - expected_entropies).abs().max() < 1e-5
    found = gradient(model, (scores.logps * weights + 0.1 * scores.entropies).sum())
    assert (found - wanted).norm() / wanted.norm() < bound


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"chunk": 300}, {"chunk": 0}, {"shared_prefix": False}])
def test_groups_equal_single_rows(kind, options):
    model = tiny_model(kind)
    calls = packed_forwards(model)
    check_scores(model, scorer(temperature=0.7, **options))
    packed, shape = calls[-1]
    assert packed is options.get("shared_prefix", True)
    if packed:
        assert shape == (1, TOKENS)
    else:
        assert shape == (9, 10)


def test_groups_equal_single_rows_in_double_precision():
    """Rotary tables are float32, so positions count at that level; nothing else does."""
    model = tiny_model().double()
    check_scores(model, scorer(), bound=1e-6)


def test_a_group_that_is_cut_is_scored_the_same():
    """Rows in pieces, as after running out of memory."""
    model, batch, score = tiny_model(), rollout(*GROUPS), scorer()
    whole = score(model, batch).logps
    for start in range(0, 9, 2):
        part = score(model, batch.select(range(start, min(start + 2, 9)))).logps
        assert (part - whole[start : start + 2, : part.shape[1]]).abs().max() < 1e-6


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant):
    model, plain = tiny_model(), tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    check_scores(model.train(), scorer(), plain)


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_passes_change_nothing(monkeypatch, checkpointing):
    """A row that is long enough is cut, where layers are computed again or no gradient is kept."""
    monkeypatch.setattr(passes, "SHORTEST_PASS", 3)
    model, plain = tiny_model(), tiny_model()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    calls = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    check_scores(model.train(), scorer(), plain)
    assert (calls[-1] < TOKENS) == (checkpointing is False)
    calls.clear()
    batch = rollout(*GROUPS)
    expected, _ = row_by_row(plain, batch)
    assert (scorer().logps(model, batch) - expected).abs().max() < 1e-5
    assert calls[-1] < TOKENS


def test_adapters_and_their_gradients():
    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]
    config = LoraConfig(target_modules=targets, init_lora_weights=False)
    check_scores(get_peft_model(tiny_model(), config), scorer())


def test_an_adapter_on_the_head():
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = get_peft_model(tiny_model(), config)
    check_scores(model, scorer(chunk=300))


@pytest.mark.parametrize("tied", [False, True])
def test_half_precision_with_a_float32_head(tied):
    model = tiny_model(tie_word_embeddings=tied).to(torch.bfloat16)
    cast_head_to_float32(model)
    batch = rollout(*GROUPS)
    expected, _ = row_by_row(model, batch)
    found = scorer()(model, batch).logps
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 0.05


def test_log_probabilities_under_autocast():
    """As close to those of single rows as bfloat16 allows."""
    model, batch = tiny_model(), rollout(*GROUPS)
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = row_by_row(model, batch)
        found = scorer()(model, batch).logps
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 0.05


# --- Models that cannot share ---


def mixtral():
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **experts))


def test_mixtures_of_experts_share_prompts_unless_their_router_is_trained():
    """The load-balancing loss counts each row's own prompt."""
    model, batch = mixtral(), rollout(*GROUPS)
    calls = packed_forwards(model)
    check_scores(model, scorer(), bound=1e-5)
    assert calls[-1][0]
    score = scorer(router_logits=True)
    check_scores(model, score, bound=1e-5)
    assert calls[-1] == (False, (9, 10))
    found = score(model, batch).aux_loss
    ids = torch.zeros(9, 10, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(*GROUPS, strict=True)):
        at = slice(len(prompt + completion))
        ids[row, at], mask[row, at] = torch.tensor(prompt + completion), 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model(ids, mask, positions, output_router_logits=True).aux_loss
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


class Unusual(LlamaForCausalLM):
    """Does something to its logits that no configuration tells about."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 2 * torch.sin(output.logits)
        return output


@pytest.mark.parametrize("multiple", [None, 8])
def test_models_with_unusual_logits_are_scored_by_them(multiple):
    model = Unusual(tiny_model().config)
    calls = packed_forwards(model)
    check_scores(model, scorer(temperature=0.7, pad_multiple=multiple))
    assert not calls[-1][0]


def opt(**changes):
    """Its forward passes by the decoder that `base_model` is, and runs a part of it."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 95,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    return OPTForCausalLM(OPTConfig(**sizes | changes)).eval()


def test_a_decoder_whose_hidden_states_cannot_be_seen_is_scored_by_its_logits(log):
    model, score = opt(), scorer(temperature=0.7)
    check_scores(model, score)
    check_scores(model, score)
    found = [r.getMessage() for r in log.records if "OPTForCausalLM" in r.getMessage()]
    assert len(found) == 1 and "hidden states" in found[0]


# --- Documents: rows without a prompt ---

LONG = [20 + (7 * i) % 60 for i in range(33)]
DOCUMENTS = {
    "alike": [([], [20, 21, 22, 23, 1]), ([], [20, 21, 22, 24, 25, 1]), ([], [20, 21])],
    "short": [([], LONG), ([], [20]), ([], []), ([], [21, 22]), ([], LONG[5:])],
    "one": [([], LONG)],
    "with prompts": [
        *(([8, 9, 10], ids) for ids in ([20, 21, 22, 1], [20, 23], [])),
        *(([], ids) for ids in (LONG, [24], [])),
        ([11], [25, 26, 27]),
        ([], [28, 29, 30]),
    ],
    "prompt first": [([8, 9, 10], [20, 21]), ([], [22, 23, 24])],
}
NOTHING = {"single": [([], [20]), ([], [21])], "empty": [([], []), ([], [])]}


@pytest.mark.parametrize("kind", DOCUMENTS)
@pytest.mark.parametrize("options", [{}, {"chunk": 300}, {"chunk": 0}, {"shared_prefix": False}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_documents_equal_single_rows(kind, options, dtype):
    model, batch = tiny_model(), Rows.of(DOCUMENTS[kind])
    model = in_double(model) if dtype == torch.float64 else model
    score, calls = scorer(temperature=0.7, **options), packed_forwards(model)
    scores = score(model, batch, with_entropy=True)
    packed, shape = calls[-1]
    assert packed == score.check.enabled == options.get("shared_prefix", True)
    if packed:
        assert shape[0] == 1 and shape[1] < sum(len(a + b) for a, b in DOCUMENTS[kind])
    expected = row_by_row(model, batch, 0.7)
    bounds = (1e-10, 1e-10) if dtype == torch.float64 else (1e-5, 5e-6)
    weights = torch.linspace(-1, 1, expected[0].numel()).view(expected[0].shape)
    losses = []
    for logps, entropies in (expected, (scores.logps, scores.entropies)):
        assert (logps - expected[0]).abs().max() < bounds[0]
        assert (entropies - expected[1]).abs().max() < bounds[0]
        losses.append((logps * weights + 0.1 * entropies).sum())
    wanted, found = (gradient(model, loss) for loss in losses)
    assert (found - wanted).norm() / wanted.norm() < bounds[1]


@pytest.mark.parametrize("kind", NOTHING)
@pytest.mark.parametrize("shared", [True, False])
def test_documents_in_which_nothing_is_predicted(kind, shared):
    """Every rank makes its forward, and the gradient is zero, not absent."""
    model, batch = tiny_model(), Rows.of(NOTHING[kind])
    scores = scorer(shared_prefix=shared)(model, batch)
    assert scores.logps.shape == (2, 1 if kind == "single" else 0)
    assert (scores.logps == 0).all()
    assert (gradient(model, scores.logps.sum()) == 0).all()


@pytest.mark.parametrize("shared", [True, False])
def test_documents_never_see_each_other(shared):
    """The gradient of one row stays within its own tokens."""
    model, rows = tiny_model(), DOCUMENTS["with prompts"]
    score, batch = scorer(shared_prefix=shared), Rows.of(rows)
    score(model, batch)
    seen = []
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: seen.append((args[0].flatten(), output)) or None
    )
    logps = score(model, batch).logps
    ids, embedded = seen[-1]
    for row, (prompt, completion) in enumerate(rows):
        (grad,) = torch.autograd.grad(logps[row].sum(), embedded, retain_graph=True)
        reached = ids[grad.flatten(0, 1).abs().sum(-1) > 0].tolist()
        predicts = (prompt + completion)[:-1] if completion else []
        assert sorted(reached) == sorted(predicts)


@pytest.mark.parametrize("kind", ["with prompts", "short"])
def test_documents_in_passes(monkeypatch, kind):
    """Rows with prompts are cut; documents among them are tails that no prefix belongs to."""
    monkeypatch.setattr(passes, "SHORTEST_PASS", 3)
    monkeypatch.setattr(passes, "SHORTEST_TAIL_PASS", 3)
    model, plain, batch = tiny_model().train(), tiny_model(), Rows.of(DOCUMENTS[kind])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    expected, _ = row_by_row(plain, batch)
    found = scorer()(model, batch).logps
    assert (found - expected).abs().max() < 1e-5
    wanted, ours = gradient(plain, expected.square().sum()), gradient(model, found.square().sum())
    assert (ours - wanted).norm() / wanted.norm() < 5e-6
    assert (scorer().logps(model, batch) - expected).abs().max() < 1e-5


def test_documents_of_models_with_unusual_logits():
    model, batch = Unusual(tiny_model().config), Rows.of(DOCUMENTS["short"])
    expected, entropies = row_by_row(model, batch)
    scores = scorer()(model, batch, with_entropy=True, statistic=Support(top_p=0.8))
    assert (scores.logps - expected).abs().max() < 1e-5
    assert (scores.entropies - entropies).abs().max() < 1e-5
    assert scores.log_mass.shape == expected.shape and (scores.log_mass[:, 0] == 0).all()
    wanted, ours = gradient(model, expected.sum()), gradient(model, scores.logps.sum())
    assert (ours - wanted).norm() / wanted.norm() < 5e-6


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_answers_to_one_prompt_and_pairs_of_others_have_no_padding(rows):
    """Chosen and rejected, K answers: the tokens of a forward are counted."""
    answers = [[30 + i, 40, *range(50, 50 + i)] for i in range(rows)]
    batch = Rows.of(
        [*(([8, 9, 10, 11], ids) for ids in answers), ([12], [20, 21]), ([12], [22, 23, 24])]
    )
    model = tiny_model()
    calls = packed_forwards(model)
    found = scorer()(model, batch).logps
    tokens = 4 + sum(len(ids) - 1 for ids in answers) + 1 + 1 + 2
    assert calls[-1] == (True, (1, tokens))
    expected, _ = row_by_row(model, batch)
    assert (found - expected).abs().max() < 1e-5


def twice_in_place(model, score, batches):
    """Gradients of two micro-batches, one backward pass after the other."""
    for batch in batches:
        score(model, batch).logps.sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_in_place_equal_single_rows(kind, tied, checkpointing):
    """The rows hold the padding token of the embedding, whose row has no gradient of its own."""
    batches = [rollout([[8, 0, 10], [11, 0], [13]]), rollout([[30], [31, 32], [0, 33]])]
    model = tiny_model(kind, tie_word_embeddings=tied).train()
    reference = copy.deepcopy(model)
    for batch in batches:
        row_by_row(reference, batch)[0].sum().backward()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    found = twice_in_place(model, scorer(in_place=True), batches)
    for name, parameter in reference.named_parameters():
        assert (found[name] - parameter.grad).norm() <= 2e-6 * parameter.grad.norm(), name
    assert model.get_input_embeddings().padding_idx == 0


def made_for_weights(model, work):
    """Shapes of the gradients that autograd hands to the weights of a model in `work`."""
    handed = []
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
    for node in nodes:
        node.register_prehook(lambda grads: handed.extend(g.shape for g in grads if g is not None))
    work()
    return handed


def test_gradients_of_the_vocabularys_size_are_not_handed_on():
    model = tiny_model(tie_word_embeddings=False)
    size = model.lm_head.weight.shape
    for in_place, count in ((False, 2), (True, 0)):
        loss = scorer(in_place=in_place)(model, rollout()).logps.sum()
        assert made_for_weights(model, loss.backward).count(size) == count


@pytest.mark.parametrize("kind", ["tensor", "post-accumulate"])
def test_hooks_on_a_tied_weight_see_all_of_its_gradient(kind):
    model = tiny_model(tie_word_embeddings=True)
    reference = copy.deepcopy(model)
    row_by_row(reference, rollout())[0].sum().backward()
    seen, weight = [], model.lm_head.weight
    if kind == "tensor":
        weight.register_hook(lambda grad: seen.append(grad.clone()))
    else:
        weight.register_post_accumulate_grad_hook(lambda x: seen.append(x.grad.clone()))
    scorer(in_place=True)(model, rollout()).logps.sum().backward()
    wanted = reference.lm_head.weight.grad
    assert len(seen) == 1 and (seen[0] - wanted).norm() <= 2e-6 * wanted.norm()


@pytest.mark.parametrize("trained", ["embed_tokens", "lm_head"])
def test_an_adapter_that_trains_a_whole_end_of_the_model(trained):
    config = LoraConfig(r=2, target_modules=["v_proj"], modules_to_save=[trained])
    model = get_peft_model(tiny_model(), config)
    reference = copy.deepcopy(model)
    row_by_row(reference, rollout())[0].sum().backward()
    found = twice_in_place(model, scorer(in_place=True), [rollout()])
    for name, parameter in reference.named_parameters():
        if parameter.requires_grad and parameter.grad.norm() > 0:
            assert (found[name] - parameter.grad).norm() <= 2e-6 * parameter.grad.norm(), name
        assert parameter.requires_grad or name not in found


def test_embeddings_of_a_class_of_their_own():
    """Gemma's multiplies what it looks up."""
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES))
    reference = copy.deepcopy(model)
    row_by_row(reference, rollout())[0].sum().backward()
    found = twice_in_place(model, scorer(in_place=True), [rollout()])
    wanted = reference.lm_head.weight.grad
    assert (found["model.embed_tokens.weight"] - wanted).norm() <= 2e-6 * wanted.norm()

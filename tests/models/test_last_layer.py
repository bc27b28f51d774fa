"""The last layer computes its feed-forward part where it is read, and nothing changes by that."""

import copy

import pytest
import torch
from rollouts import rollout_of
from tiny import SIZES, tiny_model
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from trl.models import packed_layout as passes
from trl.models.packed_layout import packed_layout
from trl.models.packed_row import Packing
from trl.models.scorer import Scorer

PROMPTS = [[8, 9, 10], [8, 9, 10], [13, 14, 15, 16, 17], [20, 21]]
COMPLETIONS = [[20, 21, 1], [20, 22], [23, 24, 25, 26, 1], []]
READ = 3 + 5 + 1  # ends of prompts, and all but the last tokens of completions; 20 once


def batch(prompts=PROMPTS, completions=COMPLETIONS):
    return rollout_of(list(zip(prompts, completions, strict=True)))


def scorer(**options):
    return Scorer(pad_id=0, temperature=1.0, device=torch.device("cpu"), **options)


def widths(model):
    """Tokens that each call of a last layer's feed-forward part computes."""
    seen = []
    inner = model.base_model.layers[-1].mlp.down_proj
    inner.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-2]))
    return seen


def recomputing(kind="llama"):
    torch.manual_seed(0)
    gemma = kind == "gemma3"  # has a norm behind its feed-forward part
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES)) if gemma else tiny_model(kind)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def gradients(model, scores):
    """Of a weighted sum of log-probabilities, by parameter."""
    weights = torch.linspace(-1, 1, scores.logps.numel()).view(scores.logps.shape)
    model.zero_grad()
    (scores.logps * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("at_once", [True, False])
def test_gradients_are_those_of_plain_rows(kind, at_once, monkeypatch):
    if not at_once:
        monkeypatch.setattr(passes, "SHORTEST_PASS", 4)
        monkeypatch.setattr(passes, "SHORTEST_TAIL_PASS", 3)
        monkeypatch.setattr(passes, "gradient_bytes", lambda causal: 0)
    model = recomputing(kind)
    score = scorer()
    score(model, batch())  # checks the layout
    seen = widths(model)
    found = score(model, batch())
    assert sum(seen) == READ if at_once else len(seen) > 1 and sum(seen) < 16, seen
    ours = gradients(model, found)
    assert sum(seen) <= 2 * (READ if at_once else 16), "recomputed as well"
    plain = scorer(shared_prefix=False)(model, batch())
    assert (found.logps - plain.logps).abs().max() < 1e-5
    for name, expected in gradients(model, plain).items():
        assert (ours[name] - expected).norm() <= 5e-6 * expected.norm() + 1e-9, name


def test_a_copy_computes_as_before():
    model = tiny_model()
    found = scorer()(model, batch()).logps
    twin = copy.deepcopy(model)
    assert (scorer(shared_prefix=False)(twin, batch()).logps - found).abs().max() < 1e-5
    assert (scorer()(twin, batch()).logps - found).abs().max() < 1e-6


def test_forwards_outside_compute_every_token():
    """Also behind a forward that ended between attention and feed-forward part."""
    model = tiny_model()
    scorer()(model, batch())
    ids = torch.tensor([[8, 9, 10, 11]])
    expected = tiny_model()(ids).logits
    mlp = model.base_model.layers[-1].mlp

    def fail(*_):
        raise MemoryError

    with mlp.gate_proj.register_forward_pre_hook(fail), pytest.raises(MemoryError):
        scorer()(model, batch())
    assert torch.equal(model(ids).logits, expected)


def test_what_others_predict_is_read_behind_an_empty_answer():
    model = recomputing()
    own = batch([[8, 9, 10]] * 2, [[], [20]])
    others = batch([[8, 9, 10]] * 2, [[30, 31], [32]])
    _, found = scorer().with_others(model, own, others)
    expected = scorer(shared_prefix=False).logps(model, others)
    assert (found - expected).abs().max() < 1e-5


def test_documents_are_read_whole():
    layout = packed_layout(batch([[], []], [[5, 6, 7], [8]]), torch.device("cpu"))
    packing = next(x for x in layout.inputs.values() if isinstance(x, Packing))
    assert packing.read_indices is None

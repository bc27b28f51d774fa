"""Recurrent and convolutional layers: what a prompt leaves behind is computed once."""

import copy

import pytest
import rounding
import torch
from rollouts import rollout_of
from torch import nn
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from trl.generation.base import Sampling
from trl.generation.transformers.shared_decoding import SharedPrefixDecoder
from trl.models import packed_layout
from trl.models.lm_head import HeadFinder
from trl.models.scorer import Scorer
from trl.types import prefixes_of

CPU = torch.device("cpu")
SIZES = {"vocab_size": 95, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
SIZES |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
KINDS = ["linear_attention", "full_attention", "linear_attention"]
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
DELTA |= {"linear_value_head_dim": 8, "num_experts": 0, "head_dim": 8, "layer_types": KINDS}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]}
MODELS = {
    "delta rule": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **DELTA)),
    "convolution": lambda: Lfm2ForCausalLM(Lfm2Config(**SIZES, full_attn_idxs=[1])),
    "mamba 2": lambda: BambaForCausalLM(BambaConfig(**SIZES, **MAMBA)),
}
# Two prompts with ragged tails, of which two have a token; before them two documents.
TAILS = ((5, 19, 2, 30), (4, 8, 1))
BATCH = rollout_of(
    [([], [40, 41, 42, 43]), ([], [44] * 9)]
    + [
        ([8 + (3 * group + i) % 40 for i in range(21 - 6 * group)], [*range(20, 20 + n), 1])
        for group, lengths in enumerate(TAILS)
        for n in lengths
    ]
)


def build(kind):
    torch.manual_seed(0)
    return MODELS[kind]()


def scorer(**options):
    return Scorer(pad_id=0, temperature=1.0, device=CPU, **options)


def gradient(model, batch=BATCH, **options):
    logps = scorer(**options)(model, batch).logps
    weights = torch.linspace(-1, 1, logps.numel()).view(logps.shape)
    model.zero_grad()
    (logps * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def said(log):
    return [record.getMessage() for record in log.records if "shared_prefix" in record.getMessage()]


def widths(model):
    """Numbers of tokens of which the first layer was asked to project something."""
    found = []
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
    layer.register_forward_hook(lambda _, args, output: found.append(args[0].shape[:-1].numel()))
    return found


@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_plain_rows(kind, passes, log, monkeypatch):
    model = build(kind).train()
    theirs = gradient(model, shared_prefix=False)
    if passes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for limit in ("SHORTEST_PASS", "SHORTEST_TAIL_PASS"):
            monkeypatch.setattr(packed_layout, limit, 16)
    ours = gradient(model)
    assert not said(log)
    assert (ours - theirs).norm() / theirs.norm() < 5e-6


@pytest.mark.parametrize("kind", MODELS)
def test_prompts_are_computed_once(kind):
    model, score = build(kind).eval(), scorer()
    score.logps(model, BATCH)  # checks the layout
    found = widths(model)
    score.logps(model, BATCH)
    prompts, tails = 21 + 15, 3 + 8 + sum(n for lengths in TAILS for n in lengths)
    assert sum(found) <= prompts + 2 * tails, "less than half of a bucket is repeats"


def test_documents_see_nothing_of_each_other():
    model, rows = build("delta rule"), [list(range(20, 20 + n)) for n in (9, 12, 30, 2)]
    batch = rollout_of([([], ids) for ids in rows])
    ours, theirs = gradient(model, batch), gradient(model, batch, shared_prefix=False)
    assert (ours - theirs).norm() / theirs.norm() < 5e-6 * rounding.slack()


def test_other_completions_of_the_same_prompts():
    """Their prompts end where completions that begin alike go on."""
    model, first = build("delta rule"), BATCH.prompt_ids[2]
    batch = rollout_of([(first, [30, 31, 32]), (first, [30, 31, 40])])
    others = rollout_of([(first, [50, 51]), (first, [52])])
    scores, logps = scorer().with_others(model, batch, others)
    plain = scorer(shared_prefix=False)
    assert (scores.logps - plain(model, batch).logps).abs().max() < 1e-5
    assert (logps - plain.logps(model, others)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", MODELS)
def test_decoding_forks_states(kind):
    """Log-probabilities of what rows of two prompts write, some of them longer than others."""
    model = build(kind).eval()
    scorer().logps(model, BATCH)  # lets its layers understand layouts
    head = HeadFinder(1.0).find(model)
    few = Sampling(max_tokens=9, stop_ids=(20, 21, 22, 23, 24, 25, 26, 27, 28, 29))
    prompts = [BATCH.prompt_ids[2]] * 3 + [BATCH.prompt_ids[-1]] * 2
    ids, logps = SharedPrefixDecoder(model, head, few)(prefixes_of(prompts), range(5))
    assert len({*map(tuple, ids)}) == 5 and len({*map(len, ids)}) > 1
    rows = rollout_of(list(zip(prompts, ids, strict=True)))
    plain = scorer(shared_prefix=False).logps(model, rows)
    for row, told in enumerate(logps):
        assert (plain[row, : len(told)] - torch.tensor(told)).abs().max() < 2e-5


# --- Layers that cannot be forked ---


class Forgets(nn.Module):
    """Notes a state, and never looks at it."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(32, 32)

    def forward(self, hidden_states, past_key_values=None, **kwargs):
        before = hidden_states.cumsum(1)
        if past_key_values is not None:
            past_key_values.update_recurrent_state(before[:, -1], 0)
        return self.mix(before)


def forgetful():
    model = build("convolution")
    model.model.layers[0].conv = Forgets()
    return model


def jamba():
    torch.manual_seed(0)
    ranks = {"mamba_dt_rank": 4, "num_experts": 1, "use_mamba_kernels": False}
    periods = {"attn_layer_period": 2, "attn_layer_offset": 1}
    return JambaForCausalLM(JambaConfig(**SIZES, **ranks, **periods))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (forgetful, "do not continue from a given state"),
        (jamba, "do not receive the packed layout"),
    ],
)
def test_layers_that_do_not_go_on_take_plain_rows(make, words, log):
    model = make()
    ours = gradient(model)
    assert len(said(log)) == 1 and words in said(log)[0]
    theirs = gradient(model, shared_prefix=False)
    assert (ours - theirs).norm() / theirs.norm() < 5e-6


def test_a_model_whose_layers_were_forked_stays_a_model():
    """It can be copied, and computes what it did."""
    model, ids = build("delta rule").eval(), torch.arange(20, 40)[None]
    with torch.no_grad():
        before = model(ids).logits
        scorer().logps(model, BATCH)
        assert torch.equal(copy.deepcopy(model)(ids).logits, before)

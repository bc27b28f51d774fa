"""Under autocast, the trial before prompts are shared tests what trains."""

import pytest
import torch
from faulty_kernels import break_kernels
from peft import LoraConfig, get_peft_model
from rollouts import rollout_of
from tiny import tiny_model
from transformers.utils import logging

from trl.models import layout_check
from trl.models.autocast import autocast_of, precisions_to_check
from trl.models.kernel_check import Heads
from trl.models.packed_attention import KEYWORD
from trl.models.scorer import Scorer
from trl.types import Rollout

CPU = torch.device("cpu")
HALF = torch.bfloat16


@pytest.fixture
def log(caplog):
    logging.enable_propagation()
    yield caplog
    logging.disable_propagation()


def warnings(log):
    return [r.getMessage() for r in log.records if "shared_prefix" in r.getMessage()]


def batch() -> Rollout:
    prompt = [20, 21, 22]
    return rollout_of([(prompt, [30, 31, 32, 33]), (prompt, [40, 41, 42, 43])])


def prepared(model, dtype=HALF):
    """Autocast around the forward of the outermost module, where accelerate puts it."""
    model.forward = torch.autocast("cpu", dtype)(model.forward)
    return model


def adapter():
    return get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["v_proj"]))


def scorer(**options) -> Scorer:
    return Scorer(pad_id=0, temperature=1.0, device=CPU, **options)


def layouts(model):
    """Whether each forward of the decoder is packed, and the precision of its autocast."""
    calls = []

    def note(module, args, kwargs):
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        calls.append((KEYWORD in kwargs, dtype))

    model.model.register_forward_pre_hook(note, with_kwargs=True)
    return calls


@pytest.mark.parametrize("build", [tiny_model, adapter])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_the_autocast_around_a_decoder(build, dtype):
    """Nothing of the model runs to find it out, and hooks do not fire."""
    model = build()
    if dtype is not None:
        model = prepared(model, dtype)
    calls = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: calls.append("after"))
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    assert autocast_of(model) == dtype
    with torch.autocast("cpu", torch.float16):
        assert autocast_of(model) == (dtype or torch.float16)
    assert not calls
    model(input_ids=torch.tensor([[20, 21]]))
    assert calls, "the decoder runs again"


@pytest.mark.parametrize(
    ("weights", "autocast", "tried"),
    [
        (torch.float32, None, (None,)),
        (torch.bfloat16, None, (None,)),
        (torch.float32, torch.bfloat16, (None, torch.bfloat16)),
        (torch.bfloat16, torch.bfloat16, (torch.bfloat16,)),
        (torch.bfloat16, torch.float16, (torch.float16,)),
    ],
)
def test_what_is_tried(weights, autocast, tried):
    assert precisions_to_check(tiny_model().to(weights), autocast) == tried


def test_full_precision_is_tried_first_and_then_what_trains(monkeypatch):
    """Two rows alone and the same packed, each time; kernels with the heads of the model."""
    checked = []
    check = layout_check.check_kernels
    monkeypatch.setattr(
        layout_check,
        "check_kernels",
        lambda device, layers: (checked.append(layers), check(device, layers)),
    )
    model = prepared(tiny_model())
    calls = layouts(model)
    scorer()(model, batch())
    trial = [(False, None)] * 2 + [(True, None)] + [(False, HALF)] * 2 + [(True, HALF)]
    assert calls[-7:] == [*trial, (True, HALF)]
    assert checked == [{Heads(4, 2, 8, 8, torch.float32)}, {Heads(4, 2, 8, 8, HALF)}]


@pytest.mark.parametrize(
    ("fault", "words"),
    [("value", "is off by 0.03"), ("causality", "is off by"), ("error", "no kernel image")],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_kernel_at_fault_leads_to_plain_rows(log, monkeypatch, fault, words, dtype):
    """One warning that says why, and the results of plain rows."""
    model = tiny_model() if dtype == torch.float32 else prepared(tiny_model())
    expected = scorer(shared_prefix=False)(model, batch()).logps
    break_kernels(monkeypatch, fault, dtype)
    score = scorer()
    for _ in range(2):
        assert torch.equal(score(model, batch()).logps, expected)
    assert not score.check.enabled
    assert len(warnings(log)) == 1
    assert "a check of log-probabilities failed" in warnings(log)[0] and words in warnings(log)[0]


def test_ranks_that_decide_together_try_it_too(log, monkeypatch):
    """Outside of any autocast, as at the start of a round."""
    model, score = prepared(adapter()), scorer()
    break_kernels(monkeypatch, "key", HALF)
    score.agree(model, batch(), float)
    assert not score.check.enabled and "in bfloat16" in warnings(log)[0]


def test_a_layout_that_is_lost_shows_in_full_precision(log):
    """In half precision rounding may hide it."""
    model = prepared(tiny_model())
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (
            args,
            {k: None if k == "attention_mask" else v for k, v in kwargs.items() if k != KEYWORD},
        ),
        with_kwargs=True,
    )
    expected = scorer(shared_prefix=False)(model, batch()).logps
    assert torch.equal(scorer()(model, batch()).logps, expected)
    assert len(warnings(log)) == 1 and "differed by" in warnings(log)[0]

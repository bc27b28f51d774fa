"""A small example tells right attention kernels from wrong ones, in the precision they run in."""

import pytest
import torch
from faulty_kernels import FAULTS, break_kernels
from rollouts import rollout_of
from tiny import lora_model, tiny_model, with_autocast
from transformers.utils import logging

from trl.models import layout_check
from trl.models.kernel_check import Heads, check_kernels, noted_heads
from trl.models.layout_check import precisions_to_check
from trl.models.packed_attention import KEYWORD
from trl.models.packed_layout import packed_layout
from trl.models.scorer import Scorer
from trl.types import Rollout

CPU = torch.device("cpu")
HALF = torch.bfloat16
WIDTHS = [(4, 2, 8), (6, 1, 64), (2, 2, 12)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def heads(dtype, queries=4, keys=2, size=8) -> Heads:
    return Heads(queries, keys, size, size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_of_this_machine_is_right(dtype):
    """Whatever the precision of autocast is around the check."""
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        check_kernels(CPU, {heads(dtype, *widths) for widths in WIDTHS})


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_kernel_is_found(monkeypatch, fault, dtype):
    break_kernels(monkeypatch, fault, dtype)
    with pytest.raises(RuntimeError, match=r"off by .* for 4 heads on 2, of size 8 in \w+\d+,"):
        check_kernels(CPU, {heads(dtype)})


def test_each_kind_of_layer_is_checked(monkeypatch):
    break_kernels(monkeypatch, "key", torch.bfloat16)
    check_kernels(CPU, {heads(torch.float32)})
    with pytest.raises(RuntimeError, match="in bfloat16"):
        check_kernels(CPU, {heads(torch.float32), heads(torch.bfloat16)})


def test_what_cannot_be_checked_is_an_error(monkeypatch):
    with pytest.raises(RuntimeError, match="did not ask for attention"):
        check_kernels(CPU, set())
    break_kernels(monkeypatch, "error", torch.float32)
    with pytest.raises(RuntimeError, match="no kernel image"):
        check_kernels(CPU, {heads(torch.float32)})


def packed(model):
    """Run a model on a prompt with two completions."""
    layout = packed_layout(batch(), CPU)
    return model.base_model(**layout.inputs, use_cache=False)[0]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_what_layers_work_on_is_noted(autocast):
    model = tiny_model("qwen3", num_key_value_heads=1, head_dim=16)
    with torch.autocast("cpu", autocast, autocast is not None):
        with noted_heads(model) as found:
            noted = packed(model)
        assert torch.equal(packed(model), noted), "noting changes nothing"
    assert found == {Heads(4, 1, 16, 16, autocast or torch.float32)}


def test_nothing_is_noted_after_an_error():
    model = tiny_model()
    with pytest.raises(ValueError, match="of a test"), noted_heads(model) as found:
        raise ValueError("of a test")
    packed(model)
    assert not found


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
    model = with_autocast(tiny_model())
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
    model = tiny_model() if dtype == torch.float32 else with_autocast(tiny_model())
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
    model, score = with_autocast(lora_model()), scorer()
    break_kernels(monkeypatch, "key", HALF)
    score.agree(model, batch(), float)
    assert not score.check.enabled and "in bfloat16" in warnings(log)[0]


def test_a_layout_that_is_lost_shows_in_full_precision(log):
    """In half precision rounding may hide it."""
    model = with_autocast(tiny_model())
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

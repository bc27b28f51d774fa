"""Decoding on shared prompts is proved before it is relied on."""

from contextlib import nullcontext

import pytest
import torch
from faulty_kernels import break_kernels
from tiny import tiny_model
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.utils import logging

from trl.generation.transformers.backend import TransformersBackend
from trl.models.packed_attention import KEYWORD, Decoding
from trl.types import Prompts, Sampling

CPU = torch.device("cpu")
PROMPTS = [[20, 21, 22]] * 2 + [[30, 31]] * 2


@pytest.fixture
def log(caplog):
    logging.enable_propagation()
    yield caplog
    logging.disable_propagation()


def said(log):
    return [r.getMessage() for r in log.records if "shared_prefix" in r.getMessage()]


class Watched(LlamaForCausalLM):
    """Notes for each forward of its decoder what layout it was given."""

    def __init__(self, config):
        super().__init__(config)
        self.layouts = []
        self.model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module, args, kwargs):
        self.layouts.append(type(kwargs.get(KEYWORD)).__name__)


class Ignorant(Watched):
    """Its attention never hears of the layout."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.register_forward_pre_hook(self._forget, with_kwargs=True)

    def _forget(self, module, args, kwargs):
        if KEYWORD in kwargs:
            rest = {name: value for name, value in kwargs.items() if name != KEYWORD}
            return args, rest | {"attention_mask": None}
        return None


class ForgetsPrefixes(Watched):
    """It packs prompts well, but decodes without them."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.register_forward_pre_hook(self._forget, with_kwargs=True)

    def _forget(self, module, args, kwargs):
        if isinstance(kwargs.get(KEYWORD), Decoding):
            rest = {name: value for name, value in kwargs.items() if name != KEYWORD}
            return args, rest | {"attention_mask": None}
        return None


def build(kind, **changes):
    torch.manual_seed(0)
    return kind(tiny_model(**changes).config).eval()


def sampling(**changes) -> Sampling:
    return Sampling(**({"max_tokens": 6, "stop_ids": (1,), "seeds": (1, 2, 3, 4)} | changes))


def backend(model, **options):
    return TransformersBackend(lambda: nullcontext(model), pad_id=0, device=CPU, **options)


def generate(engine, rows=PROMPTS, **changes):
    return engine.generate(
        Prompts(messages=[""] * len(rows), token_ids=rows), sampling(**changes), 2
    )


@pytest.mark.parametrize("kind", [Ignorant, ForgetsPrefixes])
def test_a_model_that_ignores_the_layout_generates_through_padded_rows(log, kind):
    """One warning, and the tokens that padded rows give."""
    model = build(kind)
    expected = generate(backend(model, shared_prefix=False))
    engine = backend(model)
    for _ in range(3):
        assert generate(engine) == expected
    assert len(said(log)) == 1
    assert kind.__name__ in said(log)[0] and "decoding differed by" in said(log)[0]
    model.layouts.clear()
    generate(engine, [[40 + i for i in range(9)]] * 4)
    assert set(model.layouts) == {"NoneType"}, "not tried again"


def test_a_model_that_understands_it_is_tried_once(log):
    model = build(Watched)
    engine = backend(model)
    found = generate(engine, stop_ids=())
    # The head is found, two rows write four tokens and are scored alone, then all rows decode.
    trial = ["Packing", *["Decoding"] * 3, *["NoneType"] * 2]
    probes = model.layouts.index("Packing")
    assert model.layouts[probes:] == [*trial, "Packing", *["Decoding"] * 5]
    padded = generate(backend(model, shared_prefix=False), stop_ids=())
    assert found.completion_ids == padded.completion_ids
    model.layouts.clear()
    generate(engine, [[40 + i for i in range(6)]] * 4, stop_ids=())
    assert model.layouts == ["Packing", *["Decoding"] * 5], "twice as long is near enough"
    model.layouts.clear()
    generate(engine, [[40 + i for i in range(7)]] * 4, stop_ids=())
    assert model.layouts.count("Packing") == 2, "a longer one is tried"
    assert not said(log)


@pytest.mark.parametrize(("fault", "words"), [("scale", "off by"), ("error", "no kernel image")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_kernels_are_found_out(log, monkeypatch, fault, words, dtype):
    """Under the autocast of generation, by a fault in what it runs in."""
    model = build(Watched)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
        expected = generate(backend(model, shared_prefix=False))
        break_kernels(monkeypatch, fault, dtype)
        assert generate(backend(model)) == expected
    assert len(said(log)) == 1
    assert (
        "a check of log-probabilities of decoding failed" in said(log)[0] and words in said(log)[0]
    )


def test_autocast_is_tried_after_full_precision(log, monkeypatch):
    """And a fault in a precision that is not used harms nobody."""
    break_kernels(monkeypatch, "error", torch.bfloat16)
    model = build(Watched)
    generate(backend(model), stop_ids=())
    trial = ["Packing", *["Decoding"] * 3, *["NoneType"] * 2]
    assert model.layouts.count("Packing") == 2 and not said(log)
    monkeypatch.undo()
    model.layouts.clear()
    with torch.autocast("cpu", torch.bfloat16):
        generate(backend(model), stop_ids=())
    start = model.layouts.index("Packing")
    assert model.layouts[start : start + 6] == trial
    assert model.layouts.count("Packing") == 3 and not said(log)


def test_running_out_of_memory_is_no_refusal():
    class Large(Watched):
        full = True

        def _note(self, module, args, kwargs):
            if self.full and KEYWORD in kwargs:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            super()._note(module, args, kwargs)

    model = build(Large)
    engine = backend(model)
    with pytest.raises(torch.OutOfMemoryError):
        generate(engine)
    model.full = False
    generate(engine)
    assert "Decoding" in model.layouts


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {"extra": {"no_repeat_ngram_size": 2}}),
        ({"cache_implementation": "static"}, {}),
        ({"shared_prefix": False}, {}),
    ],
)
def test_what_only_padded_rows_can_do_is_not_tried(log, options, changes):
    model = build(Watched)
    generate(backend(model, **options), **changes)
    assert set(model.layouts) == {"NoneType"}
    assert not said(log)


def test_a_window_that_completions_may_outgrow(log):
    """Prompts of 3 tokens and completions of up to 6 fit a window of 9, but not one of 8."""
    for window, shared in ((9, True), (8, False)):
        torch.manual_seed(0)
        model = MistralForCausalLM(
            MistralConfig(
                vocab_size=95,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                sliding_window=window,
            )
        ).eval()
        found = generate(backend(model))
        assert (found.sampling_logps is not None) == shared
        padded = generate(backend(model, shared_prefix=False))
        assert found.completion_ids == padded.completion_ids
    assert len(said(log)) == 1 and "window of 8 tokens" in said(log)[0]


def test_logits_that_cannot_be_reproduced_take_padded_rows():
    class Unusual(Watched):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = 2 * torch.sin(output.logits)
            return output

    model = build(Unusual)
    found = generate(backend(model))
    assert found == generate(backend(model, shared_prefix=False)) and found.sampling_logps is None
    assert set(model.layouts) == {"NoneType"}


def test_parts_that_were_generated_in_both_ways_are_joined():
    """Log-probabilities are known for all rows or for none."""
    model = build(Watched)
    shared, padded = generate(backend(model)), generate(backend(model, shared_prefix=False))
    for parts in ([shared, padded], [padded, shared]):
        joined = type(shared).concatenate(parts)
        assert joined.completion_ids == parts[0].completion_ids + parts[1].completion_ids
        assert joined.sampling_logps is None

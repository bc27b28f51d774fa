"""Shared decoding against `generate` of transformers, one row at a time."""

import copy
from contextlib import nullcontext

import pytest
import torch
from faulty_kernels import break_kernels
from tiny import SIZES, tiny_model
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
)

from trl.generation.base import Sampling
from trl.generation.transformers import shared_decoding
from trl.generation.transformers.backend import TransformersBackend
from trl.generation.transformers.sampler import NonFiniteLogitsError, RowSampler
from trl.generation.transformers.shared_decoding import GrowingCache, SharedPrefixDecoder
from trl.models.lm_head import HeadFinder, cast_head_to_float32
from trl.models.packed_attention import KEYWORD, Decoding, install
from trl.types import Prefix, Prompts, prefixes_of

CPU = torch.device("cpu")
ROWS = [[20, 21, 22]] * 3 + [[30]] * 2 + [[40, 41, 42, 43, 44, 45, 46]] * 3 + [[30]]
SEEDS = tuple(range(100, 100 + len(ROWS)))


def sampling(**changes) -> Sampling:
    return Sampling(**({"max_tokens": 10, "stop_ids": (1, 50, 51, 52), "seeds": SEEDS} | changes))


def model_of(kind="llama", **changes):
    return tiny_model(kind, **changes).double().eval()


def backend(model, **options) -> TransformersBackend:
    return TransformersBackend(lambda: nullcontext(model), pad_id=0, device=CPU, **options)


def complete(model, options, ids=ROWS, **how):
    prompts = Prompts(messages=[""] * len(ids), token_ids=ids)
    return backend(model, **how).generate(prompts, options, 3)


def by_transformers(model, options, greedy=False):
    """Ids of each row, from `generate` called for it alone, without padding."""
    config = GenerationConfig(
        max_new_tokens=options.max_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=list(options.stop_ids),
        repetition_penalty=options.repetition_penalty,
    )
    found = []
    for prompt, seed in zip(ROWS, SEEDS, strict=True):
        options = options.replace(seeds=(seed,))
        sampler = RowSampler(options, torch.device("cpu"), len(prompt))
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=config,
            logits_processor=LogitsProcessorList([] if greedy else [sampler]),
        )
        found.append(output[0, len(prompt) :].tolist())
    return found


@torch.no_grad()
def log_probs(model, prompt, completion, temperature):
    """Under the model at a temperature, before filters and penalties."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    every = (logits / temperature).log_softmax(-1)
    return every[torch.arange(len(completion)), torch.tensor(completion)]


OPTIONS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.8, "top_k": 12},
    {"top_p": 0.7},
    {"min_p": 0.4, "temperature": 0.3},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.5, "temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    {"max_tokens": 1},
    {"stop_ids": ()},
]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("changes", OPTIONS)
def test_tokens_are_those_of_generate(kind, changes):
    model, options = model_of(kind), sampling(**changes)
    expected = by_transformers(model, options)
    found = complete(model, options)
    assert found.completion_ids == expected
    assert [reason == "stop" for reason in found.finish_reasons] == [
        ids[-1] in options.stop_ids for ids in expected
    ]
    rows = zip(ROWS, expected, found.sampling_logps, strict=True)
    for prompt, ids, logps in rows:
        wanted = log_probs(model, prompt, ids, options.temperature)
        assert len(logps) == len(ids)
        # Rotary tables are float32, so positions of double precision differ at that level.
        assert (torch.tensor(logps).double() - wanted).abs().max() < 1e-6
    if not changes:
        assert len({len(ids) for ids in expected}) > 2, "rows end at different times"
        assert "length" in found.finish_reasons and "stop" in found.finish_reasons


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_tokens_are_those_of_generate(penalty):
    """No token is drawn, so siblings are the same."""
    model, options = model_of(), sampling(repetition_penalty=penalty)
    expected = by_transformers(model, options, greedy=True)
    found = complete(model, options.replace(extra={"do_sample": False}))
    assert found.completion_ids == expected and expected[0] == expected[1]
    for prompt, ids, logps in zip(ROWS, expected, found.sampling_logps, strict=True):
        wanted = log_probs(model, prompt, ids, 1.0)
        assert (torch.tensor(logps).double() - wanted).abs().max() < 1e-6


@pytest.mark.parametrize("changes", [{}, {"repetition_penalty": 2.0}, {"top_k": 5}])
def test_padded_rows_give_the_same_tokens(changes):
    """What is drawn for a row does not depend on the way, nor on the padding in front of it."""
    model = model_of()
    with torch.no_grad():
        hidden = model.model(torch.tensor([ROWS[0]])).last_hidden_state[0, -1]
        model.lm_head.weight[0] = 5 * hidden / hidden.norm() ** 2  # padding is a likely token
    options = sampling(**changes)
    shared = complete(model, options)
    padded = complete(model, options, shared_prefix=False)
    assert padded.completion_ids == shared.completion_ids
    assert 0 in {token for ids in shared.completion_ids for token in ids}
    assert padded.sampling_logps is None


PIECES = [
    {"max_rows": 1},
    {"max_rows": 2},
    {"max_rows": 4},
    {"max_cache_bytes": 20_000},
    {"logits_chunk_size": 95},
    {"logits_chunk_size": 200},
    {"logits_chunk_size": 0},
]


@pytest.mark.parametrize("how", PIECES)
def test_pieces_change_nothing(how):
    model, options = model_of(), sampling(repetition_penalty=1.2)
    whole, cut = complete(model, options), complete(model, options, **how)
    assert cut.completion_ids == whole.completion_ids and cut.finish_reasons == whole.finish_reasons
    for ours, theirs in zip(cut.sampling_logps, whole.sampling_logps, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "padded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_model_without_a_distribution_is_an_error(shared, bad):
    """It names the rows among all that were to be completed."""
    model = model_of()
    with torch.no_grad():
        model.model.embed_tokens.weight[30] = bad
    with pytest.raises(NonFiniteLogitsError, match="logits of row 3, 4, 8 are NaN"):
        complete(model, sampling(), shared_prefix=shared)
    with pytest.raises(NonFiniteLogitsError, match="logits of row 4 are NaN"):
        complete(model, sampling(), shared_prefix=shared, max_rows=2, oom_retry=from_4)


def from_4(count, complete):
    return [complete(range(4, count))]


# --- What is computed ---


class Work:
    """Counts the tokens that go through a decoder, and the logits that its head makes at once."""

    def __init__(self, model):
        self.prefill, self.steps, self.logits = 0, [], []
        model.model.register_forward_pre_hook(self._note, with_kwargs=True)
        model.lm_head.register_forward_pre_hook(lambda m, args: self.logits.append(len(args[0])))

    def _note(self, module, args, kwargs):
        rows, width = kwargs["input_ids"].shape
        if kwargs.get("past_key_values").get_seq_length() == 0 and rows == 1 and width > 1:
            self.prefill += width
        else:
            self.steps.append(rows)


def decoder(model, options, greedy=False, chunk=None):
    install(model)
    options = options.replace(extra={"do_sample": not greedy})
    return SharedPrefixDecoder(model, HeadFinder(1.0, chunk).find(model), options)


def test_each_prompt_is_computed_once():
    model, options = model_of(), sampling(stop_ids=())
    rows = [[20, 21, 22]] * 3 + [[30, 31]] * 2 + [[40, 41, 42, 43]] * 3
    decode, work = decoder(model, options), Work(model)
    decode(prefixes_of(rows), SEEDS[:8])
    assert (work.prefill, work.steps) == (9, [8] * 9)


def test_each_prompt_is_computed_once_over_pieces_that_cut_its_group():
    model, options = model_of(), sampling(stop_ids=())
    rows = [[20, 21, 22]] * 3 + [[30, 31]] * 2 + [[40, 41, 42, 43]] * 3
    expected, _ = decoder(model, options)(prefixes_of(rows), SEEDS[:8])
    decode, work = decoder(model, options), Work(model)
    found = []
    for at in (slice(0, 2), slice(2, 4), slice(4, 7), slice(7, 8)):
        found += decode(prefixes_of(rows[at]), SEEDS[:8][at])[0]
    assert found == expected
    assert work.prefill == 9
    assert work.steps == [2] * 9 + [2] * 9 + [3] * 9 + [1] * 9


def test_a_prompt_that_is_kept_does_not_keep_those_computed_with_it():
    """The bound on a piece's cache counts the prompts of the piece alone."""
    model, options = model_of(), sampling(stop_ids=())
    decode = decoder(model, options)
    decode(prefixes_of([[20, 21, 22], [30, 31]]), SEEDS[:2])
    decode(prefixes_of([[30, 31], [40, 41, 42]]), SEEDS[:2])
    kept = decode._computed[Prefix([30, 31])]
    for tensor in (tensor for layer in kept.layers.values() for tensor in layer):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_finished_rows_are_computed_no_more():
    model, options = model_of(), sampling()
    decode, work = decoder(model, options), Work(model)
    found, _ = decode(prefixes_of(ROWS), SEEDS)
    lengths = [len(ids) for ids in found]
    assert work.steps == [
        sum(length > step + 1 for length in lengths) for step in range(max(lengths) - 1)
    ]


def test_long_prompts_are_computed_a_few_at_a_time(monkeypatch):
    model, options = model_of(), sampling()
    expected, _ = decoder(model, options)(prefixes_of(ROWS), SEEDS)
    monkeypatch.setattr(shared_decoding, "PREFILL_TOKENS", 8)
    decode, widths = decoder(model, options), []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert decode(prefixes_of(ROWS), SEEDS)[0] == expected
    # Prompts of 3, 1 and 7 tokens, the second one once though it stands in two places.
    assert [width for width in widths if width > 1] == [4, 7]


def test_no_more_logits_exist_than_a_chunk():
    model, options = model_of(), sampling(stop_ids=(), max_tokens=3)
    decode, work = decoder(model, options, chunk=2 * 95 + 10), Work(model)
    decode(prefixes_of(ROWS), SEEDS)
    assert work.logits == [2, 2, 2, 2, 1] * 3


def test_under_autocast_the_head_works_in_its_precision():
    model, options = tiny_model().eval(), sampling(max_tokens=4)
    with torch.autocast("cpu", torch.bfloat16):
        found = complete(model, options)
        for prompt, ids, logps in zip(
            ROWS, found.completion_ids, found.sampling_logps, strict=True
        ):
            wanted = log_probs(model, prompt, ids, 1.0).float()
            assert (torch.tensor(logps) - wanted).abs().max() < 0.05


def test_a_float32_head_is_used():
    model = tiny_model().bfloat16().eval()
    cast_head_to_float32(model)
    found = complete(model, sampling(max_tokens=4))
    values = torch.tensor([x for row in found.sampling_logps for x in row])
    assert not torch.equal(values, values.bfloat16().float())
    for prompt, ids, logps in zip(ROWS, found.completion_ids, found.sampling_logps, strict=True):
        assert (torch.tensor(logps) - log_probs(model, prompt, ids, 1.0)).abs().max() < 0.05


# --- The cache ---


def test_a_growing_cache_holds_what_was_appended():
    generator = torch.Generator().manual_seed(0)

    def draw(rows, count):
        return torch.randn(rows, 2, count, 3, generator=generator)

    cache = GrowingCache()
    assert len(cache) == 0 and cache.get_seq_length() == 0
    expected = {0: [], 1: []}
    rows = 5
    for step, count in enumerate([1, 1, 3, 1, 20, 1, 40, 1, 1]):
        for layer in (0, 1):
            new = draw(rows, count), draw(rows, count)
            held = expected[layer]
            expected[layer] = (
                [torch.cat(pair, 2) for pair in zip(held, new, strict=True)] if held else list(new)
            )
            found = cache.update(*new, layer)
            assert all(map(torch.equal, found, expected[layer]))
            assert all(map(torch.equal, cache.layer(layer), expected[layer]))
            assert cache.get_seq_length(layer) == expected[layer][0].shape[2]
        if step in (1, 4, 6):
            kept = torch.tensor([i for i in range(rows) if i != step % rows])
            cache.select_rows(kept)
            expected = {layer: [x[kept] for x in held] for layer, held in expected.items()}
            rows -= 1
    assert len(cache) == 2 and cache.get_seq_length() == 69


def test_appending_does_not_copy_everything_each_time():
    """Buffers double: the storage changes a few times for a hundred tokens."""
    cache, storages = GrowingCache(), set()
    for _ in range(100):
        key, _ = cache.update(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), 0)
        storages.add((key.data_ptr(), key.untyped_storage().nbytes()))
    assert len({size for _, size in storages}) <= 6


def test_keys_take_the_dtype_of_the_values():
    cache = GrowingCache()
    keys = torch.ones(1, 1, 1, 4)
    found = cache.update(keys, keys.bfloat16(), 0)
    assert {x.dtype for x in found} == {torch.bfloat16}


# --- The check, before it is relied on ---

PROMPTS = [[20, 21, 22]] * 2 + [[30, 31]] * 2


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


def checked_sampling(**changes) -> Sampling:
    return Sampling(**({"max_tokens": 6, "stop_ids": (1,), "seeds": (1, 2, 3, 4)} | changes))


def generate(engine, rows=PROMPTS, **changes):
    return engine.generate(
        Prompts(messages=[""] * len(rows), token_ids=rows), checked_sampling(**changes), 2
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
    assert kind.__name__ in said(log)[0] and "of decoding" in said(log)[0]
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


@pytest.mark.parametrize("window", [2, 4, 8, 9])
def test_windows_that_completions_outgrow(log, window):
    """Prompts of 3 tokens and completions of up to 6 fit a window of 9."""
    model = windowed(window)
    found = generate(backend(model))
    assert found.sampling_logps is not None and not said(log)
    padded = generate(backend(model, shared_prefix=False))
    assert found.completion_ids == padded.completion_ids


@pytest.mark.parametrize("told", [None, 7, 9])
def test_a_layer_that_names_another_window_than_it_masks(log, told):
    """No prompt is longer than the window, so that the check has to make one that is."""
    model = windowed(8)
    for layer in model.model.layers:
        layer.self_attn.config = copy.copy(model.config)
        layer.self_attn.config.sliding_window = told
    generate(backend(model))
    assert len(said(log)) == 1 and "differed by" in said(log)[0]


def windowed(window):
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, sliding_window=window, initializer_range=0.5)
    return MistralForCausalLM(config).eval()


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
    shared, padded = (
        generate(backend(model)),
        generate(backend(model, shared_prefix=False)),
    )
    for parts in ([shared, padded], [padded, shared]):
        joined = type(shared).concatenate(parts)
        assert joined.completion_ids == parts[0].completion_ids + parts[1].completion_ids
        assert joined.sampling_logps is None

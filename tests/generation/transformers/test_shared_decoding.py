"""Shared decoding against `generate` of transformers, one row at a time."""

from contextlib import nullcontext

import pytest
import torch
from tiny import tiny_model
from transformers import GenerationConfig, LogitsProcessorList

from trl.generation.transformers import shared_decoding
from trl.generation.transformers.backend import TransformersBackend
from trl.generation.transformers.batch_limits import BatchLimits
from trl.generation.transformers.sampler import NonFiniteLogitsError, RowDraws, RowSampler
from trl.generation.transformers.shared_decoding import GrowingCache, SharedDecoder
from trl.models.lm_head import HeadFinder, cast_head_to_float32
from trl.models.packed_attention import install
from trl.types import Prompts, Sampling

CPU = torch.device("cpu")
ROWS = [[20, 21, 22]] * 3 + [[30]] * 2 + [[40, 41, 42, 43, 44, 45, 46]] * 3 + [[30]]
SEEDS = tuple(range(100, 100 + len(ROWS)))


def sampling(**changes) -> Sampling:
    return Sampling(**({"max_tokens": 10, "stop_ids": (1, 50, 51, 52), "seeds": SEEDS} | changes))


def model_of(kind="llama", **changes):
    return tiny_model(kind, **changes).double().eval()


def backend(model, **options) -> TransformersBackend:
    return TransformersBackend(lambda: nullcontext(model), pad_id=0, device=CPU, **options)


def complete(model, options, rows=ROWS, **how):
    prompts = Prompts(messages=[""] * len(rows), token_ids=rows)
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
        draws = RowDraws(options.replace(seeds=(seed,)), torch.device("cpu"))
        sampler = RowSampler(draws, len(prompt))
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
    assert [reason == "stop" for reason in found.finish] == [
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
        assert "length" in found.finish and "stop" in found.finish


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
    {"limits": BatchLimits(rows=1)},
    {"limits": BatchLimits(rows=2)},
    {"limits": BatchLimits(rows=4)},
    {"limits": BatchLimits(cache_bytes=20_000)},
    {"chunk": 95},
    {"chunk": 200},
    {"chunk": 0},
]


@pytest.mark.parametrize("how", PIECES)
def test_pieces_change_nothing(how):
    model, options = model_of(), sampling(repetition_penalty=1.2)
    whole, cut = complete(model, options), complete(model, options, **how)
    assert cut.completion_ids == whole.completion_ids and cut.finish == whole.finish
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
        complete(
            model, sampling(), shared_prefix=shared, limits=BatchLimits(rows=2), attempt=from_4
        )


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
    install("sdpa")
    return SharedDecoder(model, HeadFinder(1.0, chunk).find(model), options, greedy)


def test_each_prompt_is_computed_once():
    model, options = model_of(), sampling(stop_ids=())
    rows = [[20, 21, 22]] * 3 + [[30, 31]] * 2 + [[40, 41, 42, 43]] * 3
    decode, work = decoder(model, options), Work(model)
    decode(rows, SEEDS[:8])
    assert (work.prefill, work.steps) == (9, [8] * 9)


def test_each_prompt_is_computed_once_over_pieces_that_cut_its_group():
    model, options = model_of(), sampling(stop_ids=())
    rows = [[20, 21, 22]] * 3 + [[30, 31]] * 2 + [[40, 41, 42, 43]] * 3
    expected, _ = decoder(model, options)(rows, SEEDS[:8])
    decode, work = decoder(model, options), Work(model)
    found = []
    for at in (slice(0, 2), slice(2, 4), slice(4, 7), slice(7, 8)):
        found += decode(rows[at], SEEDS[:8][at])[0]
    assert found == expected
    assert work.prefill == 9
    assert work.steps == [2] * 9 + [2] * 9 + [3] * 9 + [1] * 9


def test_a_prompt_that_is_kept_does_not_keep_those_computed_with_it():
    """The bound on a piece's cache counts the prompts of the piece alone."""
    model, options = model_of(), sampling(stop_ids=())
    decode = decoder(model, options)
    decode([[20, 21, 22], [30, 31]], SEEDS[:2])
    decode([[30, 31], [40, 41, 42]], SEEDS[:2])
    kept = decode._prefixes[(30, 31)]
    for tensor in (tensor for layer in kept.layers for tensor in layer):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_finished_rows_are_computed_no_more():
    model, options = model_of(), sampling()
    decode, work = decoder(model, options), Work(model)
    found, _ = decode(ROWS, SEEDS)
    lengths = [len(ids) for ids in found]
    assert work.steps == [
        sum(length > step + 1 for length in lengths) for step in range(max(lengths) - 1)
    ]


def test_long_prompts_are_computed_a_few_at_a_time(monkeypatch):
    model, options = model_of(), sampling()
    expected, _ = decoder(model, options)(ROWS, SEEDS)
    monkeypatch.setattr(shared_decoding, "PREFILL_TOKENS", 8)
    decode, widths = decoder(model, options), []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert decode(ROWS, SEEDS)[0] == expected
    # Prompts of 3, 1 and 7 tokens, the second one once though it stands in two places.
    assert [width for width in widths if width > 1] == [4, 7]


def test_no_more_logits_exist_than_a_chunk():
    model, options = model_of(), sampling(stop_ids=(), max_tokens=3)
    decode, work = decoder(model, options, chunk=2 * 95 + 10), Work(model)
    decode(ROWS, SEEDS)
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
            cache.keep(kept)
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

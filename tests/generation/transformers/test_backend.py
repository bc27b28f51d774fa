import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_bytes import TensorBytes
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, DynamicCache, GitConfig, RwkvConfig

from trl.generation.base import Sampling
from trl.generation.transformers.backend import (
    TransformersBackend,
    cache_bytes_per_token,
    merge_options,
    split_into_batches,
)
from trl.ops.matmul_precision import matmul_precision_kept
from trl.types import Prompts, prefixes_of

PROMPTS = Prompts(
    messages=["a", "a", "bb", "ccc"], token_ids=[[20], [20], [21, 22], [23, 24, 25, 26]]
)


SIZES = {"vocab_size": 95, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}


def backend(model, **options) -> TransformersBackend:
    return TransformersBackend(
        lambda: nullcontext(model.eval()), pad_id=0, device=torch.device("cpu"), **options
    )


def sampling(**changes) -> Sampling:
    return Sampling(**({"max_tokens": 12, "stop_ids": (1,), "seeds": (1, 2, 3, 4)} | changes))


def one_row(ids, seeds) -> tuple[Prompts, Sampling]:
    return Prompts(messages=["x"], token_ids=[ids]), sampling(seeds=seeds)


def test_rows_do_not_depend_on_their_batch():
    model = tiny_model()
    together = backend(model).generate(PROMPTS, sampling(), 2).completion_ids
    for row, ids in enumerate(PROMPTS.token_ids):
        alone = backend(model).generate(*one_row(ids, (row + 1,)), 1)
        assert alone.completion_ids == [together[row]]
    assert together[0] != together[1], "same prompt, different seeds"


@pytest.mark.parametrize(
    ("config", "alike"),
    [
        # Its cache mixes up rows.
        (RwkvConfig(**SIZES, attention_hidden_size=32), "one row"),
        # With a cache it counts padding as positions.
        (GitConfig(**SIZES, num_attention_heads=4), "prompts of equal length"),
    ],
)
def test_rows_do_not_depend_on_their_batch_in_classes_that_take_no_padding(config, alike, log):
    config.initializer_range, config.use_cache = 0.5, True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    engine, ids = backend(model), [*PROMPTS.token_ids[:3], [30, 20]]
    prompts = Prompts(messages=["x"] * 4, token_ids=ids)
    together = engine.generate(prompts, sampling(), 2).completion_ids
    for row, prompt in enumerate(ids):
        assert backend(model).generate(*one_row(prompt, (row + 1,)), 1).completion_ids == [
            together[row]
        ]
    assert f"it completes {alike} at a time" in log.text


def test_batches_are_compared_in_full_precision():
    """What TF32 rounds off would look like a model that mixes up rows."""
    model, seen = tiny_model(), []
    engine = backend(model, shared_prefix=False)
    with matmul_precision_kept():
        torch.set_float32_matmul_precision("medium")
        engine._heads.find(model)
        model.model.register_forward_pre_hook(
            lambda *args: seen.append(torch.get_float32_matmul_precision())
        )
        engine.generate(PROMPTS, sampling(max_tokens=2), 2)
    # Two tokens of a prompt alone, and of the same in a batch; then those that were asked for.
    assert seen[:4] == ["highest"] * 4 and set(seen[4:]) == {"medium"}


def test_same_seeds_same_completions_whatever_torch_drew_before():
    model = tiny_model()
    torch.manual_seed(0)
    first = backend(model).generate(PROMPTS, sampling(), 2)
    torch.manual_seed(99)
    assert backend(model).generate(PROMPTS, sampling(), 2) == first


def most_bytes(count, rows=None):
    """Held at once beyond the model while rows of one prompt are completed."""
    model, prompt = tiny_model().eval(), [20 + i % 40 for i in range(100)]
    engine = TransformersBackend(
        lambda: nullcontext(model), pad_id=0, device=torch.device("cpu"), max_rows=rows
    )
    prompts = Prompts(messages=["x"] * count, token_ids=[prompt] * count)
    options = sampling(max_tokens=40, stop_ids=(), seeds=tuple(range(count)))
    engine.generate(prompts, options, count)  # tries the model, and makes what stays
    with TensorBytes([*model.parameters(), *model.buffers()]) as meter:
        found = engine.generate(prompts, options, count)
    assert len(found) == count
    return meter.peak


def test_a_large_group_decodes_in_the_memory_of_a_small_one():
    few = most_bytes(2, 2)
    assert most_bytes(32, 2) <= 1.02 * few
    assert most_bytes(32) > 2 * few


def test_matches_sampling_one_token_at_a_time():
    """The definition: full forward for each token, its own random numbers, no cache."""
    from trl.generation.transformers.sampler import uniform_draws

    model = tiny_model().eval()
    options = sampling(temperature=0.7)
    found = backend(model).generate(PROMPTS, options, 2).completion_ids
    for row, prompt in enumerate(PROMPTS.token_ids):
        ids, draws = list(prompt), uniform_draws([row + 1], 12)[0]
        for draw in draws:
            logits = model(torch.tensor([ids])).logits[0, -1].double() / 0.7
            token = int((logits.softmax(0).cumsum(0) <= draw).sum())
            ids.append(token)
            if token == 1:
                break
        assert found[row] == ids[len(prompt) :]


def test_every_stop_id_ends_a_completion():
    model = tiny_model()
    free = backend(model).generate(PROMPTS, sampling(stop_ids=()), 2)
    assert free.finish_reasons == ["length"] * 4 and {len(ids) for ids in free.completion_ids} == {
        12
    }
    stops = (free.completion_ids[0][3], free.completion_ids[1][5])
    found = backend(model).generate(PROMPTS, sampling(stop_ids=stops), 2)
    for row, ids in enumerate(found.completion_ids):
        whole = free.completion_ids[row]
        ends = [place for place, token in enumerate(whole) if token in stops]
        assert ids == (whole[: ends[0] + 1] if ends else whole)
        assert found.finish_reasons[row] == ("stop" if ends else "length")


@pytest.mark.parametrize("shared", [True, False])
def test_the_model_does_not_choose_what_ends_a_completion(shared):
    """Its own end-of-sequence token counts only if it is among the stop ids."""
    model = tiny_model()
    engine = TransformersBackend(
        lambda: nullcontext(model.eval()),
        pad_id=0,
        device=torch.device("cpu"),
        shared_prefix=shared,
    )
    wanted = engine.generate(PROMPTS, sampling(stop_ids=()), 2)
    model.generation_config.eos_token_id = wanted.completion_ids[0][2]
    found = engine.generate(PROMPTS, sampling(stop_ids=()), 2)
    assert found.completion_ids == wanted.completion_ids
    assert found.finish_reasons == ["length"] * 4


def test_pad_equal_to_eos_changes_nothing():
    model = tiny_model()
    usual = backend(model).generate(PROMPTS, sampling(), 2)
    padded = TransformersBackend(
        lambda: nullcontext(model), pad_id=1, device=torch.device("cpu")
    ).generate(PROMPTS, sampling(), 2)
    assert padded == usual


def test_greedy_by_generation_kwargs():
    model = tiny_model()
    greedy = merge_options(sampling(extra={"do_sample": False, "max_new_tokens": 3}, stop_ids=()))
    found = backend(model).generate(PROMPTS, greedy, 2).completion_ids
    assert found[0] == found[1] and len(found[0]) == 3
    first = model(torch.tensor([PROMPTS.token_ids[3]])).logits[0, -1].argmax()
    assert found[3][0] == first


def test_extra_options_win():
    merged = merge_options(
        sampling(extra={"temperature": 0.5, "top_k": 3, "no_repeat_ngram_size": 2})
    )
    assert (merged.temperature, merged.top_k) == (0.5, 3)
    assert merged.extra == {"no_repeat_ngram_size": 2} and merge_options(merged) == merged


@pytest.mark.parametrize("eos", [5, [5, 7]])
def test_end_tokens_by_generation_kwargs(eos):
    """They end completions, and reach everything that asks what ended one."""
    merged = merge_options(sampling(extra={"eos_token_id": eos}, stop_ids=(1,), max_tokens=64))
    ends = {eos} if isinstance(eos, int) else set(eos)
    assert (set(merged.stop_ids), merged.extra) == (ends, {})
    found = backend(tiny_model()).generate(PROMPTS, merged, 2)
    stopped = [
        ids
        for ids, why in zip(found.completion_ids, found.finish_reasons, strict=True)
        if why == "stop"
    ]
    assert stopped and all(ids[-1] in ends for ids in stopped)
    assert not any(ends & set(ids[:-1]) for ids in found.completion_ids)
    assert merge_options(sampling(extra={"eos_token_id": None})).stop_ids == ()


@pytest.mark.parametrize(
    "extra",
    [
        {"use_cache": False},
        {"cache_implementation": "dynamic"},
        {"disable_compile": False},
        {"pad_token_id": 3},
    ],
)
def test_extra_options_win_over_those_that_are_always_given(extra):
    model = tiny_model()
    usual = backend(model).generate(PROMPTS, sampling(), 2)
    found = backend(model).generate(PROMPTS, sampling(extra=extra), 2)
    assert found.completion_ids == usual.completion_ids


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"temprature": 1}, "Did you mean temperature"),
        ({"num_beams": 2}, "cannot be used in training: beam search picks completions instead of"),
        ({"typical_p": 0.9}, "cannot be used in training: the trainer samples tokens itself"),
        ({"max_tokens": 3}, "is not a generation option"),
    ],
)
def test_unknown_and_refused_options(extra, words):
    with pytest.raises(ValueError, match=words):
        merge_options(sampling(extra=extra))


@pytest.mark.parametrize("text", ["g", "gh", ["!!", "xyz"]])
def test_stop_strings_end_completions_where_they_are_complete(text):
    """Text that only ends in the prompt does not count."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    texts = [text] if isinstance(text, str) else text
    free = sampling(max_tokens=48, stop_ids=())
    whole = backend(model).generate(PROMPTS, free, 2).completion_ids
    script = tokenizer.decode(whole[0])
    texts = [*texts, script[5:7]]  # one of them is written for certain
    extra = {"stop_strings": texts}
    engine = TransformersBackend(
        lambda: nullcontext(model.eval()),
        pad_id=whole[0][6],  # that padding looks like what was written must not matter
        device=torch.device("cpu"),
        tokenizer=tokenizer,
    )
    found = engine.generate(PROMPTS, free.replace(extra=extra), 2)
    for ids, finish, every in zip(found.completion_ids, found.finish_reasons, whole, strict=True):
        written = [tokenizer.decode(every[: n + 1]) for n in range(48)]
        ends = [n + 1 for n, seen in enumerate(written) if any(end in seen for end in texts)]
        assert len(ids) == min(ends, default=48) and ids == every[: len(ids)]
        assert finish == ("stop" if ends else "length")
    assert found.finish_reasons[0] == "stop"


# --- Rows at once ---


MODEL = tiny_model()
TOKEN = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head size, bytes of float32
A, B, C = [1] * 4, [2] * 4, [3] * 9


def cut(prompts, shared=True, rows=None, tokens=None):
    bounds = [math.inf if bound is None else bound for bound in (rows, tokens)]
    return [(r.start, r.stop) for r in split_into_batches(prefixes_of(prompts), 6, shared, *bounds)]


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4, "num_hidden_layers": 3}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_token_are_those_of_a_cache(changes, dtype):
    model = tiny_model(**changes).to(dtype)
    cache = DynamicCache()
    model(torch.arange(10)[None], past_key_values=cache)
    held = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    assert cache_bytes_per_token(model) * 10 == sum(x.numel() * x.element_size() for x in held)


def test_bytes_of_the_tiny_model():
    assert cache_bytes_per_token(MODEL) == TOKEN


@pytest.mark.parametrize(
    ("rows", "pieces"),
    [
        (None, [(0, 7)]),
        (7, [(0, 7)]),
        (100, [(0, 7)]),
        (3, [(0, 3), (3, 6), (6, 7)]),
        (1, [(i, i + 1) for i in range(7)]),
    ],
)
def test_bounded_rows(rows, pieces):
    assert cut([A] * 4 + [B] * 3, rows=rows) == pieces


@pytest.mark.parametrize(
    ("tokens", "shared", "pieces"),
    [
        # Each row writes up to 6 tokens; a shared prompt of 4 counts once in each piece.
        (4 + 3 * 6, True, [(0, 3), (3, 5), (5, 7)]),
        (4 + 4 * 6, True, [(0, 4), (4, 7)]),
        (4 + 4 * 6 + 4 + 3 * 6, True, [(0, 7)]),
        (4 + 4 * 6 + 4 + 3 * 6 - 1, True, [(0, 6), (6, 7)]),
        (2 * 10, False, [(0, 2), (2, 4), (4, 6), (6, 7)]),
        (7 * 10, False, [(0, 7)]),
        (1, True, [(i, i + 1) for i in range(7)]),
    ],
)
def test_bounded_bytes(tokens, shared, pieces):
    assert cut([A] * 4 + [B] * 3, shared, tokens=tokens) == pieces


def test_no_rows_are_no_pieces():
    assert cut([]) == [] and cut([], rows=2, tokens=9) == []


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from([A, B, C]), max_size=12),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 60),
    st.booleans(),
)
def test_pieces_are_in_order_within_bounds_and_no_smaller_than_needed(
    prompts, rows, tokens, shared
):
    """A piece is as long as it can be, and has one row at least."""

    def fits(start, stop):
        size, last = 0, None
        for prompt in prompts[start:stop]:
            size += 6 + (0 if shared and prompt == last else len(prompt))
            last = prompt
        within = tokens is None or size <= tokens
        return stop - start == 1 or (within and (rows is None or stop - start <= rows))

    pieces = cut(prompts, shared, rows, tokens)
    assert [row for start, stop in pieces for row in range(start, stop)] == [*range(len(prompts))]
    assert all(fits(start, stop) for start, stop in pieces)
    assert not any(fits(start, stop + 1) for start, stop in pieces[:-1])

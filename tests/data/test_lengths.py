import json

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from trl.data.cutting import DocumentLimits, cut_documents
from trl.data.encode import TextEncoder
from trl.data.examples import target_positions
from trl.data.lengths import (
    candidates,
    padding_table,
    profile_preferences,
    profile_supervised,
    repeated_share,
)
from trl.data.packing import MicroBatchSampler
from trl.data.preference_cutting import PreferenceLimits, cut_preferences
from trl.data.preference_rows import prepare_preferences
from trl.data.prepare import prepare_supervised
from trl.data.supervised import SupervisedOptions

ENCODER = TextEncoder(tiny_tokenizer())


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    prompts, answers = (rng.integers(1, 90, 60).tolist() for _ in range(2))
    rows = {"prompt": ["a" * n for n in prompts], "completion": ["b" * n for n in answers]}
    return prepare_supervised(Dataset.from_dict(rows), ENCODER, SupervisedOptions())


def test_the_numbers_are_those_of_an_epoch(table):
    profile = profile_supervised(table, [50], pack_size=200)
    for limit in profile.limits:
        found = cut_documents(table, DocumentLimits(max_length=limit["max_length"]))
        documents = list(found.dataset)
        assert limit["rows untrained"] == len(table) - len(documents)
        trained = sum(len(target_positions(row)) for row in documents)
        assert limit["trained lost"] == profile.parts["trained"]["tokens"] - trained
        assert limit["rows cut"] == len(found.report.long)
        cut = {i for i, ids in enumerate(table["input_ids"]) if len(ids) > limit["max_length"]}
        assert limit["ends lost"] == len(cut)
        assert all(
            (row["input_ids"][-1] == ENCODER.eos) == (row["source"] not in cut) for row in documents
        )
    assert {50, 64, profile.parts["row"]["max"]} <= {row["max_length"] for row in profile.limits}
    packs = list(MicroBatchSampler(cut_documents(table).lengths, 1, pack_size=200))
    assert profile.packing["packs"] == len(packs)
    assert profile.packing["packing efficiency"] == pytest.approx(profile.tokens / 200 / len(packs))


def test_parts_and_longest(table):
    profile = profile_supervised(table)
    lengths = [len(ids) for ids in table["input_ids"]]
    assert profile.rows == 60 and profile.tokens == sum(lengths)
    assert profile.parts["row"]["max"] == max(lengths)
    assert profile.parts["row"]["p50"] == np.percentile(lengths, 50, method="higher")
    assert profile.longest[0] == (int(np.argmax(lengths)), max(lengths))
    assert json.loads(json.dumps(vars(profile)))["rows"] == 60


def test_warnings_name_what_is_wrong():
    rows = {"input_ids": [[1, 2], [3]], "labels": [[-100, -100], [3]]}
    table = prepare_supervised(Dataset.from_dict(rows), ENCODER, SupervisedOptions())
    assert profile_supervised(table).warnings == ["Warning: no token to train on in 2 of 2 rows."]
    pairs = [
        {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [2]},
        {"prompt_ids": [1], "chosen_ids": [], "rejected_ids": [2]},
    ]
    table = prepare_preferences(Dataset.from_list(pairs), ENCODER)
    assert profile_preferences(table).warnings == [
        "Warning: an empty answer in 1 of 2 rows.",
        "Warning: the same answer twice in 1 of 2 rows.",
    ]


def test_preferences():
    rows = [
        {"prompt": "a" * 10, "chosen": "b" * 4, "rejected": "c" * 6},
        {"prompt": "a" * 90, "chosen": "b" * 2, "rejected": "c" * 2},
    ]
    table = prepare_preferences(Dataset.from_list(rows), ENCODER)
    profile = profile_preferences(table, [16])
    sums = {name: part["tokens"] for name, part in profile.parts.items()}
    assert sums == {"prompt": 100, "chosen": 8, "rejected": 10, "row": 110}
    repeated = profile.repeated["repeated share in the answers of a prompt"]
    assert repeated == pytest.approx(100 / 218)
    limit = next(row for row in profile.limits if row["max_length"] == 16)
    kept = cut_preferences(table, PreferenceLimits(max_length=16))
    assert limit["rows untrained"] == 2 - len(kept) == 1
    assert limit["rows cut"] == 2 == len(kept.report.long)


def test_a_prompt_counts_once_for_each_answer_that_is_there():
    rows = [
        {"prompt": "a" * 10, "answers": ["b" * 4, "c" * 6, "d" * 8], "ranks": [0, 1, 2]},
        {"prompt": "a" * 30, "answers": ["b" * 2, "c" * 2], "ranks": [0, 1]},
    ]
    profile = profile_preferences(prepare_preferences(Dataset.from_list(rows), ENCODER))
    answers = 5 + 7 + 9 + 3 + 3  # each with its end
    expected = 1 - (40 + answers) / (3 * 10 + 2 * 30 + answers)
    found = profile.repeated["repeated share in the answers of a prompt"]
    assert found == pytest.approx(expected)


def test_padding_is_counted_as_a_collator_would():
    found = padding_table(np.array([1, 4, 2, 3, 5]))
    by_batch = {row["batch"]: row for row in found}
    assert by_batch[1]["padding"] == 0
    assert by_batch[2]["padding"] == round(1 - 15 / (4 + 4 + 3 + 3 + 5), 4)
    assert by_batch[2]["sorted"] == round(1 - 15 / (2 + 2 + 4 + 4 + 5), 4)
    assert by_batch[8]["padding"] == round(1 - 15 / 25, 4)


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=8))
def test_repeated_share_is_that_of_a_prefix_tree(rows):
    nodes = {tuple(ids[: t + 1]) for ids in rows for t in range(len(ids))}
    total = sum(map(len, rows))
    assert repeated_share(rows) == pytest.approx(1 - len(nodes) / total if total else 0)


def test_candidates():
    assert candidates(np.array([10, 100, 300]), [7]) == [7, 64, 128, 256, 300, 512]

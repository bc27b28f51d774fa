import pickle
from functools import partial

import numpy as np
import pytest
from datasets import Dataset, load_from_disk
from tiny import tiny_tokenizer

from trl.data.encode import TextEncoder
from trl.data.examples import token_counts
from trl.data.preference_cutting import (
    PreferenceLimits,
    add_kl_answers,
    choose_partners,
    cut_preferences,
    preference_lengths,
    with_kl_answers,
    with_ref_logps,
)
from trl.data.preference_rows import prepare_preferences
from trl.data.streams import PreparedStream

ENCODER = TextEncoder(tiny_tokenizer())
PROMPT, CHOSEN, REJECTED = [1, 2, 3, 4], [5, 6, 7], [8, 9]


def prepare(*rows):
    return prepare_preferences(Dataset.from_list(list(rows)), ENCODER)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, (PROMPT, CHOSEN, REJECTED)),
        ({"max_prompt_length": 2}, ([3, 4], CHOSEN, REJECTED)),
        ({"max_completion_length": 1}, (PROMPT, [5], [8])),
        ({"max_length": 6}, (PROMPT, [5, 6], [8, 9])),
        ({"max_length": 5}, (PROMPT, [5], [8])),
        ({"max_length": 5, "truncation_mode": "keep_end"}, ([3, 4], CHOSEN, REJECTED)),
        ({"max_length": 3, "truncation_mode": "keep_end"}, ([4], [6, 7], [8, 9])),
        ({"max_length": 4, "max_prompt_length": 2}, ([3, 4], [5, 6], [8, 9])),
        (
            {"max_length": 2, "max_completion_length": 2, "truncation_mode": "keep_end"},
            ([4], [6], [9]),
        ),
    ],
)
def test_limits(limits, expected):
    row = {"prompt_ids": PROMPT, "chosen_ids": CHOSEN, "rejected_ids": REJECTED}
    cut = cut_preferences(prepare(row), PreferenceLimits(**limits))
    for (found,) in (cut.examples(), cut.dataset):
        assert (found["prompt_ids"], found["chosen_ids"], found["rejected_ids"]) == expected
    assert token_counts(cut.dataset).tolist() == [sum(map(len, expected))]


def test_what_was_cut_is_counted_and_empty_rows_are_named():
    rows = [
        {"prompt_ids": PROMPT, "chosen_ids": CHOSEN, "rejected_ids": REJECTED},
        {"prompt_ids": list(range(9)), "chosen_ids": CHOSEN, "rejected_ids": REJECTED},
        {"prompt_ids": PROMPT, "chosen_ids": CHOSEN, "rejected_ids": []},
    ]
    found = cut_preferences(prepare(*rows), PreferenceLimits(max_length=6))
    assert found.dataset["source"][:] == [0] and found.report.untrained == (1, 2)
    assert found.report.lines("max_length=6") == [
        "3 of 3 rows longer than max_length=6: 22 tokens left out, 9 of them trained.",
        "2 of 3 rows left with nothing to train on: 1, 2.",
    ]
    assert (
        len(cut_preferences(prepare(*rows), PreferenceLimits(max_length=7, truncation_mode="drop")))
        == 1
    )
    assert cut_preferences(prepare(*rows), PreferenceLimits(max_prompt_length=4)).report.long == (
        1,
    )
    with pytest.raises(ValueError, match=r"None of the 3 rows .*max_length=2"):
        cut_preferences(prepare(*rows), PreferenceLimits(max_length=2)).checked("max_length=2")


def test_cut_pairs_are_a_dataset(tmp_path):
    rows = [
        {"prompt_ids": [*range(n)], "chosen_ids": CHOSEN[: n + 1], "rejected_ids": REJECTED}
        for n in (0, 7, 2, 1)
    ]
    limits = PreferenceLimits(max_length=4, truncation_mode="keep_end")
    found = cut_preferences(prepare(*rows), limits).dataset
    assert found["prompt_ids"][:] == [[], [6], [1], [0]]
    assert found["chosen_ids"][:] == [[5], CHOSEN, CHOSEN, [5, 6]]
    found.save_to_disk(tmp_path)
    assert load_from_disk(tmp_path)[1:3] == found[1:3]
    assert found.map(lambda row: {"n": len(row["prompt_ids"])})["n"][:] == [0, 1, 1, 1]
    assert cut_preferences(found, limits).dataset is found


def test_answers_of_different_numbers_are_counted():
    rows = [
        {"prompt_ids": [1], "answers_ids": [[2], [3], [4]], "ranks": [2, 0, 1]},
        {"prompt_ids": [1], "answers_ids": [[5, 6]], "ranks": [3]},
    ]
    table = prepare(*rows)
    lengths = preference_lengths(table)
    assert lengths.answers.tolist() == [[1, 1, 1], [2, 2, 2]]
    assert lengths.exists.tolist() == [[True] * 3, [True, False, False]]
    assert token_counts(table).tolist() == [4, 3]
    cut = cut_preferences(table, PreferenceLimits(max_completion_length=1))
    assert cut.report.tokens_lost == 1
    with pytest.raises(NotImplementedError, match="Ranked answers can be left out"):
        cut.checked("")
    limits = PreferenceLimits(max_length=2, truncation_mode="drop")
    assert cut_preferences(table, limits).dataset["source"][:] == [0]


def test_reference_values_become_columns():
    table = prepare({"prompt_ids": PROMPT, "chosen_ids": CHOSEN, "rejected_ids": REJECTED})
    for logps in ([[1.0, 2.0]], [[-1.0, -2.0]]):
        table = with_ref_logps(table, np.array(logps, dtype=np.float32), "key")
        found = (table[0]["ref_chosen_logps"], table[0]["ref_rejected_logps"])
        assert found == tuple(logps[0])


# --- Answers of other rows ---


def test_partners_follow_from_the_seed():
    rows = [{"prompt": f"{i}?", "completion": "a" * (i + 1), "label": True} for i in range(50)]
    table = prepare(*rows)
    found = [choose_partners(table, seed).tolist() for seed in (0, 1, 0)]
    assert found[0] == found[2] != found[1]
    assert np.bincount(found[0]).max() <= 2
    assert choose_partners(table.shuffle(seed=1), 0).tolist() == found[0]


PAIRS = [
    {"prompt": f"{i}? ", "chosen": "yes" * (i + 1), "rejected": "no" * (i % 2)} for i in range(6)
]
LABELLED = [
    {"prompt": f"{i % 3}? ", "completion": "ab" * (i + 1), "label": i % 2 == 0} for i in range(8)
]


def rows_of(data, stream=False, **limits):
    """Rows with the answer of another row each."""
    limits = PreferenceLimits(**limits)
    dataset = Dataset.from_list(data)
    dataset = dataset.to_iterable_dataset() if stream else dataset
    prepared = prepare_preferences(dataset, ENCODER, unpaired=True)
    cut = partial(cut_preferences, limits=limits)
    if stream:
        return list(PreparedStream(prepared, cut, partial(add_kl_answers, limits=limits)))
    return list(with_kl_answers(cut(prepared), limits, 0))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("data", [PAIRS, LABELLED], ids=["pairs", "labelled"])
def test_partners_are_other_answers_of_other_examples(data, stream):
    rows = rows_of(data, stream)
    homes = {}
    for row in rows:
        homes.setdefault(tuple(row["completion_ids"]), set()).add(row["source"])
    assert len(rows) == (12 if data is PAIRS else 8)
    for row in rows:
        assert row["kl_completion_ids"] != row["completion_ids"]
        assert homes[tuple(row["kl_completion_ids"])] - {row["source"]}


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_cut_to_the_room_behind_the_prompt(stream):
    prompts = ["a" * 7, "b", "c" * 3, "d"]
    data = [row | {"prompt": prompt} for row, prompt in zip(LABELLED, prompts, strict=False)]
    for row in rows_of(data, stream, max_length=9):
        assert row["completion_ids"] and row["kl_completion_ids"]
        longest = max(len(row["completion_ids"]), len(row["kl_completion_ids"]))
        assert len(row["prompt_ids"]) + longest <= 9


def test_partners_of_a_dataset_on_disk_stay_there(tmp_path):
    Dataset.from_list(LABELLED).save_to_disk(tmp_path / "rows")
    limits = PreferenceLimits(max_length=12)
    kinds = []
    for _ in range(2):
        prepared = prepare_preferences(load_from_disk(tmp_path / "rows"), ENCODER)
        found = with_kl_answers(cut_preferences(prepared, limits), limits, 0)
        files = sorted(path.stat().st_mtime_ns for path in (tmp_path / "rows").glob("cache-*"))
        kinds.append((found._fingerprint, found[:], files))
    assert kinds[0] == kinds[1] and len(kinds[0][2]) == 2
    assert pickle.loads(pickle.dumps(found))[:] == found[:]
    found.save_to_disk(tmp_path / "saved")
    assert load_from_disk(tmp_path / "saved")[:] == found[:]


def test_a_partner_in_a_stream_is_the_last_one_before():
    data = [{"prompt": f"{i}? ", "completion": "x" * (i + 1), "label": True} for i in range(4)]
    rows = rows_of(data, stream=True)
    longer = {
        row["source"]: len(row["kl_completion_ids"]) - len(row["completion_ids"]) for row in rows
    }
    assert longer == {0: 1, 1: -1, 2: -1, 3: -1}  # the first one waits for the second


@pytest.mark.parametrize("stream", [False, True])
def test_a_row_without_a_partner_is_an_error(stream):
    data = [{"prompt": p, "completion": "b", "label": True} for p in "ac"]
    with pytest.raises(ValueError, match="has no partner: the KL estimate needs rows"):
        rows_of(data, stream)

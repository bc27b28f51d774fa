"""Preference pairs."""

from itertools import takewhile

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from hypothesis import given
from hypothesis import strategies as st

from trl.data.preference import (
    common_prefix_length,
    extract_prompt,
    maybe_extract_prompt,
    maybe_unpair_preference_dataset,
    unpair_preference_dataset,
)


def turns(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("chosen", "rejected", "parts"),
    [
        ("sky is blue", "sky is green", ("sky is", " blue", " green")),
        ("sky:blue", "sky:green", ("sky:", "blue", "green")),
        ("blue", "green", ("", "blue", "green")),
        ("ab", "abc", ("a", "b", "bc")),  # one is the beginning of the other
        ("abc", "ab", ("a", "bc", "b")),
        ("ab ", "ab c", ("ab", " ", " c")),
        ("a b", "a bc", ("a", " b", " bc")),
        ("ab", "ab", ("a", "b", "b")),
        ("a", "a", ("", "a", "a")),
        ("", "a", ("", "", "a")),
    ],
)
def test_common_beginning_of_strings(chosen, rejected, parts):
    found = extract_prompt({"chosen": chosen, "rejected": rejected, "id": 3})
    assert found == dict(zip(("prompt", "chosen", "rejected"), parts, strict=True))
    assert found["prompt"] + found["chosen"] == chosen
    assert found["prompt"] + found["rejected"] == rejected


@pytest.mark.parametrize(
    ("chosen", "rejected", "shared"),
    [
        (turns("a", "b"), turns("a", "c"), 1),
        (turns("a", "b", "c", "d"), turns("a", "b", "c", "e"), 3),
        (turns("a", "b"), turns("x", "b"), 0),
        (turns("a", "b"), turns("a", "b", "c", "d"), 1),
        (turns("a", "b", "c"), turns("a"), 0),
        (turns("a", "b"), turns("a", "b"), 1),
    ],
)
def test_common_beginning_of_messages(chosen, rejected, shared):
    found = extract_prompt({"chosen": chosen, "rejected": rejected})
    assert found == {
        "prompt": chosen[:shared],
        "chosen": chosen[shared:],
        "rejected": rejected[shared:],
    }
    assert min(len(found["chosen"]), len(found["rejected"])) > 0


def test_only_pairs_without_a_fitting_prompt_are_split():
    split = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert maybe_extract_prompt({"chosen": "ab", "rejected": "ac"}) == split
    for unchanged in (
        {"prompt": "q", "chosen": "ab", "rejected": "ac"},
        {"prompt": turns("q"), "chosen": turns("a", "b"), "rejected": turns("a", "c")},
        {"prompt": "q", "completion": "ab"},
        {"chosen": "ab"},
    ):
        assert maybe_extract_prompt(unchanged) is unchanged


def test_a_prompt_of_the_other_format_is_replaced():
    example = {"prompt": "a", "chosen": turns("a", "b"), "rejected": turns("a", "c")}
    assert maybe_extract_prompt(example) == {
        "prompt": turns("a"),
        "chosen": turns("a", "b")[1:],
        "rejected": turns("a", "c")[1:],
    }


def test_mapping_keeps_other_columns():
    data = Dataset.from_dict({"chosen": ["ab", "xy"], "rejected": ["ac", "xz"], "id": [7, 8]})
    assert list(data.map(maybe_extract_prompt)) == [
        {"chosen": "b", "rejected": "c", "id": 7, "prompt": "a"},
        {"chosen": "y", "rejected": "z", "id": 8, "prompt": "x"},
    ]


PAIRS = {"prompt": ["p", "q"], "chosen": ["a", "b"], "rejected": ["c", "d"], "id": [7, 8]}
SINGLES = [
    {"prompt": "p", "id": 7, "completion": "a", "label": True},
    {"prompt": "q", "id": 8, "completion": "b", "label": True},
    {"prompt": "p", "id": 7, "completion": "c", "label": False},
    {"prompt": "q", "id": 8, "completion": "d", "label": False},
]


def test_unpairing_keeps_other_columns():
    assert list(unpair_preference_dataset(Dataset.from_dict(PAIRS))) == SINGLES


def test_unpairing_by_batches():
    found = unpair_preference_dataset(Dataset.from_dict(PAIRS), batch_size=1)
    assert list(found) == [SINGLES[i] for i in (0, 2, 1, 3)]


def test_unpairing_messages_and_several_splits():
    data = Dataset.from_dict({"chosen": [turns("a")], "rejected": [turns("b")]})
    found = maybe_unpair_preference_dataset(DatasetDict({"train": data, "test": data}))
    rows = [{"completion": turns(x), "label": x == "a"} for x in ("a", "b")]
    assert {name: list(split) for name, split in found.items()} == {"train": rows, "test": rows}


def test_streams_are_unpaired():
    rows = [dict(zip(PAIRS, row, strict=True)) for row in zip(*PAIRS.values(), strict=True)]
    known = Dataset.from_list(rows).to_iterable_dataset()
    unknown = IterableDataset.from_generator(lambda: iter(rows))
    assert unknown.column_names is None
    for stream in (known, unknown):
        assert list(maybe_unpair_preference_dataset(stream)) == SINGLES
        assert list(unpair_preference_dataset(stream)) == SINGLES
    for stream in (
        IterableDataset.from_generator(lambda: iter(SINGLES)),
        IterableDataset.from_generator(lambda: iter([])),
    ):
        assert maybe_unpair_preference_dataset(stream) is stream


def test_only_pairs_are_unpaired():
    paired = Dataset.from_dict(PAIRS)
    assert list(maybe_unpair_preference_dataset(paired, num_proc=1, desc="x")) == SINGLES
    for other in (
        paired.remove_columns("rejected"),
        Dataset.from_dict({"prompt": ["a"], "completion": ["b"]}),
        DatasetDict({"train": paired.remove_columns("chosen")}),
    ):
        assert maybe_unpair_preference_dataset(other) is other


@given(st.lists(st.booleans()), st.lists(st.booleans()))
def test_common_prefix_length(first, second):
    pairs = zip(first, second, strict=False)
    expected = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert common_prefix_length(first, second) == expected

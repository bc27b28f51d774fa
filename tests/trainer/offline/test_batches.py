from dataclasses import replace
from functools import partial
from itertools import chain, pairwise

import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from kto_runs import labelled, make_trainer
from sft_runs import config
from tiny import tiny_tokenizer

from trl.data.encode import TextEncoder
from trl.data.preference_rows import MismatchedDataset, PreferenceLimits, with_others
from trl.data.prepare import CutReport, ItemDataset, SupervisedDataset
from trl.data.rows import AnswerGroup
from trl.trainer.offline.batches import ItemStream, prepare_answers

lengths = st.lists(st.integers(2, 20), min_size=1, max_size=60)


def stream_of(rows, **options):
    """A stream of prepared rows: all their tokens are trained but the first."""
    rest = {"merged": 0, "origin": "", "largest_id": 7}
    rows = [
        {"source": i, "input_ids": [7] * n, "trained": [True] * n, **rest}
        for i, n in enumerate(rows)
    ]
    return ItemStream(
        IterableDataset.from_generator(lambda: iter(rows)), SupervisedDataset, **options
    )


@settings(deadline=None, max_examples=40)
@given(lengths, st.integers(1, 4), st.integers(1, 3), st.sampled_from([None, 24]), st.booleans())
def test_every_document_of_a_stream_is_trained_on_by_one_rank(sizes, rows, ranks, most, packs):
    seen, counts = [], set()
    for rank in range(ranks):
        limits = rows, most, 20 if packs else None
        batches = list(stream_of(sizes, limits=limits, place=(rank, ranks)))
        counts.add(len(batches))
        for batch in batches:
            assert packs or len(batch) <= rows
            taken = sum(sizes[d.source] for d in batch)
            assert most is None or taken <= most or len(batch) == 1
        seen += [d.source for batch in batches for d in batch if d.counts]
    assert sorted(seen) == list(range(len(sizes))) and len(counts) == 1


@settings(deadline=None, max_examples=40)
@given(lengths, st.integers(1, 4))
def test_a_micro_batch_of_a_stream_is_full_unless_it_is_the_last(sizes, rows):
    """Wherever reading stops for a while, what is read next may still go into it."""
    batches = list(stream_of(sizes, limits=(rows, 24, None)))
    for batch, later in pairwise(batches):
        taken = sum(sizes[d.source] for d in batch)
        assert len(batch) == rows or taken + sizes[later[0].source] > 24


def test_a_stream_is_read_as_it_is_needed():
    read = []

    def rows():
        for i in range(10_000):
            read.append(i)
            yield {"text": "ab"}

    stream = ItemStream(IterableDataset.from_generator(rows), Texts, limits=(4, None, None))
    next(iter(stream))
    assert max(read) < 100


class Texts(ItemDataset):
    """An item of each row."""

    def __init__(self, table):
        super().__init__(table, [2] * len(table), CutReport(len(table), (), 0, 0, (), 0))

    def item(self, at):
        return AnswerGroup([1], [[2]], at)


def test_rows_that_are_left_out_or_cut_are_named_and_counted(caplog):
    stream = stream_of([3, 1, 4, 1, 5])
    stream.cut = partial(SupervisedDataset, max_length=3)
    assert [len(item.ids) for item in chain(*stream)] == [3, 3, 3]
    left_out, cut, counts = caplog.messages
    assert (
        left_out
        == "Row 1 is left out, with nothing left to train on; further ones are only counted."
    )
    assert cut == "Row 2 is over a length limit; further ones are only counted."
    assert counts == (
        "Rows of the stream: 2 over a length limit; 2 left out, with nothing left to train on."
    )


ENCODER = TextEncoder(tiny_tokenizer())
ROWS = [
    {"prompt_ids": [1] * 4, "chosen_ids": [2] * 4, "rejected_ids": [3]},
    {"prompt_ids": [1] * 9, "chosen_ids": [4], "rejected_ids": [5]},
    {"prompt_ids": [1], "chosen_ids": [6], "rejected_ids": [7, 8]},
]


@pytest.mark.parametrize("drop_long", [False, True])
@pytest.mark.parametrize("unpaired", [False, True])
def test_a_stream_has_the_items_of_the_dataset(tmp_path, caplog, unpaired, drop_long):
    limits = PreferenceLimits(max_length=6, truncation_mode="drop" if drop_long else "keep_start")
    data = Dataset.from_list(ROWS)
    whole = prepare_answers(data, ENCODER, config(tmp_path), limits, unpaired)
    assert "longer than max_length=6: " in caplog.text
    assert "left with nothing to train on: " in caplog.text
    stream = data.to_iterable_dataset()
    found = list(chain(*prepare_answers(stream, ENCODER, config(tmp_path), limits, unpaired)))
    assert found == [whole[i] for i in range(len(whole))]


def test_older_names_of_columns_are_told_of(tmp_path):
    old = {"chosen_input_ids": [[1, 2, 3]], "rejected_input_ids": [[1, 4]]}
    with pytest.warns(FutureWarning, match="chosen_input_ids is now chosen_ids, rejected_input_id"):
        found = prepare_answers(
            Dataset.from_dict(old), ENCODER, config(tmp_path), PreferenceLimits()
        )
    assert (found[0].prompt_ids, found[0].answer_ids) == ([1], [[2, 3], [4]])


# --- Answers of other examples ---

PAIRS = Dataset.from_list(
    [{"prompt": f"{i}? ", "chosen": "yes" * (i + 1), "rejected": "no" * (i % 2)} for i in range(6)]
)


def items_of(folder, data, stream=False, **limits):
    limits = PreferenceLimits(**limits)
    data = data.to_iterable_dataset() if stream else data
    answers = prepare_answers(data, ENCODER, config(folder), limits, unpaired=True)
    if stream:
        return list(chain(*replace(answers, arrange=partial(with_others, limits=limits))))
    found = MismatchedDataset(answers, 0)
    return [found[i] for i in range(len(found))]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("data", [PAIRS, labelled()], ids=["pairs", "labelled"])
def test_partners_are_other_answers_of_other_examples(tmp_path, data, stream):
    items = items_of(tmp_path, data, stream)
    homes = {}
    for item in items:
        homes.setdefault(tuple(item.answer_ids[0]), set()).add(item.source)
    assert len(items) == (12 if data is PAIRS else 8)
    for item in items:
        own, other = item.answer_ids
        assert own != other
        assert homes[tuple(other)] - {item.source}


def test_partners_do_not_depend_on_processes_or_batches(tmp_path):
    found = [
        make_trainer(tmp_path, PAIRS, **changes).train_dataset.partners.tolist()
        for changes in (
            {},
            {"dataset_num_proc": 2},
            {"per_device_train_batch_size": 1, "train_sampling_strategy": "random"},
        )
    ]
    assert found[0] == found[1] == found[2]
    assert make_trainer(tmp_path, PAIRS, seed=1).train_dataset.partners.tolist() != found[0]


def test_answers_are_cut_to_the_room_behind_the_prompt(tmp_path):
    for stream in (False, True):
        for item in items_of(tmp_path, labelled(), stream, max_length=34):
            assert all(ids for ids in item.answer_ids)
            assert len(item.prompt_ids) + max(map(len, item.answer_ids)) <= 34


def test_a_partner_in_a_stream_is_the_last_one_before(tmp_path):
    rows = [{"prompt": f"{i}? ", "completion": "x" * (i + 1), "label": True} for i in range(4)]
    items = items_of(tmp_path, Dataset.from_list(rows), stream=True)
    longer = {i.source: len(i.answer_ids[1]) - len(i.answer_ids[0]) for i in items}
    assert longer == {0: 1, 1: -1, 2: -1, 3: -1}  # the first one waits for the second


@pytest.mark.parametrize("stream", [False, True])
def test_a_row_without_a_partner_is_an_error(tmp_path, stream):
    data = labelled([("a", "b", True), ("c", "b", False)])
    with pytest.raises(ValueError, match="has no partner: the KL estimate needs rows"):
        items_of(tmp_path, data, stream)


def test_an_item_that_does_not_count_stays_one(tmp_path):
    dataset = make_trainer(tmp_path).train_dataset
    assert not dataset[~3].counts and dataset[~3].answer_ids == dataset[3].answer_ids
    assert dataset.lengths[3] == dataset[3].tokens()

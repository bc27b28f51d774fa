import pytest
from datasets import Dataset
from sft_runs import config
from tiny import tiny_tokenizer

from trl.data.encode import TextEncoder
from trl.data.preference_rows import PreferenceLimits
from trl.trainer.offline.answers import prepare_answers

ENCODER = TextEncoder(tiny_tokenizer())
ROWS = [
    {"prompt_ids": [1] * 4, "chosen_ids": [2] * 4, "rejected_ids": [3]},
    {"prompt_ids": [1] * 9, "chosen_ids": [4], "rejected_ids": [5]},
    {"prompt_ids": [1], "chosen_ids": [6], "rejected_ids": [7, 8]},
]


@pytest.mark.parametrize("drop_long", [False, True])
@pytest.mark.parametrize("unpaired", [False, True])
def test_a_stream_has_the_items_of_the_dataset(tmp_path, caplog, unpaired, drop_long):
    limits = PreferenceLimits(**{"drops_over" if drop_long else "max_length": 6})
    data = Dataset.from_list(ROWS)
    whole = prepare_answers(data, ENCODER, config(tmp_path), limits, unpaired)
    reason = "more than max_length tokens" if drop_long else "an answer without tokens"
    assert f"{reason}, left out: " in caplog.text
    assert drop_long or "2 tokens cut off" in caplog.text
    stream = data.to_iterable_dataset()
    found = list(prepare_answers(stream, ENCODER, config(tmp_path), limits, unpaired))
    assert found == [whole[i] for i in range(len(whole))]


def test_older_names_of_columns_are_told_of(tmp_path):
    old = {"chosen_input_ids": [[1, 2, 3]], "rejected_input_ids": [[1, 4]]}
    with pytest.warns(FutureWarning, match="chosen_input_ids is now chosen_ids, rejected_input_id"):
        found = prepare_answers(
            Dataset.from_dict(old), ENCODER, config(tmp_path), PreferenceLimits()
        )
    assert (found[0].prompt_ids, found[0].answer_ids) == ([1], [[2, 3], [4]])

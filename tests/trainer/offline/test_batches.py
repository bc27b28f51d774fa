import pytest
from datasets import Dataset
from kto_runs import make_trainer
from sft_runs import config
from tiny import tiny_tokenizer

from trl.data.encode import TextEncoder
from trl.data.preference_cutting import PreferenceLimits
from trl.trainer.offline.batches import prepare_answers

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
    cut = prepare_answers(data, ENCODER, config(tmp_path), limits, unpaired)
    whole = cut.checked(str(limits))
    assert "longer than max_length=6: " in caplog.text
    assert "left with nothing to train on: " in caplog.text
    stream = data.to_iterable_dataset()
    found = prepare_answers(stream, ENCODER, config(tmp_path), limits, unpaired)
    assert list(found) == list(whole) and found.column_names == whole.column_names


def test_older_names_of_columns_are_told_of(tmp_path):
    old = {"chosen_input_ids": [[1, 2, 3]], "rejected_input_ids": [[1, 4]]}
    with pytest.warns(FutureWarning, match="chosen_input_ids is now chosen_ids, rejected_input_id"):
        found = prepare_answers(
            Dataset.from_dict(old), ENCODER, config(tmp_path), PreferenceLimits()
        )
    (row,) = found.dataset
    assert (row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]) == ([1], [2, 3], [4])


PAIRS = Dataset.from_list(
    [{"prompt": f"{i}? ", "chosen": "yes" * (i + 1), "rejected": "no" * (i % 2)} for i in range(6)]
)


def test_partners_do_not_depend_on_processes_or_batches(tmp_path):
    found = [
        make_trainer(tmp_path, PAIRS, **changes).train_dataset["kl_completion_ids"][:]
        for changes in (
            {},
            {"dataset_num_proc": 2},
            {"per_device_train_batch_size": 1, "train_sampling_strategy": "random"},
        )
    ]
    assert found[0] == found[1] == found[2]
    assert make_trainer(tmp_path, PAIRS, seed=1).train_dataset["kl_completion_ids"][:] != found[0]

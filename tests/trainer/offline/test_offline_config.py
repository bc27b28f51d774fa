import pytest
from accelerate.parallelism_config import ParallelismConfig

from trl.trainer.offline.offline_config import OfflineConfig


def make(**changes):
    return OfflineConfig("out", **({"use_cpu": True, "bf16": False} | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 cannot be used: logits are"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 cannot be used: its noise"),
        ({"auto_find_batch_size": True}, "recover_from_oom"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last=True cannot be used"),
        ({"train_sampling_strategy": "group_by_length"}, "use max_tokens_per_micro_batch"),
        ({"dataset_kwargs": "[]"}, "must be a dictionary"),
    ],
)
def test_what_would_mean_nothing_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        make(**changes)


def test_padding():
    assert make(pad_to_multiple_of="8").pad_to_multiple_of == 8
    assert make(pad_to_multiple_of=16).pad_to_multiple_of == 16


@pytest.mark.parametrize(
    ("changes", "seed"),
    [
        ({"seed": 7}, 7),
        ({"train_sampling_strategy": "sequential"}, None),
        ({"train_sampling_strategy": "sequential", "shuffle_dataset": True}, 42),
    ],
)
def test_the_order_of_rows(changes, seed):
    assert make(**changes).order_seed == seed


def test_ulysses_is_refused_when_the_options_are_made():
    with pytest.raises(ValueError, match="sp_size=2: .* drops the masks .* Use cp_size"):
        make(parallelism_config=ParallelismConfig(sp_size=2, sp_backend="deepspeed"))

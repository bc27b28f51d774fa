"""What a profile says is what a run does."""

import pytest
from datasets import Dataset
from sft_runs import config, make_trainer
from tiny import save_tiny

from trl.trainer.length_profile import profile_rows
from trl.trainer.sft_trainer import SFTTrainer

SIZES = [(3 + 5 * i % 17, 1 + 7 * i % 40) for i in range(30)] + [(70, 4), (2, 90)]


class Counting(SFTTrainer):
    """Notes tokens, trained tokens and documents of each micro-batch."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seen = []

    def compute_loss(self, model, inputs, **options):
        self.seen.append((inputs.tokens(), int(self.weigh(inputs).sum()), len(inputs)))
        return super().compute_loss(model, inputs, **options)


@pytest.mark.parametrize("packing", [False, True])
def test_the_numbers_are_those_of_the_first_epoch_of_a_run(tmp_path, packing):
    rows = {"prompt": ["a" * p for p, _ in SIZES], "completion": ["b" * c for _, c in SIZES]}
    data = Dataset.from_dict(rows)
    options = {"max_length": 64, "packing": packing, "per_device_train_batch_size": 1}
    found = profile_rows(data, save_tiny(tmp_path / "tiny"), config(tmp_path, **options), [64])
    epoch = {"max_steps": -1, "num_train_epochs": 1}
    trainer = make_trainer(tmp_path, data, kind=Counting, **options, **epoch)
    trainer.train()
    tokens, trained, documents = (sum(column) for column in zip(*trainer.seen, strict=True))
    limit = next(row for row in found.limits if row["max_length"] == 64)
    assert found.tokens - limit["tokens lost"] == tokens
    assert found.parts["trained"]["tokens"] - limit["trained lost"] == trained
    assert found.rows - limit["rows untrained"] == documents == 31
    assert (limit["rows cut"], limit["ends lost"]) == (2, 2)
    if packing:
        assert found.packing["packs"] == len(trainer.seen)

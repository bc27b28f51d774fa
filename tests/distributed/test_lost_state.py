"""Processes that resume decide together, whatever each of them finds on its disk."""

import os
from pathlib import Path

import pytest
import torch
from distributed.engines import call
from online_runs import dataset, make_trainer, weights

from trl.distributed import RankError

# Four micro-steps a round and two an update: step 3 begins within the second round.
SETTINGS = {
    "data": dataset(["ab", "cde", "f", "ghij", "kl", "mno", "p", "qr"]),
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 3,
    "ddp_backend": "gloo",
}


def work(folder, case):
    """One of two processes, each on a node, and so with a disk, of its own."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = "0"
    disk = Path(folder, str(rank))
    disk.mkdir()
    os.chdir(disk)
    found = {}
    for part, resumes in (("whole", False), ("resumed", True)):
        trainer = make_trainer(Path("out"), **SETTINGS, save_on_each_node=True)
        rounds, collect = [], trainer.collect

        def counted(*given, rounds=rounds, collect=collect, trainer=trainer):
            rounds.append(trainer.state.global_step)
            return collect(*given)

        trainer.collect = counted
        if resumes:
            lose(case, rank)
        trainer.accelerator.wait_for_everyone()
        try:
            trainer.train(resume_from_checkpoint="out/checkpoint-3" if resumes else None)
        except (ValueError, RankError) as error:
            found["error"] = str(error)
        found[part] = {"weights": weights(trainer.model), "rounds": rounds}
        trainer.accelerator.wait_for_everyone()
    return found


def lose(case, rank):
    """Remove what the case says the second process is to miss."""
    if rank == 1 and case == "no state":
        Path("out/checkpoint-3/trl_state_1.pt").unlink()
    if rank == 1 and case == "no checkpoint":
        Path("out/checkpoint-3").rename("out/elsewhere")


@pytest.mark.distributed
def test_state_on_two_disks_is_found_again(tmp_path):
    """Each node publishes its own part, and nothing is generated a second time."""
    for found in call(work, tmp_path, "nothing lost"):
        assert found["whole"]["rounds"] == [0, 2] and found["resumed"]["rounds"] == []
        assert torch.equal(found["whole"]["weights"], found["resumed"]["weights"])
    for rank in (0, 1):
        names = {path.name for path in (tmp_path / str(rank) / "out/checkpoint-3").iterdir()}
        assert f"trl_state_{rank}.pt" in names and f"trl_state_{1 - rank}.pt" not in names
        assert "trl_manifest.json" in names and ".disk-of-rank-0" not in names
        assert not (tmp_path / str(rank) / "out/unfinished").exists()


@pytest.mark.distributed
def test_a_round_is_generated_anew_on_all_ranks_or_on_none(tmp_path):
    for found in call(work, tmp_path, "no state"):
        assert "error" not in found
        assert found["whole"]["rounds"] == [0, 2] and found["resumed"]["rounds"] == [3]


@pytest.mark.distributed
def test_a_node_that_finds_no_checkpoint_stops_all(tmp_path):
    for found in call(work, tmp_path, "no checkpoint"):
        assert "rank 1 cannot find it" in found["error"]
        assert "save_on_each_node=True" in found["error"]

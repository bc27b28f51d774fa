"""A failure of one rank ends all of them, with its error."""

import math
import re
import sys
from pathlib import Path

import pytest
from online_runs import rows_of
from workspace import run_trl_forked, write_inputs

sys.path.insert(0, str(Path(__file__).parent))

from engines import Job

SCRIPT = Path(__file__).with_name("failing_run.py")
JOBS = {
    "whole weights": (
        "ddp",
        "mismatch",
        "prompts",
        "reward",
        "sampling",
        "loss",
    ),
    "shards": (
        *("zero3", "mismatch", "sampling", "padded sampling"),
        *("layerwise sampling", "layerwise forward"),
    ),
    "checkpoint": ("ddp", "checkpoint"),
}
PLANNED = "a planned failure"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """For each job: exit codes, what ranks heard before the last failure, and their last words."""
    running = {
        name: Job(SCRIPT, engine, tmp_path_factory.mktemp("run"), *places)
        for name, (engine, *places) in JOBS.items()
    }
    found = {}
    try:
        for name, job in running.items():
            codes = job.wait()
            heard = [job.reported(rank) or {} for rank in range(2)]
            found[name] = codes, heard, [job.words(rank) for rank in range(2)]
    finally:
        for job in running.values():
            job.stop()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("job", "where", "kind", "words", "stage"),
    [
        ("whole weights", "prompts", "Mistake", PLANNED, "reading prompts"),
        ("whole weights", "reward", "RewardError", f"Mistake: {PLANNED}.", "rewards"),
        ("whole weights", "sampling", "Mistake", PLANNED, "generation"),
        ("shards", "sampling", "Mistake", PLANNED, "generation"),
        ("shards", "padded sampling", "Mistake", PLANNED, "generation"),
        ("shards", "layerwise sampling", "Mistake", PLANNED, "generation"),
    ],
)
def test_all_ranks_hear_of_a_failure_between_collectives(ended, job, where, kind, words, stage):
    other, failed = (heard[where] for heard in ended[job][1])
    assert failed[0] == kind and failed[1].endswith(words)
    assert failed[2] == ["This was rank 1 of 2."]
    assert other[:2] == ("RankError", f"Rank 1 failed in {stage}: {kind}: {failed[1]}")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("job", "rank"), [("whole weights", 1), ("shards", 1), ("checkpoint", 0)], ids=JOBS
)
def test_a_failure_amid_collectives_ends_all_ranks(ended, job, rank):
    codes, _, words = ended[job]
    assert codes == [1, 1]
    assert f"Mistake: {PLANNED}" in words[rank]
    assert f"This was rank {rank} of 2." in words[rank]
    lost = f"RankError: Rank {1 - rank} lost contact with a rank: "
    found = words[1 - rank]
    # The ranks leave word where they met, which is on rank 0 unless a launcher keeps it.
    told = f"rank {rank} failed: .*Mistake: {PLANNED}"
    assert re.search(lost + told, found) or (rank == 0 and lost in found)


REWARD = """
import os, signal

def deadly(completions, **kwargs):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return [0.0] * len(completions)
"""


@pytest.mark.distributed
@pytest.mark.parametrize("job", ["whole weights", "shards"])
def test_ranks_stop_together_at_the_mean_mismatch_of_all(ended, job):
    """Rank 0 has none; the bound of 0.1 is exceeded by the mean over the tokens of both."""
    counts = [sum(len(ids) for _, ids in rows_of([prompt], 4)) for prompt in ("ab", "cde")]
    mean, ratio = 0.4 * counts[1] / sum(counts), math.exp(-0.4)
    for heard in ended[job][1]:
        kind, words, _ = heard["mismatch"]
        assert kind == "MismatchError" and f"differ by {mean:.3g} nats" in words
        expected = {
            "replayed_logp_difference/mean": mean,
            "replayed_logp_difference/max": 0.4,
            "importance_sampling_ratio/min": ratio,
            "importance_sampling_ratio/mean": (counts[0] + ratio * counts[1]) / sum(counts),
            "importance_sampling_ratio/max": 1.0,
        }
        found = {name: heard["metrics"][f"sampling/{name}"] for name in expected}
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.distributed
def test_the_launcher_names_a_killed_process_and_ends_the_others(tmp_path):
    write_inputs(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARD)
    done = run_trl_forked(
        [
            *("rloo", "--accelerate_config", "multi_cpu", "--use_cpu", "--output_dir", "out"),
            *("--model_name_or_path", "tiny-model", "--dataset_name", "prompts.jsonl"),
            *("--reward_funcs", "rewards.deadly", "--reward_dry_run", "false"),
            *("--max_completion_length", "4", "--max_steps", "1", "--report_to", "none"),
        ],
        tmp_path,
    )
    assert done.returncode == 128 + 9, done.stderr[-2000:]
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("trl rloo: error: process 1 was ended by SIGKILL;")

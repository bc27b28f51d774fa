"""What the memory plan says a rank holds, against the tensors of real engines."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engines import launch
from held_bytes import BUCKET, SHAPE
from tiny import tiny_model

from trl.memory.model_size import model_size
from trl.memory.rank_memory import RankMemory
from trl.memory.settings import RunSettings, Sharding

SCRIPT = Path(__file__).with_name("held_bytes.py")
ENGINES = {
    "zero1": Sharding("zero", 1, 2, bucket=BUCKET, syncs=True),
    "zero2": Sharding("zero", 2, 2, bucket=BUCKET, syncs=True),
    "zero3": Sharding("zero", 3, 2, bucket=BUCKET, syncs=True),
    "fsdp1": Sharding("fsdp1", 3, 2),
    "fsdp2": Sharding("fsdp2", 3, 2),
}
KINDS = {"zero": ("zero1", "zero2", "zero3"), "fsdp": ("fsdp1", "fsdp2")}
RUN = RunSettings(2, 3, 1, 1, accumulation=2, processes=2, optimizer="adamw_torch", on_cpu=True)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_what_is_predicted(kind):
    size = model_size(tiny_model("llama", **SHAPE).config)
    if kind == "zero":
        pytest.importorskip("deepspeed")
    ranks = launch(SCRIPT, KINDS[kind][0], *KINDS[kind])
    for engine in KINDS[kind]:
        rank = RankMemory(size, RUN.replace(sharding=ENGINES[engine]))
        expected = {
            "rest": rank.resident().total,
            "waiting": rank.resident(rank.waiting).total,
            "update": rank.resident(rank.gradients).total,
        }
        for rank, found in enumerate(ranks):
            # Step counters of the optimizer, and what pads shares to equal sizes.
            assert found[engine] == pytest.approx(expected, rel=0.02), f"{engine}, rank {rank}"

"""Seconds against the formulas written out, and against what is known of the limits."""

import dataclasses
import sys
from pathlib import Path

import pytest
from peft import LoraConfig
from tiny import save_tiny, tiny_model

from trl.memory.model_size import model_size
from trl.memory.settings import RunSettings, Sharding

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from step_time import MACHINES, Machine, Seconds, StepTime, main, render_time

SIZE = model_size(tiny_model("llama").config)
MET = SIZE.parameters - (0 if SIZE.tied else SIZE.head)
# Round figures: a second is 1e9 operations, 1e6 bytes of memory, 1e4 of a link, 1e3 of a network.
UNIT = Machine(1e9, 1e6, 1e4, 1e3, mfu=1, hbm_share=1, link_share=1, host=1e5, gpus=2)
RUN = RunSettings(4, 30, 10, 8, slices=2, accumulation=2, weight_bytes=2, product_bytes=2)
TOKENS = 2 * 30 + 8 * 9  # of a micro-batch: two prompts once, and what their completions read
SEEN = 30 + 10 / 2
FORWARD = TOKENS * (2 * MET + 4 * SIZE.queries * SIZE.layers * SEEN)


def step(size=SIZE, parallel=1, machine=UNIT, **changes):
    return StepTime(size, RUN.replace(**changes), machine, parallel)


def zero(stage, ranks=2, **changes):
    return {"sharding": Sharding("zero", stage, ranks, syncs=True, **changes), "processes": ranks}


def test_training_takes_three_forwards_and_one_more_with_checkpointing():
    assert step().training().compute == pytest.approx(2 * 4 * FORWARD / 1e9)
    plain = step(gradient_checkpointing=False)
    assert plain.training().compute == pytest.approx(2 * 3 * FORWARD / 1e9)


def test_frozen_weights_have_no_gradient_to_compute():
    size = model_size(tiny_model("llama").config, LoraConfig(r=1, target_modules=["q_proj"]))
    ratio = (
        step(size).training().compute / step(size, gradient_checkpointing=False).training().compute
    )
    assert ratio == pytest.approx(3 / 2)


def test_scoring_is_one_forward_for_each_policy():
    assert "scoring" not in step().phases
    assert step(reference=True).scoring().compute == pytest.approx(2 * FORWARD / 1e9)
    both = step(reference=True, scores_policy=True)
    assert both.scoring().compute == pytest.approx(4 * FORWARD / 1e9)


def test_decoding_reads_weights_and_cache_for_every_token():
    cache = 2 * 2 * SIZE.keys * SIZE.layers * (4 * 30 + 16 * 10 / 2)
    expected = 10 * (2 * SIZE.parameters + cache) / 1e6
    assert step().decoding().memory == pytest.approx(expected)
    pieces = step(generation_rows=4)
    cache = 2 * 2 * SIZE.keys * SIZE.layers * (30 + 4 * 10 / 2)
    assert pieces.decoding().memory == pytest.approx(40 * (2 * SIZE.parameters + cache) / 1e6)


def test_an_engine_divides_the_weights_it_reads():
    alone, four = (step(parallel=n, engine_bytes=1e9).decoding().memory for n in (1, 4))
    assert alone - four == pytest.approx(10 * 2 * SIZE.parameters * 3 / 4 / 1e6)


def test_several_rounds_of_an_update_are_all_generated():
    twice = step(accumulation=4)
    for phase in ("prefill", "decoding", "forward + backward"):
        assert twice.phases[phase].total == pytest.approx(2 * step().phases[phase].total)
    again = step(passes=2, accumulation=4)
    assert again.decoding().total == pytest.approx(step().decoding().total)


# Bytes on the wire an update, in multiples of the weights: of two ranks, a ring moves half of them.
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sharding": Sharding(ranks=2), "processes": 2}, 2 / 2),  # all-reduce
        (zero(1), 1 / 2),
        (zero(2), 2 / 2),  # after each of two micro-batches
        (zero(3), (2 * 2 + 2) / 2),  # forward, backward and gradients of both
        ({"sharding": Sharding("fsdp2", 3, 2), "processes": 2}, (2 * 2 + 1) / 2),
        (
            {"sharding": Sharding("fsdp2", 3, 2, keeps_weights=True), "processes": 2},
            (2 + 1) / 2,
        ),
    ],
)
def test_communication_of_training(changes, expected):
    weights = 2 * SIZE.parameters / 1e4
    found = step(**changes).training()
    assert found.communication == pytest.approx(expected * weights)
    assert found.total == max(found.compute, found.communication)


def test_machines_are_slower_to_reach():
    near, far = (UNIT.ring(1e4, ranks) for ranks in (2, 4))
    assert (near, far) == (1 / 2, 10 * 3 / 4)
    assert UNIT.ring(1e4, 1) == 0
    assert UNIT.ring(1e4, 2, across=True) == 5


def test_hybrid_sharding_keeps_weights_within_a_machine():
    hybrid = {"sharding": Sharding("fsdp2", 3, 2, syncs=True), "processes": 4, "accumulation": 1}
    found = step(slices=1, **hybrid).training().communication
    weights = 2 * SIZE.parameters
    within, among = (2 + 1) * weights / 2 / 1e4, 2 * weights / 2 / 2 / 1e3
    assert found == pytest.approx(within + among)


def test_generation_from_shards_gathers_once_or_for_every_token():
    weights = 2 * SIZE.parameters / 2 / 1e4
    whole, layerwise = step(**zero(3)), step(**zero(3), gathers=False)
    assert whole.prefill().communication == pytest.approx(weights)
    assert whole.decoding().communication == 0
    assert layerwise.decoding().communication == pytest.approx(10 * weights)
    assert step(**zero(2)).prefill().communication == 0


def test_the_update_reads_and_writes_its_share_of_states():
    # Masters and two moments in float32 are read and written; gradient read, weights written.
    moved = (2 * 12 + 4 + 2) * SIZE.parameters / 2
    assert step(**zero(3)).update().memory == pytest.approx(moved / 1e6)
    offloaded = step(**zero(3, offloads_optimizer=True)).update()
    assert offloaded.memory == pytest.approx(moved / 1e5)
    assert step(**zero(2)).update().communication == pytest.approx(2 * SIZE.parameters / 2 / 1e4)


def test_totals():
    assert Seconds(2, 3, 4).total == 7
    assert Seconds(2, 3, 4, overlaps=True).total == 4
    found = step(reference=True)
    assert found.total == pytest.approx(sum(phase.total for phase in found.phases.values()))


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Machine) if f.name != "gpus"])
def test_better_hardware_is_never_slower(field):
    faster = UNIT.replace(**{field: 2 * getattr(UNIT, field)})
    changes = zero(3, ranks=4, offloads_optimizer=True)
    # Four ranks on two machines never wait for the links within one.
    expected = "same" if field == "link" else "faster"
    slower, found = step(**changes).total, step(machine=faster, **changes).total
    assert ("faster" if found < slower else "same") == expected


def test_figures_of_hardware_are_checked():
    assert MACHINES["h100"].replace(mfu=0.5).mfu == 0.5
    with pytest.raises(ValueError, match="hardware: mfo is none of flops, gpus"):
        UNIT.replace(mfo=1)
    with pytest.raises(ValueError, match="mfu=0 must be above 0"):
        UNIT.replace(mfu=0)


def test_the_table_says_what_was_assumed():
    shown = render_time(step(reference=True)).splitlines()
    assert [line.split("  ")[0] for line in shown[1:-1]] == [
        *step(reference=True).phases,
        "an update",
    ]
    assert "MFU of 100%" in shown[-1]


def test_the_command_prints_plan_and_time(tmp_path, capsys):
    words = ["--model_name_or_path", save_tiny(tmp_path / "model"), "--use_cpu", "--bf16", "false"]
    words += ["--accelerate_config", "zero3", "--num_processes", "2", "--longest_prompt", "64"]
    main(["--gpu", "a100", "--hardware", '{"mfu": 0.5}', "--method", "grpo", *words])
    shown = capsys.readouterr().out
    assert "held at the peak of" in shown
    assert "predicted seconds of" in shown
    assert "312 TFLOP/s at an MFU of 50%" in shown
    assert "within a machine of 2 GPUs" in shown
    with pytest.raises(SystemExit):
        main(["--gpu", "abacus", *words])

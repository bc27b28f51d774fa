"""The search, against trying every value; and the changes, against estimates made by hand."""

import pytest
from peft import LoraConfig
from tiny import tiny_model

from trl.memory.estimate import Estimate
from trl.memory.model_size import model_size
from trl.memory.plan import (
    HEADROOM,
    Plan,
    group_sizes,
    largest_fitting,
    render,
    resized,
    table,
)
from trl.memory.settings import RunSettings, Sharding
from trl.number_format import format_bytes

SIZE = model_size(tiny_model("llama", max_position_embeddings=4096).config)
RUN = RunSettings(4, 200, 50, 4, slices=2, accumulation=2, on_cpu=True)


def plan(share=1.0, **changes):
    """A plan for a device with that share of the memory the run needs, headroom on top."""
    run = RUN.replace(**changes)
    needed = Estimate(SIZE, run).peak
    return Plan(SIZE, run, share * needed / (1 - HEADROOM) + 1)


def largest(found, option):
    return next(limit.largest for limit in found.limits() if limit.option == option)


def test_fits_up_to_the_device_less_the_headroom():
    assert plan(1.0).fits()
    assert not plan(0.99).fits()


@pytest.mark.parametrize("border", [3, 4, 5, 17, 99, 100])
def test_bisection_finds_the_border(border):
    tried = []

    def fits(value):
        tried.append(value)
        return value <= border

    assert largest_fitting(fits, range(3, 100)) == min(border, 99)
    assert len(tried) <= 8


def test_the_search_goes_on_from_a_value_that_fits():
    """Small values need not fit where larger ones do."""
    assert largest_fitting(lambda value: 10 <= value <= 30, range(1, 100), 12) == 30
    assert largest_fitting(lambda value: 10 <= value <= 30, range(1, 100), 40) == 30
    assert largest_fitting(lambda value: value <= 30, range(1, 100), 40) == 30


def test_bisection_without_anything_that_fits():
    assert largest_fitting(lambda value: False, range(1, 10)) is None
    assert largest_fitting(lambda value: True, range(1, 1)) is None


@pytest.mark.parametrize("share", [0.8, 1.0, 1.5, 4.0])
@pytest.mark.parametrize(
    ("option", "field"),
    [("tokens of a prompt", "prompt"), ("max_completion_length", "completion")],
)
def test_largest_lengths(share, option, field):
    found = plan(share)
    length = largest(found, option)
    fitting = [n for n in range(1, 1000) if found.fits(RUN.replace(**{field: n}))]
    if not fitting or fitting[-1] < 999:
        assert length == max(fitting, default=None)
    else:
        assert length >= 999


def test_lengths_end_with_the_context():
    prompt, completion = plan(1e6).limits()[1:3]
    assert (prompt.largest, prompt.note) == (4096 - RUN.completion, " (the model's context)")
    assert completion.largest == 4096 - RUN.prompt


def test_fewer_of_longer_documents_are_in_a_chunk():
    """So the same memory holds documents as long as a whole chunk."""
    chunks = {"examples": (8, 1), "chunk_tokens": 800}
    run = RunSettings(1, 0, 100, 8, accumulation=1, generates=False, on_cpu=True, **chunks)
    found = Plan(SIZE, run, Estimate(SIZE, run).peak / (1 - HEADROOM) + 1)
    length = largest(found, "max_length")
    assert length > 600 and found.fits(run.of_length(length))
    assert not found.fits(run.of_length(length + 1))


@pytest.mark.parametrize("share", [0.9, 1.0, 2.0, 3.0])
def test_largest_group(share):
    found = plan(share)
    fitting = [n for n in (2, *range(4, 400, 4)) if found.fits(resized(RUN, group_size=n))]
    assert largest(found, "num_generations") == max(fitting, default=None)


def test_group_sizes():
    assert group_sizes(8, 4)[:5] == [2, 4, 8, 16, 24]
    assert group_sizes(8, 2)[:3] == [4, 8, 16]
    assert group_sizes(8, 1)[:2] == [8, 16]
    assert group_sizes(1, 3)[:3] == [2, 3, 4]
    for rows, prompts in ((6, 3), (12, 4), (5, 5)):
        assert all(prompts * n % rows == 0 for n in group_sizes(rows, prompts))


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0, 2.0])
def test_largest_micro_batch_divides_the_round(share):
    found = plan(share)
    fitting = [n for n in (1, 2, 4, 8) if found.fits(resized(RUN, micro_batch=n))]
    assert largest(found, "per_device_train_batch_size") == max(fitting, default=None)


def test_other_splits_are_the_same_update():
    smaller = resized(RUN, micro_batch=2)
    assert (smaller.micro_batch, smaller.slices, smaller.accumulation) == (2, 4, 4)
    assert smaller.rows == RUN.rows
    larger = resized(RUN, group_size=16)
    assert (larger.rows, larger.micro_batch) == (32, 4)
    assert larger.accumulation == larger.slices == 8


def test_a_group_that_ranks_share_grows_on_each_of_them():
    """Two completions of a group of eight here: twice as large a group has four."""
    run = RUN.replace(group_size=8, micro_batch=2, slices=1, accumulation=1)
    assert resized(run, group_size=8) == run
    assert resized(run, group_size=16).rows == 4


def changes(found):
    return {change.option: change for change in found.changes()}


def test_each_change_is_the_estimate_with_it():
    run = RUN.replace(reference=True, scores_policy=True, optimizer="adamw_torch")
    adapter = model_size(tiny_model("llama").config, LoraConfig(target_modules=["q_proj"]))
    found = changes(Plan(SIZE, run, 1e9, adapter))
    expected = {
        "gradient_checkpointing": (SIZE, run.replace(gradient_checkpointing=False)),
        "shared_prefix": (SIZE, run.replace(shared_prefix=False)),
        "logits_chunk_size": (SIZE, run.replace(logits_chunk=0)),
        "per_device_train_batch_size": (SIZE, resized(run, micro_batch=1)),
        "generation_max_rows": (SIZE, run.replace(generation_rows=4)),
        "beta": (SIZE, run.replace(reference=False, scores_policy=False)),
        "dtype": (SIZE, run.replace(weight_bytes=2, product_bytes=2)),
        "optim": (SIZE, run.replace(optimizer="adamw_8bit")),
        "use_peft": (adapter, run),
    }
    assert found.keys() == expected.keys()
    for option, (model, other) in expected.items():
        assert found[option].peak == Estimate(model, other).peak
    peaks = [change.peak for change in Plan(SIZE, run, 1e9, adapter).changes()]
    assert peaks == sorted(peaks)


def test_changes_that_are_made_already_are_shown_the_other_way():
    lean = RUN.replace(
        gradient_checkpointing=False,
        shared_prefix=False,
        logits_chunk=0,
        micro_batch=1,
        weight_bytes=2,
        product_bytes=2,
        optimizer="sgd",
        generation_rows=2,
    )
    found = changes(Plan(SIZE, lean, 1e9))
    values = {option: change.value for option, change in found.items()}
    assert values == {
        "gradient_checkpointing": "true",
        "shared_prefix": "true",
        "logits_chunk_size": "none",
    }


def test_off_policy_scoring_stays_without_a_reference():
    run = RUN.replace(reference=True, scores_policy=True, accumulation=1)
    assert "scoring" in changes(Plan(SIZE, run, 1e9))["beta"].phases


def test_other_engines_are_proposed_to_several_ranks():
    run = RUN.replace(processes=4, sharding=Sharding(ranks=4), product_bytes=2)
    found = [c for c in Plan(SIZE, run, 1e9).changes() if c.option == "accelerate_config"]
    assert {change.value for change in found} == {"zero1", "zero2", "zero3"}
    second = next(change for change in found if change.value == "zero2")
    zero = Sharding("zero", 2, 4, syncs=True)
    other = run.replace(sharding=zero, weight_bytes=2, loaded_bytes=4)
    assert second.peak == Estimate(SIZE, other).peak
    fsdp = changes(Plan(SIZE, run.replace(sharding=Sharding("fsdp2", 3, 4)), 1e9))
    assert {"fsdp_offload_params", "ds3_gather_for_generation"} < fsdp.keys()
    assert "accelerate_config" not in fsdp
    assert "ds3_gather_for_generation" not in changes(Plan(SIZE, other, 1e9))
    assert "offload_optimizer_device" in changes(Plan(SIZE, other, 1e9))


# --- Text ---


TINY = model_size(tiny_model("llama").config)
SHORT = RunSettings(4, 100, 20, 4, on_cpu=True)


def test_columns_are_aligned():
    shown = table([["a", "bb", "c"], ["long", "1", "22"]]).splitlines()
    assert shown == ["a     bb   c", "long   1  22"]


def sections(plan):
    return render(plan).split("\n\n")


def cells(section, start):
    line = next(line for line in section.splitlines() if line.startswith(start))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_phases_show_every_part_and_its_sum():
    plan = Plan(TINY, SHORT.replace(reference=True), 1e9)
    phases = sections(plan)[1]
    heading = cells(phases, "held at the peak of")[1:]
    assert heading[:2] == ["weights", "reference"]
    assert heading[-1] == "total"
    for name, parts in plan.estimate.phases.items():
        row = cells(phases, name)[1:]
        assert row[0] == row[1] == format_bytes(parts.weights)
        assert row[-1] == format_bytes(parts.total)
    assert "reference" not in sections(Plan(TINY, SHORT, 1e9))[1]


def test_the_peak_is_compared_with_the_device():
    plan = Plan(TINY, SHORT, 1e9)
    phase = max(plan.estimate.phases, key=lambda name: plan.estimate.phases[name].total)
    assert sections(plan)[2] == (
        f"Peak: {format_bytes(plan.estimate.peak)}, in {phase}; fits in 900 MB of a device of 1 GB "
        "(10% is left free)."
    )
    assert "does not fit in 90 kB" in sections(Plan(TINY, SHORT, 1e5))[2]


def test_largest_values():
    limits = sections(Plan(TINY, SHORT, 1e12))[3]
    assert cells(limits, "tokens of a prompt") == [
        "tokens of a prompt",
        "100",
        "236 (the model's context)",
    ]
    assert cells(limits, "per_device")[1:] == ["4", "4 (the whole round)"]
    assert cells(sections(Plan(TINY, SHORT, 1))[3], "num_generations")[1:] == ["4", "none fits"]


def test_changes_are_differences():
    plan = Plan(TINY, SHORT.replace(reference=True), 1e9)
    shown = sections(plan)[4]
    without = next(change for change in plan.changes() if change.option == "beta")
    saved = plan.estimate.phases["optimizer"].total - without.phases["optimizer"]
    row = cells(shown, "beta=0")
    assert row[1].startswith("-")
    assert row[2:] == [row[2], "gone", row[4], f"-{format_bytes(saved)}", "no KL penalty"]
    assert cells(shown, "shared_prefix=false")[-1] == "="  # the optimizer does not see it


def test_the_header_says_what_is_planned():
    plan = Plan(TINY, SHORT.replace(product_bytes=2, optimizer="sgd", slices=3), 1e9)
    first, second, third = sections(plan)[0].splitlines()
    assert first.endswith("parameters; 32-bit weights, 16-bit autocast; sgd")
    assert second == (
        "Round per rank: 12 completions of up to 20 tokens, 4 for each prompt of up to 100 tokens"
    )
    tokens = 100 + 4 * 19
    assert third == f"Micro-batch: 4 completions, {tokens} tokens in one forward"

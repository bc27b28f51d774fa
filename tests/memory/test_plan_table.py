import pytest
from tiny import tiny_model

from trl.memory.model_size import model_size
from trl.memory.plan import Plan
from trl.memory.plan_table import render, size, table
from trl.memory.settings import RunSettings

SIZE = model_size(tiny_model("llama").config)
RUN = RunSettings(4, 100, 20, 4, on_cpu=True)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0"), (999, "0.999 kB"), (1234, "1.23 kB"), (83_100_000, "83.1 MB")),
        *((999_600_000, "1 GB"), (1.76e9, "1.76 GB"), (123.4e9, "123 GB"), (2.5e12, "2.5 TB")),
    ],
)
def test_sizes(count, text):
    assert size(count) == text


def test_columns_are_aligned():
    shown = table([["a", "bb", "c"], ["long", "1", "22"]]).splitlines()
    assert shown == ["a     bb   c", "long   1  22"]


def sections(plan):
    return render(plan).split("\n\n")


def cells(section, start):
    line = next(line for line in section.splitlines() if line.startswith(start))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_phases_show_every_part_and_its_sum():
    plan = Plan(SIZE, RUN.replace(reference=True), 1e9)
    phases = sections(plan)[1]
    heading = cells(phases, "held at the peak of")[1:]
    assert heading[:2] == ["weights", "reference"]
    assert heading[-1] == "total"
    for name, parts in plan.estimate.phases.items():
        row = cells(phases, name)[1:]
        assert row[0] == row[1] == size(parts.weights)
        assert row[-1] == size(parts.total)
    assert "reference" not in sections(Plan(SIZE, RUN, 1e9))[1]


def test_the_peak_is_compared_with_the_device():
    plan = Plan(SIZE, RUN, 1e9)
    phase = max(plan.estimate.phases, key=lambda name: plan.estimate.phases[name].total)
    assert sections(plan)[2] == (
        f"Peak: {size(plan.estimate.peak)}, in {phase}; fits 900 MB of a device of 1 GB "
        "(10% are left free)."
    )
    assert "does not fit 90 kB" in sections(Plan(SIZE, RUN, 1e5))[2]


def test_largest_values():
    limits = sections(Plan(SIZE, RUN, 1e12))[3]
    assert cells(limits, "tokens of a prompt") == [
        "tokens of a prompt",
        "100",
        "236 (the model's context)",
    ]
    assert cells(limits, "per_device")[1:] == ["4", "4 (the whole round)"]
    assert cells(sections(Plan(SIZE, RUN, 1))[3], "num_generations")[1:] == ["4", "none fits"]


def test_changes_are_differences():
    plan = Plan(SIZE, RUN.replace(reference=True), 1e9)
    shown = sections(plan)[4]
    without = next(change for change in plan.changes() if change.option == "beta")
    saved = plan.estimate.phases["optimizer"].total - without.phases["optimizer"]
    row = cells(shown, "beta=0")
    assert row[1].startswith("-")
    assert row[2:] == [row[2], "gone", row[4], f"-{size(saved)}", "no KL penalty"]
    assert cells(shown, "shared_prefix=false")[-1] == "="  # the optimizer does not see it


def test_the_header_says_what_is_planned():
    plan = Plan(SIZE, RUN.replace(product_bytes=2, optimizer="sgd", slices=3), 1e9)
    first, second, third = sections(plan)[0].splitlines()
    assert first.endswith("parameters; 32-bit weights, 16-bit autocast; sgd")
    assert second == (
        "Round on a rank: 12 completions of up to 20 tokens, 4 for each prompt of up to 100 tokens"
    )
    tokens = 100 + 4 * 19
    assert third == f"Micro-batch: 4 completions, {tokens} tokens in one forward"

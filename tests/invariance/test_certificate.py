"""The bounds of the certificate, one test for each variant."""

import gc
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import cases
import one_row
import preferences
import rounding
import supervised
from cases import EOS, MOST_TOKENS
from certificate import (
    BOUND,
    DEVIATION,
    EXACT,
    EXACT_ON_TWO,
    HALF_PRECISION,
    HALF_PRECISION_FACTOR,
    LEFT_OUT,
    MIXED,
    OF_OTHERS,
    OF_STATISTICS,
    ON_TWO,
    RESIDUAL,
    VARIANTS,
    Line,
    all_curves,
    contribution,
    dropped_difference,
    gradient_difference,
    judged,
    lines_of,
    main,
    plain_and_shared,
)
from trajectories import CLASSES, OPTIMIZERS, STEPS, compare, steps_of
from two_ranks import ON_ENGINES, result, start
from variants import (
    DIMENSIONS,
    OTHER_DIMENSIONS,
    STATISTIC_DIMENSIONS,
    Variant,
    difference,
    measure,
    pairs,
    possible_pairs,
    reference,
    reference_in,
)


@pytest.fixture(scope="module", autouse=True)
def job(request):
    """Two processes that run beside the other tests, if a chosen test needs them."""
    # Each training run collects garbage, which should not look at libraries.
    gc.collect()
    gc.freeze()
    wanted = any("on_two" in getattr(item, "fixturenames", ()) for item in request.session.items)
    started = start() if wanted else None
    yield started
    if started is not None:
        started.stop()
    gc.unfreeze()


@pytest.fixture(scope="module")
def on_two(job):
    """What the two processes found."""
    return result(job)


@pytest.fixture(scope="module")
def curves(on_two):
    """Loss curves by optimizer and class."""
    return all_curves(on_two)


@pytest.mark.parametrize("variant", supervised.VARIANTS, ids=str)
def test_supervised_fine_tuning(variant):
    assert supervised.difference(variant) <= BOUND


@pytest.mark.parametrize("variant", preferences.VARIANTS, ids=str)
def test_preferences(variant):
    assert preferences.difference(variant) <= BOUND


@pytest.mark.parametrize("variant", VARIANTS + OF_OTHERS + OF_STATISTICS, ids=str)
def test_gradient_is_that_of_single_rows(variant):
    assert gradient_difference(variant) <= BOUND * rounding.slack()


@pytest.mark.parametrize("variant", EXACT, ids=str)
def test_rows_left_out_change_no_bit(variant):
    assert dropped_difference(variant) == 0.0


@pytest.mark.parametrize("variant", MIXED, ids=str)
def test_rows_left_out_of_a_forward_would_add_nothing(variant):
    assert contribution(variant) == 0.0
    assert dropped_difference(variant) <= BOUND


@pytest.mark.parametrize("variant", HALF_PRECISION, ids=str)
def test_half_precision_is_as_good_as_single_rows(variant):
    own = difference(reference_in(variant), reference(variant))
    assert own > BOUND
    for members in plain_and_shared(variant).values():
        for member in members:
            assert gradient_difference(member) <= HALF_PRECISION_FACTOR * own, str(member)


@pytest.mark.distributed
@pytest.mark.parametrize("variant", ON_TWO + ON_ENGINES, ids=str)
def test_two_processes_give_the_gradient_of_single_rows(on_two, variant):
    assert difference(on_two[variant], reference(variant)) <= BOUND


@pytest.mark.distributed
@pytest.mark.parametrize("variant", EXACT_ON_TWO, ids=str)
def test_rows_left_out_change_no_bit_on_two_processes(on_two, variant):
    assert torch.equal(on_two[variant], on_two[variant.but(skip=False)])


@pytest.mark.distributed
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_loss_curves_stay_together(curves, optimizer):
    members = curves[optimizer]
    assert set(members) == set(CLASSES)
    for name, losses in members.items():
        assert losses.shape == (steps_of(name),) and losses[-1] < losses[0] - 0.3
    deviation, residual, pair = compare(members)
    assert deviation <= DEVIATION, pair
    assert residual <= RESIDUAL


# --- That the certificate can fail ---


def test_a_wrong_denominator_is_seen():
    # This loss divides by the tokens of a micro-batch, on purpose.
    wrong = measure(Variant(loss="dapo"), loss_type="bnpo").gradient
    assert difference(wrong, reference(Variant(loss="dapo"))) > 0.01


def test_a_wrong_temperature_is_seen():
    wrong = measure(Variant(), temperature=1.001).gradient
    assert difference(wrong, reference(Variant())) > 10 * BOUND


def test_the_reference_depends_on_what_a_round_has():
    whole, halves = Variant(loss="dapo"), Variant(loss="dapo", rounds=2)
    assert difference(reference(halves), reference(whole)) > 0.01
    assert difference(reference(halves.but(order=1)), reference(halves)) > 0.01


@pytest.mark.parametrize("loss", cases.STATISTICS)
def test_statistics_of_a_round_are_not_those_of_its_halves(loss):
    """And they matter: without the option the gradient is another one."""
    option = list(cases.LOSSES[loss].options)[-1]
    usual = {"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None}
    usual |= {"scale_rewards": "group", "normalize_advantages": False}
    usual |= {"multi_objective_aggregation": "sum_then_normalize"}
    without = measure(Variant(loss=loss), **{option: usual[option]}).gradient
    assert difference(without, reference(Variant(loss=loss))) > 0.01


def test_an_unexpected_layout_is_seen():
    plain = measure(Variant(shared=False))
    assert judged(Variant(shared=False), plain) <= BOUND
    assert not judged(Variant(), plain) <= BOUND


@pytest.mark.parametrize("variant", [Variant(passes=True), Variant(micro_batch=16)], ids=str)
def test_forwards_in_passes_are_told_from_whole_ones(variant):
    measured = measure(variant)
    assert measured.in_passes == variant.passes and judged(variant, measured) <= BOUND
    assert not judged(variant.but(passes=not variant.passes), measured) <= BOUND


def test_rows_that_add_something_are_seen():
    assert contribution(MIXED[0], with_signal=True) > 1e-3


def test_curves_that_part_are_seen():
    straight = torch.linspace(4, 3, STEPS, dtype=torch.float64)
    deviation, residual, pair = compare({"a": straight, "b": straight, "c": straight + 0.01})
    assert deviation == pytest.approx(0.01) and residual == pytest.approx(0.01)
    assert "c" in pair


# --- What is covered ---


@pytest.mark.parametrize(
    ("dimensions", "variants"),
    [
        (DIMENSIONS, VARIANTS),
        (OTHER_DIMENSIONS, OF_OTHERS),
        (STATISTIC_DIMENSIONS, OF_STATISTICS),
    ],
)
def test_every_pair_of_values_occurs(dimensions, variants):
    covered = set().union(*(pairs(variant, dimensions) for variant in variants))
    assert possible_pairs(dimensions) <= covered
    for name, values in dimensions.items():
        assert {getattr(variant, name) for variant in variants} == set(values), name


def test_the_rollout_has_the_rows_that_go_wrong():
    groups = cases.groups()
    rows = [row for group in groups for row in group]
    assert len({len(row.prompt) for row in rows}) == len(groups)
    assert any(row.completion == (EOS,) for row in rows)
    assert any(row.completion[-1] != EOS and len(row.completion) == MOST_TOKENS for row in rows)
    assert any(0 in row.prompt for row in rows) and any(0 in row.completion for row in rows)
    alike = [row.completion for row in groups[1]]
    assert len(set(alike)) < len(alike) and len({ids[:5] for ids in alike}) == 1
    credit = [one_row.advantages(cases.LOSSES["rloo"], group, one_row.Known()) for group in groups]
    assert credit[2] == [0.0] * 4
    assert sum(a == 0.0 for a in credit[3]) == 2


def test_rows_are_left_out_of_all_kinds_of_forwards():
    assert EXACT and MIXED and len(EXACT) + len(MIXED) == len(LEFT_OUT)
    assert {variant.passes for variant in MIXED} == {False, True}


def test_junk_is_written_behind_the_end():
    row = cases.groups()[0][0]
    assert cases.script(0, junk=False)(row.prompt, 0) == list(row.completion)
    written = cases.script(0, junk=True)(row.prompt, 0)
    assert written[: len(row.completion)] == list(row.completion)
    assert len(written) > len(row.completion)


@pytest.mark.parametrize("padding", DIMENSIONS["padding"])
def test_the_scorer_sees_what_fills_the_padding(padding):
    seen = set()

    def look(trainer):
        trainer.model.register_forward_pre_hook(
            lambda model, args, inputs: seen.update(
                inputs["input_ids"][inputs["attention_mask"] == 0].tolist()
            ),
            with_kwargs=True,
        )

    measure(Variant(shared=False, padding=padding, pad_multiple=8), look)
    if padding == "junk":
        assert len(seen) > 50
    else:
        assert seen == {{"pad": 0, "eos": EOS}[padding]}


# --- The report ---


@pytest.mark.parametrize(("values", "code"), [([1e-6, 4e-6], 0), ([1e-6, 6e-6], 1)])
def test_the_report_names_what_is_broken(tmp_path, capsys, values, code):
    family = ("Llama", "RLOO", "plain rows")
    variants = [Variant(), Variant(micro_batch=1)]
    found = [(family, v, value) for v, value in zip(variants, values, strict=True)]
    file = tmp_path / "report.md"
    arguments = ["--write", str(file)]
    assert main(arguments, lambda: {"float32": list(lines_of(found, BOUND))}) == code
    printed = capsys.readouterr().out
    assert file.read_text() == printed
    assert f"2 variants, {code} of 1 bounds broken." in printed
    assert ("BROKEN: Llama | rloo | shared | micro_batch=1: 6.00e-06" in printed) == bool(code)


def test_nan_breaks_a_bound():
    family = ("Llama", "RLOO", "plain rows")
    values = [float("nan"), 1.0]
    [line] = lines_of([(family, Variant(), value) for value in values], 2.0)
    assert line.variants == 2 and not line.holds
    assert not Line(*family, 1, float("nan"), 2.0, "").holds

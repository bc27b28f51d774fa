import itertools

import pytest

from trl.trainer.online.batch_math import (
    BatchPlan,
    check_eval_groups,
    check_groups,
    nearest_divisors,
    nearest_multiples,
    resolve_rounds,
    smaller_round,
)

PER_DEVICE = "per_device_train_batch_size to {} and generation_batch_size to {}"


def plan(**changes) -> BatchPlan:
    values = {"micro_batch": 16, "num_processes": 2, "micro_batches": 4, "accumulation": 4}
    return BatchPlan(**(values | {"group_size": 8, "iterations": 1} | changes))


def test_sentence():
    assert plan().describe() == (
        "each update: 16 prompts x 8 completions = 128 sequences, in 4 micro-batches on 2 ranks"
    )
    assert (
        plan(micro_batches=8, iterations=2)
        .describe()
        .endswith("; each generation round of 256 sequences serves 4 updates")
    )
    single = plan(micro_batch=8, num_processes=1, micro_batches=1, accumulation=1)
    assert single.describe() == (
        "each update: 1 prompt x 8 completions = 8 sequences, in 1 micro-batch on 1 rank"
    )


def simulate(micro_batches: int, iterations: int, accumulation: int) -> bool:
    """Replay the loop: does any micro-step train on a round older than the last update?"""
    period, version, made = micro_batches * iterations, 0, 0
    for step in range(4 * period * accumulation):
        if step % period == 0:
            made = version
        if made != version:
            return False
        if (step + 1) % accumulation == 0:
            version += 1
    return True


def test_on_policy_is_what_the_loop_does():
    for micro_batches, iterations, accumulation in itertools.product(
        range(1, 5), range(1, 4), range(1, 9)
    ):
        expected = simulate(micro_batches, iterations, accumulation)
        found = plan(micro_batches=micro_batches, iterations=iterations, accumulation=accumulation)
        assert found.is_on_policy == expected, (micro_batches, iterations, accumulation)


@pytest.mark.parametrize(
    ("given", "expected"),
    [((None, None), (24, 3)), ((16, None), (16, 2)), ((None, 5), (40, 5)), ((16, 2), (16, 2))],
)
def test_rounds(given, expected):
    assert resolve_rounds(8, 3, *given) == expected


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: resolve_rounds(8, 3, 12, None), "generation_batch_size=12.*8 or 16"),
        (lambda: resolve_rounds(8, 3, 5, None), "Nearest legal: 8"),
        (lambda: resolve_rounds(8, 3, 0, None), "generation_batch_size=0"),
        (lambda: resolve_rounds(8, 3, 16, 3), "steps_per_generation=2.*generation_batch_size=24"),
        (lambda: check_groups(8, 0, 8), "num_generations=0.*>= 2"),
        (lambda: check_groups(8, 1, 8), "num_generations=1.*>= 2"),
        (lambda: check_groups(8, None, 8), "num_generations=None.*>= 2"),
        (lambda: check_groups(8, 3, 8), "num_generations=2 or 4, or generation_batch_size=24"),
        (lambda: check_groups(32, 5, 4), "num_generations=4 or 8.*generation_batch_size=20 or 40"),
        (lambda: check_eval_groups(8, 1, 3), "per_device_eval_batch_size=6 or 9"),
        (lambda: check_eval_groups(8, 1, 0), "num_generations_eval=0"),
    ],
)
def test_errors_name_the_nearest_legal_numbers(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("changes", "prompts", "words"),
    [
        ({}, 5, "generation_batch_size to 16"),
        ({"micro_batch": 4}, 5, "generation_batch_size to 20"),
        ({"micro_batch": 16}, 2, PER_DEVICE.format(8, 8)),
        ({"num_processes": 4}, 1, PER_DEVICE.format(1, 4)),
        ({"num_processes": 8}, 1, "the number of processes, 8"),
    ],
)
def test_a_round_of_few_prompts(changes, prompts, words):
    given = plan(
        **{"micro_batch": 8, "num_processes": 1, "micro_batches": 8, "group_size": 4} | changes
    )
    assert smaller_round(given, prompts) == f", or lower {words}"
    if "generation_batch_size" in words:
        rows = int(words.split()[-1])
        micro = int(words.split()[2]) if "per_device" in words else given.micro_batch
        resolve_rounds(micro * given.num_processes, 8, rows, None)
        check_groups(rows, 4, micro * given.num_processes)
        assert rows // 4 <= prompts


def test_proposals_are_legal():
    for rows, size in itertools.product(range(2, 40), range(2, 12)):
        if rows % size == 0:
            check_groups(rows, size, 1)
            continue
        for word in filter(None, nearest_divisors(rows, size).split(" or ")):
            check_groups(rows, int(word), 1)
        for word in nearest_multiples(rows, size).split(" or "):
            check_groups(int(word), size, 1)

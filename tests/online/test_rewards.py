import asyncio
import math
import threading
import warnings

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import multiprocessing

from trl.distributed import Ranks
from trl.online.reward_sources import resolve_rewards
from trl.online.rewards import RewardError, RewardInputs, RewardSuite


class Alone:
    rank = 0

    def gather(self, rows):
        return rows

    def gather_objects(self, value):
        return [value]


def suite(*functions, weights=None, timeout=None, ranks=None) -> RewardSuite:
    return RewardSuite(resolve_rewards(list(functions)), weights, timeout, ranks or Alone())


def inputs(*texts, rows=None) -> RewardInputs:
    rows = rows or [{"prompt": "p"} for _ in texts]
    return RewardInputs.from_rows(rows, list(texts), [[1]] * len(texts), "state")


def score(*functions, texts=("a", "bb"), log_metric=lambda name, value: None, **options):
    return suite(*functions, **options)(inputs(*texts), 1, log_metric)


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def test_table_and_weights():
    def sometimes(completions, **kwargs):
        return [None, math.nan, 3]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table, _ = score(length, sometimes, texts=("a", "bb", "ccc"), weights=[1.0, 10.0])
    assert table.per_function[:, 0].tolist() == [1, 2, 3]
    assert table.per_function[:2, 1].isnan().all() and table.per_function[2, 1] == 3
    assert table.total.tolist() == [1.0, 2.0, 33.0]
    assert table.names == ("length", "sometimes") and table.group_size == 1


def test_what_functions_receive():
    seen = {}

    def look(**kwargs):
        seen.update(kwargs)
        return [0.0, 0.0]

    rows = [{"prompt": "p", "answer": 1, "completion": "x"}, {"prompt": "q", "hint": "h"}]
    suite(look)(inputs("a", "b", rows=rows), 2, lambda name, value: None)
    expected = {
        "prompts": ["p", "q"], "completions": ["a", "b"], "completion_ids": [[1], [1]],
        "answer": [1, None], "hint": [None, "h"], "trainer_state": "state",
    }  # fmt: skip
    assert {name: seen[name] for name in expected} == expected
    assert set(seen) == {*expected, "log_extra", "log_metric"}, "no reserved column"


@pytest.mark.parametrize(
    "values", [[1, 2], (1.0, True), torch.tensor([1.0, 2.0]), np.array([1.0, 2.0]), [None, 0]]
)
def test_accepted_returns(values):
    table, _ = score(lambda **kwargs: values)
    assert table.per_function.shape == (2, 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        ("ab", "a str"),
        (None, "a NoneType"),
        (3.0, "a float"),
        ([1.0, "2"], "'2' for row 1"),
        (torch.zeros(2, 1), r"\[0.0\] for row 0"),
        ([1.0, math.inf], "inf for row 1"),
        ([-math.inf, 1.0], "-inf for row 0"),
    ],
)
def test_refused_returns_name_function_and_row(values, words):
    def odd(**kwargs):
        return values

    with pytest.raises(RewardError, match=f"'odd' .*{words}"):
        score(odd)


def test_failures_name_function_and_cause():
    def broken(completions, **kwargs):
        raise KeyError("solution")

    async def broken_later(completions, **kwargs):
        raise OSError("no judge")

    with pytest.raises(RewardError, match="'broken' failed: KeyError: 'solution'") as info:
        score(broken)
    assert isinstance(info.value.__cause__, RewardError)
    with pytest.raises(RewardError, match="'broken_later' failed: OSError: no judge"):
        score(broken_later)


def test_coroutines_run_at_the_same_time():
    """Each waits for the other: one after the other they would never end."""
    ready = {}

    async def meet(mine, other):
        ready.setdefault(mine, asyncio.Event()).set()
        await asyncio.wait_for(ready.setdefault(other, asyncio.Event()).wait(), 10)
        return [1.0, 1.0]

    async def first(**kwargs):
        return await meet("first", "second")

    async def second(**kwargs):
        return await meet("second", "first")

    table, _ = score(first, length, second)
    assert table.names == ("first", "length", "second")
    assert table.per_function.tolist() == [[1, 1, 1], [1, 2, 1]]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_calls_have_a_deadline(kind):
    release = threading.Event()

    def slow(**kwargs):
        release.wait(30)
        return [0.0, 0.0]

    async def slow_later(**kwargs):
        await asyncio.sleep(30)

    with pytest.raises(RewardError, match="took longer than reward_timeout=0.05"):
        score(slow if kind == "sync" else slow_later, timeout=0.05)
    release.set()


def test_a_timeout_of_the_function_itself_is_a_failure():
    def impatient(**kwargs):
        raise TimeoutError("judge")

    with pytest.raises(RewardError, match="failed: TimeoutError: judge"):
        score(impatient)


def test_functions_within_the_deadline():
    table, _ = score(length, timeout=30.0)
    assert table.total.tolist() == [1.0, 2.0]


def test_rows_nobody_scores_are_reported_once():
    def none(completions, **kwargs):
        return [None] * len(completions)

    with pytest.warns(UserWarning, match="2 completions; the first is row 0 of rank 0: 'a'") as w:
        table, _ = score(none)
    assert len(w) == 1 and table.total.isnan().all()


def test_extra_columns_and_metrics():
    metrics = []

    def first(completions, log_extra, log_metric, **kwargs):
        log_extra("note", ["x", "y"])
        log_metric("speed", 3.0)
        return [0.0, 0.0]

    def second(completions, log_extra, **kwargs):
        log_extra("note", ["z", "w"])
        return [0.0, 0.0]

    _, extras = score(first, second, log_metric=lambda *pair: metrics.append(pair))
    assert extras == {"note": ["x", "y"], "second/note": ["z", "w"]}
    assert metrics == [("speed", 3.0)]

    def misaligned(log_extra, **kwargs):
        log_extra("note", ["x"])

    with pytest.raises(RewardError, match=r"log_extra\('note'\) got 1 values for 2"):
        score(misaligned)


def test_weights_are_counted():
    with pytest.raises(ValueError, match=r"reward_weights has 1 entries for 2 .*length, length_2"):
        suite(length, length, weights=[1.0])


def test_dry_run():
    def picky(completions, answer, **kwargs):
        return [float(text == a) for text, a in zip(completions, answer, strict=True)]

    suite(picky, length).dry_run({"prompt": "p", "answer": "3"}, None)
    with pytest.raises(ValueError, match=r"'picky' failed: TypeError.*'prompt': 'p'.*dry_run"):
        suite(picky).dry_run({"prompt": "p"}, None)
    with pytest.raises(ValueError, match="2 rewards for 1 completions"):
        suite(lambda **kwargs: [1.0, 2.0]).dry_run({"prompt": "p"}, None)
    with pytest.warns(UserWarning, match="returned NaN on the first row"):
        suite(lambda **kwargs: [math.nan]).dry_run({"prompt": "p"}, None)
    seen = []
    conversation = [{"role": "user", "content": "p"}]

    def look(completions, **kwargs):
        seen.extend(completions)
        return [None]

    suite(look).dry_run({"prompt": conversation}, None)
    assert seen == [[{"role": "assistant", "content": "0"}]]


def _worker(rank, port, queue):
    import os

    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    ranks = Ranks(Accelerator(cpu=True))

    def fails_on_one(completions, **kwargs):
        if rank == 1:
            raise RuntimeError("no luck")
        return [0.0] * len(completions)

    table, _ = suite(length, ranks=ranks)(inputs("a" * (rank + 1)), 2, lambda *pair: None)
    try:
        suite(fails_on_one, ranks=ranks)(inputs("a"), 2, lambda *pair: None)
        queue.put((rank, table.total.tolist(), "no error"))
    except RewardError as error:
        queue.put((rank, table.total.tolist(), str(error)))
    torch.distributed.destroy_process_group()


@pytest.mark.distributed
def test_every_rank_raises_what_one_raised(free_port):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=_worker, args=(rank, free_port, queue)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    found = sorted(queue.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join(30)
    for _, totals, message in found:
        assert totals == [1.0, 2.0], "gathered in rank order"
        assert "'fails_on_one' failed: RuntimeError: no luck" in message
        assert "on rank 1" in message

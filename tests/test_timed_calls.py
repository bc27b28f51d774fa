import asyncio
import threading
import time
from functools import partial

import pytest
import torch

from trl.timed_calls import CallTimeout, Outcome, TimedCalls, copy_containers

SECONDS = 0.1
LONG = 60


@pytest.fixture
def release():
    """Ends what still blocks a thread that was left behind."""
    event = threading.Event()
    yield event
    event.set()


def failing(error):
    def fail():
        raise error

    async def fail_later():
        raise error

    return fail, fail_later


@pytest.mark.parametrize("seconds", [None, LONG])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (TimeoutError("server"), "TimeoutError: server"),
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "CancelledError: "),
    ],
)
def test_failures_are_values(seconds, error, words):
    calls = TimedCalls(seconds)
    plain, later = failing(error)

    async def fine():
        return 2

    outcomes = calls([plain, later, fine])
    assert [outcome.failure is None for outcome in outcomes] == [False, False, True]
    assert [outcome.error_text for outcome in outcomes[:2]] == [words] * 2
    assert outcomes[2].value == 2 and calls([lambda: 3])[0].value == 3


def torch_settings():
    return torch.empty(1).device.type, torch.is_grad_enabled()


async def torch_settings_later():
    return torch_settings()


@pytest.mark.parametrize("seconds", [None, LONG])
@pytest.mark.parametrize("function", [torch_settings, torch_settings_later])
def test_calls_have_the_settings_of_torch_of_their_caller(seconds, function):
    """A thread has its own device and recording of gradients, and one serves many calls."""
    calls = TimedCalls(seconds)
    with torch.no_grad(), torch.device("meta"):
        assert calls([function])[0].value == ("meta", False)
    assert calls([function])[0].value == ("cpu", True)
    assert torch_settings() == ("cpu", True)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second GPU")
@pytest.mark.parametrize("seconds", [None, LONG])
def test_calls_have_the_gpu_of_their_caller(seconds):
    with torch.cuda.device(1):
        torch.empty(1, device="cuda")
        assert TimedCalls(seconds)([torch.cuda.current_device])[0].value == 1


def test_a_user_who_stops_the_program_stops_it():
    with pytest.raises(KeyboardInterrupt):
        Outcome.of(failing(KeyboardInterrupt())[0])


def test_what_takes_too_long_is_left_behind(release):
    calls = TimedCalls(SECONDS)
    started = time.monotonic()
    slow = calls([lambda: release.wait(LONG), partial(asyncio.sleep, LONG)])
    assert time.monotonic() - started < LONG / 2
    assert [outcome.error_text for outcome in slow] == ["took longer than 0.1 seconds"] * 2
    assert all(isinstance(o.failure, CallTimeout) and not o.failure.blocks for o in slow)
    assert calls([lambda: 1])[0].value == 1, "in another thread"


def test_a_coroutine_that_blocks_the_loop_is_left_behind(release):
    async def block():
        release.wait(LONG)

    async def fine():
        return 2

    calls = TimedCalls(SECONDS)
    first, second = calls([fine, block])
    assert first.value == 2
    assert second.failure.blocks and "it must await" in second.error_text
    assert calls([fine])[0].value == 2, "on another loop"


def test_a_loop_that_is_slow_but_answers_is_waited_for():
    """Each call is within its limit, and all of them together are not."""

    async def busy():
        time.sleep(0.6)
        return 1

    assert [o.value for o in TimedCalls(1.0)([busy] * 3)] == [1, 1, 1]


def test_one_thread_serves_all_plain_calls():
    calls = TimedCalls(LONG)
    names = {calls([lambda: threading.current_thread().name])[0].value for _ in range(3)}
    assert len(names) == 1 and threading.current_thread().name not in names
    assert TimedCalls(None)([threading.current_thread])[0].value is threading.current_thread()


def test_copies_share_nothing_that_can_be_changed_but_objects():
    class Environment(dict):
        pass

    own = Environment()
    value = {"ids": [[1, 2], [None, True]], "pair": ({"a": ["b"]}, "text"), "environment": own}
    found = copy_containers(value)
    assert found == value and type(found["pair"]) is tuple and found["environment"] is own
    found["ids"][0].clear()
    found["pair"][0]["a"].append("c")
    assert value["ids"] == [[1, 2], [None, True]] and value["pair"][0] == {"a": ["b"]}

import asyncio
import copy
import functools
import math
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from distributed.engines import call as call_on_ranks
from tiny import tiny_model, tiny_tokenizer
from transformers import LlamaForSequenceClassification

from trl.distributed import RankError, Ranks
from trl.online.reward_sources import resolve_rewards
from trl.online.rewards import RewardError, RewardInputs, RewardSuite

ROWS = [{"prompt": "p0", "answer": 1}, {"prompt": "p1", "answer": 2}]
TEXTS = ["c0", "c1"]
NAN = math.nan


def suite(functions, weights=None, timeout=None, tokenizers=None) -> RewardSuite:
    sources = resolve_rewards(functions, tokenizers)
    return RewardSuite(sources, weights, timeout, Ranks(Accelerator(cpu=True)))


def inputs(rows=ROWS, texts=TEXTS, state=None) -> RewardInputs:
    return RewardInputs(rows, texts, [[7 + i] for i in range(len(texts))], state)


def call(functions, weights=None, timeout=None, log_metric=None, **given):
    found = suite(functions, weights, timeout)
    return found(inputs(**given), 2, log_metric or (lambda name, value: None))


def returning(value):
    def fixed(**kwargs):
        return value

    return fixed


def same(found, expected):
    return torch.equal(found.nan_to_num(-99.0), torch.tensor(expected).nan_to_num(-99.0))


# --- The table ---


def test_weights_and_rows_without_a_score():
    """2 * 1 + 0.5 * 4 = 4; the second row has only the second function, the third has none."""
    functions = [returning([1, None, None]), returning([4.0, 6.0, NAN])]
    with pytest.warns(UserWarning, match="No reward function scored 1 completion;"):
        table, extras = call(functions, [2.0, 0.5], rows=[{"prompt": "p"}] * 3, texts=["c"] * 3)
    assert same(table.per_function, [[1.0, 4.0], [NAN, 6.0], [NAN, NAN]])
    assert same(table.total, [4.0, 3.0, NAN])
    assert table.names == ("fixed", "fixed_2")
    assert table.weights.tolist() == [2.0, 0.5]
    assert (table.group_size, extras) == (2, {})


def test_weights_are_one_by_default_and_must_be_complete():
    assert call([returning([1, 2]), returning([3, 5])])[0].total.tolist() == [4.0, 7.0]
    with pytest.raises(ValueError, match=r"has 1 entry for 2 reward functions \(fixed, fixed_2"):
        suite([returning([]), returning([])], weights=[1.0])


def test_duplicate_and_partial_functions_keep_their_own_column():
    def power(answer, exponent, **kwargs):
        return [x**exponent for x in answer]

    table, _ = call([functools.partial(power, exponent=e) for e in (1, 2, 3)])
    assert table.names == ("power", "power_2", "power_3")
    assert table.per_function.tolist() == [[1, 1, 1], [2, 4, 8]]


@pytest.mark.parametrize(
    "values",
    [
        (1, 0),
        [True, False],
        torch.tensor([1, 0]),
        torch.tensor([1.0, 0.0], requires_grad=True),
        np.array([1.0, 0.0]),
        [np.float32(1), torch.tensor(0.0)],
        [torch.tensor(1.0, dtype=torch.float16), np.bool_(False)],
    ],
)
def test_many_kinds_of_numbers(values):
    assert call(returning(values))[0].per_function.tolist() == [[1.0], [0.0]]


def test_one_warning_when_nothing_was_scored():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table, _ = call([returning([None, None]), returning([None, None])])
    messages = [str(w.message) for w in caught]
    assert messages == [
        "No reward function scored 2 completions; the first is row 0 of rank 0: 'c0'. Such rows "
        "are not trained on."
    ]
    assert table.total.isnan().all()


def test_nan_is_a_missing_reward():
    table, _ = call([returning([NAN, 2.0]), returning([1.0, 1.0])])
    assert same(table.per_function, [[NAN, 1.0], [2.0, 1.0]])
    assert table.total.tolist() == [1.0, 3.0]


# --- What functions are given ---


def spoil(prompts, completions, completion_ids, answer, notes, environments, **kwargs):
    """Change all that can be changed of the arguments."""
    for ids in completion_ids:
        ids.clear()
    completions[0][0]["content"] = "changed"
    completions[1].pop()
    prompts[0][0]["content"] = "changed"
    prompts.pop()
    answer.reverse()
    notes[0]["seen"].append("changed")
    environments[0].score += 1
    return [0.0, 0.0]


def test_functions_cannot_change_what_others_and_the_trainer_read():
    class Environment:
        score = 0

    shared = Environment()
    columns = {"answer": 1, "notes": {"seen": []}, "environments": shared}
    row = {"prompt": [{"role": "user", "content": "q"}]} | columns
    texts = [[{"role": "assistant", "content": text}] for text in ("c0", "c1")]
    given, seen = inputs([row, row | {"answer": 2}], texts), {}

    def watch(**kwargs):
        seen.update(copy.deepcopy({name: kwargs[name] for name in before}))
        assert kwargs["environments"][0] is shared
        return [0.0, 0.0]

    before = copy.deepcopy(
        {
            "prompts": [row["prompt"]] * 2,
            "completions": texts,
            "completion_ids": given.completion_ids,
            "answer": [1, 2],
            "notes": [{"seen": []}] * 2,
        }
    )
    suite([spoil, watch])(given, 2, lambda name, value: None)
    assert seen == before and shared.score == 1
    assert given.completions == before["completions"]
    assert given.completion_ids == before["completion_ids"]
    assert given.column("prompt") == before["prompts"] and row["notes"] == {"seen": []}


def only_texts(completions):
    return [0.0] * len(completions)


def all_but_columns(
    prompts, completions, completion_ids, trainer_state, log_extra, log_metric=None, answer=None
):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "columns", "words"),
    [
        (only_texts, {}, "does not accept 'prompts', 'completion_ids', 'trainer_state', ...: "
         "functions get all columns and more by name. Add **kwargs to its arguments."),
        (all_but_columns, {"level": 1}, "does not accept 'level': "),
        (functools.partial(all_but_columns, answer=[1]), {"level": 1}, "Add **kwargs"),
        (lambda solution, **kwargs: [], {"answer": 1, "level": 2},
         "needs the column 'solution', which the dataset lacks; it has 'answer', 'level'."),
        (lambda answers, **kwargs: [], {"answer": 1}, "the nearest is 'answer'."),
        (lambda answer, **kwargs: [], {}, "it has prompts alone."),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_named_with_what_to_do(function, columns, words):
    with pytest.raises(RewardError) as error:
        call(function, rows=[{"prompt": "p"} | columns] * 2)
    assert words in str(error.value)


def test_a_function_may_name_all_it_gets():
    rows = [{"prompt": "p", "answer": 1}] * 2
    assert call(all_but_columns, rows=rows)[0].total.tolist() == [0.0, 0.0]


def test_functions_get_columns_by_name():
    rows = [
        {"prompt": "p0", "answer": 1, "completion": "reserved", "trainer_state": "column"},
        {"prompt": "p1", "hint": "h", "completion_ids": [0], "prompts": "column"},
    ]
    before, seen = copy.deepcopy(rows), {}

    def watch(**kwargs):
        seen.update(kwargs)
        return [0.0, 0.0]

    state = object()
    call(watch, rows=rows, state=state)
    assert callable(seen.pop("log_extra"))
    assert callable(seen.pop("log_metric"))
    assert seen.pop("trainer_state") is state
    assert seen == {
        "prompts": ["p0", "p1"],
        "completions": ["c0", "c1"],
        "completion_ids": [[7], [8]],
        "answer": [1, None],
        "hint": [None, "h"],
    }
    assert rows == before


def test_functions_can_log_metrics_and_columns():
    logged = []

    def first(completions, log_extra, log_metric, **kwargs):
        log_extra("text", (c.upper() for c in completions))
        log_metric("seen", 2.0)
        return [0.0, 0.0]

    async def second(log_extra, log_metric, **kwargs):
        log_extra("text", [1, 2])
        log_metric("later", 3.0)
        return [0.0, 0.0]

    _, extras = call([first, second], log_metric=lambda *entry: logged.append(entry))
    assert extras == {"text": ["C0", "C1"], "second/text": [1, 2]}
    assert logged == [("seen", 2.0), ("later", 3.0)]


@pytest.mark.parametrize("first_ends_last", [False, True])
def test_columns_do_not_depend_on_who_ends_first(first_ends_last):
    """Processes must agree on the names, whatever their coroutines wait for."""
    events = [asyncio.Event(), asyncio.Event()]

    def made(mine, other, must_wait):
        async def judge(log_extra, **kwargs):
            if must_wait:
                await asyncio.wait_for(events[other].wait(), 60)
            log_extra("text", [mine, mine])
            events[mine].set()
            return [0.0, 0.0]

        return judge

    _, extras = call([made(0, 1, first_ends_last), made(1, 0, not first_ends_last)])
    assert extras == {"text": [0, 0], "judge_2/text": [1, 1]}


def test_functions_may_change_their_lists():
    def clear(prompts, completions, completion_ids, answer, **kwargs):
        for values in (prompts, completions, completion_ids, answer):
            values.clear()
        return [0.0, 0.0]

    def watch(prompts, completions, completion_ids, answer, **kwargs):
        assert (prompts, completions) == (["p0", "p1"], ["c0", "c1"])
        return [ids[0] * right for ids, right in zip(completion_ids, answer, strict=True)]

    given = inputs(texts=list(TEXTS))
    table, _ = suite([clear, watch])(given, 2, print)
    assert table.per_function.tolist() == [[0.0, 7.0], [0.0, 16.0]]
    assert given == inputs()


def test_misaligned_columns_are_an_error():
    def short(log_extra, **kwargs):
        log_extra("text", [1])
        return [0.0, 0.0]

    words = r"'short' failed: ValueError: log_extra\('text'\) got 1 value for 2 completions"
    with pytest.raises(RewardError, match=words):
        call(short)


# --- What functions must not return ---


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1.0], "'fixed' returned 1 reward for 2 completions"),
        ([1.0] * 3, "'fixed' returned 3 rewards for 2 completions"),
        (torch.zeros(3), "'fixed' returned 3 rewards for 2 completions"),
        ("ab", "'fixed' returned a str; it must return a list of 2 numbers"),
        (None, "'fixed' returned a NoneType"),
        (1.0, "'fixed' returned a float"),
        (torch.tensor(1.0), "'fixed' returned a float"),
        ({0: 1.0, 1: 2.0}, "'fixed' returned a dict"),
        ((x for x in (1.0, 2.0)), "'fixed' returned a generator"),
        (torch.zeros(2, 2), r"'fixed' returned \[0.0, 0.0\] for row 0; a reward must be a number"),
        (["1", 1.0], "'fixed' returned '1' for row 0; a reward must be a number or None"),
        ([1.0, math.inf], "'fixed' returned inf for row 1"),
        ([1.0, -math.inf], "'fixed' returned -inf for row 1"),
        (torch.tensor([math.inf, 1.0]), "'fixed' returned inf for row 0"),
        ([0.0, 1e39], r"'fixed' returned 1e\+39 for row 1; a reward must be finite in float32"),
        ([10**400, 0.0], "'fixed' returned 1000.* for row 0"),
        ([1.0, 1j], "'fixed' returned 1j for row 1; a reward must be a number"),
        ([torch.tensor(1j), 1.0], r"'fixed' returned tensor\(0.\+1.j\) for row 0; a reward must"),
        ([1.0, np.str_("a")], "'fixed' returned .*'a'.* for row 1; a reward must be a number"),
        ([np.datetime64("2020-01-01"), 1], "'fixed' returned .* for row 0; a reward must be a"),
    ],
)
def test_what_is_no_list_of_rewards(value, words):
    with pytest.raises(RewardError, match=words):
        call(returning(value))


@pytest.mark.parametrize("is_async", [False, True])
def test_the_error_of_a_function_is_named(is_async):
    calls = []

    def broken(**kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("lost")
        return [0.0, 0.0]

    async def broken_async(**kwargs):
        return broken()

    rewards = suite([returning([1, 1]), broken_async if is_async else broken])
    rewards(inputs(), 2, print)
    name = "broken_async" if is_async else "broken"
    with pytest.raises(RewardError, match=f"'{name}' failed: KeyError: 'lost'") as found:
        rewards(inputs(), 2, print)
    assert isinstance(found.value.__cause__, KeyError)
    assert rewards(inputs(), 2, print)[0].total.tolist() == [1.0, 1.0], "usable afterwards"


@pytest.mark.parametrize("timeout", [None, 60.0])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()])
def test_functions_cannot_leave_without_a_word(error, is_async, timeout):
    """Other processes would wait for this one forever."""

    def leave(**kwargs):
        raise error

    async def leave_async(**kwargs):
        raise error

    name = "leave_async" if is_async else "leave"
    with pytest.raises(RewardError, match=f"'{name}' failed: {type(error).__name__}"):
        call([leave_async if is_async else leave], timeout=timeout)


# --- Coroutines ---


def test_coroutines_wait_for_each_other():
    """Each sets what the other waits for: one after the other, neither would end."""
    first_began, second_began = asyncio.Event(), asyncio.Event()

    async def first(**kwargs):
        first_began.set()
        await asyncio.wait_for(second_began.wait(), 60)
        return [1.0, 2.0]

    class Second:
        async def __call__(self, **kwargs):
            second_began.set()
            await asyncio.wait_for(first_began.wait(), 60)
            return [3.0, 4.0]

    table, _ = call([first, Second()])
    assert table.names == ("first", "Second")
    assert table.per_function.tolist() == [[1.0, 3.0], [2.0, 4.0]]


def test_columns_keep_the_order_of_the_functions():
    def made(value, is_async):
        async def later(**kwargs):
            await asyncio.sleep(0.02 / value)
            return [value, -value]

        return later if is_async else returning([value, -value])

    functions = [made(1, True), made(2, False), made(3, True), made(4, False)]
    table, _ = call(functions)
    assert table.names == ("later", "fixed", "later_2", "fixed_2")
    assert table.per_function.tolist() == [[1, 2, 3, 4], [-1, -2, -3, -4]]


def test_coroutines_of_all_calls_share_one_loop():
    loops = []

    async def watch(**kwargs):
        loops.append(asyncio.get_running_loop())
        return [0.0, 0.0]

    async def inside():
        """Also when the caller has a running event loop, as in a notebook."""
        return rewards(inputs(), 2, print)

    rewards = suite([watch])
    rewards(inputs(), 2, print)
    asyncio.run(inside())
    assert len(loops) == 2
    assert loops[0] is loops[1]


# --- Time limits ---


@pytest.mark.parametrize("is_async", [False, True])
def test_calls_are_limited_in_time(is_async):
    release = threading.Event()

    def slow(**kwargs):
        release.wait(60)
        return [0.0, 0.0]

    async def slow_async(**kwargs):
        await asyncio.sleep(60)
        return [0.0, 0.0]

    start = time.monotonic()
    words = r"'slow\w*' took longer than 0.05 seconds \(reward_timeout\)"
    try:
        with pytest.raises(RewardError, match=words):
            call([slow_async if is_async else slow], timeout=0.05)
    finally:
        release.set()
    assert time.monotonic() - start < 30


def test_coroutines_that_block_the_loop_are_limited_in_time():
    release, calls = threading.Event(), []

    async def stuck(**kwargs):
        calls.append(1)
        if len(calls) == 1:
            release.wait(60)
        return [1.0, 2.0]

    rewards = suite(stuck, timeout=0.05)
    words = r"'stuck' took longer than 0.05 seconds and blocks the event loop.*reward_timeout"
    try:
        with pytest.raises(RewardError, match=words):
            rewards(inputs(), 2, print)
        assert rewards(inputs(), 2, print)[0].total.tolist() == [1.0, 2.0], "usable afterwards"
    finally:
        release.set()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_may_itself_meet_a_time_limit(is_async):
    def fetch(**kwargs):
        raise TimeoutError("the judge does not answer")

    async def fetch_async(**kwargs):
        return fetch()

    words = "failed: TimeoutError: the judge does not answer"
    with pytest.raises(RewardError, match=words):
        call([fetch_async if is_async else fetch], timeout=60.0)


def test_results_and_errors_within_the_limit():
    def broken(**kwargs):
        raise ValueError("no")

    async def later(**kwargs):
        return [1.0, 2.0]

    table, _ = call([returning([3, 4]), later], timeout=60.0)
    assert table.total.tolist() == [4.0, 6.0]
    with pytest.raises(RewardError, match="'broken' failed: ValueError: no"):
        call([broken], timeout=60.0)


# --- Reward models ---


def test_a_reward_model_next_to_functions():
    config = tiny_model().config
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    rewards = suite([returning([10, 20]), model], [0.0, 2.0], 60.0, [None, tiny_tokenizer()])
    rewards.to(torch.device("cpu"))
    table, _ = rewards(inputs(texts=["a", "longer"]), 2, print)
    direct = []
    for text in ("p0a", "p1longer"):
        ids = torch.tensor([tiny_tokenizer()(text)["input_ids"]])
        with torch.no_grad():
            direct.append(model(input_ids=ids).logits[0, 0])
    assert torch.allclose(table.per_function[:, 1], torch.stack(direct), atol=1e-6)
    assert torch.allclose(table.total, 2 * torch.stack(direct), atol=1e-6)


def test_reward_models_move():
    config = tiny_model().config
    config.num_labels = 1
    rewards = suite(LlamaForSequenceClassification(config), tokenizers=tiny_tokenizer())
    assert rewards.to(torch.device("meta")) is rewards
    assert rewards.sources[0].model.device == torch.device("meta")


def test_the_error_of_a_reward_model_is_named():
    config = tiny_model().config
    config.num_labels = 1
    rewards = suite(LlamaForSequenceClassification(config), tokenizers=tiny_tokenizer())
    with pytest.raises(RewardError, match="'LlamaForSequenceClassification' failed: TypeError"):
        rewards(inputs(texts=[1, 2]), 2, print)


# --- The trial before training ---


def test_the_trial_calls_every_function_once():
    seen = []

    def watch(**kwargs):
        seen.append((kwargs["prompts"], kwargs["completions"], kwargs["answer"]))
        return [None]

    async def watch_async(**kwargs):
        return watch(**kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        suite([watch, watch_async]).dry_run({"prompt": "p", "answer": 3}, None)
    assert seen == [(["p"], ["0"], [3])] * 2
    chat = [{"role": "user", "content": "hi"}]
    suite([watch]).dry_run({"prompt": chat, "answer": 3}, None)
    assert seen[-1] == ([chat], [[{"role": "assistant", "content": "0"}]], [3])


def test_the_trial_can_show_a_whole_group():
    seen = []

    def watch(prompts, completions, completion_ids, answer, **kwargs):
        seen.append((prompts, completions, completion_ids, answer))
        return [0.0] * len(prompts)

    suite([watch]).dry_run({"prompt": "p", "answer": 3}, None, 3)
    assert seen == [(["p"] * 3, ["0"] * 3, [[0]] * 3, [3] * 3)]


def test_the_trial_names_function_error_row_and_way_out():
    def broken(solution, **kwargs):
        return [0.0]

    with pytest.raises(ValueError, match="'broken' needs the column") as found:
        suite([returning([1]), broken]).dry_run({"prompt": "p", "answer": 3}, None)
    message = str(found.value)
    assert not isinstance(found.value, RewardError)
    for words in ("'solution'", "{'prompt': 'p', 'answer': 3}", "'0'", "reward_dry_run=False"):
        assert words in message
    with pytest.raises(ValueError, match="returned 2 rewards for 1 completion"):
        suite([returning([1, 2])]).dry_run({"prompt": "p"}, None)


@pytest.mark.parametrize(
    "values", [[NAN, 0.0], [0.0, NAN], [np.float32(NAN), 0], [0, torch.tensor(NAN)]]
)
def test_the_trial_warns_of_nan(values):
    with pytest.warns(UserWarning, match="'fixed' returned NaN on the first row; return None"):
        suite([returning(values)]).dry_run({"prompt": "p"}, None, 2)


# --- Two processes ---


def work():
    """One of two processes: a round of rewards, then one in which rank 1 fails."""

    def judge(prompts, **kwargs):
        if ranks.rank == 1 and prompts[0] == "bad":
            raise KeyError("lost")
        return [ranks.rank + 0.5, None]

    ranks = Ranks(Accelerator(cpu=True))
    rewards = RewardSuite(resolve_rewards(judge), [2.0], None, ranks)
    warnings.simplefilter("ignore")
    table, _ = rewards(inputs(), 2, print)
    with pytest.raises((RewardError, RankError)) as found:
        rewards(inputs(rows=[{"prompt": "bad"}] * 2), 2, print)
    return {"total": table.total.nan_to_num(-1.0).tolist(), "error": str(found.value)}


@pytest.mark.distributed
def test_every_rank_raises_what_one_rank_met():
    own = "The reward function 'judge' failed: KeyError: 'lost'."
    errors = [f"Rank 1 failed in rewards: RewardError: {own}", own]
    for found, error in zip(call_on_ranks(work), errors, strict=True):
        assert found == {"total": [1.0, -1.0, 3.0, -1.0], "error": error}


def test_a_function_that_does_not_come_back_from_its_trial_is_named(monkeypatch):
    said = threading.Event()
    monkeypatch.setattr("trl.online.rewards.SLOW_TRIAL", 0.01)
    monkeypatch.setattr("builtins.print", lambda *words: said.set() if "'slow'" in words[0] else 0)

    def slow(**kwargs):
        return [float(said.wait(60))]

    suite([slow]).dry_run({"prompt": "p"}, None)
    assert said.is_set()

from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator
from distributed.engines import call as call_on_ranks
from scripted import ScriptedBackend
from tiny import tiny_model, tiny_tokenizer
from tool_chat import END, STOPS, add, call, fail, ids, spell, tool_tokenizer, user

from trl.distributed import Ranks
from trl.generation.base import GenerationBackend, Sampling
from trl.generation.function_backend import FunctionBackend
from trl.generation.tools.calls import ToolCallParser, ToolRunner
from trl.generation.tools.loop import ToolLoop
from trl.generation.tools.templates import ToolResultEncoder
from trl.generation.transformers.backend import TransformersBackend, merge_options
from trl.types import Prompts

ASK = call("add", '{"a": 2, "b": 3}')
ANSWER = "(tool add: 5)<assistant>"


def loop(engine, tokenizer=None, ranks=None, tools=(add, spell, fail), **limits) -> ToolLoop:
    tokenizer = tokenizer or tool_tokenizer()
    runner = ToolRunner(tools, 20.0)
    parser = ToolCallParser(tokenizer, runner.schemas)
    turns = ToolResultEncoder(tokenizer, STOPS)
    return ToolLoop(engine, runner, parser, turns, ranks or Ranks(), **limits)


def prompts(*texts) -> Prompts:
    return Prompts(messages=[user(t) for t in texts], token_ids=[ids(t) for t in texts])


def sampling(**changes) -> Sampling:
    return Sampling(**({"max_tokens": 1000, "stop_ids": STOPS} | changes))


def says(*turns: str):
    """A script that writes the turns one after the other, each ended by <end>."""

    def script(seen, place):
        done = tiny_tokenizer().decode(seen).count("<assistant>")
        return [*ids(turns[min(done, len(turns) - 1)]), END]

    return script


def text(tokens) -> str:
    return tiny_tokenizer().decode(tokens)


def test_answers_stand_between_the_turns():
    backend = loop(ScriptedBackend(says("so " + ASK, ASK * 2, "ten")))
    found = backend.generate(prompts("q"), sampling(), 1)
    turns = ["so " + ASK + "<end>", ASK * 2 + "<end>", "ten<end>"]
    answers = [ANSWER, "(tool add: 5)" + ANSWER]
    expected = turns[0] + answers[0] + turns[1] + answers[1] + turns[2]
    assert text(found.completion_ids[0]) == expected and found.finish_reasons == ["stop"]
    pairs = zip(found.completion_ids[0], found.policy_mask[0], strict=True)
    kept = [token for token, ours in pairs if ours]
    assert text(kept) == "".join(turns), "only what the policy wrote is trained on"
    assert found.policy_token_counts() == [len(kept)] and found.tool_call_counts == [(3, 0)]
    roles = [message["role"] for message in found.messages[0]]
    assert roles == ["assistant", "tool", "assistant", "tool", "tool", "assistant"]
    assert found.messages[0][0]["content"] == "so"
    assert found.messages[0][1] == {"role": "tool", "name": "add", "content": "5"}
    assert found.messages[0][-1] == {"role": "assistant", "content": "ten"}


def test_the_engine_goes_on_from_the_same_tokens():
    """`hi` is one token for the tokenizer, but the policy wrote two: they stay two."""
    tokenizer = tool_tokenizer()
    tokenizer.add_tokens(["hi"])
    turn = [*ids("h"), *ids("i"), *ids(ASK), END]
    assert tokenizer(tokenizer.decode(turn))["input_ids"] != turn
    seen = []

    def script(tokens, place):
        seen.append(list(tokens))
        return turn if len(seen) == 1 else [*ids("ok"), END]

    found = loop(ScriptedBackend(script), tokenizer).generate(prompts("q"), sampling(), 1)
    assert seen == [ids("q"), ids("q") + turn + ids(ANSWER)]
    assert found.completion_ids[0] == turn + ids(ANSWER) + [*ids("ok"), END]


def test_rows_go_on_without_those_that_are_done():
    def script(seen, place):
        done = text(seen).startswith("x") or "(tool" in text(seen)
        return [*ids("ok" if done else ASK), END]

    engine = ScriptedBackend(script)
    found = loop(engine).generate(prompts("q", "x", "q"), sampling(seeds=(1, 2, 3)), 1)
    assert [len(call.seeds) for call in engine.calls] == [3, 2]
    assert engine.calls[0].seeds == (1, 2, 3), "the first turn draws as without tools"
    assert not {*engine.calls[1].seeds} & {1, 2, 3} and len({*engine.calls[1].seeds}) == 2
    assert [text(row) for row in found.completion_ids] == [
        ASK + "<end>" + ANSWER + "ok<end>", "ok<end>", ASK + "<end>" + ANSWER + "ok<end>",
    ]  # fmt: skip
    assert found.tool_call_counts == [(1, 0), (0, 0), (1, 0)]


def test_failures_are_told_and_counted():
    wrong = call("fail", '{"why": "no"}') + call("ad", "{}") + "<tool_call>{</tool_call>"
    found = loop(ScriptedBackend(says(wrong, "ok"))).generate(prompts("q"), sampling(), 1)
    answers = [m["content"] for m in found.messages[0] if m["role"] == "tool"]
    assert [answer.startswith('{"error": ') for answer in answers] == [True] * 3
    assert found.tool_call_counts == [(3, 3)] and text(found.completion_ids[0]).endswith("ok<end>")


@pytest.mark.parametrize(("turns", "made"), [(0, 0), (1, 1), (2, 2), (None, 3)])
def test_most_turns_that_are_answered(turns, made):
    backend = loop(ScriptedBackend(says(ASK, ASK, ASK, "ok")), max_iterations=turns)
    found = backend.generate(prompts("q"), sampling(), 1)
    assert found.tool_call_counts == [(made, 0)]
    assert found.messages[0][-1]["role"] == "assistant" and found.finish_reasons == ["stop"]


FIRST = len(ids(ASK)) + 1
TWO = FIRST + len(ids(ANSWER))


@pytest.mark.parametrize(
    ("most", "expected", "finish"),
    [
        (FIRST - 1, ASK, "length"),
        (FIRST, ASK + "<end>", "stop"),
        (TWO, ASK + "<end>", "stop"),  # the answer would leave no room to go on
        (TWO + 1, ASK + "<end>" + ANSWER + "o", "length"),
        (TWO + 3, ASK + "<end>" + ANSWER + "ok<end>", "stop"),
    ],
)
@pytest.mark.parametrize("bound", ["max_tokens", "max_new_tokens", "context_length"])
def test_a_completion_ends_where_there_is_no_room(bound, most, expected, finish):
    changes, limits = {}, {}
    if bound == "context_length":
        limits = {"context_length": most + len(ids("q"))}
    else:
        changes = {"max_tokens": most} if bound == "max_tokens" else {"extra": {bound: most}}
    backend = loop(ScriptedBackend(says(ASK, "ok")), **limits)
    found = backend.generate(prompts("q"), merge_options(sampling(**changes)), 1)
    assert text(found.completion_ids[0]) == expected and found.finish_reasons == [finish]
    assert found.messages[0][-1]["role"] == "assistant"
    assert found.tool_call_counts == [(int(most >= FIRST), 0)], "a turn that was cut calls nothing"
    assert len(found.policy_mask[0]) == len(found.completion_ids[0])


def test_a_row_with_less_room_than_the_others_is_cut():
    engine = ScriptedBackend(lambda seen, place: ids("a" * 30))
    backend = loop(engine, context_length=20)
    found = backend.generate(prompts("q", "q" * 8), sampling(), 1)
    assert list(map(len, found.completion_ids)) == [19, 12] == found.policy_token_counts()
    assert found.finish_reasons == ["length"] * 2 and engine.calls[0].max_tokens == 19


def real(model) -> TransformersBackend:
    return TransformersBackend(
        lambda: nullcontext(model.eval()), pad_id=0, device=torch.device("cpu")
    )


def test_without_calls_completions_are_those_of_the_engine():
    given, drawn = prompts("q", "xy"), sampling(max_tokens=12, seeds=(5, 6))
    plain = real(tiny_model()).generate(given, drawn, 1)
    found = loop(real(tiny_model())).generate(given, drawn, 1)
    assert (
        found.completion_ids == plain.completion_ids
        and found.finish_reasons == plain.finish_reasons
    )
    assert found.sampling_logps == plain.sampling_logps
    assert found.tool_call_counts == [(0, 0)] * 2


def test_a_real_engine_goes_on_behind_an_answer():
    """Tokens and log-probabilities of the second turn are those of the model on all before it."""

    class Starts(GenerationBackend):
        """An engine whose first turn is a call, whatever it draws."""

        reports_policy_logps = True

        def __init__(self):
            self.inner, self.turn = real(model), 0

        def generate(self, given, drawn, group_size):
            self.turn += 1
            if self.turn > 1:
                return self.inner.generate(given, drawn, group_size)
            return ScriptedBackend(says(ASK)).generate(given, drawn, group_size)

    model = tiny_model()
    engine = Starts()
    backend = loop(engine)
    found = backend.generate(prompts("q"), sampling(max_tokens=TWO + 9, seeds=(5,)), 1)
    assert engine.turn == 2 and found.sampling_logps is None, "the first turn reports none"
    before = [*ids("q"), *ids(ASK), END, *ids(ANSWER)]
    assert found.completion_ids[0][: len(before) - 1] == before[1:]
    rest = found.completion_ids[0][len(before) - 1 :]
    again = real(model).generate(
        Prompts(messages=[""], token_ids=[before]), engine_seeds(found, 5), 1
    )
    assert rest == again.completion_ids[0] and len(rest) > 0


def engine_seeds(found, seed) -> Sampling:
    from trl.generation.base import row_seeds

    return sampling(max_tokens=9, seeds=row_seeds((seed, "turn"), 1, 1))


# --- Several ranks ---


def work():
    """One of two processes: on rank 0 tools are called, and fail; on rank 1 there is no call."""
    ranks = Ranks(Accelerator(cpu=True))
    rank = ranks.rank
    script = says(ASK, call("fail", '{"why": "no"}'), "ok") if rank == 0 else says("ok")
    engine = ScriptedBackend(script)
    backend = loop(Together(engine, ranks), ranks=ranks)
    found = backend.generate(prompts("q", "qq"), sampling(max_tokens=900 + rank), 2)
    result = {
        "texts": [text(row) for row in found.completion_ids],
        "calls": found.tool_call_counts,
        "limits": [drawn.max_tokens for drawn in engine.calls],
    }
    good = {"prompt_ids": [[9]], "completion_ids": [[END]], "logprobs": [[0.0]]}
    rollouts = FunctionBackend(engine, lambda *args: 1 / (1 - rank) and good, ranks)
    try:
        rollouts.generate(prompts("q"), sampling(), 1)
    except Exception as error:
        result["failure"] = f"{type(error).__name__}: {error}"
    return result


class Together(GenerationBackend):
    """An engine whose call is a collective."""

    def __init__(self, engine, ranks):
        self.engine, self.ranks = engine, ranks

    def generate(self, given, drawn, group_size):
        self.ranks.gather_objects(len(given))
        return self.engine.generate(given, drawn, group_size)


@pytest.mark.distributed
def test_ranks_call_the_engine_equally_often():
    both = call_on_ranks(work)
    assert both[1]["failure"] == "ZeroDivisionError: division by zero"
    assert both[0]["failure"] == f"RankError: Rank 1 failed in rollout_func: {both[1]['failure']}"
    assert both[0]["limits"] == both[1]["limits"] and len(both[0]["limits"]) == 3
    assert both[0]["calls"] == [(2, 1)] * 2 and both[1]["calls"] == [(0, 0)] * 2
    assert both[1]["texts"] == ["ok<end>"] * 2
    assert all(row.endswith("ok<end>") for row in both[0]["texts"])

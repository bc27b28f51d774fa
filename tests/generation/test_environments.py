import pytest
import torch
from scripted import ScriptedBackend
from tiny import tiny_tokenizer
from tool_chat import END, STOPS, add, call, ids, tool_tokenizer, user

from trl.distributed import Ranks
from trl.generation.base import Sampling
from trl.generation.environments import EnvironmentBackend, Environments
from trl.generation.tools.calls import ToolCallParser, ToolRunner
from trl.generation.tools.loop import ToolLoop
from trl.generation.tools.templates import ToolResultEncoder
from trl.online.prompts import PromptEncoder
from trl.online.reward_sources import resolve_rewards
from trl.online.rewards import RewardInputs, RewardSuite
from trl.types import Prompts


class Base:
    def look(self) -> str:
        """See where one is."""
        return f"at {self.place}"


class Maze(Base):
    """Rows have their own place; each step is counted."""

    made = 0
    size = property(lambda self: 1 / 0)

    def __init__(self):
        Maze.made += 1
        self.helper = add

    def reset(self, start, **kwargs):
        self.place, self.seen = start, sorted(kwargs)
        return f" from {start}"

    async def step(self, by: int) -> str:
        """
        Go on.

        Args:
            by: how far
        """
        self.place += by
        return f"at {self.place}"

    def get_reward(self):
        return float(self.place)

    def _hidden(self) -> str:
        """Not a tool."""

    @classmethod
    def build(cls) -> str:
        """Not a tool."""


class Quiet:
    """Shows nothing, and can only be talked to."""

    def reset(self, **kwargs):
        self.given = kwargs

    async def get_reward(self):
        return None


@pytest.fixture(autouse=True)
def none_made():
    Maze.made = 0


def rows(*starts, **columns):
    return [
        {"prompt": user("go"), "start": start} | {name: v[i] for name, v in columns.items()}
        for i, start in enumerate(starts)
    ]


def test_public_methods_are_tools_and_win_over_functions_of_all_rows():
    found = Environments(Maze, [add])
    assert [tool.__name__ for tool in found.tools] == ["add", "look", "step"]
    assert Maze.made == 1, "one that is asked for its tools is used afterwards"

    def look() -> str:
        """See something else."""

    (chosen,) = Environments(Maze, [look]).reset_for_rows(rows(3))[0]
    assert Environments(Maze, [look]).tools_of(chosen)["look"]() == "at 3"


def test_each_row_has_its_own_and_later_rounds_reset_it():
    found, given = Environments(lambda: Maze()), rows(1, 1, 7)
    environments, begun = found.reset_for_rows(given)
    assert len(set(map(id, environments))) == 3 == Maze.made
    assert [env.place for env in environments] == [1, 1, 7]
    assert environments[0].seen == ["prompt"]
    assert [row["prompt"][-1]["content"] for row in begun] == ["go from 1"] * 2 + ["go from 7"]
    assert given == rows(1, 1, 7), "rows stay as they are"
    again, _ = found.reset_for_rows(rows(4, 5))
    assert [env.place for env in again] == [4, 5] and again == environments[:2]
    assert found.reset_for_rows(rows(0, 0, 0))[0] == environments and Maze.made == 3


def test_lone_surrogates_that_are_observed_are_replaced():
    _, [row] = Environments(Maze).reset_for_rows(rows("\ud83d"))
    assert row["prompt"][-1]["content"] == "go from \ufffd"


def test_a_reset_cannot_change_its_row():
    class Greedy(Quiet):
        def reset(self, prompt, hints, **kwargs):
            prompt[0]["content"] = "changed"
            hints.clear()

    given = rows(1, 2, hints=[["a"], ["b"]])
    _, begun = Environments(Greedy).reset_for_rows(given)
    assert given == rows(1, 2, hints=[["a"], ["b"]])
    assert [row["prompt"] for row in begun] == [user("go"), user("go")]


def test_rows_choose_among_several():
    found = Environments({"maze": Maze, "quiet": Quiet}, [add])
    names = ["quiet", "maze", "quiet"]
    environments, begun = found.reset_for_rows(rows(1, 2, 3, environment=names))
    assert [type(env).__name__ for env in environments] == ["Quiet", "Maze", "Quiet"]
    assert environments[0] is not environments[2] and "environment" not in environments[0].given
    tools = [row["chat_template_kwargs"]["tools"] for row in begun]
    named = [[tool["function"]["name"] for tool in of_row] for of_row in tools]
    assert named == [["add"], ["add", "look", "step"], ["add"]]
    assert begun[0]["prompt"] == user("go"), "reset returned None"
    for wrong in ("maxe", None):
        with pytest.raises(ValueError, match=f"Row 1 .*environment={wrong!r}.*maze"):
            found.reset_for_rows(rows(1, 2, environment=["maze", wrong]))


def test_rewards_of_environments_are_columns_beside_the_others():
    found = Environments({"a": Maze, "b": Maze, "c": Quiet})
    assert [reward.__name__ for reward in found.reward_functions] == ["Maze", "Quiet"]
    given = rows(2, 3, 4, environment=["a", "c", "b"])
    environments, begun = found.reset_for_rows(given)
    begun = [row | {"environments": own} for row, own in zip(begun, environments, strict=True)]

    def mine(environments, **kwargs):
        return [float(hasattr(own, "place")) for own in environments]

    sources = resolve_rewards(mine, of_environments=found.reward_functions)
    suite = RewardSuite(sources, [10.0], 5.0, Ranks())
    inputs = RewardInputs(begun, ["x"] * 3, [[1]] * 3, None)
    table, _ = suite(inputs, 1, lambda name, value: None)
    assert table.names == ("mine", "Maze", "Quiet")
    assert table.total.tolist() == [12.0, 0.0, 14.0]
    assert torch.equal(table.weights, torch.tensor([10.0, 1.0, 1.0]))
    with pytest.raises(ValueError, match="2 entries for 1 reward function .mine"):
        RewardSuite(sources, [1.0, 1.0], 5.0, Ranks())


def test_blocks_are_appended_as_such():
    class Blocks(Quiet):
        def reset(self, shown, **kwargs):
            return shown

    blocks = [{"type": "text", "text": "see"}]
    given = [{"prompt": user("go"), "shown": blocks}]
    first = {"type": "text", "text": "go"}
    begun = Environments(Blocks).reset_for_rows(given)[1]
    assert begun[0]["prompt"] == [{"role": "user", "content": [first, *blocks]}]
    again = [{"prompt": begun[0]["prompt"], "shown": "!"}]
    content = Environments(Blocks).reset_for_rows(again)[1][0]["prompt"][0]["content"]
    assert content == [first, *blocks, {"type": "text", "text": "!"}]
    for prompt, shown, words in (
        (user("go"), 3, "Blocks.reset returned 3; it must return None, text"),
        ("go", "x", "the prompt is text"),
    ):
        with pytest.raises(TypeError, match=words):
            Environments(Blocks).reset_for_rows([{"prompt": prompt, "shown": shown}])


class Undescribed(Quiet):
    def step(self, by):
        return by


@pytest.mark.parametrize(
    ("factory", "error", "words"),
    [
        (Quiet(), TypeError, "cannot be called; give a class"),
        ("maze", TypeError, "'maze' cannot be called"),
        ({}, ValueError, "environment_factory is empty"),
        (dict, ValueError, "dict has no method 'reset'"),
        (Undescribed, ValueError, "'step' has no schema"),
    ],
)
def test_what_is_no_environment(factory, error, words):
    with pytest.raises(error, match=words):
        Environments(factory)


def episode(seen, place):
    """Steps by its place in the group, then says where it is."""
    written = tiny_tokenizer().decode(seen)
    if "(tool" not in written:
        return [*ids(call("step", f'{{"by": {place}}}')), END]
    return [*ids(written.split("(tool step: ")[-1].split(")")[0]), END]


def test_the_policy_acts_in_the_environment_of_its_row():
    found, tokenizer = Environments(Maze), tool_tokenizer()
    runner = ToolRunner(found.tools, 20.0)
    parser, turns = ToolCallParser(tokenizer, runner.schemas), ToolResultEncoder(tokenizer, STOPS)
    loop = ToolLoop(ScriptedBackend(episode), runner, parser, turns, Ranks())
    encode = PromptEncoder(tokenizer)
    backend = EnvironmentBackend(loop, found, encode, Ranks())
    given = rows(10, 10, 20, 20)
    prompts = encode(given)
    generations = backend.generate(prompts, Sampling(max_tokens=500, stop_ids=STOPS), 2)
    shown = generations.completed_prompts(prompts)
    texts = [tokenizer.decode(row) for row in shown.token_ids]
    assert texts == [
        f"<system>look step <end><user>go from {n}<end><assistant>" for n in (10, 10, 20, 20)
    ]
    assert shown.messages[2] == user("go from 20")
    assert [turns[-1]["content"] for turns in generations.messages] == [
        "at 10",
        "at 11",
        "at 20",
        "at 21",
    ]
    assert generations.tool_call_counts == [(1, 0)] * 4
    columns = generations.with_extra_columns(given)
    assert [row["environments"].place for row in columns] == [10, 11, 20, 21]
    backend.sync_weights(3)
    assert loop.engine.synced_steps == [3]


def test_a_reset_that_fails_is_raised():
    class Broken(Quiet):
        def reset(self, **kwargs):
            raise KeyError("no level")

    backend = EnvironmentBackend(ScriptedBackend(episode), Environments(Broken), None, Ranks())
    prompts = Prompts(messages=["x"], token_ids=[[1]], rows=[{"prompt": "x"}])
    with pytest.raises(KeyError, match="no level"):
        backend.generate(prompts, Sampling(max_tokens=3), 1)

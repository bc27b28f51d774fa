import asyncio
import json
import threading
import time

import pytest
from tiny import CHAT_TEMPLATE
from tool_chat import TEMPLATE, add, call, fail, ids, spell, tool_tokenizer

from trl.generation.tools.calls import (
    BARE,
    TAGGED,
    ToolCall,
    ToolCallParser,
    ToolResult,
    ToolRunner,
    read_calls,
    tool_schema,
)
from trl.timed_calls import Outcome

SCHEMAS = [tool_schema(add), tool_schema(spell)]
ADD = ToolCall("add", {"a": 1, "b": 2})
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>2</parameter>\n"
    "</function>\n</tool_call>"
)
SPELL = "<tool_call><function=spell><parameter=word>1</parameter></function></tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("5 apples", "5 apples", []),
        ("so " + call("add", '{"a": 1, "b": 2}'), "so", [ADD]),
        (call("add", '{"a": 1, "b": 2}') * 2, "", [ADD, ADD]),
        (call("add", '"{\\"a\\": 1, \\"b\\": 2}"'), "", [ADD]),
        (call("add", '{"a": 1, "b": 2}').removesuffix("</tool_call>"), "", [ADD]),
        ('<tool_call>{"name": "now"}</tool_call>', "", [ToolCall("now", {})]),
        (XML, "", [ADD]),
        (SPELL, "", [ToolCall("spell", {"word": "1"})]),
    ],
    ids=["none", "with text", "two", "arguments as text", "not closed", "no arguments", "xml",
         "xml string"],
)  # fmt: skip
def test_tagged_calls(text, content, calls):
    assert read_calls(TAGGED, text, SCHEMAS) == (content, calls)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"name": "add", "arguments": {"a": 1', "it is not JSON"),
        ("add(1, 2)", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[1]", "an object with a name"),
        ('{"arguments": {}}', "an object with a name"),
        ('{"name": "add", "arguments": [1, 2]}', "arguments must be an object"),
    ],
)
def test_malformed_calls_say_what_is_wrong(body, words):
    text = f"<tool_call>{body}</tool_call>" + call("add", '{"a":1,"b":2}')
    found, good = read_calls(TAGGED, text, [])[1]
    assert words in found.problem and good == ADD


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', ("", [ADD])),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', ("", [ADD])),
        ('I say {"name": "add"}', ('I say {"name": "add"}', [])),
        ('{"x": 1}', ('{"x": 1}', [])),
        ('{"parameters": {"a": 1, "b": 2}, "name": "add"}', ("", [ADD])),
    ],
)
def test_bare_calls(text, expected):
    assert read_calls(BARE, text, SCHEMAS) == expected


LONE = '{"name": "add\\ud83d", "arguments": {"a": ["\\ud83d"], "\\ude00": "\\ud83d\\ude00"}}'
NESTED_LONE = (
    '<function=add><parameter=a>["\\ud83d"]</parameter>'
    '<parameter=\ufffd>"\\ud83d\\ude00"</parameter></function>'
)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (LONE, "add\ufffd"),
        (json.dumps(json.loads(LONE) | {"arguments": json.dumps(json.loads(LONE)["arguments"])}),
         "add\ufffd"),
        (NESTED_LONE, "add"),
    ],
    ids=["object", "arguments as text", "nested tags"],
)  # fmt: skip
def test_lone_surrogates_of_a_model_are_replaced(body, name):
    _, [found] = read_calls(TAGGED, f"<tool_call>{body}</tool_call>", SCHEMAS)
    assert found == ToolCall(name, {"a": ["\ufffd"], "\ufffd": "😀"})


def test_lone_surrogates_of_tools_are_replaced():
    results = [
        ToolResult.from_outcome("x", Outcome("\ud83d")),
        ToolResult.from_outcome("x", Outcome({"a": ["\ud83d"]})),
        ToolResult.from_outcome("x", Outcome(failure=ValueError("\ud83d"))),
    ]
    contents = ["\ufffd", '{"a": ["\ufffd"]}', '{"error": "ValueError: \ufffd"}']
    assert [result.content for result in results] == contents


def test_a_turn_becomes_a_message():
    parse = ToolCallParser(tool_tokenizer(), SCHEMAS)
    message, calls = parse(ids("x"), ids("so " + call("add", '{"a": 1, "b": 2}')))
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert calls == [ADD]
    assert message == {
        "role": "assistant",
        "content": "so",
        "tool_calls": [{"type": "function", "function": function}],
    }
    assert parse(ids("x"), ids(" 5 <user>")) == ({"role": "assistant", "content": " 5 "}, [])


def test_the_template_says_how_calls_are_written():
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("<tool_call>", "").replace("</tool_call>", "")
    text = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    assert ToolCallParser(tokenizer, SCHEMAS)([], ids(text))[1] == [ADD]
    assert ToolCallParser(tool_tokenizer(), SCHEMAS)([], ids(text))[1] == []


def test_unknown_ways_of_writing_calls():
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("tool_call>", "call>")
    with pytest.raises(ValueError, match="<call>.*Set tokenizer.response_template"):
        ToolCallParser(tokenizer, SCHEMAS)


def test_response_templates_are_used():
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = {
        "start_anchor": "<assistant>",
        "fields": {
            "content": {"content": "text"},
            "tool_calls": {"open": "[", "close": "]", "content": "json", "repeats": True},
        },
    }
    parse = ToolCallParser(tokenizer, SCHEMAS)
    prompt = ids("<user>hi<end><assistant>")
    message, calls = parse(prompt, ids('so[{"name": "add", "arguments": {"a": 1, "b": 2}}]'))
    assert (message["content"], calls) == ("so", [ADD])
    assert "malformed" in parse(prompt, ids("[{]"))[1][0].problem
    tokenizer.response_template["fields"]["data"] = {"open": "(", "close": ")", "content": "text"}
    assert parse(prompt, ids("(2)4")) == ({"role": "assistant", "data": "2", "content": "4"}, [])


# --- Making calls ---

RELEASE = threading.Event()


def wait_here(seconds: int) -> str:
    """
    Wait.

    Args:
        seconds: how long
    """
    RELEASE.wait(seconds)
    return "done"


async def sleep(seconds: int) -> str:
    """
    Sleep.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return "done"


async def block(seconds: int) -> str:
    """
    Keep the event loop busy.

    Args:
        seconds: how long
    """
    RELEASE.wait(seconds)
    return "done"


def slow_inside() -> str:
    """Raise a timeout of one's own."""
    raise TimeoutError("server")


def leave() -> str:
    """End the process."""
    raise SystemExit(3)


TOOLS = [add, spell, fail, wait_here, sleep, block, slow_inside, leave]
SUM = ToolCall("add", {"a": 2, "b": 3})


@pytest.fixture(autouse=True)
def released():
    RELEASE.clear()
    yield
    RELEASE.set()


def errors(results):
    return [json.loads(result.content)["error"] for result in results if result.failed]


@pytest.mark.parametrize("timeout", [20.0, None])
def test_results_stand_in_the_order_of_the_calls(timeout):
    calls = [ToolCall("spell", {"word": "ab"}), SUM, ToolCall("spell", {"word": "c"})]
    found = ToolRunner(TOOLS, timeout)(calls)
    assert [(r.name, r.content, r.failed) for r in found] == [
        ("spell", "a-b", False), ("add", "5", False), ("spell", "c", False),
    ]  # fmt: skip


def test_tools_cannot_change_the_recorded_call():
    def drain(numbers):
        return len(numbers) - len([numbers.pop() for _ in list(numbers)])

    asked = ToolCall("drain", {"numbers": [1, 2]})
    (found,) = ToolRunner([], None)([asked], [{"drain": drain}])
    assert found.content == "0" and asked.arguments == {"numbers": [1, 2]}


def test_functions_of_its_own_are_all_that_a_call_may_name():
    own = {"spell": lambda word: word.upper()}
    calls = [ToolCall("spell", {"word": "ab"}), SUM, SUM]
    run = ToolRunner(TOOLS, None)
    found = run(calls, [own, own, run.by_name])
    assert [result.content for result in found if not result.failed] == ["AB", "5"]
    assert errors(found) == ["there is no tool 'add'. There are: spell."]


@pytest.mark.parametrize("timeout", [20.0, None])
def test_failures_are_told_to_the_model(timeout):
    calls = [
        ToolCall("fail", {"why": "no luck"}),
        ToolCall("add", {"a": 1}),
        ToolCall("ad", {}),
        ToolCall("unlike", {}),
        ToolCall.malformed("no JSON", "{"),
        ToolCall("slow_inside", {}),
        ToolCall("leave", {}),
        ToolCall("spell", {"word": 3}),
    ]
    found = ToolRunner(TOOLS, timeout)([*calls, SUM])
    assert [r.failed for r in found] == [True] * 8 + [False]
    told = errors(found)
    assert told[0] == "RuntimeError: no luck"
    assert "missing 1 required positional argument: 'b'" in told[1]
    assert told[2] == "there is no tool 'ad'. Did you mean add?"
    assert "There are: add, spell, fail" in told[3]
    assert told[4].startswith("malformed tool call (no JSON)")
    assert told[5:7] == ["TimeoutError: server", "SystemExit: 3"]
    assert told[7].startswith("TypeError")


def test_a_call_that_takes_too_long_is_given_up():
    run = ToolRunner(TOOLS, 0.2)
    started = time.monotonic()
    found = run([ToolCall("wait_here", {"seconds": 60}), ToolCall("sleep", {"seconds": 60}), SUM])
    assert time.monotonic() - started < 20
    assert errors(found) == ["the call took longer than 0.2 seconds"] * 2
    assert found[2].content == "5", "the others go on"
    assert run([SUM])[0].content == "5"


def test_a_coroutine_that_blocks_is_given_up():
    run = ToolRunner(TOOLS, 0.2)
    found = run([ToolCall("block", {"seconds": 60})])
    (told,) = errors(found)
    assert told.startswith("the call took longer than 0.2 seconds and blocks the event loop")
    assert run([ToolCall("spell", {"word": "ab"})])[0].content == "a-b", "on another loop"


def test_coroutines_run_at_once():
    both = asyncio.Barrier(2)

    async def meet() -> str:
        """Wait for the other call."""
        await both.wait()
        return "met"

    found = ToolRunner([meet], 20.0)([ToolCall("meet", {})] * 2)
    assert [r.content for r in found] == ["met"] * 2


def test_without_a_limit_tools_run_in_the_calling_thread():
    def where() -> str:
        """Name the thread."""
        return threading.current_thread().name

    here = threading.current_thread().name
    names = {limit: ToolRunner([where], limit)([ToolCall("where", {})])[0] for limit in (None, 9.0)}
    assert names[None].content == here != names[9.0].content


def test_values_become_text():
    values = ["a b", 5, 2.5, True, None, {"k": ["é"]}, {1, 2}]
    assert [ToolResult.from_outcome("x", Outcome(v)).content for v in values] == [
        "a b", "5", "2.5", "true", "null", '{"k": ["é"]}', '"{1, 2}"',
    ]  # fmt: skip


def test_schemas():
    function = ToolRunner([add], None).schemas[0]["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert function["parameters"]["required"] == ["a", "b"]


def no_docs(a: int):
    return a


def no_hint(a):
    """
    Do.

    Args:
        a: number
    """


@pytest.mark.parametrize(
    ("tools", "error", "words"),
    [
        ([no_docs], ValueError, "'no_docs' has no schema.*docstring"),
        ([no_hint], ValueError, "'no_hint' has no schema.*type hint"),
        ([add, add], ValueError, "two tools are named 'add'"),
        ([3], TypeError, "3 is not a function"),
    ],
)
def test_what_is_no_tool(tools, error, words):
    with pytest.raises(error, match=words):
        ToolRunner(tools, 1.0)

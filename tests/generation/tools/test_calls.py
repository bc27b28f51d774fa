import pytest
from tiny import CHAT_TEMPLATE
from tool_chat import TEMPLATE, add, call, ids, spell, tool_tokenizer

from trl.generation.tools.calls import CallParser, ToolCall, read_bare, read_tagged
from trl.generation.tools.runner import schema_of

SCHEMAS = [schema_of(add), schema_of(spell)]
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
    assert read_tagged(text, SCHEMAS) == (content, calls)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"name": "add", "arguments": {"a": 1', "it is not JSON"),
        ("add(1, 2)", "it is not JSON"),
        ("[1]", "an object with a name"),
        ('{"arguments": {}}', "an object with a name"),
        ('{"name": "add", "arguments": [1, 2]}', "arguments must be an object"),
    ],
)
def test_malformed_calls_say_what_is_wrong(body, words):
    found, good = read_tagged(f"<tool_call>{body}</tool_call>" + call("add", '{"a":1,"b":2}'), [])[
        1
    ]
    assert words in found.problem and good == ADD


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', ("", [ADD])),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', ("", [ADD])),
        ('I say {"name": "add"}', ('I say {"name": "add"}', [])),
        ('{"x": 1}', ('{"x": 1}', [])),
    ],
)
def test_bare_calls(text, expected):
    assert read_bare(text, SCHEMAS) == expected


def test_a_turn_becomes_a_message():
    parse = CallParser(tool_tokenizer(), SCHEMAS)
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
    assert CallParser(tokenizer, SCHEMAS)([], ids(text))[1] == [ADD]
    assert CallParser(tool_tokenizer(), SCHEMAS)([], ids(text))[1] == []


def test_unknown_ways_of_writing_calls():
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("tool_call>", "call>")
    with pytest.raises(ValueError, match="<call>.*Set tokenizer.response_template"):
        CallParser(tokenizer, SCHEMAS)


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
    parse = CallParser(tokenizer, SCHEMAS)
    prompt = ids("<user>hi<end><assistant>")
    message, calls = parse(prompt, ids('so[{"name": "add", "arguments": {"a": 1, "b": 2}}]'))
    assert (message["content"], calls) == ("so", [ADD])
    assert "malformed" in parse(prompt, ids("[{]"))[1][0].problem
    tokenizer.response_template["fields"]["data"] = {"open": "(", "close": ")", "content": "text"}
    assert parse(prompt, ids("(2)4")) == ({"role": "assistant", "data": "2", "content": "4"}, [])

import pytest
from bpe import CHATML, THINKING, bpe_tokenizer
from tiny import CHAT_TEMPLATE
from tool_chat import STOPS, TEMPLATE, ids, tool_tokenizer

from trl.generation.tools.templates import (
    ToolResultEncoder,
    add_response_schema,
    is_chat_template_prefix_preserving,
    supports_tool_calling,
)

RESULTS = [
    {"role": "tool", "name": "add", "content": "5"},
    {"role": "tool", "name": "spell", "content": "a-b"},
]
# Earlier turns lose their reasoning, or the empty place of it, as soon as something follows.
DROPS_REASONING = TEMPLATE.replace(
    "<{{ m.role }}>",
    "<{{ m.role }}>{% if m.role == 'assistant' and (loop.last or m.reasoning_content) %}"
    "[{{ m.reasoning_content }}]{% endif %}",
)


def with_template(template):
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TEMPLATE, True),
        (CHAT_TEMPLATE, False),
        ("{{ raise_exception('no tools') }}", False),
        (TEMPLATE.replace("{{ c.function.arguments | tojson }}", "{}"), False),
    ],
    ids=["tools", "no calls", "refuses", "no arguments"],
)
def test_which_templates_support_tools(template, expected):
    assert supports_tool_calling(with_template(template)) is expected


def test_prefix_preserving():
    assert is_chat_template_prefix_preserving(bpe_tokenizer(CHATML))
    shortening = "{% for m in messages %}{{ m['content'][:messages|length] }}.{% endfor %}"
    assert not is_chat_template_prefix_preserving(bpe_tokenizer(shortening))
    assert is_chat_template_prefix_preserving(bpe_tokenizer(THINKING))


def test_tokens_behind_a_turn_with_calls():
    turns = ToolResultEncoder(tool_tokenizer(), STOPS)
    assert turns.encode(RESULTS) == ids("(tool add: 5)(tool spell: a-b)<assistant>")
    assert turns.encode(RESULTS[:1]) == ids("(tool add: 5)<assistant>")


def test_what_stands_between_stop_token_and_answer_belongs_to_the_answer():
    template = TEMPLATE.replace("<end>{% endif %}{% endfor %}", "<end>\n{% endif %}{% endfor %}")
    assert ToolResultEncoder(with_template(template), STOPS).encode(RESULTS[:1]) == ids(
        "\n(tool add: 5)<assistant>"
    )


def test_turns_that_no_token_ends():
    template = TEMPLATE.replace("<end>{% endif %}{% endfor %}", "{% endif %}{% endfor %}")
    found = ToolResultEncoder(with_template(template), STOPS).encode(RESULTS[:1])
    assert found == ids("(tool add: 5)<assistant>")


def test_template_arguments_reach_the_answer():
    template = TEMPLATE.replace("<assistant>{% endif %}", "<assistant>{{ mood }}{% endif %}")
    turns = ToolResultEncoder(with_template(template), STOPS, {"mood": "x"})
    assert turns.encode(RESULTS[:1]) == ids("(tool add: 5)<assistant>x")


def test_templates_that_drop_earlier_reasoning_can_be_used():
    assert ToolResultEncoder(with_template(DROPS_REASONING), STOPS).encode(RESULTS[:1]) == ids(
        "(tool add: 5)<assistant>"
    )


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "need a chat template; the tokenizer has none"),
        (CHAT_TEMPLATE, "does not render tool calls"),
        ("{{ messages | length }}" + TEMPLATE, "not prefix-preserving.* from token 0 .*'2.* '3"),
    ],
    ids=["none", "no calls", "changes earlier turns"],
)
def test_templates_that_cannot_be_used(template, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        ToolResultEncoder(with_template(template), STOPS)


WRITTEN = '{"name": "add", "arguments": {"a": 7}}'
WAYS = {  # what a template writes for a call, and what a model writes
    "tags": (
        "<tool_call>\n{{ {'name': f.name, 'arguments': f.arguments} | tojson }}\n</tool_call>",
        f"<tool_call>\n{WRITTEN}\n</tool_call>",
    ),
    "nested tags": (
        "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
        "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
        "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>",
    ),
    "bare": (
        "{{ {'name': f.name, 'parameters': f.arguments} | tojson }}",
        WRITTEN.replace("arguments", "parameters"),
    ),
}


def template_with(call, thinking=""):
    shown = (
        "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{% set f = c.function %}"
        f"{call}{{% endfor %}}{thinking}"
    )
    return CHATML.replace("{{ m['content'] }}", shown)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_model_writes_is_parsed_as_its_template_writes_it(way):
    """Content, reasoning, and calls; arguments have the types that the tools say."""
    shown, written = WAYS[way]
    tokenizer = bpe_tokenizer(template_with(shown, thinking="{# <think> #}"))
    assert add_response_schema(tokenizer) is tokenizer
    prefix = tokenizer.apply_chat_template(
        [{"role": "user", "content": "7?"}], tokenize=False, add_generation_prompt=True
    )
    numbers = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": numbers}}]

    def parse(text):
        return tokenizer.parse_response(text + "<|im_end|>", prefix=prefix, tools=tools)

    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 7}}}
    assert parse(written) == {"role": "assistant", "tool_calls": [call]}
    assert parse("<think>so</think>seven") == {
        "role": "assistant",
        "reasoning_content": "so",
        "content": "seven",
    }
    if way != "bare":
        assert parse(f"yes\n{written}\n{written}") == {
            "role": "assistant",
            "content": "yes",
            "tool_calls": [call, call],
        }


def test_a_response_template_that_is_there_stays():
    tokenizer, own = bpe_tokenizer(), {"start_anchor": "a", "fields": {"content": {}}}
    tokenizer.response_template = own
    assert add_response_schema(tokenizer).response_template is own


def test_templates_whose_calls_cannot_be_read():
    with pytest.raises(ValueError, match="does not render tool calls"):
        add_response_schema(bpe_tokenizer(CHATML))
    with pytest.raises(ValueError, match="in an unknown format: .look_up"):
        add_response_schema(bpe_tokenizer(template_with("{{ f.name }}({{ f.arguments }})")))
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template = {"default": CHATML}
    with pytest.raises(ValueError, match="must be one text"):
        add_response_schema(tokenizer)

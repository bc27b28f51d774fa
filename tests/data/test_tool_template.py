import pytest
from tiny import CHAT_TEMPLATE
from tool_chat import STOPS, TEMPLATE, ids, tool_tokenizer

from trl.data.tool_template import ToolTurns, supports_tool_calling, tool_message

RESULTS = [tool_message("add", "5"), tool_message("spell", "a-b")]
# Earlier turns lose their reasoning, or the empty place of it, as soon as something follows.
THINKING = TEMPLATE.replace(
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


def test_tokens_behind_a_turn_with_calls():
    turns = ToolTurns(tool_tokenizer(), STOPS)
    assert turns.after(RESULTS) == ids("(tool add: 5)(tool spell: a-b)<assistant>")
    assert turns.after(RESULTS[:1]) == ids("(tool add: 5)<assistant>")


def test_what_stands_between_stop_token_and_answer_belongs_to_the_answer():
    template = TEMPLATE.replace("<end>{% endif %}{% endfor %}", "<end>\n{% endif %}{% endfor %}")
    assert ToolTurns(with_template(template), STOPS).after(RESULTS[:1]) == ids(
        "\n(tool add: 5)<assistant>"
    )


def test_turns_that_no_token_ends():
    template = TEMPLATE.replace("<end>{% endif %}{% endfor %}", "{% endif %}{% endfor %}")
    found = ToolTurns(with_template(template), STOPS).after(RESULTS[:1])
    assert found == ids("(tool add: 5)<assistant>")


def test_template_arguments_reach_the_answer():
    template = TEMPLATE.replace("<assistant>{% endif %}", "<assistant>{{ mood }}{% endif %}")
    turns = ToolTurns(with_template(template), STOPS, {"mood": "x"})
    assert turns.after(RESULTS[:1]) == ids("(tool add: 5)<assistant>x")


def test_templates_that_drop_earlier_reasoning_can_be_used():
    assert ToolTurns(with_template(THINKING), STOPS).after(RESULTS[:1]) == ids(
        "(tool add: 5)<assistant>"
    )


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "need a chat template; the tokenizer has none"),
        (CHAT_TEMPLATE, "does not show tool calls"),
        ("{{ messages | length }}" + TEMPLATE, "not prefix-preserving.* from token 0 .*'2.* '3"),
    ],
    ids=["none", "no calls", "changes earlier turns"],
)
def test_templates_that_cannot_be_used(template, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        ToolTurns(with_template(template), STOPS)

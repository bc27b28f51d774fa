import pytest
from bpe import CHATML, MARKED, THINKING, bpe_tokenizer
from tiny import CHAT_TEMPLATE, save_tiny, tiny_model, tiny_tokenizer
from tool_chat import STOPS, TEMPLATE, ids, tool_tokenizer

from trl.data.templates import (
    ToolTurns,
    add_response_schema,
    as_message,
    clone_chat_template,
    get_training_chat_template,
    has_generation_markers,
    is_chat_template_prefix_preserving,
    read_response,
    reads_responses,
    supports_tool_calling,
)


def test_markers_are_seen():
    assert has_generation_markers(MARKED) and has_generation_markers("{%- generation -%}")
    assert has_generation_markers({"default": MARKED, "other": ""})
    assert not has_generation_markers(CHATML)
    with pytest.raises(TypeError, match="no chat template"):
        has_generation_markers(None)


def test_a_training_template_renders_alike_and_marks_what_the_assistant_writes():
    tokenizer = bpe_tokenizer(CHATML)
    template = get_training_chat_template(tokenizer)
    assert tokenizer.chat_template == CHATML and has_generation_markers(template)
    said = [{"role": "assistant", "content": text} for text in ("one", "<two> ", "three")]
    user = {"role": "user", "content": "hi"}
    talk = [{"role": "system", "content": "s"}, user, said[0], user, *said[1:], user]
    plain = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    options = {"chat_template": template, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(talk, tokenize=False, **options) == plain
    found = tokenizer.apply_chat_template(
        talk, return_dict=True, return_assistant_tokens_mask=True, **options
    )
    pairs = zip(found["input_ids"], found["assistant_masks"], strict=True)
    trained = tokenizer.decode([token for token, kept in pairs if kept])
    assert trained == "".join(m["content"] + "<|im_end|>" for m in said)


def test_training_templates_that_are_not_needed_or_cannot_be_made():
    assert get_training_chat_template(tokenizer=bpe_tokenizer(MARKED)) is None
    with pytest.raises(ValueError, match="later messages change how a turn"):
        get_training_chat_template(bpe_tokenizer(THINKING))
    with pytest.raises(TypeError, match="no chat template"):
        get_training_chat_template(bpe_tokenizer(None))
    with pytest.raises(TypeError, match="processing_class alone"):
        get_training_chat_template(tiny_tokenizer(), tokenizer=tiny_tokenizer())


def test_prefix_preserving():
    assert is_chat_template_prefix_preserving(bpe_tokenizer(CHATML))
    shortening = "{% for m in messages %}{{ m['content'][:messages|length] }}.{% endfor %}"
    assert not is_chat_template_prefix_preserving(bpe_tokenizer(shortening))
    assert is_chat_template_prefix_preserving(bpe_tokenizer(THINKING))


@pytest.mark.parametrize(("multiple", "size"), [(None, 100), (64, 128), (50, 100)])
def test_clone_chat_template(tmp_path, multiple, size):
    source = bpe_tokenizer(CHATML, eos_token="<|im_end|>")
    source.save_pretrained(tmp_path)
    model, tokenizer = tiny_model(), tiny_tokenizer()
    known = len(tokenizer)
    before = model.get_input_embeddings().weight[:known].clone()
    size = size if multiple else known + len({*source.get_added_vocab()} - {*tokenizer.get_vocab()})
    model, tokenizer, added = clone_chat_template(model, tokenizer, str(tmp_path), multiple)
    assert tokenizer.chat_template == CHATML and tokenizer.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == model.generation_config.eos_token_id
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == model.get_input_embeddings().num_embeddings == size
    assert added == list(range(known, size))
    assert (model.get_input_embeddings().weight[:known] == before).all()


def test_a_source_without_template_is_refused(tmp_path):
    source = tiny_tokenizer()
    source.chat_template = None
    source.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="chat_template"):
        clone_chat_template(tiny_model(), tiny_tokenizer(), str(tmp_path))


def test_a_cloned_checkpoint_speaks_the_template(tmp_path):
    path = save_tiny(tmp_path)
    _, tokenizer, added = clone_chat_template(tiny_model(), bpe_tokenizer(), path)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert text == "<user>a<end>" and len(added) > 0


# --- Tool calls ---

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
    assert ToolTurns(with_template(DROPS_REASONING), STOPS).after(RESULTS[:1]) == ids(
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
    with pytest.raises(ValueError, match="does not show tool calls"):
        add_response_schema(bpe_tokenizer(CHATML))
    with pytest.raises(ValueError, match="in a way that is not known here: .look_up"):
        add_response_schema(bpe_tokenizer(template_with("{{ f.name }}({{ f.arguments }})")))
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template = {"default": CHATML}
    with pytest.raises(ValueError, match="must be one text"):
        add_response_schema(tokenizer)


READABLE = {
    "start_anchor": "<assistant>",
    "fields": {
        "reasoning_content": {"open": "(", "close": ")", "content": "text"},
        "content": {"content": "text"},
        "data": {"open": "[", "close": "]", "content": "json"},
    },
}


def tiny_ids(text):
    return tiny_tokenizer()(text)["input_ids"]


PROMPT = tiny_ids("<user>hi<end><assistant>")


def tokenizer_with_template():
    tokenizer = tiny_tokenizer()
    tokenizer.response_template = READABLE
    return tokenizer


def test_the_parts_of_a_turn():
    tokenizer = tokenizer_with_template()
    assert reads_responses(tokenizer) and not reads_responses(tiny_tokenizer())
    message = {"role": "assistant", "reasoning_content": "2+2", "content": "4"}
    assert read_response(tokenizer, PROMPT, tiny_ids("(2+2)4")) == message
    assert read_response(tokenizer, PROMPT, tiny_ids("(2+2)"))["content"] == ""
    assert as_message(tokenizer, PROMPT, [*tiny_ids("(2+2)4"), tokenizer.eos_token_id]) == message


def test_what_cannot_be_read_is_content():
    tokenizer = tokenizer_with_template()
    assert as_message(tokenizer, PROMPT, tiny_ids("[{]")) == {"role": "assistant", "content": "[{]"}
    assert as_message(tokenizer, PROMPT, []) == {"role": "assistant", "content": ""}
    found = as_message(tiny_tokenizer(), PROMPT, [*tiny_ids("(2+2)4"), 1])
    assert found == {"role": "assistant", "content": "(2+2)4"}

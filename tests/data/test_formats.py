import copy

import pytest
from tiny import tiny_tokenizer

from trl.data.formats import (
    apply_chat_template,
    is_conversational,
    is_conversational_from_value,
    malformed_prompt,
    maybe_apply_chat_template,
    maybe_convert_to_chatml,
    prepare_multimodal_messages,
)

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yo"}
OTHER = {"role": "assistant", "content": "no"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": [USER]}, True),
        ({"messages": [USER]}, True),
        ({"prompt": "text"}, False),
        ({"prompt": []}, False),
        ({"prompt": "", "completion": [ANSWER]}, True),
        ({"other": [USER]}, False),
        ({"prompt": [{"from": "user"}]}, False),
        ({"prompt": None}, False),
    ],
)
def test_conversational(row, expected):
    assert is_conversational(row) is expected


def test_conversational_from_value():
    assert is_conversational_from_value({"conversations": [{"from": "a", "value": "b"}]})
    assert not is_conversational_from_value({"conversations": []})
    assert not is_conversational_from_value({"conversations": [USER]})
    assert not is_conversational_from_value({})


def test_templates_by_hand():
    """The template writes <role>content<end>, and <assistant> as generation prompt."""
    render = lambda row, **kwargs: apply_chat_template(row, tiny_tokenizer(), **kwargs)  # noqa: E731
    assert render({"messages": [USER, ANSWER]}) == {"text": "<user>hi<end><assistant>yo<end>"}
    assert render({"prompt": [USER]}) == {"prompt": "<user>hi<end><assistant>"}
    assert render({"prompt": [USER], "completion": [ANSWER], "label": True}) == {
        "prompt": "<user>hi<end><assistant>",
        "completion": "yo<end>",
        "label": True,
    }
    assert render({"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER], "more": 1}) == {
        "prompt": "<user>hi<end><assistant>",
        "chosen": "yo<end>",
        "rejected": "no<end>",
    }
    assert render({"prompt": [USER, ANSWER]}) == {"prompt": "<user>hi<end><assistant>yo"}


def test_templates_need_known_fields_and_roles():
    with pytest.raises(KeyError, match="supported are"):
        apply_chat_template({"completion": [ANSWER]}, tiny_tokenizer())
    with pytest.raises(ValueError, match="A prompt has no messages; it must end with user"):
        apply_chat_template({"prompt": []}, tiny_tokenizer())
    with pytest.raises(ValueError, match="role 'system'"):
        apply_chat_template({"prompt": [{"role": "system", "content": "x"}]}, tiny_tokenizer())


def test_maybe_leaves_strings():
    row = {"prompt": "text"}
    assert maybe_apply_chat_template(row, tiny_tokenizer()) is row
    assert maybe_apply_chat_template({"prompt": [USER]}, tiny_tokenizer())["prompt"]


def test_images_stand_before_the_first_text():
    messages = [{"role": "system", "content": "s"}, USER]
    found = prepare_multimodal_messages(messages, ["picture"])
    assert found[0]["content"] == [{"type": "text", "text": "s"}]
    assert found[1]["content"] == [
        {"type": "image", "image": "picture"},
        {"type": "text", "text": "hi"},
    ]
    assert messages[1]["content"] == "hi", "not modified"


def test_images_fill_empty_blocks_in_order():
    blocks = [{"type": "image"}, {"type": "text", "text": "x"}, {"type": "image"}]
    found = prepare_multimodal_messages([{"role": "user", "content": blocks}], ["a", "b"])
    assert [b.get("image") for b in found[0]["content"]] == ["a", None, "b"]
    assert blocks[0] == {"type": "image"}
    with pytest.raises(ValueError, match="1 images were given for 2 image blocks"):
        prepare_multimodal_messages([{"role": "user", "content": blocks}], ["a"])
    with pytest.raises(ValueError, match="Unknown role 'robot'"):
        prepare_multimodal_messages([{"role": "robot", "content": "x"}])


@pytest.mark.parametrize("key", ["image", "url", "path", "base64"])
def test_blocks_with_an_image_are_not_empty(key):
    """A dataset gives every block all keys of all blocks, absent ones as None."""
    full, empty = {"type": "image", key: "mine"}, {"type": "image", key: None, "text": None}
    found = prepare_multimodal_messages([{"role": "user", "content": [full, empty]}], ["a"])
    assert found[0]["content"] == [full, empty | {"image": "a"}]


def test_a_prompt_is_what_all_renderings_share():
    """The template writes <think> before a new answer, and drops it once the answer is there."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    )
    found = apply_chat_template(
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}, tokenizer
    )
    assert found == {"prompt": "[user]hi[assistant]", "chosen": "yo", "rejected": "no"}
    assert apply_chat_template({"prompt": [USER]}, tokenizer)["prompt"].endswith("<think>")


def test_template_arguments_of_the_row_win():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ mood }}{{ tools is none }}{{ messages[0]['content'] }}"
    row = {"messages": [USER]}
    assert apply_chat_template(row, tokenizer, mood="a") == {"text": "aTruehi"}
    mine = row | {"chat_template_kwargs": {"mood": "b"}}
    assert apply_chat_template(mine, tokenizer, tools=[{"type": "function"}], mood="a") == {
        "text": "bFalsehi"
    }


def test_pairs_without_prompt_are_rendered_whole():
    found = apply_chat_template({"chosen": [USER, ANSWER], "rejected": [USER]}, tiny_tokenizer())
    assert found == {"chosen": "<user>hi<end><assistant>yo<end>", "rejected": "<user>hi<end>"}


def test_blocks_of_tools_and_missing_contents_are_left_alone():
    tool = {"role": "tool", "content": [{"type": "image"}]}
    call = {"role": "assistant", "tool_calls": []}
    found = prepare_multimodal_messages([tool, call, USER], ["a", "b"])
    assert found[:2] == [tool, call]
    assert [block.get("image") for block in found[2]["content"]] == ["a", "b", None]
    with pytest.raises(ValueError, match="1 images were given for 0 image blocks"):
        prepare_multimodal_messages([ANSWER], ["a"])


def test_the_form_of_prompts():
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    for good in ("", "a", [{"role": "user", "content": "a"}, call]):
        assert malformed_prompt(good) is None
    for bad in (None, 3, [], ["a"], [{"content": "a"}], [call, {"role": "user", "content": None}]):
        assert malformed_prompt(bad)


OLD = [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]
NEW = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("column", ["prompt", "completion", "chosen", "rejected", "messages"])
def test_each_column_is_renamed(column):
    assert maybe_convert_to_chatml({column: OLD, "n": 3}) == {column: NEW, "n": 3}


def test_conversations_become_messages():
    assert maybe_convert_to_chatml({"conversations": OLD}) == {"messages": NEW}
    assert maybe_convert_to_chatml({"conversations": NEW}) == {"messages": NEW}


def test_other_fields_of_a_turn_are_kept():
    turn = {"from": "user", "value": "a", "weight": 0}
    found = maybe_convert_to_chatml({"messages": [turn]})
    assert found == {"messages": [{"role": "user", "content": "a", "weight": 0}]}


@pytest.mark.parametrize(
    "example",
    [
        {"prompt": "from value", "completion": "x"},
        {"messages": NEW},
        {"prompt": ["a", "b"]},
        {"other": OLD},
        {"prompt": None},
        {"prompt": []},
        {},
    ],
)
def test_other_formats_are_unchanged(example):
    before = copy.deepcopy(example)
    found = maybe_convert_to_chatml(example)
    assert found == before == example
    assert found is not example


def test_the_example_itself_is_not_modified():
    example = {"conversations": copy.deepcopy(OLD), "chosen": copy.deepcopy(OLD)}
    maybe_convert_to_chatml(example)
    assert example == {"conversations": OLD, "chosen": OLD}

import copy
from itertools import takewhile

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from trl.data.formats import (
    apply_chat_template,
    common_prefix_length,
    extract_prompt,
    is_conversational,
    is_conversational_from_value,
    malformed_prompt,
    maybe_apply_chat_template,
    maybe_convert_to_chatml,
    maybe_extract_prompt,
    maybe_unpair_preference_dataset,
    prepare_multimodal_messages,
    unpair_preference_dataset,
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
    unspoken = {"role": "user", "content": None}
    for bad in (None, 3, [], ["a"], [call, "a"], [{"content": "a"}], [call, unspoken]):
        assert malformed_prompt(bad)


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video"])
def test_parts_that_are_no_text_are_named(kind):
    blocks = [{"type": "text", "text": "a"}, {"type": kind, kind: "x.png"}]
    problem = malformed_prompt([USER, {"role": "user", "content": blocks}])
    assert problem == (
        f"has {kind!r} content, which is not available in this release, in message 1."
    )


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


def turns(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("chosen", "rejected", "parts"),
    [
        ("sky is blue", "sky is green", ("sky is", " blue", " green")),
        ("sky:blue", "sky:green", ("sky:", "blue", "green")),
        ("blue", "green", ("", "blue", "green")),
        ("ab", "abc", ("a", "b", "bc")),  # one is the beginning of the other
        ("abc", "ab", ("a", "bc", "b")),
        ("ab ", "ab c", ("ab", " ", " c")),
        ("a b", "a bc", ("a", " b", " bc")),
        ("ab", "ab", ("a", "b", "b")),
        ("a", "a", ("", "a", "a")),
        ("", "a", ("", "", "a")),
    ],
)
def test_common_beginning_of_strings(chosen, rejected, parts):
    found = extract_prompt({"chosen": chosen, "rejected": rejected, "id": 3})
    assert found == dict(zip(("prompt", "chosen", "rejected"), parts, strict=True))
    assert found["prompt"] + found["chosen"] == chosen
    assert found["prompt"] + found["rejected"] == rejected


@pytest.mark.parametrize(
    ("chosen", "rejected", "shared"),
    [
        (turns("a", "b"), turns("a", "c"), 1),
        (turns("a", "b", "c", "d"), turns("a", "b", "c", "e"), 3),
        (turns("a", "b"), turns("x", "b"), 0),
        (turns("a", "b"), turns("a", "b", "c", "d"), 1),
        (turns("a", "b", "c"), turns("a"), 0),
        (turns("a", "b"), turns("a", "b"), 1),
    ],
)
def test_common_beginning_of_messages(chosen, rejected, shared):
    found = extract_prompt({"chosen": chosen, "rejected": rejected})
    assert found == {
        "prompt": chosen[:shared],
        "chosen": chosen[shared:],
        "rejected": rejected[shared:],
    }
    assert min(len(found["chosen"]), len(found["rejected"])) > 0


def test_only_pairs_without_a_fitting_prompt_are_split():
    split = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert maybe_extract_prompt({"chosen": "ab", "rejected": "ac"}) == split
    for unchanged in (
        {"prompt": "q", "chosen": "ab", "rejected": "ac"},
        {"prompt": turns("q"), "chosen": turns("a", "b"), "rejected": turns("a", "c")},
        {"prompt": "q", "completion": "ab"},
        {"chosen": "ab"},
    ):
        assert maybe_extract_prompt(unchanged) is unchanged


def test_a_prompt_of_the_other_format_is_replaced():
    example = {"prompt": "a", "chosen": turns("a", "b"), "rejected": turns("a", "c")}
    assert maybe_extract_prompt(example) == {
        "prompt": turns("a"),
        "chosen": turns("a", "b")[1:],
        "rejected": turns("a", "c")[1:],
    }


def test_mapping_keeps_other_columns():
    data = Dataset.from_dict({"chosen": ["ab", "xy"], "rejected": ["ac", "xz"], "id": [7, 8]})
    assert list(data.map(maybe_extract_prompt)) == [
        {"chosen": "b", "rejected": "c", "id": 7, "prompt": "a"},
        {"chosen": "y", "rejected": "z", "id": 8, "prompt": "x"},
    ]


PAIRS = {"prompt": ["p", "q"], "chosen": ["a", "b"], "rejected": ["c", "d"], "id": [7, 8]}
SINGLES = [
    {"prompt": "p", "id": 7, "completion": "a", "label": True},
    {"prompt": "q", "id": 8, "completion": "b", "label": True},
    {"prompt": "p", "id": 7, "completion": "c", "label": False},
    {"prompt": "q", "id": 8, "completion": "d", "label": False},
]


def test_unpairing_keeps_other_columns():
    assert list(unpair_preference_dataset(Dataset.from_dict(PAIRS))) == SINGLES


def test_unpairing_by_batches():
    found = unpair_preference_dataset(Dataset.from_dict(PAIRS), batch_size=1)
    assert list(found) == [SINGLES[i] for i in (0, 2, 1, 3)]


def test_unpairing_messages_and_several_splits():
    data = Dataset.from_dict({"chosen": [turns("a")], "rejected": [turns("b")]})
    found = maybe_unpair_preference_dataset(DatasetDict({"train": data, "test": data}))
    rows = [{"completion": turns(x), "label": x == "a"} for x in ("a", "b")]
    assert {name: list(split) for name, split in found.items()} == {"train": rows, "test": rows}


def test_streams_are_unpaired():
    rows = [dict(zip(PAIRS, row, strict=True)) for row in zip(*PAIRS.values(), strict=True)]
    known = Dataset.from_list(rows).to_iterable_dataset()
    unknown = IterableDataset.from_generator(lambda: iter(rows))
    assert unknown.column_names is None
    for stream in (known, unknown):
        assert list(maybe_unpair_preference_dataset(stream)) == SINGLES
        assert list(unpair_preference_dataset(stream)) == SINGLES
    for stream in (
        IterableDataset.from_generator(lambda: iter(SINGLES)),
        IterableDataset.from_generator(lambda: iter([])),
    ):
        assert maybe_unpair_preference_dataset(stream) is stream


def test_only_pairs_are_unpaired():
    paired = Dataset.from_dict(PAIRS)
    assert list(maybe_unpair_preference_dataset(paired, num_proc=1, desc="x")) == SINGLES
    for other in (
        paired.remove_columns("rejected"),
        Dataset.from_dict({"prompt": ["a"], "completion": ["b"]}),
        DatasetDict({"train": paired.remove_columns("chosen")}),
    ):
        assert maybe_unpair_preference_dataset(other) is other


@given(st.lists(st.booleans()), st.lists(st.booleans()))
def test_common_prefix_length(first, second):
    pairs = zip(first, second, strict=False)
    expected = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert common_prefix_length(first, second) == expected

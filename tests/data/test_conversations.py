"""Prompts and answers of different forms, and answers that repeat their prompt."""

import pytest
from datasets import Dataset, Features, Json, Value
from tiny import tiny_tokenizer

from trl.data.conversations import align_answers, as_messages
from trl.data.encode import TextEncoder
from trl.data.preference_rows import prepare_preferences
from trl.data.prepare import prepare_supervised
from trl.data.supervised import SupervisedOptions

ENCODER = TextEncoder(tiny_tokenizer())


def message(role):
    return lambda text, **others: {"role": role, "content": text, **others}


system, user, assistant, tool = map(message, ("system", "user", "assistant", "tool"))


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        # Text alone stays text.
        ("a", "b", ("a", "b")),
        ("a", "ab", ("a", "ab")),
        ("", "b", ("", "b")),
        # One of both is text.
        ([user("a")], "b", ([user("a")], [assistant("b")])),
        ([user("a")], "", ([user("a")], [assistant("")])),
        ("a", [assistant("b")], ([user("a")], [assistant("b")])),
        ("", [user("a"), assistant("b")], ([], [user("a"), assistant("b")])),
        # The answer repeats the prompt, or its end.
        ([user("a")], [user("a"), assistant("b")], ([user("a")], [assistant("b")])),
        ("a\n", [user("a"), assistant("b")], ([user("a\n")], [assistant("b")])),
        (
            [user("a", tool_calls=None)],
            [user("a", n=1), assistant("b")],
            ([user("a", tool_calls=None)], [assistant("b")]),
        ),
        (
            [user("a")],
            [user([{"type": "text", "text": "a"}]), assistant("b")],
            ([user("a")], [assistant("b")]),
        ),
        (
            [system("s"), user("a")],
            [user("a"), assistant("b")],
            ([system("s"), user("a")], [assistant("b")]),
        ),
        (
            [user("a"), assistant("b"), user("a")],
            [user("a"), assistant("c")],
            ([user("a"), assistant("b"), user("a")], [assistant("c")]),
        ),
        (
            [user("a")],
            [system("s"), user("a"), assistant("b")],
            ([system("s"), user("a")], [assistant("b")]),
        ),
        (
            [user("a"), assistant("b")],
            [user("a"), assistant("b"), user("c"), assistant("d")],
            ([user("a"), assistant("b")], [user("c"), assistant("d")]),
        ),
        # Nothing is repeated: later turns only look like the prompt.
        (
            [user("go on")],
            [assistant("b"), user("go on"), assistant("c")],
            ([user("go on")], [assistant("b"), user("go on"), assistant("c")]),
        ),
        (
            [system("s")],
            [user("a"), assistant("b")],
            ([system("s")], [user("a"), assistant("b")]),
        ),
        (
            [user("a"), assistant("b")],
            [assistant("b"), assistant("c")],
            ([user("a"), assistant("b")], [assistant("b"), assistant("c")]),
        ),
        ([user("a")], [], ([user("a")], [])),
    ],
)
def test_one_answer(prompt, answer, expected):
    found, (rest,) = align_answers(prompt, {"completion": answer})
    assert (found, rest) == expected


def test_answers_that_are_whole_conversations_share_all_they_begin_with():
    talk = [user("a"), assistant("b"), user("c")]
    answers = {"chosen": [*talk, assistant("d")], "rejected": [*talk, assistant("e")]}
    for prompt in ("a", [user("a")]):
        assert align_answers(prompt, answers) == (talk, [[assistant("d")], [assistant("e")]])
    same = {"chosen": talk, "rejected": talk}
    assert align_answers("a", same) == (talk[:2], [talk[2:], talk[2:]])


@pytest.mark.parametrize(
    ("prompt", "answers", "error"),
    [
        (None, {"completion": "a"}, "'prompt' is missing. Remove such rows"),
        ("a", {"completion": None}, "'completion' is missing. Remove such rows"),
        ([user("a")], {"completion": [assistant(None)]}, "'completion' has no 'content' in mess"),
        ([], {"completion": "b"}, "'prompt' has no messages, while 'completion' is text"),
        ([user("a"), assistant("b")], {"completion": "c"}, "which may go on with it or not"),
        ([user("a")], {"chosen": [user("b"), assistant("c")]}, "'chosen' begins with a message of"),
        ("a", {"chosen": [system("b"), user("c")]}, "'chosen' begins with a message of the system"),
        ([user("a")], {"chosen": [user("a")]}, "'chosen' repeats 'prompt' and has no answer to it"),
        (
            [user("a")],
            {
                "chosen": [system("s"), user("a"), assistant("b")],
                "rejected": [user("a"), assistant("c")],
            },
            "'chosen' and 'rejected' put different messages in front of 'prompt'",
        ),
    ],
)
def test_what_has_no_clear_meaning_is_refused(prompt, answers, error):
    with pytest.raises(ValueError, match=error):
        align_answers(prompt, answers)


def test_names_of_roles_are_translated():
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert as_messages(turns) == [user("a"), assistant("b")]
    with pytest.raises(TypeError, match="'messages' must be a list of messages, not the string"):
        as_messages("a")


def test_forms_may_differ_by_row_in_columns_of_json():
    rows = [
        {"prompt": "ab", "completion": "cd"},
        {"prompt": [user("hi")], "completion": "yes"},
        {"prompt": "hi", "completion": [assistant("no")]},
        {"prompt": "e", "completion": "f"},
    ]
    expected = ["abcd<eos>", *(f"<user>hi<end><assistant>{x}<end>" for x in ("yes", "no"))]
    features = Features(prompt=Json(), completion=Json())
    data = Dataset.from_list(rows, features=features)
    table = prepare_supervised(data, ENCODER, SupervisedOptions())
    decode = ENCODER.tokenizer.decode
    assert list(map(decode, table["input_ids"])) == [*expected, "ef<eos>"]
    assert table["source"][:] == [0, 1, 2, 3]
    features["label"] = Value("bool")
    labelled = Dataset.from_list([row | {"label": True} for row in rows], features=features)
    answers = prepare_preferences(labelled, ENCODER)["completion_ids"]
    assert list(map(decode, answers)) == ["cd<eos>", "yes<end>", "no<end>", "f<eos>"]


def test_text_among_conversations_has_no_turns_of_the_assistant():
    rows = [{"prompt": [user("hi")], "completion": "yes"}, {"prompt": "ab", "completion": "cd"}]
    data = Dataset.from_list(rows, features=Features(prompt=Json(), completion=Json()))
    options = SupervisedOptions(assistant_only_loss=True)
    with pytest.raises(ValueError, match="Row 1 .*assistant_only_loss=True needs conversations"):
        prepare_supervised(data, ENCODER, options)


LONG = "What is two and two?"


@pytest.mark.parametrize(
    ("row", "warned"),
    [
        ({"prompt": LONG, "chosen": LONG + " 4", "rejected": LONG + " 5"}, True),
        ({"prompt": LONG, "chosen": LONG + " 4", "rejected": "5"}, False),
        ({"prompt": LONG, "completion": LONG + " 4", "label": True}, True),
        ({"prompt": LONG, "completion": "4", "label": True}, False),
        ({"prompt": "ab", "completion": "abc", "label": True}, False),
    ],
)
def test_text_that_repeats_its_prompt_is_warned_of(row, warned, log):
    data = Dataset.from_list([row])
    prepare_preferences(data, ENCODER)
    if "completion" in row:
        prepare_supervised(data, ENCODER, SupervisedOptions())
    texts = [record.message for record in log.records]
    expected = (1 + ("completion" in row)) * warned
    assert sum("with the whole text of 'prompt'" in text for text in texts) == expected

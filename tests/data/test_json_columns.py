"""Columns of the feature `Json`: conversations whose messages differ in their keys."""

import json

import pyarrow as pa
import pytest
from datasets import Dataset, Features, IterableDataset, Json, List, Value, load_dataset
from tiny import tiny_tokenizer

from trl.data.cutting import DocumentLimits
from trl.data.encode import TextEncoder
from trl.data.json_columns import json_decoder, to_rows
from trl.data.lazy import lazy_documents
from trl.data.preference_rows import prepare_preferences
from trl.data.prepare import prepare_supervised
from trl.data.supervised import SupervisedOptions
from trl.online.prompts import PromptEncoder


def call(**arguments):
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def tool(**properties):
    return {"type": "function", "function": {"name": "f", "parameters": properties}}


USER = {"role": "user", "content": "hi"}
CALLS = [call(x=1), call(y="two")]  # their arguments have no common type
TOOLS = [[tool(x={"type": "integer"})], [tool(y={"enum": ["two"]})]]
FIELD = List({"type": Value("string"), "function": Json()})
# How datasets may hold messages: each as JSON, the list as JSON, or JSON in one key of messages.
MESSAGES = {
    "each": List(Json()),
    "whole": Json(),
    "key": List({"role": Value("string"), "content": Value("string"), "tool_calls": Json()}),
    "deep": List({"role": Value("string"), "content": Value("string"), "tool_calls": FIELD}),
}


def tokenizer():
    """Its template writes the tools, and the arguments of calls."""
    found = tiny_tokenizer()
    found.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
        "{% for c in m['tool_calls'] or [] %}{{ c['function']['arguments'] | tojson }}{% endfor %}"
        "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return found


ENCODER = TextEncoder(tokenizer())
TEXTS = [
    json.dumps(tools) + "<user>hi<end><assistant>" + json.dumps(answer) + "<end>"
    for tools, answer in zip(TOOLS, [{"x": 1}, {"y": "two"}], strict=True)
]


def decoded(lists):
    return [ENCODER.tokenizer.decode(ids) for ids in lists]


def conversations(form, tools=None):
    features = Features(messages=MESSAGES[form], tools=tools or List(Json()))
    rows = [{"messages": [USER, c], "tools": t} for c, t in zip(CALLS, TOOLS, strict=True)]
    return Dataset.from_list(rows, features=features)


@pytest.mark.parametrize("form", MESSAGES)
def test_conversations_are_decoded(form):
    rows = prepare_supervised(conversations(form), ENCODER, SupervisedOptions())
    assert decoded(rows["input_ids"]) == TEXTS


@pytest.mark.parametrize("tools", [Json(), List(Json()), FIELD], ids=str)
def test_tools_are_decoded(tools):
    rows = prepare_supervised(conversations("each", tools), ENCODER, SupervisedOptions())
    assert decoded(rows["input_ids"]) == TEXTS


@pytest.mark.parametrize("form", MESSAGES)
def test_streams_and_lazily_tokenized_rows(form):
    data = conversations(form)
    stream = prepare_supervised(data.to_iterable_dataset(), ENCODER, SupervisedOptions())
    assert decoded(row["input_ids"] for row in stream) == TEXTS
    lazy = lazy_documents(data, ENCODER, SupervisedOptions(), DocumentLimits())
    assert decoded(lazy[:2]["input_ids"]) == TEXTS


@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_of_tool_calls(tmp_path, streaming):
    rows = [{"messages": [USER, c], "tools": t} for c, t in zip(CALLS, TOOLS, strict=True)]
    (tmp_path / "calls.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"data_files": str(tmp_path / "calls.jsonl"), "cache_dir": str(tmp_path)}
    data = load_dataset("json", split="train", streaming=streaming, **files)
    rows = prepare_supervised(data, ENCODER, SupervisedOptions())
    assert decoded(row["input_ids"] for row in rows) == TEXTS


def test_a_generator_with_and_without_features():
    rows = list(conversations("each"))
    for features in (None, conversations("each").features):
        stream = IterableDataset.from_generator(lambda: iter(rows), features=features)
        found = prepare_supervised(stream, ENCODER, SupervisedOptions())
        assert decoded(row["input_ids"] for row in found) == TEXTS


@pytest.mark.parametrize("form", MESSAGES)
def test_preferences_are_decoded(form):
    names = dict.fromkeys(("prompt", "chosen", "rejected"), MESSAGES[form])
    row = {"prompt": [USER], "chosen": [CALLS[0]], "rejected": [CALLS[1]], "tools": TOOLS[0]}
    data = Dataset.from_list([row], features=Features(**names, tools=Json()))
    (found,) = prepare_preferences(data, ENCODER)
    assert decoded([found["prompt_ids"] + found["chosen_ids"]]) == TEXTS[:1]
    assert decoded([found["chosen_ids"], found["rejected_ids"]]) == [
        '{"x": 1}<end>',
        '{"y": "two"}<end>',
    ]


def test_ranked_answers_are_decoded():
    features = Features(prompt=List(Json()), answers=List(List(Json())), ranks=List(Value("int32")))
    row = {"prompt": [USER], "answers": [[one] for one in CALLS], "ranks": [1, 0]}
    (found,) = prepare_preferences(Dataset.from_list([row], features=features), ENCODER)
    assert decoded(found["answers_ids"]) == ['{"x": 1}<end>', '{"y": "two"}<end>']


def test_labelled_answers_are_decoded():
    rows = [{"prompt": [USER], "completion": [one], "label": True} for one in CALLS]
    features = Features(prompt=List(Json()), completion=List(Json()), label=Value("bool"))
    found = prepare_preferences(Dataset.from_list(rows, features=features), ENCODER)
    assert decoded(found["completion_ids"]) == ['{"x": 1}<end>', '{"y": "two"}<end>']


@pytest.mark.parametrize("form", MESSAGES)
def test_prompts_are_decoded(form):
    rows = [{"prompt": [USER]}, {"prompt": [USER, CALLS[0], {"role": "tool", "content": "3"}]}]
    features = Features(prompt=MESSAGES[form])
    prompts = Dataset.from_list(rows, features=features)
    for data in (prompts, prompts.to_iterable_dataset()):
        checked = PromptEncoder(tokenizer()).check("train_dataset", data)
        expected = '<user>hi<end><assistant>{"x": 1}<end><tool>3<end><assistant>'
        found = PromptEncoder(tokenizer())(list(checked)).token_ids
        assert decoded(found) == ["<user>hi<end><assistant>", expected]


def test_values_that_are_missing():
    features = Features(a=List(Json()), b=Json(), c={"d": List(Json()), "e": Value("int64")})
    rows = [
        {"a": None, "b": None, "c": None},
        {"a": [None, {"x": [1]}], "b": 2, "c": {"d": None, "e": 3}},
        {"a": [], "b": "text", "c": {"d": [[1], "t"], "e": None}},
    ]
    table = Dataset.from_list(rows, features=features).with_format("arrow")[:]
    assert to_rows(table) == list(Dataset.from_list(rows, features=features)) == rows


def test_plain_columns_have_no_decoder():
    """Their rows cost what Arrow makes of them."""
    struct = pa.struct({"role": pa.string(), "content": pa.string()})
    for kind in (pa.string(), pa.list_(pa.int32()), pa.list_(struct), pa.map_("str", "str")):
        assert json_decoder(kind) is None
    assert json_decoder(pa.list_(pa.json_())) is not None
    assert json_decoder(pa.large_list(pa.struct({"a": pa.json_()}))) is not None

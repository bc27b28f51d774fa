import pytest
from tiny import tiny_tokenizer

from trl.online.prompts import PromptEncoder

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yo"}


def ids(text):
    return tiny_tokenizer()(text)["input_ids"]


def test_strings_are_tokenized_once():
    rows = [{"prompt": "ab"}, {"prompt": "ab"}, {"prompt": "c"}]
    prompts = PromptEncoder(tiny_tokenizer())(rows)
    assert prompts.token_ids == [ids("ab"), ids("ab"), ids("c")]
    assert prompts.token_ids[0] is prompts.token_ids[1]
    assert prompts.messages == ["ab", "ab", "c"]


def test_conversations_end_with_a_generation_prompt():
    encode = PromptEncoder(tiny_tokenizer())
    found = encode([{"prompt": [USER]}, {"prompt": [USER, ANSWER]}])
    assert found.token_ids[0] == ids("<user>hi<end><assistant>")
    assert found.token_ids[1] == ids("<user>hi<end><assistant>yo"), "continued"


def test_template_arguments():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ mood }}{{ messages[0]['content'] }}"
    encode = PromptEncoder(tokenizer, {"mood": "x"})
    rows = [{"prompt": [USER]}, {"prompt": [USER], "chat_template_kwargs": {"mood": "y"}}]
    assert encode(rows).token_ids == [ids("xhi"), ids("yhi")]


def test_completions_have_the_format_of_their_prompts():
    encode = PromptEncoder(tiny_tokenizer())
    prompts = encode([{"prompt": "a"}, {"prompt": [USER]}])
    found = encode.completions(prompts, [[*ids("12"), 1], ids("3")])
    assert found == ["12", [{"role": "assistant", "content": "3"}]]


def test_completions_are_parsed_where_the_tokenizer_knows_how():
    tokenizer = tiny_tokenizer()
    thought = {"open": "(", "close": ")", "content": "text"}
    fields = {"reasoning_content": thought, "content": {"content": "text"}}
    tokenizer.response_template = {"start_anchor": "<assistant>", "fields": fields}
    encode = PromptEncoder(tokenizer)
    prompts = encode([{"prompt": "a"}, {"prompt": [USER]}])
    text, messages = encode.completions(prompts, [ids("(1)2"), [*ids("(1)2"), 1]])
    assert text == "(1)2"
    assert messages == [{"role": "assistant", "reasoning_content": "1", "content": "2"}]


@pytest.mark.parametrize(
    ("row", "error", "words"),
    [
        ({"text": "a"}, KeyError, "Row 1 has no 'prompt' column; it has"),
        ({"prompt": ""}, ValueError, "row 1 .* has no tokens"),
        ({"prompt": "x" * 20}, ValueError, "row 1 .* has 20 tokens, .* only 20"),
        ({"prompt": 3}, ValueError, "not 3"),
        ({"prompt": []}, ValueError, "must be a string or a list of messages"),
    ],
)
def test_errors_name_the_row(row, error, words):
    with pytest.raises(error, match=words):
        PromptEncoder(tiny_tokenizer(), context=20)([{"prompt": "a"}, row])


def test_unusual_text_survives():
    encode = PromptEncoder(tiny_tokenizer())
    assert len(encode([{"prompt": "a\u00e9\U0001f600b"}]).token_ids[0]) == 4


def test_rows_that_differ_in_template_arguments_are_encoded_apart():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ mood }}"
    rows = [{"prompt": [USER], "chat_template_kwargs": {"mood": m}} for m in ("a", "b", "a")]
    before = repr(rows)
    found = PromptEncoder(tokenizer, {"mood": "x"})(rows).token_ids
    assert found == [ids("hia"), ids("hib"), ids("hia")]
    assert found[0] is found[2]
    assert repr(rows) == before


def test_empty_completions_are_empty_text():
    encode = PromptEncoder(tiny_tokenizer())
    prompts = encode([{"prompt": "a"}, {"prompt": "a"}])
    assert encode.completions(prompts, [[], [1]]) == ["", ""]
    with pytest.raises(ValueError):
        encode.completions(prompts, [[]])

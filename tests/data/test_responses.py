from tiny import tiny_tokenizer

from trl.data.responses import as_message, read_response, reads_responses

TEMPLATE = {
    "start_anchor": "<assistant>",
    "fields": {
        "reasoning_content": {"open": "(", "close": ")", "content": "text"},
        "content": {"content": "text"},
        "data": {"open": "[", "close": "]", "content": "json"},
    },
}


def ids(text):
    return tiny_tokenizer()(text)["input_ids"]


PROMPT = ids("<user>hi<end><assistant>")


def tokenizer_with_template():
    tokenizer = tiny_tokenizer()
    tokenizer.response_template = TEMPLATE
    return tokenizer


def test_the_parts_of_a_turn():
    tokenizer = tokenizer_with_template()
    assert reads_responses(tokenizer) and not reads_responses(tiny_tokenizer())
    message = {"role": "assistant", "reasoning_content": "2+2", "content": "4"}
    assert read_response(tokenizer, PROMPT, ids("(2+2)4")) == message
    assert read_response(tokenizer, PROMPT, ids("(2+2)"))["content"] == ""
    assert as_message(tokenizer, PROMPT, [*ids("(2+2)4"), tokenizer.eos_token_id]) == message


def test_what_cannot_be_read_is_content():
    tokenizer = tokenizer_with_template()
    assert as_message(tokenizer, PROMPT, ids("[{]")) == {"role": "assistant", "content": "[{]"}
    assert as_message(tokenizer, PROMPT, []) == {"role": "assistant", "content": ""}
    found = as_message(tiny_tokenizer(), PROMPT, [*ids("(2+2)4"), 1])
    assert found == {"role": "assistant", "content": "(2+2)4"}

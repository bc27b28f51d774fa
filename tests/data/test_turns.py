import itertools

import numpy as np
import pytest
from bpe import CHATML, MARKED, THINKING, bpe_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from trl.data.encode import TextEncoder
from trl.data.turns import assistant_spans, expanded_turns

USER = {"role": "user", "content": "hi"}
FIRST = {"role": "assistant", "content": "hello there"}
SECOND = {"role": "assistant", "content": "they fall asleep", "reasoning_content": "the fox"}
TALK = [{"role": "system", "content": "be brief"}, USER, FIRST, USER, SECOND]
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
@pytest.mark.parametrize("messages", [TALK, TALK[1:], [FIRST, USER, SECOND], [USER, FIRST, SECOND]])
def test_each_turn_is_found_with_its_end(template, messages):
    turns = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert said(template, messages) == turns


def test_markers_and_rendering_again_find_the_same_tokens():
    found = []
    for template in (CHATML, MARKED):
        encoder = TextEncoder(bpe_tokenizer(template))
        texts, (spans,) = assistant_spans(encoder, [TALK], [{}])
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

from itertools import accumulate

import numpy as np
import pytest
from bpe import WORDS, bpe_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer
from tokenizers import normalizers, processors

from trl.data.encode import TextEncoder, remember_words, template_options

ENCODER = TextEncoder(bpe_tokenizer())
texts = st.lists(st.sampled_from([*WORDS.split(), " ", "\n", "hel", "lo", "<|im_end|>", "é", ". "]))


def with_specials(bos: bool, eos: bool):
    tokenizer = bpe_tokenizer(bos_token="<|im_start|>")
    single = f"{'<|im_start|> ' if bos else ''}$A{' <eos>' if eos else ''}"
    pairs = [("<|im_start|>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=pairs
    )
    return tokenizer


@settings(deadline=None, max_examples=200)
@given(texts.map("".join), texts.map("".join))
def test_answers_are_encoded_as_the_whole_text_is(prompt, answer):
    """And those of its tokens are trained on that hold a byte of the answer."""
    text = prompt + answer
    ((ids, mask, merged),) = ENCODER.masked([text], [[(len(prompt), len(text))]])
    (whole,), edge = ENCODER.ids([text]), len(prompt.encode())
    stops = [*accumulate(map(len, ENCODER.tokenizer.convert_ids_to_tokens(whole)))]
    assert ids == whole
    assert mask.tolist() == [stop > edge for stop in stops]
    assert merged == (0 < edge < len(text.encode()) and edge not in stops)


def prefixed():
    """A tokenizer that writes something before each text: ends of texts do not show it."""
    tokenizer = bpe_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("the")
    return tokenizer


@settings(deadline=None, max_examples=100)
@given(texts.map(" ".join), st.lists(texts.map("".join), min_size=2, max_size=3), st.booleans())
def test_answers_to_one_prompt_are_encoded_as_each_alone(prompt, answers, prefixes):
    """The prompt is encoded once, if the end of it comes out as it stands in the whole text."""
    encoder = TextEncoder(prefixed() if prefixes else bpe_tokenizer())
    prompt = "the quick brown fox jumps over the lazy dog" + prompt
    whole = [prompt + answer for answer in answers]
    spans = [[(len(prompt), len(text))] for text in whole]
    together = encoder.masked(whole, spans)
    alone = [encoder.masked([text], [span])[0] for text, span in zip(whole, spans, strict=True)]
    for (ids, mask, merged), (own, own_mask, own_merged) in zip(together, alone, strict=True):
        assert (ids, mask.tolist(), merged) == (own, own_mask.tolist(), own_merged)


def test_a_token_over_the_boundary_belongs_to_the_answer():
    ((ids, mask, merged),) = ENCODER.masked(["tell me hello"], [[(11, 13)]])
    assert [ids] == ENCODER.ids(["tell me hello"]) and merged == 1
    assert ENCODER.tokenizer.decode(np.array(ids)[mask]) == " hello"


def test_a_space_that_a_token_does_not_tell_of_is_over_the_boundary():
    """Tokenizers that trim offsets leave it out of the characters of the token."""
    tokenizer = bpe_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    encoder = TextEncoder(tokenizer)
    ends = [[(5, 10)], [(4, 10)]]
    found = encoder.masked(["tell hello", "tell hello"], ends)
    assert [(tokenizer.decode(np.array(ids)[mask]), n) for ids, mask, n in found] == [
        (" hello", 1),
        (" hello", 0),
    ]


class Letters:
    """A tokenizer that knows no places."""

    is_fast, chat_template, eos_token_id = False, None, 0

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [7] * ("ab" in text) + [ord(c) for c in text.replace("ab", "")]}


def test_a_tokenizer_without_places_tells_prompts_from_answers_alone():
    encoder = TextEncoder(Letters())
    (plain, merging) = encoder.masked(["cde", "cab"], [[(1, 3)], [(2, 3)]])
    assert plain[1].tolist() == [False, True, True] and plain[2] == 0
    assert merging[1].tolist() == [True, True] and merging[2] == 1
    with pytest.raises(ValueError, match="tokens of a slow tokenizer"):
        encoder.masked(["cde"], [[(0, 1)]])


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("text", ["abc", "<|im_start|>abc", "abc<eos>", ""])
def test_plain_text_has_one_bos_and_one_eos(bos, eos, text):
    tokenizer = with_specials(bos, eos)
    encoder = TextEncoder(tokenizer)
    ids = encoder.ids([text])[0]
    ids, mask, _ = encoder.closed(ids, np.ones(len(ids), dtype=bool), 0)
    assert len(mask) == len(ids) and mask[-1]
    assert ids.count(tokenizer.eos_token_id) == 1 and ids[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.bos_token_id) == int(bos or "im_start" in text)


def test_without_eos_plain_text_is_refused():
    with pytest.raises(ValueError, match="no EOS token"):
        TextEncoder(bpe_tokenizer(eos_token=None)).closed([1], np.array([True]), 0)


def test_settings_left_by_a_call_do_not_count():
    tokenizer = bpe_tokenizer()
    tokenizer("some text", truncation=True, max_length=2, padding="max_length")
    assert TextEncoder(tokenizer).ids(["the quick brown"]) == ENCODER.ids(["the quick brown"])


def test_conversations_rendered_together_are_those_rendered_one_by_one():
    chats = [[{"role": "user", "content": text}] for text in ("a", "b", "c", "d")]
    options = [{"tools": None}, {"tools": None}, {"tools": None, "word": "w"}, {"tools": None}]
    encoder = TextEncoder(bpe_tokenizer("{{ word }}{{ messages[0]['content'] }}"))
    assert encoder.render_all(chats, options) == ["a", "b", "wc", "d"]


def test_the_digest_holds_what_decides_the_ids():
    same = {TextEncoder(bpe_tokenizer()).digest for _ in range(2)}
    assert len(same) == 1
    tokenizer = bpe_tokenizer()
    tokenizer.add_tokens(["quick brown"])
    others = {
        TextEncoder(bpe_tokenizer(template="{{ 1 }}")).digest,
        TextEncoder(bpe_tokenizer(eos_token="<pad>")).digest,
        TextEncoder(with_specials(True, False)).digest,
        TextEncoder(tokenizer).digest,
        TextEncoder(tiny_tokenizer()).digest,
    }
    assert len(others | same) == 6


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({}, {"tools": None}),
        ({"tools": None, "chat_template_kwargs": None}, {"tools": None}),
        ({"tools": "[]"}, {"tools": None}),
        ({"tools": '[{"name": "f"}]'}, {"tools": [{"name": "f"}]}),
        ({"chat_template_kwargs": {"a": 1, "b": None}}, {"tools": None, "a": 1}),
    ],
)
def test_template_options(row, expected):
    assert template_options(row) == expected


def test_how_many_words_a_tokenizer_remembers():
    """Tokens are the same; only the time that encoding takes shows it."""
    model = bpe_tokenizer().backend_tokenizer.model
    assert callable(model._resize_cache)
    texts = [" ".join(f"{word}{i % 7}" for i in range(20)) for word in WORDS.split()]
    tokenizer = bpe_tokenizer()
    before = tokenizer(texts)["input_ids"]
    for count in (0, 100_000):
        remember_words(tokenizer.backend_tokenizer, count)
        assert tokenizer(texts)["input_ids"] == before
    remember_words(tiny_tokenizer().backend_tokenizer, 5)  # whose kind may remember none


def parts(*texts, **others):
    return [{"type": "text", "text": text, **others} for text in texts]


BY_PART = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{{ 'IMAGE' if 'image' in p else p['text'] }}|"
    "{% endfor %}{% endif %}<end>{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "<user>hi you<end><assistant>yes<end>"),
        (BY_PART, "<user>hi| you|<end><assistant>yes<end>"),
        # One that refuses lists, and one that writes them as JSON.
        (
            "{% for m in messages %}{{ m['role'] + ':' + m['content'] }};{% endfor %}",
            "user:hi you;assistant:yes;",
        ),
        (
            "{% for m in messages %}{{ m['content'] | tojson }};{% endfor %}",
            '"hi you";"yes";',
        ),
    ],
)
def test_text_parts_are_joined_unless_the_template_reads_parts(template, expected):
    """Datasets give parts all keys of all parts, absent ones as None."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    user = {"role": "user", "content": parts("hi", " you", image=None)}
    chat = [user, {"role": "assistant", "content": "yes"}]
    encoder = TextEncoder(tokenizer)
    assert encoder.render_all([chat], [{}]) == [expected]
    assert user["content"] == parts("hi", " you", image=None), "not modified"
    if template is None:
        assert encoder.render_prompts([[user]], [{}]) == ["<user>hi you<end><assistant>"]


def test_contents_without_text():
    render = lambda *chat: TextEncoder(tiny_tokenizer()).render_all([chat], [{}])[0]  # noqa: E731
    assert render({"role": "assistant", "content": []}) == "<assistant><end>"
    result = {"role": "tool", "content": [{"temperature": 3}]}
    assert render(result) == "<tool>[{'temperature': 3}]<end>"
    for content in (["hi"], [{"type": "input_text", "text": "hi"}], [{"type": "text"}]):
        with pytest.raises(ValueError, match="of the user has a part '.*but the chat template re"):
            render({"role": "user", "content": content})

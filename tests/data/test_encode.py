import pytest
from bpe import WORDS, bpe_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer
from tokenizers import processors

from trl.data.encode import TextEncoder, template_options
from trl.data.preference import common_prefix_length

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
@given(st.lists(texts.map("".join), min_size=1, max_size=4), texts.map("".join))
def test_answers_are_encoded_as_the_whole_text_is(starts, answer):
    prompts = [start + " " + WORDS[: 100 + 7 * i] for i, start in enumerate(starts)]
    answers = [answer] * len(prompts)
    ids, kept = ENCODER.continued(prompts, ENCODER.ids(prompts), answers)
    whole = ENCODER.ids([p + a for p, a in zip(prompts, answers, strict=True)])
    assert ids == whole
    assert kept == [
        common_prefix_length(ENCODER.ids([p])[0], w) for p, w in zip(prompts, whole, strict=True)
    ]


def test_ends_of_prompts_stand_for_whole_ones_only_where_the_tokenizer_allows_it():
    encoder = TextEncoder(bpe_tokenizer())
    prompt = WORDS * 3
    encoder.continued([prompt], encoder.ids([prompt]), ["abc"])
    assert encoder._local is True
    assert TextEncoder(with_specials(True, True))._local is None
    without_words = bpe_tokenizer()
    without_words.backend_tokenizer.pre_tokenizer = None
    assert TextEncoder(without_words)._local is False


def test_a_token_over_the_boundary_belongs_to_the_answer():
    prompt = ENCODER.ids(["tell me hel"])
    ids, kept = ENCODER.continued(["tell me hel"], prompt, ["lo"])
    assert ids == ENCODER.ids(["tell me hello"])
    assert kept[0] < len(prompt[0])


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("text", ["abc", "<|im_start|>abc", "abc<eos>", ""])
def test_plain_text_has_one_bos_and_one_eos(bos, eos, text):
    tokenizer = with_specials(bos, eos)
    encoder = TextEncoder(tokenizer)
    ids = encoder.ended(encoder.begun(encoder.ids([text])[0]))
    assert ids.count(tokenizer.eos_token_id) == 1 and ids[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.bos_token_id) == int(bos or "im_start" in text)


def test_without_eos_plain_text_is_refused():
    with pytest.raises(ValueError, match="no EOS token"):
        TextEncoder(bpe_tokenizer(eos_token=None)).ended([1])


def test_settings_left_by_a_call_do_not_count():
    tokenizer = bpe_tokenizer()
    tokenizer("some text", truncation=True, max_length=2, padding="max_length")
    assert TextEncoder(tokenizer).ids(["the quick brown"]) == ENCODER.ids(["the quick brown"])


def test_places_are_those_of_the_characters():
    (found,) = ENCODER.encodings(["hello é fall"])
    assert [found.ids] == ENCODER.ids(["hello é fall"])
    assert found.offsets[0][0] == 0 and found.offsets[-1][1] == 12


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

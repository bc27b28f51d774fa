from pathlib import Path

import pytest
from accelerate import Accelerator
from bpe import bpe_tokenizer
from datasets import Dataset, load_from_disk
from distributed.engines import call
from tiny import CountingTokenizer, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trl.data.bounds import ModelBounds
from trl.distributed import RankError, Ranks
from trl.online.prompts import PromptEncoder, PromptLimit

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
    """Where that fails, all of the text is the content."""
    tokenizer = tiny_tokenizer()
    fields = {
        "reasoning_content": {"open": "(", "close": ")", "content": "text"},
        "content": {"content": "text"},
        "data": {"open": "[", "close": "]", "content": "json"},
    }
    tokenizer.response_template = {"start_anchor": "<assistant>", "fields": fields}
    encode = PromptEncoder(tokenizer)
    prompts = encode([{"prompt": "a"}, *[{"prompt": [USER]}] * 4])
    written = [ids("(1)2"), ids("(1)2"), [*ids("(1)2"), 1], [*ids("[{]"), 1], []]
    text, *messages = encode.completions(prompts, written)
    assert text == "(1)2"
    thought = {"role": "assistant", "reasoning_content": "1", "content": "2"}
    content = [{"role": "assistant", "content": words} for words in ("[{]", "")]
    assert messages == [[thought], [thought], [content[0]], [content[1]]]


def with_spaces_in_tokens():
    """As tokenizers of Llama 2 are: a text does not begin with the space of its first token."""
    core = Tokenizer(models.WordLevel({"?": 0, "\u2581the": 1, "\u2581quick": 2}, unk_token="?"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize("make", [tiny_tokenizer, bpe_tokenizer, with_spaces_in_tokens])
def test_texts_of_tokens_add_up_to_the_completion(make):
    tokenizer = make()
    encode, ids = PromptEncoder(tokenizer), tokenizer("the quick the")["input_ids"]
    texts = encode.token_texts(ids)
    assert len(texts) == len(ids) > 2 and "".join(texts) == tokenizer.decode(ids)
    assert any(text.startswith(" ") for text in texts) and encode.token_texts([]) == []


BAD = [
    ({"prompt": ""}, "has no tokens"),
    ({"prompt": "x" * 20}, "has 20 tokens; at most 19 are possible .*the model sees 20 .*'drop'"),
    ({"prompt": 3}, "must be a string or a list of messages"),
    ({"prompt": []}, "has no messages. Remove such rows"),
    ({"prompt": None}, "is missing. Remove such rows, for example with dataset.filter"),
    ({"prompt": [USER, {"role": "assistant"}]}, "has no 'content' in message 1"),
    ({"prompt": [USER, {"content": "a"}]}, "has no 'role' in message 1"),
    ({"prompt": [USER, {"role": "refused", "content": "a"}]}, "tokenized: line 1 of the chat temp"),
]


def limit(longest=None, action="error", context=20, completion=8):
    return PromptLimit.of(longest, action, context, completion)


def strict_tokenizer():
    tokenizer = tiny_tokenizer()
    refusal = (
        "{% if messages[-1]['role'] == 'refused' %}{{ raise_exception('no such') }}{% endif %}"
    )
    tokenizer.chat_template = refusal + tokenizer.chat_template
    return tokenizer


@pytest.mark.parametrize(("row", "words"), BAD)
def test_errors_name_the_row(row, words):
    encode = PromptEncoder(strict_tokenizer(), limit=limit())
    with pytest.raises(ValueError, match=f"(?s)The prompt of row 1 of the batch .*{words}"):
        encode([{"prompt": "a"}, row])
    with pytest.raises(KeyError, match="Row 1 has no 'prompt' column; it has"):
        encode([{"prompt": "a"}, {"text": "a"}])


@pytest.mark.parametrize(("row", "words"), [BAD[i] for i in (0, 1, 4, 5, 6, 7)])
@pytest.mark.parametrize("streams", [False, True])
def test_a_dataset_is_checked_row_by_row(row, words, streams):
    """The bad row is not in the first batch of rows that are tokenized at once."""
    good = {"prompt": [USER] if isinstance(row["prompt"], list) else "a"}
    dataset = Dataset.from_list([good] * 1002 + [row])
    dataset = dataset.to_iterable_dataset() if streams else dataset
    encode = PromptEncoder(strict_tokenizer(), limit=limit())
    with pytest.raises(ValueError, match=f"(?s)row 1002 of my data .*{words}"):
        list(encode.check("my data", dataset))


def test_messages_that_call_tools_need_no_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert PromptEncoder(tiny_tokenizer())([{"prompt": [USER, call, USER]}]).token_ids


@pytest.mark.parametrize("streams", [False, True])
def test_long_prompts_are_dropped(streams):
    dataset = Dataset.from_list([{"prompt": "x" * n, "n": n} for n in (1, 13, 12, 30, 2)])
    dataset = dataset.to_iterable_dataset() if streams else dataset
    encode = PromptEncoder(tiny_tokenizer(), limit=limit(action="drop"))
    found = encode.check("train_dataset", dataset)
    assert [row["n"] for row in found] == [1, 12, 2]
    assert encode.counts() == {"prompts/dropped": 2.0}
    assert encode.check("train_dataset", found) is found, "once is enough"


def test_long_prompts_keep_their_end():
    encode = PromptEncoder(tiny_tokenizer(), limit=limit(5, "cut-left"))
    dataset = Dataset.from_list([{"prompt": "abc"}, {"prompt": "abcdefgh"}])
    assert encode.check("train_dataset", dataset) is dataset
    assert encode.counts() == {"prompts/cut": 1.0}
    assert encode(list(dataset)).token_ids == [ids("abc"), ids("defgh")]
    assert PromptEncoder(tiny_tokenizer(), limit=limit()).counts() == {}


def test_many_prompts_are_encoded_as_single_ones():
    rows = [{"prompt": "ab"}, {"prompt": [USER]}, {"prompt": "c"}, {"prompt": [USER, ANSWER]}]
    rows += [{"prompt": [USER, USER]}, {"prompt": [USER], "chat_template_kwargs": {"x": 1}}]
    encode = PromptEncoder(tiny_tokenizer())
    assert encode(rows).token_ids == [encode([row]).token_ids[0] for row in rows]


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


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({}, 19),
        ({"action": "drop"}, 12),
        ({"action": "cut-left"}, 12),
        ({"longest": 15}, 15),
        ({"longest": 15, "action": "drop"}, 15),
        ({"longest": 50}, 19),
        ({"context": None}, None),
        ({"context": None, "action": "drop"}, None),
        ({"context": None, "longest": 50}, 50),
    ],
)
def test_where_the_limit_comes_from(given, tokens):
    """20 tokens of context leave 19 for a prompt that may have any completion, 12 for one of 8."""
    assert limit(**given).tokens == tokens


def test_what_becomes_of_a_long_prompt():
    ids = list(range(21))
    assert limit(5, "cut-left").cut(ids) == [16, 17, 18, 19, 20]
    assert limit(5, "drop").cut(ids) == ids
    for action in ("drop", "cut-left"):
        assert limit(5, action).is_broken_by(21) and limit(5, action).problem(21) is None
        assert "no tokens" in limit(5, action).problem(0)
    assert limit(21, context=None).problem(21) is None
    assert "has 21 tokens; at most 5 are possible (max_prompt_length=5)" in limit(5).problem(21)
    assert "the model sees 20 tokens" in limit().problem(21)
    assert limit(context=None).cut(ids) == ids


def checked_on_disk(folder, ranks=None, **options):
    """Check prompts of a folder; return the rows that are left, and what was tokenized for that."""
    tokenizer = CountingTokenizer.from_pretrained(Path(folder) / "tokenizer")
    encode = PromptEncoder(tokenizer, limit=limit(action="drop"), ranks=ranks, **options)
    kept = encode.check("train_dataset", load_from_disk(str(Path(folder) / "rows")))
    return kept["prompt"][:], tokenizer.tokenized, encode.longest["train_dataset"]


def save_prompts(folder, prompts):
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    Dataset.from_dict({"prompt": prompts}).save_to_disk(folder / "rows")


@pytest.mark.parametrize("chats", [False, True])
def test_prompts_that_were_checked_are_not_tokenized_again(tmp_path, chats):
    texts = ["ab", "x" * 30, "abcd"]
    prompts = [[{"role": "user", "content": text[:2]}] for text in texts] if chats else texts
    save_prompts(tmp_path, prompts)
    first, again = checked_on_disk(tmp_path), checked_on_disk(tmp_path)
    assert first[1] == prompts and again[1] == []
    assert first[0] == again[0] == (prompts if chats else ["ab", "abcd"])
    assert first[2] == again[2]


def test_prompts_are_tokenized_again_for_another_template(tmp_path):
    prompts = [[USER], [USER, ANSWER]]
    save_prompts(tmp_path, prompts)
    checked_on_disk(tmp_path)
    assert checked_on_disk(tmp_path, template_kwargs={"mood": "x"})[1] == prompts


def on_ranks(folder):
    """What each rank tokenizes, and what it hears of a prompt that cannot be tokenized."""
    ranks = Ranks(Accelerator(cpu=True))
    found = checked_on_disk(folder, ranks)
    encode = PromptEncoder(strict_tokenizer(), ranks=ranks)
    refused = Dataset.from_dict({"prompt": [[{"role": "refused", "content": "a"}]]})
    try:
        encode.check("train_dataset", refused)
    except (RankError, ValueError) as error:
        return found, f"{type(error).__name__}: {error}"
    return found, ""


@pytest.mark.distributed
def test_one_of_several_ranks_tokenizes_prompts(tmp_path):
    save_prompts(tmp_path, ["ab", "x" * 30, "abcd"])
    (first, own), (second, heard) = call(on_ranks, tmp_path)
    assert first[1] == ["ab", "x" * 30, "abcd"] and second[1] == []
    assert first[0] == second[0] == ["ab", "abcd"]
    assert first[2] == second[2] == (4, 2)
    assert own.startswith("ValueError: The prompt of row 0 of train_dataset")
    assert heard.startswith("RankError: Rank 0 failed in checking the prompts of train_dataset")


@pytest.mark.parametrize("streams", [False, True])
def test_ids_that_the_model_does_not_know_are_refused(streams):
    """Before training, or when a stream is read."""
    dataset = Dataset.from_dict({"prompt": ["a", "b", "z"]})
    dataset = dataset.to_iterable_dataset() if streams else dataset
    largest = ids("z")[0]
    encode = PromptEncoder(tiny_tokenizer(), bounds=ModelBounds(vocabulary=largest))
    words = (
        rf"row 2 of train_dataset \('z'\) has the token id {largest}, but the vocabulary of the "
        rf"model has {largest} tokens \(ids 0 to {largest - 1}\)\. Use the tokenizer of this "
    )
    with pytest.raises(ValueError, match=words):
        list(encode.check("train_dataset", dataset))
    with pytest.raises(ValueError, match="row 1 of the batch .* has the token id"):
        encode([{"prompt": "a"}, {"prompt": "z"}])


@pytest.mark.parametrize(("context", "warns"), [(20, True), (21, False), (None, False)])
def test_completions_that_outgrow_the_context_are_told_of(log, context, warns):
    """Of prompts of 3, 13 and 12 tokens, two leave less than 8 of 20 tokens, and one of 21 does."""
    dataset = Dataset.from_dict({"prompt": ["abc", "x" * 13, "y" * (13 if context == 20 else 12)]})
    dataset = dataset if context == 20 else dataset.select([0, 2])
    chosen = PromptLimit(completion=8)
    bounds = ModelBounds(context=context)
    PromptEncoder(tiny_tokenizer(), limit=chosen, bounds=bounds).check("train_dataset", dataset)
    told = [line for line in log.messages if "max_position_embeddings" in line]
    expected = (
        "train_dataset: 2 of 3 prompts, with max_completion_length=8, are longer than the 20 "
        "tokens that the model sees (max_position_embeddings): first row 1, and the longest has "
        "13. Lower max_completion_length to 7, or set max_prompt_length=12 with "
        "long_prompts='drop' or 'cut-left'."
    )
    assert told == ([expected] if warns else [])

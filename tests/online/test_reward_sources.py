import functools

import pytest
import torch
from tiny import tiny_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

from trl.online.reward_sources import AsyncReward, ModelReward, SyncReward, resolve_rewards


def length(completions, **kwargs):
    return [len(text) for text in completions]


async def later(completions, **kwargs):
    return [0.0] * len(completions)


class Judge:
    def __call__(self, completions, **kwargs):
        return [1.0] * len(completions)


class AsyncJudge:
    async def __call__(self, completions, **kwargs):
        return [1.0] * len(completions)


def classifier():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
    )
    return LlamaForSequenceClassification(config).eval()


def names(*functions):
    return [source.name for source in resolve_rewards(list(functions))]


def test_kinds_and_names():
    partial = functools.partial(length, extra=1)
    sources = resolve_rewards([length, later, Judge(), AsyncJudge(), partial])
    kinds = [SyncReward, AsyncReward, SyncReward, AsyncReward, SyncReward]
    assert [type(source) for source in sources] == kinds
    assert [s.name for s in sources] == ["length", "later", "Judge", "AsyncJudge", "length_2"]
    assert names(length, length, length) == ["length", "length_2", "length_3"]


def test_one_function_needs_no_list():
    assert [source.name for source in resolve_rewards(length)] == ["length"]


@pytest.mark.parametrize("nothing", [None, []])
def test_nothing_is_an_error(nothing):
    with pytest.raises(ValueError, match="at least one reward"):
        resolve_rewards(nothing)


def test_errors_name_the_place():
    with pytest.raises(TypeError, match=r"reward_funcs\[1\] is a int"):
        resolve_rewards([length, 3])
    with pytest.raises(ValueError, match="1 entries for 2 reward functions"):
        resolve_rewards([length, later], [None])
    with pytest.raises(ValueError, match="reward_processing_classes"):
        resolve_rewards(classifier())


def test_nothing_given_is_modified(tmp_path):
    classifier().save_pretrained(tmp_path / "judge")
    tiny_tokenizer().save_pretrained(tmp_path / "judge")
    functions, options = [str(tmp_path / "judge")], {"dtype": "float32", "revision": "x"}
    sources = resolve_rewards(functions, model_init_kwargs=options)
    assert functions == [str(tmp_path / "judge")]
    assert options == {"dtype": "float32", "revision": "x"}
    assert isinstance(sources[0], ModelReward) and sources[0].name == "judge"
    assert sources[0].model.dtype == torch.float32


@pytest.mark.parametrize("conversational", [False, True])
def test_model_rewards_are_the_first_logit(conversational):
    model, tokenizer = classifier(), tiny_tokenizer()
    source = resolve_rewards([model], [tokenizer])[0]
    texts = [("ab", "c"), ("d", "efgh")]
    whole = [prompt + completion for prompt, completion in texts]
    prompts, completions = map(list, zip(*texts, strict=True))
    if conversational:
        prompts = [[{"role": "user", "content": text}] for text in prompts]
        completions = [[{"role": "assistant", "content": text}] for text in completions]
        whole = [f"<user>{p}<end><assistant>{c}<end>" for p, c in texts]
    alone = [float(model(torch.tensor([tokenizer(text)["input_ids"]])).logits) for text in whole]
    assert source.score(prompts, completions) == pytest.approx(alone, abs=1e-6)


def test_missing_pad_token_falls_back_to_eos():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    source = resolve_rewards([classifier()], [tokenizer])[0]
    assert source.tokenizer.pad_token == "<eos>"
    assert source.model.config.pad_token_id == tokenizer.eos_token_id

import functools
import json
import re

import pytest
import torch
from tiny import save_tiny, tiny_model, tiny_tokenizer
from torch import nn
from transformers import LlamaForSequenceClassification

from trl.online.reward_sources import (
    FunctionReward,
    JudgeReward,
    ModelReward,
    resolve_rewards,
)
from trl.timed_calls import is_async


def plain(completions, **kwargs):
    return [0.0] * len(completions)


async def later(completions, **kwargs):
    return [0.0] * len(completions)


class Scorer:
    def __call__(self, completions, **kwargs):
        return [0.0] * len(completions)

    def method(self, completions, **kwargs):
        return [0.0] * len(completions)


class AsyncScorer:
    async def __call__(self, completions, **kwargs):
        return [0.0] * len(completions)


def classifier(**changes) -> LlamaForSequenceClassification:
    config = tiny_model().config
    config.num_labels = 1
    config.update(changes)
    torch.manual_seed(1)
    return LlamaForSequenceClassification(config)


def by_hand(model, texts):
    """Last hidden state of each text alone, without padding, times the weights of the score."""
    found = []
    for text in texts:
        ids = torch.tensor([tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state[0, -1]
            found.append((model.score.weight[0] @ hidden).item())
    return found


@pytest.mark.parametrize(
    ("function", "waits", "name"),
    [
        (plain, False, "plain"),
        (later, True, "later"),
        (Scorer(), False, "Scorer"),
        (Scorer().method, False, "method"),
        (AsyncScorer(), True, "AsyncScorer"),
        (functools.partial(plain, power=2), False, "plain"),
        (functools.partial(functools.partial(later, a=1), b=2), True, "later"),
        (functools.partial(AsyncScorer(), a=1), True, "AsyncScorer"),
        (lambda **kwargs: [], False, "<lambda>"),
    ],
)
def test_kinds_and_names(function, waits, name):
    (source,) = resolve_rewards(function)
    assert isinstance(source, FunctionReward) and is_async(source.function) == waits
    assert source.name == name
    assert source.function is function


def test_names_are_made_unique():
    def plain_2(**kwargs):
        return []

    names = [s.name for s in resolve_rewards([plain, plain_2, plain, later, plain])]
    assert names == ["plain", "plain_2", "plain_3", "later", "plain_4"]


def test_what_was_given_is_not_modified():
    functions, tokenizers, options = [plain, later], [None, None], {"dtype": "float32"}
    resolve_rewards(functions, tokenizers, model_init_kwargs=options)
    assert functions == [plain, later]
    assert tokenizers == [None, None]
    assert options == {"dtype": "float32"}


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_nothing_is_an_error(nothing):
    with pytest.raises(ValueError, match="reward_funcs is empty"):
        resolve_rewards(nothing)


def test_numbers_cannot_reward():
    with pytest.raises(TypeError, match=r"reward_funcs\[1\] is 3: it must be callable"):
        resolve_rewards([plain, 3])


def test_one_tokenizer_for_each_function():
    with pytest.raises(ValueError, match="has length 1, and reward_funcs has length 2"):
        resolve_rewards([plain, later], [tiny_tokenizer()])


def test_a_model_scores_prompt_and_completion():
    model = classifier().train()
    (source,) = resolve_rewards(model, tiny_tokenizer())
    assert isinstance(source, ModelReward)
    assert source.name == "LlamaForSequenceClassification"
    found = source.score(["1+2=", "a", "long prompt "], ["3", "bcdef", "x"])
    assert not model.training
    texts = ["1+2=3", "abcdef", "long prompt x"]
    assert found == pytest.approx(by_hand(model, texts), abs=1e-6)
    assert len(set(found)) == 3


def test_a_model_scores_conversations():
    model = classifier()
    (source,) = resolve_rewards([model], tiny_tokenizer())
    user, answers = [{"role": "user", "content": "hi"}], ["yo", "a longer one"]
    replies = [[{"role": "assistant", "content": text}] for text in answers]
    found = source.score([user, user], replies)
    texts = [f"<user>hi<end><assistant>{text}<end>" for text in answers]
    assert found == pytest.approx(by_hand(model, texts), abs=1e-6)


def test_what_the_prompt_began_is_one_message_with_what_goes_on_with_it():
    model = classifier()
    (source,) = resolve_rewards(model, tiny_tokenizer())
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, "}]
    found = source.score([begun], [[{"role": "assistant", "content": "yo"}]])
    assert found == pytest.approx(by_hand(model, ["<user>hi<end><assistant>well, yo<end>"]))
    assert begun[1]["content"] == "well, "


def test_chat_templates_of_reward_models_get_the_extra_arguments():
    """Those of a row win over those of all rows."""
    tokenizer, model = tiny_tokenizer(), classifier()
    tokenizer.chat_template = "{{ mood }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (source,) = resolve_rewards(model, tokenizer, template_kwargs={"mood": "a"})
    prompt, reply = [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "yo"}]
    found = source.score([prompt] * 3, [reply] * 3, [None, {"mood": "b"}, {}])
    assert found == pytest.approx(by_hand(model, ["ahiyo", "bhiyo", "ahiyo"]), abs=1e-6)


def test_a_model_by_name(tmp_path):
    folder = tmp_path / "judge"
    classifier().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    options = {"dtype": torch.bfloat16, "attn_implementation": "no such thing"}
    (rough,) = resolve_rewards(f"{folder}/", model_init_kwargs=options)
    assert rough.name == "judge"
    assert rough.model.score.weight.dtype == torch.bfloat16, "an option shared with the policy"
    exact, loaded = resolve_rewards(
        [str(folder), LlamaForSequenceClassification.from_pretrained(folder)]
    )
    assert (exact.name, loaded.name) == ("judge", "judge_2")
    expected = by_hand(classifier(), ["ab"])
    assert exact.score(["a"], ["b"]) == pytest.approx(expected, abs=1e-6)
    assert loaded.score(["a"], ["b"]) == pytest.approx(expected, abs=1e-6), "its own tokenizer"


def test_code_of_a_reward_tokenizer_runs_only_if_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "c"))
    monkeypatch.syspath_prepend(str(tmp_path / "c"))
    folder = tmp_path / "judge"
    classifier().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "custom.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class CustomTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "auto_map": {"AutoTokenizer": [None, "custom.CustomTokenizer"]},
        "tokenizer_class": "CustomTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (source,) = resolve_rewards(str(folder), trust_remote_code=True)
    assert type(source.tokenizer).__name__ == "CustomTokenizer"
    with pytest.raises(ValueError, match="contains custom code"):
        resolve_rewards(str(folder))


def test_a_model_without_tokenizer():
    with pytest.raises(ValueError, match=r"'Linear' does not say where .* reward_processing"):
        resolve_rewards([plain, nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="'LlamaForSequenceClassification' does not say where"):
        resolve_rewards(classifier())


def test_an_end_that_is_also_padding_is_read():
    model, tokenizer = classifier(), tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    (source,) = resolve_rewards(model, tokenizer)
    found = source.score(["1+2=", "long prompt "], ["3<eos>", "x"])
    assert found == pytest.approx(by_hand(model, ["1+2=3<eos>", "long prompt x"]), abs=1e-6)


def test_padding_with_the_end_token_leaves_the_users_tokenizer_alone():
    tokenizer, model = tiny_tokenizer(), classifier()
    tokenizer.pad_token = None
    (source,) = resolve_rewards(model, tokenizer)
    assert tokenizer.pad_token is None
    assert source.tokenizer.pad_token == "<eos>"
    assert model.config.pad_token_id == tokenizer.eos_token_id
    found = source.score(["a", "bc"], ["d", "efg"])
    assert found == pytest.approx(by_hand(model, ["ad", "bcefg"]), abs=1e-6)


def test_a_model_that_writes_text_gives_no_rewards(tmp_path):
    """Loaded as a classifier it would have a random head."""
    folder = save_tiny(tmp_path / "policy")
    with pytest.raises(ValueError, match=r"no weights for score.weight: .* random. Use a model"):
        resolve_rewards(folder)
    with pytest.raises(TypeError, match="is a LlamaForCausalLM, which writes text"):
        resolve_rewards([plain, tiny_model()], [None, tiny_tokenizer()])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("acuracy_reward", "no such folder. Did you mean accuracy_reward?.* passed itself"),
        ("judeg", "no such folder. Did you mean judge?"),
        ("./judeg", "no such folder. Did you mean judge?"),
        ("someone/judge", "no such folder, and HF_HUB_OFFLINE=1 .* Did you mean judge?"),
    ],
)
def test_a_name_that_means_nothing_is_refused_at_once(tmp_path, monkeypatch, name, words):
    (tmp_path / "judge").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=re.escape(f"reward_funcs: {name!r} is") + f".*{words}"):
        resolve_rewards(name)


# --- Judges ---


class Fixed:
    def __init__(self, places):
        self.places, self.asked = places, []

    def judge(self, prompts, completions):
        self.asked.append((prompts, completions))
        return self.places


def test_decisions_become_rewards():
    judge = Fixed([1, -1, 0])
    rewards = JudgeReward(judge)(list("aabbcc"), ["1", "2", "3", "4", "5", "6"], answer=None)
    assert rewards == [0.0, 1.0, None, None, 1.0, 0.0]
    assert judge.asked == [(["a", "b", "c"], [["1", "2"], ["3", "4"], ["5", "6"]])]


@pytest.mark.parametrize(
    ("places", "words"), [([1], "decided on 1 of 2 pairs"), ([0, 2], "returned 2")]
)
def test_judges_must_decide_on_every_pair(places, words):
    with pytest.raises(ValueError, match=words):
        JudgeReward(Fixed(places))(["a"] * 4, ["b"] * 4)

import dataclasses

import pytest
from accelerate.parallelism_config import ParallelismConfig
from sft_runs import make_trainer
from tiny import CHAT_TEMPLATE, save_tiny, tiny_model, tiny_tokenizer

from trl.trainer.offline.offline_config import OfflineConfig, set_template


def make(**changes):
    return OfflineConfig("out", **({"use_cpu": True, "bf16": False} | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 cannot be used: logits are"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 cannot be used: its noise"),
        ({"auto_find_batch_size": True}, "recover_from_oom"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last=True cannot be used"),
        ({"train_sampling_strategy": "group_by_length"}, "use max_tokens_per_micro_batch"),
        ({"dataset_kwargs": "[]"}, "must be a dictionary"),
    ],
)
def test_what_would_mean_nothing_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        make(**changes)


def test_tokens_are_no_secrets():
    """Else another eos_token would go unnoticed when a run is resumed."""
    found = make(eos_token="<end>", hub_token="secret").to_dict()
    assert (found["eos_token"], found["pad_token"]) == ("<end>", None)
    assert found["hub_token"] == "<HUB_TOKEN>"


def test_padding():
    assert make(pad_to_multiple_of="8").pad_to_multiple_of == 8
    assert make(pad_to_multiple_of=16).pad_to_multiple_of == 16


@pytest.mark.parametrize(
    ("changes", "seed"),
    [
        ({"seed": 7}, 7),
        ({"train_sampling_strategy": "sequential"}, None),
        ({"train_sampling_strategy": "sequential", "shuffle_dataset": True}, 42),
    ],
)
def test_the_order_of_rows(changes, seed):
    assert make(**changes).order_seed == seed


@pytest.mark.parametrize("name", ["cp_size", "sp_size"])
def test_ranks_that_divide_rows(name):
    made = make(parallelism_config=ParallelismConfig(**{name: 2}))
    assert made.ranks_per_row == 2 and dataclasses.replace(made).ranks_per_row == 2
    assert make().ranks_per_row == 1


def test_tokens_are_set_on_tokenizer_and_model():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [1]
    set_template(model, tokenizer, make(eos_token="<end>", pad_token="<bos>"))
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<end>", "<bos>")
    assert model.config.eos_token_id == end
    assert model.generation_config.eos_token_id == [end, 1]


@pytest.mark.parametrize("name", ["eos_token", "pad_token"])
def test_unknown_tokens(name):
    with pytest.raises(ValueError, match=f"{name}='<x>' is not in the tokenizer's vocabulary"):
        set_template(tiny_model(), tiny_tokenizer(), make(**{name: "<x>"}))


def test_a_template_from_a_file(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(CHAT_TEMPLATE.replace("<end>", "\n"))
    tokenizer = tiny_tokenizer()
    set_template(tiny_model(), tokenizer, make(chat_template_path=str(path)))
    chat = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<user>a\n"


def test_a_template_from_a_model(tmp_path):
    name = save_tiny(tmp_path / "other")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    trainer = make_trainer(tmp_path, tokenizer=tokenizer, chat_template_path=name)
    assert trainer.processing_class.chat_template == CHAT_TEMPLATE

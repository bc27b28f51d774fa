import pytest
from sft_runs import make_trainer
from tiny import CHAT_TEMPLATE, save_tiny, tiny_model, tiny_tokenizer

from trl.trainer.offline.template import set_template
from trl.trainer.sft_config import SFTConfig


def args(**changes):
    return SFTConfig("out", use_cpu=True, bf16=False, **changes)


def test_tokens_are_set_on_tokenizer_and_model():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [1]
    set_template(model, tokenizer, args(eos_token="<end>", pad_token="<bos>"))
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<end>", "<bos>")
    assert model.config.eos_token_id == end
    assert model.generation_config.eos_token_id == [end, 1]


@pytest.mark.parametrize("name", ["eos_token", "pad_token"])
def test_unknown_tokens(name):
    with pytest.raises(ValueError, match=f"{name}='<x>' is not in the tokenizer's vocabulary"):
        set_template(tiny_model(), tiny_tokenizer(), args(**{name: "<x>"}))


def test_a_template_from_a_file(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(CHAT_TEMPLATE.replace("<end>", "\n"))
    tokenizer = tiny_tokenizer()
    set_template(tiny_model(), tokenizer, args(chat_template_path=str(path)))
    chat = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<user>a\n"


def test_a_template_from_a_model(tmp_path):
    name = save_tiny(tmp_path / "other")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    trainer = make_trainer(tmp_path, tokenizer=tokenizer, chat_template_path=name)
    assert trainer.processing_class.chat_template == CHAT_TEMPLATE

"""Tiny real models and tokenizers, built in memory: nothing is downloaded."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

CHARACTERS = (
    " 0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-*/=.,:;!?()<>[]'\"_\n\\{}#"
)
SPECIAL = ["<pad>", "<eos>", "<bos>", "<user>", "<assistant>", "<system>", "<end>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# Of a two-layer model over the vocabulary of `tiny_tokenizer`.
SIZES = {
    "vocab_size": len(SPECIAL) + len(CHARACTERS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
# Options of a run on a CPU that takes one step of SGD and logs it.
ONE_UPDATE = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
    "per_device_train_batch_size": 8,
    "max_steps": 1,
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "save_strategy": "no",
    "logging_steps": 1,
    "log_memory": False,
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A character-level tokenizer with a chat template; decoding joins characters back exactly."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL + sorted(set(CHARACTERS)))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    from tokenizers import decoders

    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        additional_special_tokens=SPECIAL[3:],
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class CountingTokenizer(PreTrainedTokenizerFast):
    """Remembers the prompts that it was given: texts, and conversations for the template."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tokenized = []

    def __call__(self, text, *args, **kwargs):
        if isinstance(text, list):
            self.tokenized += text
        return super().__call__(text, *args, **kwargs)

    def apply_chat_template(self, conversation, *args, **kwargs):
        self.tokenized += conversation
        return super().apply_chat_template(conversation, *args, **kwargs)


def tiny_model(kind: str = "llama", seed: int = 0, **changes):
    """A two-layer random model in float32 over the vocabulary of `tiny_tokenizer`."""
    classes = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config_class, model_class = classes[kind]
    torch.manual_seed(seed)
    return model_class(config_class(**(SIZES | {"tie_word_embeddings": False} | changes)))


def save_tiny(folder, kind: str = "llama", **changes) -> str:
    """Write model and tokenizer as an ordinary checkpoint and return its path."""
    tiny_model(kind, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


class DoubleRotary(torch.nn.Module):
    """Rotary tables in double precision, where transformers has float32 whatever the weights."""

    def __init__(self, inv_freq):
        super().__init__()
        self.inv_freq = inv_freq.double()

    def forward(self, x, position_ids):
        angles = position_ids[..., None].double() * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


class DoubleNorm(LlamaRMSNorm):
    """A norm in the precision of its input."""

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)


def in_double(model):
    """Let a tiny Llama compute in double precision throughout; changed in place."""
    model.double().model.rotary_emb = DoubleRotary(model.model.rotary_emb.inv_freq)
    for module in model.modules():
        if type(module) is LlamaRMSNorm:
            module.__class__ = DoubleNorm
    return model


def lora_model():
    """A tiny model with an adapter on its values."""
    from peft import LoraConfig, get_peft_model  # an extra

    return get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["v_proj"]))


def with_autocast(model, dtype=torch.bfloat16):
    """Autocast around the forward of the outermost module, where accelerate puts it."""
    model.forward = torch.autocast("cpu", dtype)(model.forward)
    return model

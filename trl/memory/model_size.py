"""Sizes of a model from its configuration alone: it is built on the meta device."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from ..distributed import without_zero3_init
from ..models.layout_check import why_not_shared
from ..models.loading import add_adapter
from ..models.loading import load_config as load_config

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class ModelSize:
    """Counts of parameters, and the widths that decide how much memory a token takes.

    Tied weights are counted once. Widths are entries per token: `queries` is heads x head size.
    """

    parameters: int  # of the policy, adapter included
    trainable: int
    layer_matrices: int  # of all decoder layers: autocast copies them, quantization shrinks them
    head: int  # entries of the output projection
    tied: bool  # the output projection is the embedding
    adapter: int
    factored: int  # rows + columns of the trainable matrices, and entries of trainable vectors
    layers: int
    hidden: int
    intermediate: int
    queries: int
    keys: int
    vocabulary: int  # 0 for a classifier, which has no token logits
    context: int | None
    gated: bool  # whether the MLP multiplies two projections
    norms_heads: bool  # whether queries and keys are normalized
    adapted: frozenset[str] = frozenset()  # linear layers with an adapter, such as q_proj
    dropout: bool = False  # whether the adapter has dropout on its input

    @property
    def frozen(self) -> bool:
        """Whether the base model is frozen, because an adapter is trained."""
        return self.adapter > 0


class _Widths(TypedDict):
    """The fields of `ModelSize` that do not depend on an adapter."""

    layer_matrices: int
    head: int
    tied: bool
    layers: int
    hidden: int
    intermediate: int
    queries: int
    keys: int
    vocabulary: int
    context: int | None
    gated: bool
    norms_heads: bool


def model_size(
    config: PretrainedConfig,
    peft_config: "PeftConfig | None" = None,
    trust_remote_code: bool = False,
    classifies: bool = False,
) -> ModelSize:
    """Measure the language model, or classifier, of a configuration without allocating it."""
    with torch.device("meta"):
        base_model = _empty_model(config, trust_remote_code, classifies=classifies)
        base = sum(p.numel() for p in base_model.parameters())
        widths = _widths(config.get_text_config(), base_model)
        model: nn.Module = base_model
        if peft_config is not None:
            model = add_adapter(base_model, peft_config)
    parameters = sum(p.numel() for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    return ModelSize(
        parameters=parameters,
        trainable=sum(p.numel() for p in trained),
        adapter=parameters - base,
        factored=sum(sum(p.shape) if p.dim() > 1 else p.numel() for p in trained),
        adapted=frozenset(
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if getattr(module, "lora_A", None)
        ),
        dropout=bool(getattr(peft_config, "lora_dropout", 0.0)),
        **widths,
    )


def shares_prompts(
    config: PretrainedConfig, attention: str | None, longest: int, classifies: bool = False
) -> bool:
    """Whether rows of up to `longest` tokens can share one copy of their prompt in a model."""
    try:
        # trust_remote_code is False, so no code shipped with the model runs.
        model = _empty_model(config, False, attention, classifies)
    except ValueError:  # this model does not have this attention implementation
        return False
    return why_not_shared(model, longest, "cpu") is None


def _empty_model(
    config: PretrainedConfig,
    trust_remote_code: bool,
    attention: str | None = None,
    classifies: bool = False,
) -> "PreTrainedModel":
    auto_model = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    with torch.device("meta"), without_zero3_init():
        return auto_model.from_config(
            config,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            attn_implementation=attention,
        )


def _widths(config: PretrainedConfig, model: "PreTrainedModel") -> _Widths:
    embedding = model.get_input_embeddings().weight
    head = getattr(model.get_output_embeddings(), "weight", None)
    named = dict(model.named_parameters())
    ends = {id(head), id(embedding)}
    matrices = [p.numel() for p in named.values() if p.dim() > 1 and id(p) not in ends]
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "layer_matrices": sum(matrices),
        "head": 0 if head is None else head.numel(),
        "tied": head is embedding,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "intermediate": _intermediate(config),
        "queries": heads * head_dim,
        "keys": (getattr(config, "num_key_value_heads", None) or heads) * head_dim,
        "vocabulary": 0 if head is None else config.vocab_size,
        "context": getattr(config, "max_position_embeddings", None),
        "gated": any("gate" in name for name in named),
        "norms_heads": any("q_norm" in name for name in named),
    }


def _intermediate(config: PretrainedConfig) -> int:
    """Width of the MLP; in a mixture of experts, of all experts of a token together."""
    width: int = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    experts: int | None = getattr(config, "num_experts_per_tok", None)
    if not experts:
        return width
    return experts * (getattr(config, "moe_intermediate_size", None) or width)


def quantized_bytes(options: object) -> float | None:
    """Bytes of a weight with its scales, from bitsandbytes options; None if not quantized.

    `options` is a `BitsAndBytesConfig` or a `ModelConfig` of this package.
    """
    if getattr(options, "load_in_8bit", False):
        return 1.0
    if not getattr(options, "load_in_4bit", False):
        return None
    scale = 4 / 64  # one in float32 for each block of 64 weights
    is_nested = getattr(options, "use_bnb_nested_quant", False)
    if is_nested or getattr(options, "bnb_4bit_use_double_quant", False):
        scale = 1 / 64 + 4 / (64 * 256)  # in 8 bits, with float32 scales of their own
    return 0.5 + scale


# Optimizer states per trained entry: (tensors of its own dtype, bytes in a fixed precision).
_STATES = {
    (2, 0): "adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused stable_adamw",
    (1, 0): "rmsprop adagrad",
    (0, 0): "sgd adafactor",
    (0, 1): "adamw_torch_4bit lion_8bit paged_lion_8bit rmsprop_bnb_8bit",
    (0, 2): "adamw_8bit adamw_bnb_8bit paged_adamw_8bit adamw_torch_8bit",
    (0, 3): "ademamix_8bit paged_ademamix_8bit",
    (0, 4): "lion_32bit paged_lion_32bit rmsprop_bnb rmsprop_bnb_32bit",
    (0, 8): "paged_adamw_32bit",
    (0, 12): "ademamix paged_ademamix_32bit",
}
KNOWN_OPTIMIZERS = {name: states for states, names in _STATES.items() for name in names.split()}


def state_bytes(name: str, arguments: str | None, model: ModelSize, weight_bytes: int) -> float:
    """Bytes of all optimizer states, from `optim` and `optim_args`.

    An optimizer that is not in `KNOWN_OPTIMIZERS` counts as one with two float32 states.
    """
    if name == "adafactor":
        return FLOAT32 * model.factored
    copies, fixed_bytes = KNOWN_OPTIMIZERS.get(name, (0, 2 * FLOAT32))
    pairs = dict(pair.partition("=")[::2] for pair in (arguments or "").replace(" ", "").split(","))
    if name == "sgd" and float(pairs.get("momentum") or 0):
        copies = 1
    return (copies * weight_bytes + fixed_bytes) * model.trainable

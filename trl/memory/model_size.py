"""How large a model is, from its configuration alone: it is built on the meta device."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ..distributed import undivided_models
from ..imports import require
from ..models.layout_check import why_not_shared

FLOAT32 = 4


@dataclass(frozen=True)
class ModelSize:
    """Counts of parameters, and the widths that decide what a token costs.

    Tied weights are counted once. Widths are entries a token: `queries` is heads x head size.
    """

    parameters: int  # of the policy, adapter included
    trainable: int
    layer_matrices: int  # of all decoder layers: what autocast copies, and quantization shrinks
    head: int  # entries of the output projection
    tied: bool  # the output projection is the embedding
    adapter: int
    largest_matrix: int  # of the decoder layers
    factored: int  # rows + columns of the trainable matrices, and entries of trainable vectors
    layers: int
    hidden: int
    intermediate: int
    heads: int
    queries: int
    keys: int
    vocabulary: int
    context: int | None
    gated: bool  # the MLP multiplies two projections
    norms_heads: bool  # queries and keys are normalized
    adapted: frozenset[str] = frozenset()  # linear layers with an adapter, such as q_proj
    dropout: bool = False  # of the adapter's input

    @property
    def head_size(self) -> int:
        """Entries of one attention head."""
        return self.queries // self.heads

    @property
    def frozen(self) -> bool:
        """Whether the base model is frozen because an adapter is trained."""
        return self.adapter > 0


def model_size(
    config: PretrainedConfig, peft_config: Any = None, trust_remote_code: bool = False
) -> ModelSize:
    """Measure the causal language model that `config` describes, without allocating it.

    Args:
        config (`PretrainedConfig`): configuration of the model.
        peft_config (`peft.PeftConfig`, *optional*): adapter to train instead of all weights.
        trust_remote_code (`bool`): whether code shipped with the model may run.
    """
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of peft, about names of transformers
        model = _empty_model(config, trust_remote_code)
        base = sum(p.numel() for p in model.parameters())
        shape = _shape(config.get_text_config(), model)
        if peft_config is not None:
            model = require("peft", "use_peft").get_peft_model(model, peft_config)
    parameters = sum(p.numel() for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    return ModelSize(
        parameters=parameters,
        trainable=sum(p.numel() for p in trained),
        adapter=parameters - base,
        factored=sum(sum(p.shape) if p.dim() > 1 else p.numel() for p in trained),
        adapted=_adapted(model),
        dropout=bool(getattr(peft_config, "lora_dropout", 0.0)),
        **shape,
    )


def shares_prompts(config: PretrainedConfig, attention: str | None, longest: int) -> bool:
    """Whether completions of a model can see one copy of their prompt, on a CPU or a GPU.

    Args:
        config (`PretrainedConfig`): configuration of the model; code shipped with it does not run.
        attention (`str`, *optional*): its attention implementation; None: what transformers takes.
        longest (`int`): tokens of the longest row.
    """
    try:
        model = _empty_model(config, False, attention)
    except ValueError:  # this model has no such attention
        return False
    return why_not_shared(model, longest, "cpu") is None


def _empty_model(
    config: PretrainedConfig, trust_remote_code: bool, attention: str | None = None
) -> Any:
    with torch.device("meta"), undivided_models():
        return AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            attn_implementation=attention,
        )


def load_config(
    name: str, revision: str | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Read the configuration of a model; nothing else of it is read.

    Raises:
        OSError: if there is none of that name.
    """
    try:
        return AutoConfig.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise OSError(f"--model_name_or_path {name}: {reason}") from error


def _shape(config: Any, model: nn.Module) -> dict[str, Any]:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    ends = {id(module.weight) for module in (head, embedding) if module is not None}
    named = dict(model.named_parameters())
    matrices = [p.numel() for p in named.values() if p.dim() > 1 and id(p) not in ends]
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "layer_matrices": sum(matrices),
        "largest_matrix": max(matrices, default=0),
        "head": 0 if head is None else head.weight.numel(),
        "tied": head is not None and head.weight is embedding.weight,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "intermediate": _intermediate(config),
        "heads": heads,
        "queries": heads * head_dim,
        "keys": (getattr(config, "num_key_value_heads", None) or heads) * head_dim,
        "vocabulary": config.vocab_size,
        "context": getattr(config, "max_position_embeddings", None),
        "gated": any("gate" in name for name in named),
        "norms_heads": any("q_norm" in name for name in named),
    }


def _intermediate(config: Any) -> int:
    """Width of the MLP; of the chosen experts together in a mixture of experts."""
    experts = getattr(config, "num_experts_per_tok", None)
    if experts:
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        return experts * width
    return getattr(config, "intermediate_size", None) or 4 * config.hidden_size


def _adapted(model: nn.Module) -> frozenset[str]:
    found = (name for name, module in model.named_modules() if getattr(module, "lora_A", None))
    return frozenset(name.rpartition(".")[2] for name in found)


# --- Optimizer states ---


@dataclass(frozen=True)
class States:
    """What an optimizer keeps for each trainable parameter.

    Args:
        copies (`float`): tensors of the parameter's own dtype.
        size (`float`): bytes of states whose precision is the optimizer's own.
        factored (`bool`): one float32 entry for each row and column instead.
    """

    copies: float = 0.0
    size: float = 0.0
    factored: bool = False

    def total(self, model: ModelSize, weight_bytes: int) -> float:
        """Bytes for all trainable parameters, whose entries take `weight_bytes`."""
        rows = FLOAT32 * model.factored if self.factored else 0
        return rows + (self.copies * weight_bytes + self.size) * model.trainable


TWO = States(copies=2)
KNOWN = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_torch_xla"), TWO),
    **dict.fromkeys(("adamw_torch_npu_fused", "stable_adamw"), TWO),
    **dict.fromkeys(("paged_adamw_32bit",), States(size=8)),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), States(size=2)),
    "adamw_torch_8bit": States(size=2),
    "adamw_torch_4bit": States(size=1),
    **dict.fromkeys(("ademamix", "paged_ademamix_32bit"), States(size=12)),
    **dict.fromkeys(("ademamix_8bit", "paged_ademamix_8bit"), States(size=3)),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), States(size=4)),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), States(size=1)),
    **dict.fromkeys(("rmsprop", "adagrad"), States(copies=1)),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_32bit"), States(size=4)),
    "rmsprop_bnb_8bit": States(size=1),
    "sgd": States(),
    "adafactor": States(factored=True),
}


def states_of(name: str, arguments: str | None = None) -> States | None:
    """What the optimizer of option `optim` keeps, or None if that is not known.

    Args:
        name (`str`): a value of `optim`.
        arguments (`str`, *optional*): `optim_args`, such as "momentum=0.9".
    """
    found = KNOWN.get(name)
    pairs = dict(pair.partition("=")[::2] for pair in (arguments or "").replace(" ", "").split(","))
    if name == "sgd" and float(pairs.get("momentum") or 0):
        return States(copies=1)
    return found


def state_bytes(name: str, arguments: str | None, model: ModelSize, weight_bytes: int) -> float:
    """Bytes of all states; those of an unknown optimizer are taken to be two in float32."""
    states = states_of(name, arguments) or States(size=2 * FLOAT32)
    return states.total(model, weight_bytes)

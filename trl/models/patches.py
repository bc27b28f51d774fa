"""Every change that this package makes inside the code and models of transformers and accelerate.

Each is here because there is no public way to the same; seen in transformers 5.17 to 5.23 and
accelerate 1.12 to 1.15. CONTRIBUTING.md lists the private names.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import AttentionInterface, PretrainedConfig

Attention = Callable[..., Any]
EAGER = "eager_attention_forward"  # what files of models call their own plain attention


def attention_implementation(config: PretrainedConfig) -> str | None:
    """Return the name of the attention that a model with this configuration runs."""
    return config._attn_implementation


def wrap_attention(model: nn.Module, config: Any, wrap: Callable[[Attention], Attention]) -> None:
    """Replace the attention that the layers of a model call by `wrap` of it.

    It is replaced for every model of the process that calls the same function; `wrap` returns what
    is wrapped already as it is. Eager attention is in no table that models look it up in: it is a
    global name of the file that defines a model, so it is replaced there.
    """
    name = attention_implementation(config)
    if name != "eager":
        original = AttentionInterface().get(name)
        if original is not None:
            AttentionInterface.register(name, wrap(original))
        return
    forwards = [inspect.unwrap(type(module).forward) for module in model.modules()]
    files = {id(names): names for names in (getattr(x, "__globals__", {}) for x in forwards)}
    for names in files.values():
        if EAGER in names:
            names[EAGER] = wrap(names[EAGER])


def checkpointed_layers(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Yield layers that can be recomputed, and the options of `torch.utils.checkpoint` they use."""
    for layer in model.modules():
        function = getattr(layer, "_gradient_checkpointing_func", None)
        if function is not None:
            yield layer, getattr(function, "keywords", {})


def add_checkpoint_options(layer: Any, **options: Any) -> None:
    """Recompute one of `checkpointed_layers` with further options of `torch.utils.checkpoint`.

    `gradient_checkpointing_enable` takes them, but the options of a run are written as JSON, and
    functions cannot be.
    """
    layer._gradient_checkpointing_func = partial(layer._gradient_checkpointing_func, **options)


def forget_one_way_conversions(model: nn.Module) -> None:
    """Forget steps of reading the weights of a model that cannot be undone when they are written.

    Those of quantized files are such steps; a model that was dequantized needs none of them.
    """
    steps = vars(model).get("_weight_conversions") or []
    vars(model)["_weight_conversions"] = [step for step in steps if _can_be_undone(step)]


def _can_be_undone(step: Any) -> bool:
    try:
        step.reverse_transform()
    except NotImplementedError:
        return False
    return True


def forward_below_autocast(model: nn.Module) -> Any:
    """Return the forward of a prepared model without accelerate's autocast; None if it has none."""
    attributes = vars(model)
    return attributes.get("_original_forward") if "forward" in attributes else None


def prepare_apart(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Prepare a model, and let accelerate forget it: it would be saved with the policy.

    A second accelerator would change the gradient accumulation of the first one.
    """
    prepared = accelerator.prepare_model(model)
    accelerator._models.remove(prepared)
    return prepared

"""Changes to private state of transformers and accelerate.

Each is here because there is no public way to do it. Tested with transformers 5.17 to 5.23 and
accelerate 1.12 to 1.15. CONTRIBUTING.md lists the private names.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightTransform

# An attention function: returns the output and, in some implementations, the weights.
Attention = Callable[..., tuple[Tensor, object]]
EAGER = "eager_attention_forward"  # the plain attention in each model's own file


def attention_implementation(config: PretrainedConfig) -> str | None:
    """Return the name of the attention implementation of a model with this configuration."""
    implementation: str | None = config._attn_implementation
    return implementation


def wrap_attention(
    model: nn.Module, config: PretrainedConfig, wrap: Callable[[Attention], Attention]
) -> None:
    """Replace the attention function that the layers of a model call by `wrap(function)`.

    It is replaced for every model of the process that calls the same function. `wrap` must return
    a function that it has wrapped before unchanged. Eager attention is not in the registry of
    attention functions: it is a global of the module that defines the model, so it is replaced
    there.
    """
    name = attention_implementation(config)
    if name != "eager":
        original = AttentionInterface().get(name)
        if original is not None:
            AttentionInterface.register(name, wrap(original))
        return
    forwards = [inspect.unwrap(type(module).forward) for module in model.modules()]
    namespaces = [getattr(forward, "__globals__", {}) for forward in forwards]
    for namespace in {id(namespace): namespace for namespace in namespaces}.values():
        if EAGER in namespace:
            namespace[EAGER] = wrap(namespace[EAGER])


def wrap_class_forward(layer: nn.Module, wrap: Callable[[Callable[..., Any]], Any]) -> None:
    """Replace the forward of the class of a layer by `wrap(forward)`.

    Hooks cannot replace a forward. One set on the instance would be shared by copies of the model,
    and then run the layer of the original. `wrap` must return what it has wrapped before unchanged.
    """
    layer_class = type(layer)
    layer_class.forward = wrap(layer_class.forward)


def checkpointed_layers(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Yield layers with activation checkpointing, and their `torch.utils.checkpoint` options."""
    for layer in model.modules():
        function = getattr(layer, "_gradient_checkpointing_func", None)
        if function is not None:
            yield layer, getattr(function, "keywords", {})


def add_checkpoint_options(layer: nn.Module, **options: object) -> None:
    """Add `torch.utils.checkpoint` options to one of `checkpointed_layers`.

    `gradient_checkpointing_enable` accepts such options, but those of a run are written as JSON,
    which cannot hold functions.
    """
    layer._gradient_checkpointing_func = partial(layer._gradient_checkpointing_func, **options)


def forget_one_way_conversions(model: nn.Module) -> None:
    """Remove a model's weight conversions that cannot be reversed when it is saved.

    Loading a quantized checkpoint adds such conversions; a dequantized model does not need them.
    """
    conversions = vars(model).get("_weight_conversions") or []
    vars(model)["_weight_conversions"] = [x for x in conversions if _is_reversible(x)]


def _is_reversible(conversion: "WeightTransform") -> bool:
    try:
        conversion.reverse_transform()
    except NotImplementedError:
        return False
    return True


def forward_below_autocast(model: nn.Module) -> Any:
    """Return the forward of a prepared model without accelerate's autocast; None if not wrapped."""
    attributes = vars(model)
    return attributes.get("_original_forward") if "forward" in attributes else None


def prepare_untracked(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Prepare a model, and remove it from accelerate's list, so it isn't saved with the policy.

    A second accelerator instead would change the gradient accumulation of the first one.
    """
    prepared = accelerator.prepare_model(model)
    accelerator._models.remove(prepared)
    return prepared

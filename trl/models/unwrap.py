"""The causal language model below wrappers: run, observed, and switched to evaluation mode."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..ops.in_place import look_up
from ..torch_internals import tree_map
from .sharded import gathered, replaced_forward, unwrapped

# Attribute of a policy: a part that is trained with it, and none of what it computes.
VALUE_MODEL = "value_model"


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model` is wrapped by peft, without importing peft when nothing else did."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def causal_model(model: nn.Module) -> Any:
    """The model below wrappers for distributed training, compilation and adapters."""
    bare = unwrapped(model)
    return bare.get_base_model() if is_peft_model(bare) else bare


@cache
def score_layer(model: nn.Module) -> nn.Module | None:
    """The layer by which a classifier scores the last token; None if it scores all, as encoders."""
    causal = causal_model(model)
    has_one = isinstance(causal, PreTrainedModel) and not causal.config.is_encoder_decoder
    return getattr(causal, "score", None) if has_one else None


def mentions(kind: Any, *names: str) -> bool:
    """Whether the forward of a class of modules calls or reads something of these names."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return not set(names).isdisjoint(getattr(code, "co_names", ()))


def run_inside(
    model: nn.Module, inputs: dict[str, Any], work: Callable[[Callable[..., Any], Any], Any]
) -> Any:
    """Call `model`, with `work` in place of the forward of the causal model below the wrappers.

    It is given that forward, and the inputs as the wrappers hand them on, and returns tensors in
    lists, tuples or dictionaries, with which the wrappers do what comes after.
    """
    causal = causal_model(model)
    forward = causal.forward
    return called_inside(causal, lambda **given: work(forward, given), lambda: model(**inputs))


def called_inside(module: nn.Module, work: Callable[..., Any], call: Callable[[], Any]) -> Any:
    """What `work` made in place of the forward of a module, between its hooks, during `call`.

    Mixed precision of FSDP casts results, but log-probabilities need their digits. Its hooks hang
    on the tensors before they are cast, so gradients of what was made pass them all the same.
    """
    made: list[Any] = []

    def inside(*args: Any, **kwargs: Any) -> Any:
        made.append(work(*args, **kwargs))
        return made[-1]

    with replaced_forward(module, inside):
        returned = call()

    def as_made(one: Any, other: Any) -> Any:
        return one if isinstance(one, Tensor) and one.dtype != other.dtype else other

    return tree_map(as_made, made[-1], returned)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Evaluation mode; the mode is restored even after an error."""
    was_training = model.training
    model.eval()
    try:
        yield model
    finally:
        model.train(was_training)


def current_autocast(device: torch.device) -> torch.dtype | None:
    """The precision of autocast, if it is on for a device."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def autocast_to(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Autocast in a precision; switched off for None."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


class _Reached(Exception):
    """A call has come to the decoder."""


@torch.no_grad()
def autocast_of(model: nn.Module) -> torch.dtype | None:
    """The precision of autocast in the decoder when `model` is called, whose weights are whole."""
    # Accelerate puts it around the forward of what it prepared; the call ends before the decoder.
    causal = causal_model(model)
    device = next(causal.parameters()).device
    found = [current_autocast(device)]

    def note(module: nn.Module, args: Any) -> None:
        found.append(current_autocast(device))
        raise _Reached

    with suppress(_Reached), causal.base_model.register_forward_pre_hook(note, prepend=True):
        unwrapped(model).forward(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device))
    return found[-1]


@contextmanager
def embeddings_in_place(model: nn.Module, wanted: bool = True) -> Iterator[None]:
    """Let gradients of plain embeddings be added to `.grad` as they arise, in forwards inside."""
    with ExitStack() as stack:
        for module in model.modules() if wanted and torch.is_grad_enabled() else ():
            plain = type(module) is nn.Embedding and "forward" not in vars(module)
            if plain and not (module.sparse or module.scale_grad_by_freq or module.max_norm):
                found = partial(look_up, weight=module.weight, padding=module.padding_idx)
                stack.enter_context(replaced_forward(module, found))
        yield


@dataclass
class Capture:
    """Hidden states a decoder returned, and the precision its head would have worked in."""

    hidden: Tensor | None = None  # (R, S, H)
    autocast: torch.dtype | None = None


@contextmanager
def capture_hidden(model: nn.Module) -> Iterator[Capture]:
    """Keep the last hidden states of the forward made inside, if it does not bypass its decoder."""
    found = Capture()

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        found.hidden = output[0]
        found.autocast = current_autocast(next(module.parameters()).device)

    with causal_model(model).base_model.register_forward_hook(keep):
        yield found


@contextmanager
def policy_for_inference(
    model: nn.Module, accelerator: Accelerator, at_once: bool = True
) -> Iterator[Any]:
    """Yield the bare policy in evaluation mode and under the autocast of training.

    Evaluation mode switches dropout and activation recomputation off, so that completions come
    from the policy itself. Sharded weights are gathered, at once or layer by layer (see
    `sharded.gathered`); then all ranks must enter and leave together, even after an error.
    """
    bare = accelerator.unwrap_model(model)
    with gathered(model, at_once), evaluating(bare), accelerator.autocast():
        yield bare

"""Find the causal language model inside wrappers; run it, capture its states, evaluate with it."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..ops.in_place import look_up
from ..ops.torch_internals import tree_map
from .sharded import gathered, replaced_forward, unwrapped

T = TypeVar("T")

# Attribute of a policy that holds its value model: trained with the policy, but not used by it.
VALUE_MODEL = "value_model"


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model` is wrapped by peft; does not import peft."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def causal_model(model: nn.Module) -> PreTrainedModel:
    """Return the model inside wrappers for distributed training, compilation and adapters."""
    bare = unwrapped(model)
    return bare.get_base_model() if is_peft_model(bare) else bare


def score_layer(model: nn.Module) -> nn.Module | None:
    """Return the layer with which a classifier scores the last token.

    None if the model has no such layer, or scores all tokens, as encoders do.
    """
    causal = causal_model(model)
    is_decoder = isinstance(causal, PreTrainedModel) and not causal.config.is_encoder_decoder
    return getattr(causal, "score", None) if is_decoder else None


def mentions(module_class: type[nn.Module], *names: str) -> bool:
    """Whether the forward of a module class uses a global name or attribute of these names."""
    code = getattr(inspect.unwrap(module_class.forward), "__code__", None)
    return not set(names).isdisjoint(getattr(code, "co_names", ()))


def run_inside(
    model: nn.Module,
    inputs: dict[str, Any],
    work: Callable[[Callable[..., Any], dict[str, Any]], T],
) -> T:
    """Call `model`, with `work` in place of the forward of the causal model inside the wrappers.

    `work` is called with that forward and the inputs that the wrappers pass. It returns tensors in
    lists, tuples or dictionaries, which the wrappers post-process as the result of a forward.
    """
    causal = causal_model(model)
    forward = causal.forward

    def run(**forward_inputs: Any) -> T:
        return work(forward, forward_inputs)

    return called_inside(causal, run, lambda: model(**inputs))


def called_inside(module: nn.Module, work: Callable[..., T], call: Callable[[], object]) -> T:
    """Run `call` with `work` as the forward of `module`, between its hooks; return its result.

    FSDP's mixed precision casts the result, but log-probabilities need float32. Its backward hooks
    are on the tensors before the cast, so gradients of the returned tensors pass through them, too.
    """
    results: list[T] = []

    def record(*args: Any, **kwargs: Any) -> T:
        results.append(work(*args, **kwargs))
        return results[-1]

    with replaced_forward(module, record):
        returned = call()

    def before_cast(original: object, returned: Any) -> object:
        if isinstance(original, Tensor) and original.dtype != returned.dtype:
            return original
        return returned

    restored: T = tree_map(before_cast, results[-1], returned)
    return restored


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Switch to evaluation mode inside; the mode is restored even after an error."""
    was_training = model.training
    model.eval()
    try:
        yield model
    finally:
        model.train(was_training)


def current_autocast(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast on a device; None if autocast is off."""
    device_type = device.type
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_to(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Autocast to a dtype; None switches autocast off."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


class _DecoderReached(Exception):
    """A forward has reached the decoder."""


@torch.no_grad()
def autocast_of(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of autocast in the decoder when `model`, which is not sharded, is called."""
    # Accelerate wraps the forward of a prepared model in autocast. The hook stops the call before
    # the decoder computes anything.
    causal = causal_model(model)
    device = next(causal.parameters()).device
    dtypes = [current_autocast(device)]

    def stop(module: nn.Module, args: object) -> None:
        dtypes.append(current_autocast(device))
        raise _DecoderReached

    with suppress(_DecoderReached), causal.base_model.register_forward_pre_hook(stop, prepend=True):
        unwrapped(model).forward(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device))
    return dtypes[-1]


@contextmanager
def embeddings_in_place(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """In forwards inside, let plain embeddings add their gradients to `.grad` as they arise."""
    with ExitStack() as stack:
        for module in model.modules() if enabled and torch.is_grad_enabled() else ():
            plain = type(module) is nn.Embedding and "forward" not in vars(module)
            if plain and not (module.sparse or module.scale_grad_by_freq or module.max_norm):
                forward = partial(look_up, weight=module.weight, padding=module.padding_idx)
                stack.enter_context(replaced_forward(module, forward))
        yield


@dataclass
class Capture:
    """Last hidden states of a decoder, and the autocast that the output head would run under."""

    hidden: Tensor | None = None  # (R, S, H)
    autocast: torch.dtype | None = None

    def states(self) -> Tensor:
        """Return the hidden states; a RuntimeError if there are none."""
        if self.hidden is None:
            raise RuntimeError("The decoder of the model returned no hidden states to read.")
        return self.hidden


@contextmanager
def capture_hidden(model: nn.Module) -> Iterator[Capture]:
    """Capture the last hidden states of the forward made inside, if it calls the decoder."""
    capture = Capture()

    def store(module: nn.Module, args: object, output: Any) -> None:
        capture.hidden = output[0]
        capture.autocast = current_autocast(next(module.parameters()).device)

    with causal_model(model).base_model.register_forward_hook(store):
        yield capture


@contextmanager
def policy_for_inference(
    model: nn.Module, accelerator: Accelerator, at_once: bool = True
) -> Iterator[Any]:
    """Yield the unwrapped policy in evaluation mode and under the autocast of training.

    Evaluation mode switches off dropout and activation checkpointing, so that completions come from
    the policy itself. Sharded weights are gathered, at once or layer by layer (see
    `sharded.gathered`); then all ranks must enter and leave together, even after an error.
    """
    bare = accelerator.unwrap_model(model)
    with gathered(model, at_once), evaluating(bare), accelerator.autocast():
        yield bare

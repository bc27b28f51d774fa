"""The output projection of a causal language model: log-probabilities from hidden states."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..distributed import RankError
from ..ops.linear_logprobs import LogitTransform, Tiling, default_chunk, linear_log_probs
from ..ops.logit_statistics import LogitStatistic
from ..ops.logprobs import token_scores
from ..ops.oom import is_out_of_memory
from ..ops.torch_internals import forward_hooks
from .causality import PROBES, NotCausalError, check_causal
from .sharded import is_sharded, unwrapped
from .unwrap import autocast_to, called_inside, capture_hidden, causal_model, evaluating, run_inside

Run = Callable[[Tensor], Tensor]  # hidden states (m, H) to products or logits (m, V)
T = TypeVar("T")
logger = logging.get_logger(__name__)

# Rounding errors of the largest logit; four are 3 % in bfloat16.
ROUNDINGS = 64
ROUNDINGS_IN_HALF_PRECISION = 4


@dataclass(frozen=True)
class OutputHead:
    """Log-probabilities from hidden states by the output projection of a model."""

    # It is called if it has an adapter, quantization or hooks; otherwise its weight is read in
    # tiles.
    module: nn.Module
    transform: LogitTransform  # what the model does to the product, and the temperature
    vocabulary: int  # V
    chunk: int | None = None  # logits held at once; None: a measured default; 0: all at once
    # Whether the weight is sharded. The module is then called once for all tokens, which gathers
    # the weight; its hooks are those of the engine.
    sharded: bool = False
    in_place: bool = False  # see `Tiling`

    @property
    def is_plain(self) -> bool:
        """Whether the module computes the product with its weight, and nothing else."""
        if self._layer_class not in (nn.Linear, Float32Linear):
            return False
        return self.sharded or not any(forward_hooks(self.module))

    @property
    def _inner(self) -> nn.Module:
        return unwrapped(self.module)

    @property
    def _layer_class(self) -> type:
        layer_class = type(self._inner)
        if issubclass(layer_class, FSDPModule):  # `fully_shard` derives (FSDPModule, class) from it
            return layer_class.__mro__[2]
        return layer_class

    def where_whole(self, read: Callable[[Tensor, Run], T], hidden: Tensor) -> T:
        """Call `read(hidden, project)` where the weight is whole; `project` applies the module."""
        if not self.sharded:
            return read(hidden, self.module)
        # A sharded weight is whole inside a call of the module, so `read` replaces its forward.
        inner = self._inner
        project = inner.forward
        return called_inside(inner, lambda x: read(x, project), lambda: self.module(hidden))

    def logits(
        self, hidden: Tensor, autocast: torch.dtype | None, project: Run | None = None
    ) -> Tensor:
        """Logits (M, V), in float32 at least, of hidden states (M, H); `project` or the module."""
        if self._layer_class is nn.Linear and autocast is None:  # other modules cast themselves
            hidden = hidden.to(self._inner.weight.dtype)
        with autocast_to(hidden.device, autocast):
            products = (project or self.module)(hidden)
        wide = products.to(torch.promote_types(products.dtype, torch.float32))
        return self.transform.forward(wide.clone() if wide is products else wide)

    def scores(
        self,
        hidden: Tensor,
        ids: Tensor,
        autocast: torch.dtype | None = None,
        with_entropy: bool = False,
        statistic: LogitStatistic | None = None,
    ) -> Sequence[Tensor | None]:
        """Log-probabilities (M,) of ids (M,) after hidden states (M, H).

        Also returns, each (M,) or None: entropies, whether ids are the top prediction (both
        `with_entropy`), and the statistic.
        """
        if self.chunk == 0:
            logits = self.logits(hidden, autocast)
            values = None if statistic is None else statistic.compute(logits.detach(), ids)
            return *token_scores(logits, ids, with_entropy=with_entropy), values
        step = max(1, (self.chunk or default_chunk(hidden.device)) // self.vocabulary)

        def read(hidden: Tensor, project: Run) -> Sequence[Tensor | None]:
            run = partial(self.logits, autocast=autocast, project=project)
            values = None
            if statistic is not None:
                values = _chunked_statistic(statistic, run, hidden, ids, step)
            if self.is_plain:
                scores = self._tiled_log_probs(hidden, ids, autocast, with_entropy)
            else:
                run = run if self.sharded else partial(run, project=summing_in_float32(self.module))
                scores = chunked_log_probs(run, hidden, ids, step, with_entropy)
            return *scores, values

        return self.where_whole(read, hidden)

    def _tiled_log_probs(
        self, hidden: Tensor, ids: Tensor, autocast: torch.dtype | None, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        weight = self._inner.weight
        dtype = autocast or weight.dtype
        if self._layer_class is Float32Linear:
            dtype = torch.float32
        tiling = Tiling(self.transform, self.chunk, dtype, self.in_place and not self.sharded)
        return linear_log_probs(hidden, weight, ids, self._inner.bias, tiling, with_entropy)


@torch.no_grad()
def _chunked_statistic(
    statistic: LogitStatistic, run: Run, hidden: Tensor, ids: Tensor, step: int
) -> Tensor:
    # A statistic needs the whole vocabulary of a token, so chunks are of tokens.
    chunks = zip(hidden.split(step), ids.split(step), strict=True)
    return torch.cat([statistic.compute(run(states), targets) for states, targets in chunks])


# --- Output projections that must be called: with adapters, quantized weights or hooks ---


def chunked_log_probs(
    run: Run, hidden: Tensor, ids: Tensor, step: int, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Like `linear_log_probs`, but with logits (m, V) that `run` computes, `step` tokens at a time.

    They are recomputed in the backward pass, with the same random numbers.
    """

    def scores_of(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        # With autocast's cache, chunks would share one cast weight and sum gradients in its dtype.
        with torch.autocast(hidden.device.type, enabled=False, cache_enabled=False):
            return token_scores(run(hidden), ids, with_entropy=with_entropy)

    chunks = zip(hidden.split(step), ids.split(step), strict=True)
    scores = [checkpoint(scores_of, *chunk, use_reentrant=False) for chunk in chunks]
    logps, entropies, hits = zip(*scores, strict=True)
    if not with_entropy:
        return torch.cat(logps), None, None
    return torch.cat(logps), torch.cat(entropies), torch.cat(hits)


def summing_in_float32(module: nn.Module) -> Run:
    """Return a call of `module` that sums gradients over several calls in float32, rounded once."""
    # Autograd sums in the dtype of the parameter: in bfloat16, 160 chunks are 3 % off.
    sums = {
        name: (parameter.detach(), _GradientSum.apply(parameter))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and torch.finfo(parameter.dtype).bits < 32
    }

    def call(hidden: Tensor) -> Tensor:
        parameters = {name: _UseParameter.apply(*pair) for name, pair in sums.items()}
        return functional_call(module, parameters, (hidden,))

    return call if sums else module


class _GradientSum(torch.autograd.Function):
    """Sums gradients of a parameter in float32; the output takes no memory, and is never read."""

    @staticmethod
    def forward(ctx: FunctionCtx, parameter: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return parameter.new_zeros((), dtype=torch.float32).expand_as(parameter)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        return grad.to(ctx.dtype)


class _UseParameter(torch.autograd.Function):
    """One use of a parameter; its gradient goes to the sum instead."""

    @staticmethod
    def forward(ctx: FunctionCtx, parameter: Tensor, gradient_sum: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.float()


class Float32Linear(nn.Linear):
    """A linear layer that computes in float32 even inside autocast, with the weights of another.

    The weight (V, H) and bias (V,) of that layer become float32.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, "meta")
        linear.to(torch.float32)
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Project hidden states (..., H) to float32 logits (..., V)."""
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.float())


def cast_head_to_float32(model: PreTrainedModel) -> None:
    """Make the output projection of `model` compute in float32, outside of autocast.

    With tied weights the embedding becomes float32 too; its output is cast back, so the layers
    see the precision they were loaded in. There must be a projection, without an adapter.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError("cast_lm_head_to_fp32=True needs a model with an output projection.")
    if type(head) is not nn.Linear:
        raise ValueError(
            "cast_lm_head_to_fp32=True cannot be used with an adapter or quantization on the "
            "output projection: leave it out of target_modules and of what is quantized."
        )
    embedding = model.get_input_embeddings()
    dtype = head.weight.dtype
    tied = embedding.weight is head.weight
    float32_head = Float32Linear(head)
    model.set_output_embeddings(float32_head)
    if tied:
        embedding.weight = float32_head.weight
        embedding.register_forward_hook(lambda module, args, output: output.to(dtype))


@dataclass
class HeadFinder:
    """Finds the output head of a model, and which transform it applies to its logits.

    It tries the transforms that the configuration suggests, once for each class of models.
    """

    temperature: float  # divides the logits
    chunk: int | None = None  # of the head, see `OutputHead`
    in_place: bool = False  # of the head, see `OutputHead`
    _transforms: dict[type, LogitTransform | None] = field(default_factory=dict)

    def find(self, model: nn.Module) -> OutputHead | None:
        """Return the head of a causal model, or None, with a warning, if its logits are unknown.

        Raises a `NotCausalError` if the model is not causal.
        """
        causal = causal_model(model)
        model_class = type(causal)
        if model_class not in self._transforms:
            self._transforms[model_class] = self._search(model, causal)
        transform = self._transforms[model_class]
        if transform is None:
            return None
        return OutputHead(
            module=causal.get_output_embeddings(),
            transform=transform,
            vocabulary=causal.config.get_text_config().vocab_size,
            chunk=self.chunk,
            sharded=is_sharded(model),
            in_place=self.in_place,
        )

    @torch.no_grad()
    def _search(self, model: nn.Module, causal: PreTrainedModel) -> LogitTransform | None:
        """Return the transform that reproduces the model's logits of a few tokens."""
        reason = "its logits cannot be reproduced from its last hidden states"
        try:
            module = causal.get_output_embeddings()
            if module is not None and causal.base_model is not causal:
                products, logits = _sample(model, module)
                for transform in candidate_transforms(causal.config, self.temperature):
                    if _agree(transform.forward(products.clone()) * self.temperature, logits):
                        return transform
        # An unknown model may raise anything; it can be scored without a head.
        except Exception as error:
            if isinstance(error, RankError | NotCausalError) or is_out_of_memory(error):
                raise
            reason = f"the search for its output projection failed ({error})"
        logger.warning(
            f"{type(causal).__name__} holds all logits of its completions at once, and each "
            f"completion carries its own copy of the prompt, because {reason}. Results are "
            "the same, memory and time are not."
        )
        return None


def candidate_transforms(config: PretrainedConfig, temperature: float) -> Iterator[LogitTransform]:
    """Yield the transforms that a configuration may mean, the most likely first."""
    text = config.get_text_config()
    softcap = getattr(text, "final_logit_softcapping", None)
    scales = [getattr(text, "logit_scale", None), getattr(text, "lm_head_multiplier", None)]
    if divisor := getattr(text, "logits_scaling", None):
        scales += [1.0 / divisor, divisor]  # models disagree on what it means
    for scale in [*(float(scale) for scale in scales if scale), 1.0]:
        yield LogitTransform(temperature, scale, softcap)


def _sample(model: nn.Module, module: nn.Module) -> tuple[Tensor, Tensor]:
    """Run `PROBES`: what the output projection returned (T, V), and the model's logits (T, V)."""
    causal = causal_model(model)
    device = next(causal.parameters()).device
    inputs = {"input_ids": torch.tensor(PROBES, device=device)}
    projections: list[tuple[Tensor, Tensor]] = []  # (hidden states, products)

    # The model then computes its logits in float32, where half precision would hide errors.
    def record_in_float32(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        products = output.to(torch.promote_types(output.dtype, torch.float32))
        projections.append((args[0], products))
        return products.clone()

    def work(*_: object) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, enabled=False), capture_hidden(causal) as capture:
            # The forward of the class: that of the instance may be wrapped in autocast.
            logits = type(causal).forward(causal, **inputs, use_cache=False).logits
        check_causal(causal, logits)
        if capture.hidden is None:
            raise RuntimeError("its decoder returned no hidden states")
        return logits, capture.hidden

    with module.register_forward_hook(record_in_float32), evaluating(model):
        logits, hidden = run_inside(model, inputs, work) if is_sharded(model) else work()
    if len(projections) == 1:
        projected, products = projections[0]
        if torch.equal(projected, hidden.to(projected.dtype)):
            return products.flatten(0, 1), logits.flatten(0, 1)
    raise RuntimeError("it projects something other than its last hidden states")


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    """Whether logits differ only by rounding; the model may have rounded its own once more."""
    errors = ROUNDINGS if torch.finfo(theirs.dtype).bits > 16 else ROUNDINGS_IN_HALF_PRECISION
    bound = errors * torch.finfo(theirs.dtype).eps * theirs.abs().amax().clamp(min=1e-3)
    return bool((ours - theirs.to(ours.dtype)).abs().amax() <= bound)

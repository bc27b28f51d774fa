"""The output projection of a causal language model: log-probabilities from hidden states."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.utils import logging

from ..distributed import RankError
from ..ops.linear_logprobs import LogitTransform, Tiling, default_chunk, linear_log_probs
from ..ops.logit_statistics import LogitStatistic
from ..ops.logprobs import token_scores
from ..ops.matmul_precision import highest_matmul_precision
from ..ops.oom import is_out_of_memory
from ..torch_internals import forward_hooks
from .sharded import is_sharded, unwrapped
from .unwrap import autocast_to, called_inside, capture_hidden, causal_model, evaluating, run_inside

Run = Callable[[Tensor], Tensor]
logger = logging.get_logger(__name__)

PROBES = [[1, 2, 3, 4], [1, 2, 5, 6]]  # ids that begin alike
# Of the norm of logits, in single and in half precision; rounding is far below.
LARGEST_CHANGE = 5e-3
LARGEST_CHANGE_IN_HALF_PRECISION = 0.05
LARGEST_CHANGE_OF_DECODERS = 1e-4  # the same in full single precision
# Rounding errors of the largest logit; four are 3 % in bfloat16.
ROUNDINGS = 64
ROUNDINGS_IN_HALF_PRECISION = 4


@dataclass(frozen=True)
class OutputHead:
    """Log-probabilities from hidden states by the output projection of a model."""

    # With an adapter, quantization or hooks it is called, otherwise its weight is read in tiles.
    module: nn.Module
    transform: LogitTransform  # what the model does to the product, and the temperature
    vocabulary: int  # V
    chunk: int | None = None  # logits held at once; None: a measured default; 0: all at once
    # The module is called once for all tokens, which makes its weight whole; hooks on it are those
    # of the engine.
    sharded: bool = False
    in_place: bool = False  # see `Tiling`

    @property
    def is_plain(self) -> bool:
        """Whether the weight alone says what the module computes."""
        has_hooks = any(forward_hooks(self.module))
        return self._kind in (nn.Linear, Float32Linear) and (self.sharded or not has_hooks)

    @property
    def _inner(self) -> Any:
        return unwrapped(self.module)

    @property
    def _kind(self) -> type:
        kind = type(self._inner)  # or what `fully_shard` has derived from it
        return kind.__mro__[2] if issubclass(kind, FSDPModule) else kind

    def where_whole(self, read: Callable[[Tensor, Run], Any], hidden: Tensor) -> Any:
        """Call `read` with hidden states, and what projects them, where the weight is whole."""
        if not self.sharded:
            return read(hidden, self.module)
        # A weight in shards is so inside of a call of the module, which is made once.
        inner, whole = self._inner, self._inner.forward
        return called_inside(inner, lambda x: read(x, whole), lambda: self.module(hidden))

    def logits(
        self, hidden: Tensor, autocast: torch.dtype | None, project: Run | None = None
    ) -> Tensor:
        """Logits (M, V), in float32 at least, of hidden states (M, H); by `project` if given."""
        if self._kind is nn.Linear and autocast is None:  # other modules convert by themselves
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

        With entropies (M,) and which ids are likeliest (M,) if asked, and a statistic (M,) of the
        logits if one is given.
        """
        if self.chunk == 0:
            logits = self.logits(hidden, autocast)
            extra = None if statistic is None else statistic.compute(logits.detach(), ids)
            return *token_scores(logits, ids, with_entropy=with_entropy), extra
        step = max(1, (self.chunk or default_chunk(hidden.device)) // self.vocabulary)
        inner = self._inner

        def read(hidden: Tensor, project: Run) -> tuple[Tensor | None, ...]:
            run = partial(self.logits, autocast=autocast, project=project)
            extra = None if statistic is None else _compute(statistic, run, hidden, ids, step)
            if self.is_plain:
                weight, bias = inner.weight, inner.bias
                dtype = torch.float32 if self._kind is Float32Linear else autocast or weight.dtype
                in_place = self.in_place and not self.sharded
                tiling = Tiling(self.transform, self.chunk, dtype, in_place)
                scores = linear_log_probs(hidden, weight, ids, bias, tiling, with_entropy)
            else:
                run = run if self.sharded else partial(run, project=summing_in_float32(self.module))
                scores = chunked_log_probs(run, hidden, ids, step, with_entropy)
            return *scores, extra

        return self.where_whole(read, hidden)


@torch.no_grad()
def _compute(statistic: LogitStatistic, run: Run, hidden: Tensor, ids: Tensor, step: int) -> Tensor:
    # Statistics read the whole vocabulary, so the work is cut by tokens, not into tiles.
    chunks = zip(hidden.split(step), ids.split(step), strict=True)
    return torch.cat([statistic.compute(run(states), targets) for states, targets in chunks])


# --- Projections that must be called: adapters, quantized weights, hooks ---


def chunked_log_probs(
    run: Run, hidden: Tensor, ids: Tensor, step: int, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As `linear_log_probs`, but from logits (m, V) that `run` makes, `step` tokens at a time.

    They are computed again in the backward pass, with the same random numbers.
    """

    def piece(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        # A weight that is cast once for all chunks would sum their gradients in what it is cast to.
        with torch.autocast(hidden.device.type, enabled=False, cache_enabled=False):
            return token_scores(run(hidden), ids, with_entropy=with_entropy)

    pieces = zip(hidden.split(step), ids.split(step), strict=True)
    found = [checkpoint(piece, *part, use_reentrant=False) for part in pieces]
    logps, *others = zip(*found, strict=True)
    entropies, hits = (torch.cat(x) if with_entropy else None for x in others)
    return torch.cat(logps), entropies, hits


def summing_in_float32(module: nn.Module) -> Run:
    """A way to call `module` that adds gradients of several calls in float32, and rounds once."""
    # Autograd adds in the precision of parameters: in bfloat16, 160 chunks are 3 % off.
    halves = {
        name: (parameter.detach(), _Sum.apply(parameter))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and torch.finfo(parameter.dtype).bits < 32
    }

    def call(hidden: Tensor) -> Tensor:
        used = {name: _Use.apply(*pair) for name, pair in halves.items()}
        return functional_call(module, used, (hidden,))

    return call if halves else module


class _Sum(torch.autograd.Function):
    """Where gradients of a parameter are added: of its shape in float32, without taking memory."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return parameter.new_zeros((), dtype=torch.float32).expand_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(ctx.dtype)


class _Use(torch.autograd.Function):
    """A parameter whose gradient goes to its sum."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, total: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.float()


class Float32Linear(nn.Linear):
    """A linear layer that computes in float32 even inside autocast; shares the weights of another.

    Args:
        linear: the layer whose weight (V, H), and bias (V,) if it has one, become float32.
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


class NotCausalError(ValueError):
    """Tokens of a model see those that follow them, which they are to predict."""


def refuse_encoder(model: nn.Module) -> None:
    """Raise a `NotCausalError` if none of the attention of a model is causal, as in BERT.

    Where no layer says that it is, the logits of a few tokens decide, with a lower bound if a
    layer says that it is not. Models whose weights are sharded already are left to the same check
    before their first step.
    """
    causal = causal_model(model)
    modules = [module for module in causal.modules() if hasattr(module, "is_causal")]
    if any(module.is_causal for module in modules):
        return
    if is_sharded(model):
        return
    bound = LARGEST_CHANGE_OF_DECODERS if modules else LARGEST_CHANGE
    try:
        ids = torch.tensor(PROBES, device=next(causal.parameters()).device)
        with evaluating(model), torch.no_grad(), highest_matmul_precision():
            _check_causal(causal, causal(input_ids=ids, use_cache=False).logits, bound)
    except NotCausalError:
        raise
    except Exception:  # whatever a model that nobody has seen before may raise
        return


def _check_causal(causal: nn.Module, logits: Tensor, bound: float = LARGEST_CHANGE) -> None:
    """Compare the logits (2, T, V) of `PROBES` where nothing in front of them differs.

    `bound` is the largest change, as a share of their norm, in single precision.
    """
    if torch.finfo(logits.dtype).bits <= 16:
        bound = LARGEST_CHANGE_IN_HALF_PRECISION
    one, other = logits[:, 1].float()
    if (one - other).norm() > bound * one.norm():
        raise NotCausalError(
            f"{type(causal).__name__} is not causal: what follows a token changes the logits at "
            "that token, so it would see what it is to predict. Encoders cannot be trained here; "
            "use a model that continues text. If this one can be a decoder, as BERT can, load it "
            "with is_decoder=True in its configuration."
        )


@dataclass
class HeadFinder:
    """Finds out what a model does to its logits, by trying what its configuration suggests."""

    temperature: float  # divides the logits
    chunk: int | None = None  # of the head that is found, as `in_place`
    in_place: bool = False
    _known: dict[type, LogitTransform | None] = field(default_factory=dict)

    def find(self, model: nn.Module) -> OutputHead | None:
        """Return the head of a causal model, or None with a warning; else a `NotCausalError`."""
        causal = causal_model(model)
        kind = type(causal)
        if kind not in self._known:
            self._known[kind] = self._search(model, causal)
        transform = self._known[kind]
        if transform is None:
            return None
        module, size = causal.get_output_embeddings(), causal.config.get_text_config().vocab_size
        return OutputHead(module, transform, size, self.chunk, is_sharded(model), self.in_place)

    @torch.no_grad()
    def _search(self, model: nn.Module, causal: Any) -> LogitTransform | None:
        """Compare the logits of a few tokens with what each candidate makes of their products."""
        reason = "its logits cannot be reproduced from its last hidden states"
        try:
            module = causal.get_output_embeddings()
            if module is not None and causal.base_model is not causal:
                products, logits = _sample(model, module)
                for transform in candidate_transforms(causal.config, self.temperature):
                    if _agree(transform.forward(products.clone()) * self.temperature, logits):
                        return transform
        # Whatever a model that nobody has seen before may raise: it can be scored all the same.
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


def candidate_transforms(config: Any, temperature: float) -> Iterator[LogitTransform]:
    """Transforms that a configuration may mean, the most likely one first."""
    text = config.get_text_config()
    softcap = getattr(text, "final_logit_softcapping", None)
    scales = [getattr(text, "logit_scale", None), getattr(text, "lm_head_multiplier", None)]
    if divisor := getattr(text, "logits_scaling", None):
        scales += [1.0 / divisor, divisor]  # models disagree on what it means
    for scale in [*(float(scale) for scale in scales if scale), 1.0]:
        yield LogitTransform(temperature, scale, softcap)


def _sample(model: nn.Module, module: nn.Module) -> tuple[Tensor, Tensor]:
    """What the projection made of a few tokens (T, V), and the model's logits of them (T, V)."""
    causal = causal_model(model)
    device = next(causal.parameters()).device
    inputs = {"input_ids": torch.tensor(PROBES, device=device)}
    seen: list[tuple[Tensor, Tensor]] = []

    # Before the model goes on, so that half precision hides nothing.
    def widen(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.append((args[0], output.to(torch.promote_types(output.dtype, torch.float32))))
        return seen[-1][1].clone()

    def work(*_: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, enabled=False), capture_hidden(causal) as capture:
            # The class's own forward: an instance may be wrapped to autocast.
            logits = type(causal).forward(causal, **inputs, use_cache=False).logits
        _check_causal(causal, logits)
        if capture.hidden is None:
            raise RuntimeError("its decoder returned no hidden states")
        return logits, capture.hidden

    with module.register_forward_hook(widen), evaluating(model):
        logits, hidden = run_inside(model, inputs, work) if is_sharded(model) else work()
    if len(seen) != 1 or not torch.equal(seen[0][0], hidden.to(seen[0][0].dtype)):
        raise RuntimeError("it projects something other than its last hidden states")
    return seen[0][1].flatten(0, 1), logits.flatten(0, 1)


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    """Whether logits differ by rounding alone; a model may have rounded its own once more."""
    errors = ROUNDINGS if torch.finfo(theirs.dtype).bits > 16 else ROUNDINGS_IN_HALF_PRECISION
    bound = errors * torch.finfo(theirs.dtype).eps * theirs.abs().amax().clamp(min=1e-3)
    return bool((ours - theirs.to(ours.dtype)).abs().amax() <= bound)

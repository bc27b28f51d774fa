"""The two parts of a causal language model: the decoder, and the head that makes logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.linear_logprobs import LogitTransform, Tiling, default_chunk, linear_log_probs
from ..ops.logprobs import token_log_probs, token_statistics
from ..ops.support import Support
from .chunked_head import checkpointed_log_probs, module_log_probs
from .head import Float32Linear
from .reference import is_peft_model
from .sharded import is_sharded, original_class, replaced_forward, unwrapped

PROBE_TOKENS = 4
PROBE_TOLERANCE = 64  # rounding errors of the largest logit


def causal_model(model: nn.Module) -> Any:
    """The model below wrappers for distributed training, compilation and adapters."""
    bare = unwrapped(model)
    return bare.get_base_model() if is_peft_model(bare) else bare


def run_inside(
    model: nn.Module, inputs: dict[str, Any], work: Callable[[Callable[..., Any], Any], Any]
) -> Any:
    """Call `model`, with `work` in place of the forward of the causal model below the wrappers.

    The wrappers of distributed training and of adapters do their part before and after, on the
    result of `work` instead of the model's own.

    Args:
        inputs: keyword arguments.
        work: is given the forward that it replaces, and the inputs as the wrappers hand them on;
            returns a tuple.
    """
    causal = causal_model(model)
    forward = causal.forward
    made: list[Any] = []

    def inside(**given: Any) -> Any:
        made.append(work(forward, given))
        return made[-1]

    with replaced_forward(causal, inside):
        returned = model(**inputs)
    return as_made(made[-1], returned)


def as_made(made: Sequence[Any], returned: Sequence[Any]) -> Sequence[Any]:
    """Undo what mixed precision of FSDP does to results: log-probabilities need their digits.

    Its hooks hang on the tensors before they are cast, so gradients pass them all the same.
    """
    pairs = zip(made, returned, strict=True)
    return [one if isinstance(one, Tensor) and one.dtype != x.dtype else x for one, x in pairs]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Evaluation mode; the mode is restored even after an error."""
    was_training = model.training
    model.eval()
    try:
        yield model
    finally:
        model.train(was_training)


@dataclass
class Capture:
    """Hidden states a decoder returned, and the precision its head would have worked in."""

    hidden: Tensor | None = None  # (R, S, H)
    autocast: torch.dtype | None = None


@contextmanager
def capture_hidden(model: nn.Module) -> Iterator[Capture]:
    """Keep the last hidden states of the forward made inside, with their graph."""
    found = Capture()

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        found.hidden = output[0]
        device = output[0].device.type
        if torch.is_autocast_enabled(device):
            found.autocast = torch.get_autocast_dtype(device)

    handle = causal_model(model).base_model.register_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()


@dataclass(frozen=True)
class OutputHead:
    """Log-probabilities from hidden states by the output projection of a model.

    Args:
        module: the projection; with an adapter, quantization or hooks it is called, otherwise its
            weight is read in tiles.
        transform (`LogitTransform`): what the model does to the product, and the temperature.
        vocabulary (`int`): V.
        chunk (`int`, *optional*): logits held at once; None: a measured default; 0: all at once.
        sharded (`bool`): the module is called once for all tokens, which makes its weight whole;
            hooks on it are those of the engine.
    """

    module: nn.Module
    transform: LogitTransform
    vocabulary: int
    chunk: int | None = None
    sharded: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the weight alone says what the module computes."""
        hooks = self.module._forward_hooks or self.module._forward_pre_hooks
        return self._kind in (nn.Linear, Float32Linear) and (self.sharded or not hooks)

    @property
    def _kind(self) -> type:
        """The class of the module, before `fully_shard` put one of its own in front."""
        kind = type(self._inner)
        return original_class(kind) if self.sharded else kind

    @property
    def _inner(self) -> nn.Module:
        """The module below a wrapper of its own."""
        return unwrapped(self.module) if self.sharded else self.module

    def logits(self, hidden: Tensor, autocast: torch.dtype | None) -> Tensor:
        """Logits (M, V) of hidden states (M, H), in float32 at least."""
        return self._logits(self.module, hidden, autocast)

    def _logits(
        self, project: Callable[[Tensor], Tensor], hidden: Tensor, autocast: torch.dtype | None
    ) -> Tensor:
        with torch.autocast(hidden.device.type, dtype=autocast, enabled=autocast is not None):
            products = project(self._as_input(hidden, autocast))
        wide = products.to(torch.promote_types(products.dtype, torch.float32))
        return self.transform.forward(wide.clone() if wide is products else wide)

    def log_probs(
        self,
        hidden: Tensor,
        ids: Tensor,
        autocast: torch.dtype | None = None,
        with_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities (M,) of ids (M,) after hidden states (M, H), and entropies if asked.

        Args:
            autocast (`torch.dtype`, *optional*): precision of autocast in the model's forward.
        """
        return self.scores(hidden, ids, autocast, with_entropy)[:2]

    def scores(
        self,
        hidden: Tensor,
        ids: Tensor,
        autocast: torch.dtype | None = None,
        with_entropy: bool = False,
        support: Support | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As `log_probs`, and the logarithm of the mass (M,) of a support if one is given."""
        if self.chunk == 0:
            return scores_of_logits(self.logits(hidden, autocast), ids, with_entropy, support)
        if self.sharded:
            return self._sharded_scores(hidden, ids, autocast, with_entropy, support)
        run = partial(self._logits, self.module, autocast=autocast)
        mass = self._log_mass(run, hidden, ids, support)
        if self.is_plain:
            return *self._tiled_log_probs(hidden, ids, autocast, with_entropy), mass
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        step = self._step(hidden)
        return *module_log_probs(run, parameters, hidden, ids, step, with_entropy), mass

    @torch.no_grad()
    def _log_mass(
        self,
        run: Callable[[Tensor], Tensor],
        hidden: Tensor,
        ids: Tensor,
        support: Support | None,
    ) -> Tensor | None:
        """Filters look at the whole vocabulary at once, so this is by tokens, not by tiles."""
        if support is None:
            return None
        pieces = zip(hidden.split(step := self._step(hidden)), ids.split(step), strict=True)
        return torch.cat([support.log_mass(run(part), places) for part, places in pieces])

    def _step(self, hidden: Tensor) -> int:
        return max(1, (self.chunk or default_chunk(hidden.device)) // self.vocabulary)

    def _tiled_log_probs(
        self, hidden: Tensor, ids: Tensor, autocast: torch.dtype | None, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Read the weight, which must be whole, in tiles."""
        weight: Any = self._inner.weight
        bias: Any = self._inner.bias
        dtype = autocast or weight.dtype
        if self._kind is Float32Linear:
            dtype = torch.float32
        tiling = Tiling(self.transform, self.chunk, dtype)
        return linear_log_probs(hidden, weight, ids, bias, tiling, with_entropy)

    def _sharded_scores(
        self,
        hidden: Tensor,
        ids: Tensor,
        autocast: torch.dtype | None,
        with_entropy: bool,
        support: Support | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Call the module once, which makes its weight whole meanwhile."""
        run = partial(self._logits, self._inner.forward, autocast=autocast)
        made: list[tuple[Tensor, Tensor | None, Tensor | None]] = []

        def inside(hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
            if self.is_plain:
                found = self._tiled_log_probs(hidden, ids, autocast, with_entropy)
            else:
                found = checkpointed_log_probs(run, hidden, ids, self._step(hidden), with_entropy)
            made.append((*found, self._log_mass(run, hidden, ids, support)))
            return made[-1]

        with replaced_forward(self._inner, inside):
            returned = self.module(hidden)
        logps, entropies, mass = as_made(made[-1], returned)
        return logps, entropies, mass

    def _as_input(self, hidden: Tensor, autocast: torch.dtype | None) -> Tensor:
        """Hidden states in the dtype of a plain projection; the others convert by themselves."""
        plain = self._kind is nn.Linear and autocast is None
        weight: Any = self._inner.weight if plain else None
        return hidden.to(weight.dtype) if plain else hidden


def scores_of_logits(
    logits: Tensor, ids: Tensor, with_entropy: bool, support: Support | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What `OutputHead.scores` returns, from logits (M, V) at the temperature."""
    mass = None if support is None else support.log_mass(logits.detach(), ids)
    if with_entropy:
        return *token_statistics(logits, ids), mass
    return token_log_probs(logits, ids), None, mass


@dataclass
class HeadFinder:
    """Finds out what a model does to its logits, by trying what its configuration suggests.

    Args:
        temperature (`float`): divides the logits.
        chunk (`int`, *optional*): logits held at once; see `OutputHead`.
    """

    temperature: float
    chunk: int | None = None
    _known: dict[type, LogitTransform | None] = field(default_factory=dict)

    def find(self, model: nn.Module) -> OutputHead | None:
        """Return the head of a model, or None if its logits cannot be reproduced."""
        causal = causal_model(model)
        module = causal.get_output_embeddings()
        if module is None or causal.base_model is causal:
            return None
        kind = type(causal)
        sharded = is_sharded(model)
        if kind not in self._known:
            self._known[kind] = _probe(model if sharded else causal, module, self.temperature)
        transform = self._known[kind]
        if transform is None:
            return None
        return OutputHead(module, transform, _vocabulary(causal), self.chunk, sharded)


def candidate_transforms(config: Any, temperature: float) -> Iterator[LogitTransform]:
    """Transforms that a configuration may mean, the most likely one first."""
    text = config.get_text_config()
    softcap = getattr(text, "final_logit_softcapping", None)
    scales = [getattr(text, "logit_scale", None), getattr(text, "lm_head_multiplier", None)]
    if divisor := getattr(text, "logits_scaling", None):
        scales += [1.0 / divisor, divisor]  # models disagree on what it means
    for scale in [*(float(scale) for scale in scales if scale), 1.0]:
        yield LogitTransform(temperature, scale, softcap)


@torch.no_grad()
def _probe(model: nn.Module, module: nn.Module, temperature: float) -> LogitTransform | None:
    """Compare the logits of a few tokens with those of each candidate."""
    causal = causal_model(model)
    ids = torch.arange(PROBE_TOKENS, device=next(causal.parameters()).device)[None]
    if is_sharded(model):
        logits, hidden, project = _sharded_sample(model, module, ids)
    else:
        with evaluating(causal):
            logits, hidden = _sample(causal, ids)
        project = module
    for transform in candidate_transforms(causal.config, temperature):
        own = OutputHead(module, transform, _vocabulary(causal))._logits(project, hidden, None)
        if _agree(own * temperature, logits):
            return transform
    return None


def _sample(causal: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (T, V) and hidden states (T, H) of tokens (1, T), without autocast."""
    with torch.autocast(ids.device.type, enabled=False), capture_hidden(causal) as capture:
        # The class's own forward: an instance may be wrapped to autocast.
        logits = type(causal).forward(causal, input_ids=ids, use_cache=False).logits[0]
    return logits, torch.as_tensor(capture.hidden)[0]


def _sharded_sample(
    model: nn.Module, module: nn.Module, ids: Tensor
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """The same in one call of each module, and what the head made of the hidden states."""
    causal = causal_model(model)
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _, args, output: seen.extend((*args, output)))
    try:
        with evaluating(model):
            logits, hidden = run_inside(model, {"input_ids": ids}, lambda *_: _sample(causal, ids))
    finally:
        handle.remove()
    same = torch.equal(seen[0][0], hidden.to(seen[0].dtype))
    return logits, hidden, lambda _: seen[1][0] if same else torch.full_like(logits, torch.nan)


def _vocabulary(causal: Any) -> int:
    return int(causal.config.get_text_config().vocab_size)


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    precision = torch.finfo(theirs.dtype).eps
    bound = PROBE_TOLERANCE * precision * theirs.abs().amax().clamp(min=1e-3)
    return bool((ours - theirs.to(ours.dtype)).abs().amax() <= bound)

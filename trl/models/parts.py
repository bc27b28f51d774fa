"""The two parts of a causal language model: the decoder, and the head that makes logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from ..ops.linear_logprobs import LogitTransform, Tiling, default_chunk, linear_log_probs
from ..ops.logprobs import token_log_probs, token_statistics
from .chunked_head import module_log_probs
from .head import Float32Linear
from .reference import is_peft_model

PROBE_TOKENS = 4
PROBE_TOLERANCE = 64  # rounding errors of the largest logit


def causal_model(model: nn.Module) -> Any:
    """The model below wrappers for distributed training, compilation and adapters."""
    bare = extract_model_from_parallel(model, keep_torch_compile=False)
    return bare.get_base_model() if is_peft_model(bare) else bare


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
    """Keep the last hidden states of the forward made inside, with their graph.

    The forward goes through the wrapped model, so the hooks of distributed training work as usual.
    """
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
    """

    module: nn.Module
    transform: LogitTransform
    vocabulary: int
    chunk: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the weight alone says what the module computes."""
        hooks = self.module._forward_hooks or self.module._forward_pre_hooks
        return type(self.module) in (nn.Linear, Float32Linear) and not hooks

    def logits(self, hidden: Tensor, autocast: torch.dtype | None) -> Tensor:
        """Logits (M, V) of hidden states (M, H), in float32 at least."""
        with torch.autocast(hidden.device.type, dtype=autocast, enabled=autocast is not None):
            products = self.module(self._as_input(hidden, autocast))
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
        if self.chunk == 0:
            logits = self.logits(hidden, autocast)
            if with_entropy:
                return token_statistics(logits, ids)
            return token_log_probs(logits, ids), None
        if not self.is_plain:
            run = self._run(autocast)
            parameters = [p for p in self.module.parameters() if p.requires_grad]
            step = max(1, (self.chunk or default_chunk(hidden.device)) // self.vocabulary)
            return module_log_probs(run, parameters, hidden, ids, step, with_entropy)
        weight: Any = self.module.weight
        bias: Any = self.module.bias
        dtype = autocast or weight.dtype
        if type(self.module) is Float32Linear:
            dtype = torch.float32
        return linear_log_probs(
            hidden,
            weight,
            ids,
            bias,
            Tiling(self.transform, self.chunk, dtype),
            with_entropy,
        )

    def _run(self, autocast: torch.dtype | None) -> Callable[[Tensor], Tensor]:
        return lambda hidden: self.logits(hidden, autocast)

    def _as_input(self, hidden: Tensor, autocast: torch.dtype | None) -> Tensor:
        """Hidden states in the dtype of a plain projection; the others convert by themselves."""
        plain = type(self.module) is nn.Linear and autocast is None
        return hidden.to(self.module.weight.dtype) if plain else hidden


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
        if kind not in self._known:
            self._known[kind] = _probe(causal, module, self.temperature)
        transform = self._known[kind]
        if transform is None:
            return None
        return OutputHead(module, transform, _vocabulary(causal), self.chunk)


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
def _probe(causal: Any, module: nn.Module, temperature: float) -> LogitTransform | None:
    """Compare the logits of a few tokens with those of each candidate."""
    device = next(causal.parameters()).device
    ids = torch.arange(PROBE_TOKENS, device=device)[None]
    quiet = torch.autocast(device.type, enabled=False)
    with evaluating(causal), quiet, capture_hidden(causal) as capture:
        # The class's own forward: an instance may be wrapped to autocast.
        logits = type(causal).forward(causal, input_ids=ids, use_cache=False).logits[0]
        hidden = torch.as_tensor(capture.hidden)[0]
        for transform in candidate_transforms(causal.config, temperature):
            own = OutputHead(module, transform, _vocabulary(causal)).logits(hidden, None)
            if _agree(own * temperature, logits):
                return transform
    return None


def _vocabulary(causal: Any) -> int:
    return int(causal.config.get_text_config().vocab_size)


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    precision = torch.finfo(theirs.dtype).eps
    bound = PROBE_TOLERANCE * precision * theirs.abs().amax().clamp(min=1e-3)
    return bool((ours - theirs.to(ours.dtype)).abs().amax() <= bound)

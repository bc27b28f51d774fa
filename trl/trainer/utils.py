"""Helpers of training scripts, under the module name that they import."""

from torch import Tensor

from ..data.packing import remove_none_values as remove_none_values
from ..models.loading import disable_dropout_in_model as disable_dropout_in_model
from ..online.sampler import RepeatSampler as RepeatSampler
from ..ops.logprobs import token_scores
from .model_config import get_peft_config as get_peft_config
from .model_config import get_quantization_config as get_quantization_config


def selective_log_softmax(logits: Tensor, index: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities (...) of ids (...) under softmax(logits / temperature), logits (..., V)."""
    return token_scores(logits, index, temperature)[0]


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropies (...) in nats of softmax(logits), logits (..., V)."""
    entropies = token_scores(logits, logits.argmax(-1), with_entropy=True)[1]
    assert entropies is not None
    return entropies

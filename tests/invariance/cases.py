"""What the certificate is about: tiny models, one scripted rollout, and losses."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TESTS = Path(__file__).parents[1]
sys.path[:0] = [
    str(path) for path in (TESTS.parent, TESTS, TESTS / "trainer", TESTS / "invariance")
]

from tiny import SIZES, tiny_tokenizer  # noqa: E402

from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.online_dpo_trainer import OnlineDPOTrainer  # noqa: E402
from trl.trainer.ppo_trainer import PPOTrainer  # noqa: E402
from trl.trainer.rloo_trainer import RLOOTrainer  # noqa: E402

EOS = 1
GROUP = 4  # completions of a prompt
MOST_TOKENS = 16  # of a completion


# --- Models ---


@dataclass(frozen=True)
class Architecture:
    """A two-layer random model; its weights are large, so that attention and caps matter."""

    config: type
    model: type
    shares: bool = True  # whether it can compute a prompt once for its completions
    changes: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """Make the model in float32, always with the same weights."""
        large = {"initializer_range": 0.1, "tie_word_embeddings": False}
        torch.manual_seed(0)
        return self.model(self.config(**(SIZES | large | self.changes))).train()


CAPS = {"query_pre_attn_scalar": 8, "final_logit_softcapping": 1.0, "tie_word_embeddings": True}
MODELS = {
    "Llama": Architecture(LlamaConfig, LlamaForCausalLM),
    "Llama, tied head": Architecture(
        LlamaConfig, LlamaForCausalLM, changes={"tie_word_embeddings": True}
    ),
    "Qwen3": Architecture(Qwen3Config, Qwen3ForCausalLM),
    "Gemma2, soft-capped attention": Architecture(
        Gemma2Config, Gemma2ForCausalLM, changes=CAPS | {"attn_logit_softcapping": 0.5}
    ),
    "Gemma3, soft-capped logits": Architecture(
        Gemma3TextConfig, Gemma3ForCausalLM, changes=CAPS | {"sliding_window": 256}
    ),
    "Gemma3, window of 8": Architecture(
        Gemma3TextConfig, Gemma3ForCausalLM, changes=CAPS | {"sliding_window": 8}
    ),
    "Cohere, logit scale": Architecture(
        CohereConfig, CohereForCausalLM, changes={"logit_scale": 0.5, "tie_word_embeddings": True}
    ),
    "Granite, logits scaling": Architecture(
        GraniteConfig, GraniteForCausalLM, changes={"logits_scaling": 2.0}
    ),
    "Phi, head bias": Architecture(PhiConfig, PhiForCausalLM),
    "LFM2, convolutions": Architecture(
        Lfm2Config, Lfm2ForCausalLM, changes={"layer_types": ["conv", "full_attention"]}
    ),
}
# Those of them for which there are sequence classifiers, one for each kind of layer.
FEW = ("Llama", "Qwen3", "Gemma3, soft-capped logits", "Gemma3, window of 8")


def classifier(model: str) -> nn.Module:
    """A sequence classifier with one label, like a model but with weights of its own."""
    config = MODELS[model].build().config
    config.num_labels = 1
    torch.manual_seed(0)
    # Whole under ZeRO-3 too, which would divide it here and wait for all ranks.
    with patch("transformers.modeling_utils.is_deepspeed_zero3_enabled", lambda: False):
        return AutoModelForSequenceClassification.from_config(config)


# --- The rollout ---


@dataclass(frozen=True)
class Row:
    """One completion and its reward."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    reward: float


# The tokenizer knows no "é": it becomes the padding token, as a real token of the text.
TEXTS: dict[str, tuple[tuple[str, float], ...]] = {
    "2+3=": (("5", 1.0), ("5 apples é, ok", 0.25), ("", -0.5), ("6", 0.0)),
    # Completions that begin alike, that contain each other, and that are the same.
    "Name the sum of four and three, then stop.": (
        ("The sum is 7", 2.0),
        ("The sum is 70", -1.0),
        ("The sum", 0.5),
        ("The sum is 7", 2.0),
    ),
    # Equal rewards: every advantage is exactly 0.
    "éCount to three:": (("1 2 3", 1.0), ("one, two, three", 1.0), ("", 1.0), ("3", 1.0)),
    # Two rewards equal the mean of the others; one completion is cut off at the token limit.
    "ab é cd": (
        ("efgh", 0.0),
        ("Zz", 1.0),
        ("efghijklmnopqrstuvwxyzABCDEFGH", 2.0),
        ("efg", 1.0),
    ),
}
ORDERS = ((0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0))  # of the groups


@cache
def groups(single_zeros: bool = True) -> tuple[tuple[Row, ...], ...]:
    """The rollout, group by group.

    Args:
        single_zeros: False: advantages are 0 in a whole group or nowhere in it.
    """
    changed = {} if single_zeros else {"Zz": 1.5}
    return tuple(
        tuple(
            Row(encode(prompt), completion(text), changed.get(text, reward))
            for text, reward in rows
        )
        for prompt, rows in TEXTS.items()
    )


@cache
def encode(text: str) -> tuple[int, ...]:
    """Token ids of a text."""
    return tuple(tiny_tokenizer()(text)["input_ids"])


def completion(text: str) -> tuple[int, ...]:
    """A text and the end token, or as much of the text as is generated."""
    return (*encode(text), EOS)[:MOST_TOKENS]


def script(order: int, junk: bool, size: int = GROUP) -> Callable[[Sequence[int], int], list[int]]:
    """What a backend replays; `order` also turns the first `size` completions of a group round."""
    known = {rows[0].prompt: rows for rows in groups()}

    def replay(ids: Sequence[int], place: int) -> list[int]:
        written = known[tuple(ids)][(place + order) % size].completion
        ends = written[-1] == EOS
        return [*written, *([50, 60, EOS, 0, 70] if junk and ends else [])]

    return replay


class Reward:
    """Looks the reward of a row up by its tokens."""

    __name__ = "scripted_reward"

    def __init__(self, single_zeros: bool):
        rows = [row for group in groups(single_zeros) for row in group]
        self._known = {(row.prompt, row.completion): row.reward for row in rows}

    def __call__(
        self, prompts: list[str], completion_ids: list[list[int]], **others: Any
    ) -> list[float]:
        pairs = zip(prompts, completion_ids, strict=True)
        return [self._known[encode(prompt), tuple(ids)] for prompt, ids in pairs]


# --- Losses ---


@dataclass(frozen=True)
class Loss:
    """A trainer and its options."""

    trainer: type
    options: dict[str, Any] = field(default_factory=dict)
    second_pass: bool = False  # the gradient is taken after the weights have moved once
    learning_rate: float = 0.0  # of that move
    size: int = GROUP  # completions of a prompt: the first ones
    classifies: bool = False  # whether values are those of a classifier, not of a layer

    @property
    def family(self) -> str:
        """The name of the method."""
        name: str = self.trainer.method.name
        return f"{name}, value model" if self.classifies else name

    def option(self, name: str, default: Any = None) -> Any:
        """An option, for the reference."""
        return self.options.get(name, default)


OF_GROUPS = {  # whose credit is that of a completion among its siblings
    "rloo": Loss(RLOOTrainer),
    "rloo, KL": Loss(RLOOTrainer, {"beta": 0.1, "temperature": 0.7}),
    "rloo, second pass": Loss(RLOOTrainer, {}, True, 3e-4),
    "dapo": Loss(GRPOTrainer, {"loss_type": "dapo", "temperature": 0.7}),
    "dr_grpo": Loss(GRPOTrainer, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "grpo, KL": Loss(GRPOTrainer, {"loss_type": "grpo", "beta": 0.1}),
    "dapo, entropy bonus": Loss(
        GRPOTrainer, {"loss_type": "dapo", "entropy_coef": 0.05, "temperature": 0.7}
    ),
    "gspo, second pass": Loss(
        GRPOTrainer,
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        True,
        0.02,
    ),
}
OTHERS = {  # of pairs, and of tokens
    "online dpo": Loss(OnlineDPOTrainer, {"beta": 0.1, "temperature": 0.7}, size=2),
    "online dpo, ipo": Loss(
        OnlineDPOTrainer, {"beta": 0.2, "temperature": 1.0, "loss_type": "ipo"}, size=2
    ),
    "ppo": Loss(PPOTrainer, {"beta": 0.1, "temperature": 0.7, "num_ppo_epochs": 1}),
    "ppo, whitened rewards": Loss(
        PPOTrainer,
        {"beta": 0.0, "temperature": 1.0, "num_ppo_epochs": 1, "gamma": 0.9, "lam": 0.5}
        | {"entropy_coef": 0.05, "whiten_rewards": True},
    ),
    "ppo, second pass": Loss(
        PPOTrainer, {"beta": 0.0, "temperature": 1.0, "num_ppo_epochs": 2}, True, 0.02
    ),
    "ppo, value model": Loss(
        PPOTrainer,
        {"beta": 0.1, "kl_estimator": "k3", "temperature": 1.0, "num_ppo_epochs": 1}
        | {"vf_coef": 0.5},
        classifies=True,
    ),
}
# These compare rows or tokens of a whole round. First tokens of a prompt's completions have equal
# entropies, so shares are such that the threshold lies between unequal ones.
STATISTICS = {
    "dapo, top entropies": Loss(
        GRPOTrainer, {"loss_type": "dapo", "temperature": 0.7, "top_entropy_quantile": 0.39}
    ),
    "dapo, top entropies, second pass": Loss(
        GRPOTrainer,
        {"loss_type": "dapo", "temperature": 0.7, "top_entropy_quantile": 0.47},
        True,
        0.02,
    ),
    "dapo, off-policy mask, second pass": Loss(
        GRPOTrainer, {"loss_type": "dapo", "off_policy_mask_threshold": 0.01}, True, 0.02
    ),
    "dapo, scaled by the round": Loss(GRPOTrainer, {"loss_type": "dapo", "scale_rewards": "batch"}),
    "dapo, normalized, then added": Loss(
        GRPOTrainer, {"loss_type": "dapo", "multi_objective_aggregation": "normalize_then_sum"}
    ),
    "rloo, normalized": Loss(RLOOTrainer, {"normalize_advantages": True}),
}
LOSSES = OF_GROUPS | OTHERS | STATISTICS
REFERENCE_SCALE = 0.9  # the reference policy: the initial weights times this

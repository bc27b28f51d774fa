"""Where rewards come from: functions, coroutine functions, sequence classifiers, judges."""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..data.formats import text_of_parts
from ..distributed import without_zero3_init
from ..models.loaded_weights import check_one_label
from ..models.loading import load_config
from ..models.unwrap import causal_model, score_layer
from ..sources import check_model_name, is_cached, why_not_on_hub
from ..suggestions import did_you_mean
from ..types import RewardFunc

TRAINED = (
    "Use a model that was trained to give rewards: a sequence classifier with one label "
    "(AutoModelForSequenceClassification)."
)
REWARDS = {0: (1.0, 0.0), 1: (0.0, 1.0), -1: (None, None)}  # of a pair, by the judge's decision
# Loading options of the policy that reward models share.
SHARED_INIT_OPTIONS = ("dtype", "device_map", "trust_remote_code")


@dataclass(frozen=True)
class FunctionReward:
    """A callable of the user, whose rewards are a column of the reward table."""

    name: str  # of the column
    function: Callable[..., Any]  # returns one reward for each row
    weight: float | None = None  # None: that of `reward_weights`


@dataclass(frozen=True)
class ModelReward:
    """A sequence classifier, whose reward is its score at the last token of a completion."""

    name: str  # of the column
    model: nn.Module  # whole on every rank
    tokenizer: PreTrainedTokenizerBase  # its own
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # of every chat-template call
    weight: ClassVar[None] = None

    @torch.inference_mode()
    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        template_kwargs: Sequence[dict[str, Any] | None] | None = None,
    ) -> list[float]:
        """Score each completion with its prompt, strings or messages, in one forward pass."""
        rows = zip(prompts, completions, template_kwargs or [None] * len(prompts), strict=True)
        texts = [
            self._text(prompt, completion, self.template_kwargs | (row_kwargs or {}))
            for prompt, completion, row_kwargs in rows
        ]
        inputs = self.tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        device = next(self.model.parameters()).device
        ids = inputs["input_ids"].to(device)
        mask = inputs["attention_mask"].to(device)
        layer = score_layer(self.model)
        if layer is None:
            logits = self.model(input_ids=ids, attention_mask=mask).logits
        else:
            states = causal_model(self.model).base_model(input_ids=ids, attention_mask=mask)[0]
            # The model would take a text's last token for padding if it is the padding token.
            logits = layer(states[torch.arange(len(ids)), (mask.sum(1) - 1).clamp(min=0)])
        return logits[:, 0].float().tolist()

    def _text(self, prompt: Any, completion: Any, template_kwargs: dict[str, Any]) -> str:
        """Make one text of a prompt and its completion: strings, or lists of messages."""
        from ..data.encode import TextEncoder  # only conversations need it

        if isinstance(prompt, str):
            return prompt + completion
        messages = [*prompt, *completion]
        if prompt and completion and prompt[-1]["role"] == completion[0]["role"]:
            # The completion continues the last message of the prompt.
            content = text_of_parts(prompt[-1]["content"]) + (completion[0]["content"] or "")
            messages = [*prompt[:-1], completion[0] | {"content": content}, *completion[1:]]
        return TextEncoder(self.tokenizer).render_all([messages], [template_kwargs])[0]


RewardSource = FunctionReward | ModelReward


def resolve_rewards(
    reward_funcs: RewardFunc | Sequence[RewardFunc] | None,
    processing_classes: PreTrainedTokenizerBase
    | Sequence[PreTrainedTokenizerBase | None]
    | None = None,
    *,
    model_init_kwargs: dict[str, Any] | None = None,
    template_kwargs: Any = None,
    trust_remote_code: bool = False,
    of_environments: Sequence[Callable[..., Any]] = (),
) -> tuple[RewardSource, ...]:
    """Load the reward models, and give rewards unique names. No argument is modified.

    Models among `reward_funcs` take their tokenizers from `processing_classes`. Models given by
    name are loaded with some options of the policy: those of `model_init_kwargs` in
    `SHARED_INIT_OPTIONS`. Functions `of_environments` have weight 1.
    """
    functions = _listed(reward_funcs)
    if not functions and not of_environments:
        raise ValueError("reward_funcs is empty: give at least one reward function or model.")
    tokenizers = _tokenizers(processing_classes, len(functions))
    policy_options = model_init_kwargs or {}
    options = {name: policy_options[name] for name in SHARED_INIT_OPTIONS if name in policy_options}
    options.setdefault("trust_remote_code", trust_remote_code)
    sources: dict[str, RewardSource] = {}
    for index, function in enumerate([*functions, *of_environments]):
        name = _name(function, index)
        number = 1
        while name in sources:
            number += 1
            name = f"{_name(function, index)}_{number}"
        if isinstance(function, (str, nn.Module)):
            model, tokenizer = _model(name, function, tokenizers[index], options)
            sources[name] = ModelReward(name, model, tokenizer, template_kwargs or {})
        else:
            weight = None if index < len(functions) else 1.0
            sources[name] = FunctionReward(name, function, weight)
    return tuple(sources.values())


def _listed(values: object) -> list[Any]:
    """Return a list or tuple as a list, None as an empty one, another value as its only entry."""
    if values is None:
        return []
    return list(values) if isinstance(values, (list, tuple)) else [values]


def _tokenizers(processing_classes: object, count: int) -> list[PreTrainedTokenizerBase | None]:
    """Return the tokenizer of each reward; None for functions, and for models that bring theirs."""
    if processing_classes is None:
        return [None] * count
    tokenizers = _listed(processing_classes)
    if len(tokenizers) != count:
        raise ValueError(
            f"reward_processing_classes has length {len(tokenizers)}, and reward_funcs has length "
            f"{count}; give one for each, and None for those that are not models."
        )
    return tokenizers


def _name(function: object, index: int) -> str:
    """Return the name of a reward: of the function, or the last part of a model's path."""
    if isinstance(function, (str, nn.Module)):
        path = function if isinstance(function, str) else _path(function)
        return (path or type(function).__name__).rstrip("/").split("/")[-1]
    while isinstance(function, functools.partial):
        function = function.func
    if not callable(function):
        raise TypeError(
            f"reward_funcs[{index}] is {function!r:.60}: it must be callable, a model, or the "
            "name of a model."
        )
    return getattr(function, "__name__", type(function).__name__)


def _path(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "name_or_path", "")


def _model(
    name: str,
    model: str | nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    options: dict[str, Any],
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Return a reward model in evaluation mode, and a tokenizer that can pad.

    A model that is given by name is loaded with the `options`.
    """
    path = model if isinstance(model, str) else _path(model)
    if isinstance(model, str):
        model = _load(model, options)
    elif isinstance(model, PreTrainedModel) and model.can_generate():
        raise TypeError(
            f"reward_funcs: {name!r} is a {type(model).__name__}, which writes text and "
            f"gives no reward. {TRAINED}"
        )
    elif isinstance(model, PreTrainedModel):
        check_one_label(name, model.config, [type(model).__name__])
    if tokenizer is None:
        if not path:
            raise ValueError(
                f"The reward model {name!r} does not say where it was loaded from: pass its "
                "tokenizer in reward_processing_classes."
            )
        trust = options["trust_remote_code"]
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    if tokenizer.pad_token is None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    if isinstance(model, PreTrainedModel):
        model.config.pad_token_id = tokenizer.pad_token_id
    return model.eval(), tokenizer


def _load(path: str, options: dict[str, Any]) -> nn.Module:
    """Load a sequence classifier, and check that all of its weights were trained."""
    _check_exists(path)
    config = load_config(path, trust_remote_code=options["trust_remote_code"])
    check_one_label(path, config)
    with without_zero3_init():
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=1, output_loading_info=True, **options
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(
            f"The reward model {path!r} has no weights for {', '.join(missing[:3])}: its "
            f"rewards would be random. {TRAINED}"
        )
    return model


def _check_exists(name: str) -> None:
    """Raise a ValueError if a model is neither on disk nor on the hub, which is asked once.

    Loading it would ask the hub repeatedly, for about a minute.
    """
    path = Path(name).expanduser()
    if path.exists() or is_cached(name):
        check_model_name(name)
        return
    reason = why_not_on_hub(name) if "/" in name else "there is no such folder"
    if reason is None:
        return
    parent = path.parent if path.parent.is_dir() else Path()
    folders = [folder.name for folder in parent.glob("*/")]
    from .. import rewards  # loaded only to name them

    hint = did_you_mean(path.name, [*rewards.__all__, *folders])
    raise ValueError(
        f"reward_funcs: {name!r} is not a reward model: {reason}.{hint} A reward function is "
        "passed itself, not its name."
    )


class PairwiseJudge(Protocol):
    """Compares two completions of each prompt."""

    def judge(self, prompts: list[Any], completions: list[list[Any]]) -> Sequence[int]:
        """Return the index of the better completion of each prompt: 0 or 1; -1: no decision.

        Prompts, and two completions of each, are strings or lists of messages.
        """
        ...


class JudgeReward:
    """A reward function: 1 for the better completion of a pair, 0 for the other; None if undecided.

    The completions of a pair are neighbors.
    """

    __name__ = "judge"

    def __init__(self, judge: PairwiseJudge):
        if not callable(getattr(judge, "judge", None)):
            raise TypeError(f"judge must be an object with a method 'judge', not {judge!r:.80}.")
        self._judge = judge

    def __call__(
        self, prompts: list[Any], completions: list[Any], **columns: object
    ) -> list[float | None]:
        """Reward completions; other columns of the dataset are not used."""
        pairs = [list(pair) for pair in zip(completions[::2], completions[1::2], strict=True)]
        decisions = [int(decision) for decision in self._judge.judge(prompts[::2], pairs)]
        if len(decisions) != len(pairs):
            raise ValueError(f"the judge decided on {len(decisions)} of {len(pairs)} pairs")
        for decision in decisions:
            if decision not in REWARDS:
                raise ValueError(f"the judge returned {decision}; it must return 0, 1 or -1")
        return [reward for decision in decisions for reward in REWARDS[decision]]

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

TRAINED = (
    "Use a model that was trained to give rewards: a sequence classifier with one label "
    "(AutoModelForSequenceClassification)."
)
REWARDS = {0: (1.0, 0.0), 1: (0.0, 1.0), -1: (None, None)}  # of a pair, by the judge's decision
# What of the policy's loading options also makes sense for a reward model.
SHARED_INIT_OPTIONS = ("dtype", "device_map", "trust_remote_code")


@dataclass(frozen=True)
class FunctionReward:
    """A user's callable: one column of the reward table."""

    name: str  # of the column
    function: Callable[..., Any]  # returns one reward for each row
    weight: float | None = None  # None: that of `reward_weights`


@dataclass(frozen=True)
class ModelReward:
    """A sequence classifier: its score of prompt and completion, read at the last token."""

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
        known = self.template_kwargs
        texts = [self._text(prompt, text, known | (more or {})) for prompt, text, more in rows]
        inputs = self.tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        device = next(self.model.parameters()).device
        ids, mask = inputs["input_ids"].to(device), inputs["attention_mask"].to(device)
        layer = score_layer(self.model)
        if layer is None:
            logits = self.model(input_ids=ids, attention_mask=mask).logits
        else:
            states = causal_model(self.model).base_model(input_ids=ids, attention_mask=mask)[0]
            # The model itself looks for padding by its id, which may also end the text.
            logits = layer(states[torch.arange(len(ids)), (mask.sum(1) - 1).clamp(min=0)])
        return logits[:, 0].float().tolist()

    def _text(self, prompt: Any, completion: Any, template_kwargs: dict[str, Any]) -> str:
        from ..data.encode import TextEncoder  # which conversations alone need

        if isinstance(prompt, str):
            return prompt + completion
        messages = [*prompt, *completion]
        if prompt and completion and prompt[-1]["role"] == completion[0]["role"]:
            # The prompt began a reply that the completion goes on with.
            begun = text_of_parts(prompt[-1]["content"]) + (completion[0]["content"] or "")
            messages = [*prompt[:-1], completion[0] | {"content": begun}, *completion[1:]]
        return TextEncoder(self.tokenizer).render_all([messages], [template_kwargs])[0]


RewardSource = FunctionReward | ModelReward


def resolve_rewards(
    reward_funcs: Any,
    processing_classes: Any = None,
    *,
    model_init_kwargs: dict[str, Any] | None = None,
    template_kwargs: Any = None,
    trust_remote_code: bool = False,
    of_environments: Sequence[Callable[..., Any]] = (),
) -> tuple[RewardSource, ...]:
    """Resolve once what each reward is, under unique names. Nothing given is modified.

    Models among `reward_funcs` take their tokenizers from `processing_classes`; those given by name
    take some of the policy's loading options. Functions `of_environments` weigh 1.
    """
    functions = _listed(reward_funcs)
    if not functions and not of_environments:
        raise ValueError("reward_funcs is empty: give at least one reward function or model.")
    tokenizers = _tokenizers(processing_classes, len(functions))
    given = model_init_kwargs or {}
    options = {name: given[name] for name in SHARED_INIT_OPTIONS if name in given}
    options.setdefault("trust_remote_code", trust_remote_code)
    found: dict[str, RewardSource] = {}
    for place, function in enumerate([*functions, *of_environments]):
        name, number = _name(function, place), 1
        while name in found:
            number += 1
            name = f"{_name(function, place)}_{number}"
        if isinstance(function, (str, nn.Module)):
            model, tokenizer = _model(name, function, tokenizers[place], options)
            found[name] = ModelReward(name, model, tokenizer, template_kwargs or {})
        else:
            found[name] = FunctionReward(name, function, None if place < len(functions) else 1.0)
    return tuple(found.values())


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _tokenizers(given: Any, count: int) -> list[Any]:
    tokenizers = [None] * count if given is None else _listed(given)
    if len(tokenizers) != count:
        raise ValueError(
            f"reward_processing_classes has length {len(tokenizers)}, and reward_funcs has length "
            f"{count}; give one for each, and None for those that are not models."
        )
    return tokenizers


def _name(function: Any, place: int) -> str:
    if isinstance(function, (str, nn.Module)):
        path = function if isinstance(function, str) else _path(function)
        return (path or type(function).__name__).rstrip("/").split("/")[-1]
    while isinstance(function, functools.partial):
        function = function.func
    if not callable(function):
        raise TypeError(
            f"reward_funcs[{place}] is {function!r:.60}: it must be callable, a model, or the "
            "name of a model."
        )
    return getattr(function, "__name__", type(function).__name__)


def _path(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "name_or_path", "")


def _model(
    name: str, given: str | nn.Module, tokenizer: Any, options: dict[str, Any]
) -> tuple[nn.Module, Any]:
    """A reward model in evaluation mode, and its tokenizer, which can pad."""
    model: Any = given
    if isinstance(given, str):
        _check_exists(given)
        config = load_config(given, trust_remote_code=options["trust_remote_code"])
        check_one_label(given, config)
        with without_zero3_init():
            model, info = AutoModelForSequenceClassification.from_pretrained(
                given, num_labels=1, output_loading_info=True, **options
            )
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(
                f"The reward model {given!r} has no weights for {', '.join(missing[:3])}: its "
                f"rewards would be random. {TRAINED}"
            )
    elif isinstance(given, PreTrainedModel) and given.can_generate():
        raise TypeError(
            f"reward_funcs: {name!r} is a {type(given).__name__}, which writes text and "
            f"gives no reward. {TRAINED}"
        )
    elif isinstance(given, PreTrainedModel):
        check_one_label(name, given.config, [type(given).__name__])
    if tokenizer is None:
        path = given if isinstance(given, str) else _path(given)
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


def _check_exists(name: str) -> None:
    """Ask the hub once for what is not here; loading would ask again and again for a minute."""
    path = Path(name).expanduser()
    if path.exists() or is_cached(name):
        check_model_name(name)
        return
    reason = why_not_on_hub(name) if "/" in name else "there is no such folder"
    if reason is None:
        return
    beside = path.parent if path.parent.is_dir() else Path()
    folders = [place.name for place in beside.glob("*/")]
    from .. import rewards  # loaded only to name them

    hint = did_you_mean(path.name, [*rewards.__all__, *folders])
    raise ValueError(
        f"reward_funcs: {name!r} is not a reward model: {reason}.{hint} A reward function is "
        "passed itself, not its name."
    )


class PairwiseJudge(Protocol):
    """Compares two completions of each prompt."""

    def judge(self, prompts: list[Any], completions: list[list[Any]]) -> Sequence[int]:
        """Return the place of the better completion of each prompt: 0 or 1; -1: no decision.

        Prompts, and two completions of each, are strings or lists of messages.
        """
        ...


class JudgeReward:
    """Gives 1 to the better of two neighbors and 0 to the other; None where neither is."""

    __name__ = "judge"

    def __init__(self, judge: PairwiseJudge):
        if not callable(getattr(judge, "judge", None)):
            raise TypeError(f"judge must be an object with a method 'judge', not {judge!r:.80}.")
        self._judge = judge

    def __call__(
        self, prompts: list[Any], completions: list[Any], **others: Any
    ) -> list[float | None]:
        """Reward completions, those of a prompt next to each other."""
        pairs = [list(pair) for pair in zip(completions[::2], completions[1::2], strict=True)]
        places = [int(place) for place in self._judge.judge(prompts[::2], pairs)]
        if len(places) != len(pairs):
            raise ValueError(f"the judge decided on {len(places)} of {len(pairs)} pairs")
        for place in places:
            if place not in REWARDS:
                raise ValueError(f"the judge returned {place}; it must return 0, 1 or -1")
        return [reward for place in places for reward in REWARDS[place]]

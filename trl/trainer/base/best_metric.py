"""Checking at the start that evaluations will log the metric that decides which model is best."""

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from transformers import TrainingArguments
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Names of what is logged, without the prefix eval_.
EVERY_EVALUATION = frozenset(
    {
        "aux_loss",
        "loss",
        "model_preparation_time",  # before training alone
        "num_tokens",
        "runtime",
        "samples_per_second",
        "steps_per_second",
    }
)
TOKENS = frozenset({"entropy", "mean_token_accuracy"})
SIDES = frozenset(
    f"{kind}/{side}" for kind in ("logits", "logps", "rewards") for side in ("chosen", "rejected")
)
COMPLETIONS = frozenset(
    {
        *(f"completions/{kind}_length" for kind in ("mean", "min", "max")),
        *(f"completions/{kind}_terminated_length" for kind in ("mean", "min", "max")),
        "completions/clipped_ratio",
        "entropy",
        "frac_groups_without_baseline",
        "frac_reward_zero_std",
        "reward",
        "reward_std",
        "tools/call_frequency",
        "tools/failure_frequency",
    }
)
CLIPPING = frozenset(
    f"clip_ratio/{name}" for name in ("high_max", "high_mean", "low_mean", "low_min", "region_mean")
)
SAMPLING = frozenset(
    f"sampling/{name}"
    for name in (
        "frac_out_of_bounds",
        "importance_sampling_ratio/max",
        "importance_sampling_ratio/mean",
        "importance_sampling_ratio/min",
        "kept_mass",
        "replayed_logp_difference/max",
        "replayed_logp_difference/mean",
        "sampling_logp_difference/max",
        "sampling_logp_difference/mean",
    )
)
TYPO = 0.8  # similarity of names, above which one is probably a misspelling of the other


def check_best_model_options(args: TrainingArguments) -> None:
    """Raise a ValueError if the options of a run do not let it find its best model."""
    evaluates = getattr(args.eval_strategy, "value", args.eval_strategy)
    saves = getattr(args.save_strategy, "value", args.save_strategy)
    if saves != "best" and not args.load_best_model_at_end:
        return
    if evaluates == "no":
        needing = "save_strategy='best'" if saves == "best" else "load_best_model_at_end=True"
        wanted = "epoch" if saves == "epoch" else "steps"
        raise ValueError(
            f"{needing} needs evaluations: set eval_strategy={wanted!r}, and give an eval_dataset "
            "(--dataset_test_split)."
        )
    if args.load_best_model_at_end:
        _check_saves(saves, evaluates, args)
    elif args.metric_for_best_model is None:
        raise ValueError(
            "save_strategy='best' needs the metric that decides: set metric_for_best_model='loss', "
            "or another one that evaluations log."
        )


def _check_saves(saves: str, evaluates: str, args: TrainingArguments) -> None:
    """Each model that is evaluated must have a checkpoint."""
    if saves not in ("best", evaluates):
        raise ValueError(
            f"load_best_model_at_end=True needs a checkpoint of each evaluated model, but "
            f"save_strategy is {saves!r}: set save_strategy={evaluates!r}, or save_strategy='best'."
        )
    if saves == "steps":
        _check_multiple(args.save_steps, args.eval_steps or args.logging_steps)


def _check_multiple(save_steps: float, eval_steps: float) -> None:
    if min(save_steps, eval_steps) >= 1 and save_steps % eval_steps:
        fewer = save_steps // eval_steps * eval_steps
        legal = " or ".join(f"{steps:g}" for steps in (fewer, fewer + eval_steps) if steps)
        raise ValueError(
            f"load_best_model_at_end=True needs a checkpoint of each evaluated model: "
            f"save_steps={save_steps:g} is not a multiple of the {eval_steps:g} steps between "
            f"evaluations. Nearest legal: save_steps={legal}."
        )


def reward_metrics(names: Iterable[str]) -> frozenset[str]:
    """What is logged of each of several rewards."""
    return frozenset(f"rewards/{name}/{kind}" for name in names for kind in ("mean", "std"))


class BestMetricCheck:
    """The part of a trainer that knows the names of what its evaluations log."""

    # May be patterns, such as loss/*.
    evaluation_metrics: ClassVar[frozenset[str]] = EVERY_EVALUATION
    args: Any
    eval_dataset: Any
    callback_handler: Any

    def metric_names(self) -> frozenset[str]:
        """Those of this trainer, with what only an instance knows."""
        return self.evaluation_metrics

    def may_log_own_metrics(self) -> bool:
        """Whether a subclass, a callback or another function of the user may log metrics."""
        kinds = [type(part) for part in (self, *self.callback_handler.callbacks)]
        return any(not kind.__module__.startswith(("trl.", "transformers.")) for kind in kinds)

    def check_settings(self) -> None:
        """Raise a ValueError for an option that would fail only at the first evaluation.

        Where others may log metrics, only a name that is almost a known one is an error.
        """
        wanted = self.args.metric_for_best_model
        if wanted is None or self.args.eval_strategy == "no":
            return
        names = self._logged_names()
        full_name = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
        if any(fnmatchcase(full_name, name) for name in names):
            return
        # Without the prefix, which all of them share.
        bare_names = [name.removeprefix("eval_") for name in names]
        hint = f" Evaluations log {', '.join(names)}."
        if closest := get_close_matches(full_name.removeprefix("eval_"), bare_names, n=1):
            hint = f" Did you mean eval_{closest[0]}?"
        message = f"metric_for_best_model={wanted!r} is not logged by evaluations.{hint}"
        is_typo = get_close_matches(full_name, names, cutoff=TYPO)
        if is_typo or not self.may_log_own_metrics():
            raise ValueError(message)
        logger.warning(f"{message} If nothing else logs it, the first evaluation will fail.")

    def _logged_names(self) -> list[str]:
        """The metrics as they are logged, of each evaluation set if there are several."""
        sets = self.eval_dataset if isinstance(self.eval_dataset, dict) else [""]
        prefixes = [f"eval_{name}_" if name else "eval_" for name in sets]
        return [prefix + name for prefix in prefixes for name in sorted(self.metric_names())]

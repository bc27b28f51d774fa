"""Methods that subclasses override, of Hugging Face TRL or earlier versions, and nothing calls.

A script that defines one of them would train as if it had not, so it is warned of when the class is
made. Each name comes with what does the same here.
"""

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

ONLINE_LOSS = "override `loss(scores, batch)`"
CREDIT = "override `credit(step)`"
GENERATE = "override `generate(prompts, mode)`, or pass `rollout_func`"
LOSS = "override `loss(scores, batch)`"
SCORE = "override `score(model, batch)`"
TAKE = "override `take_step(inputs, mode)`"
NEEDS = "override `make_algorithm()`, and return an algorithm whose property `needs` says it"
PREPARE_DATASET = "override `prepare_dataset(dataset, encoder, args, mode)`"
REFERENCE = "pass `ref_model`, or override `annotate(step)`"
ADAPTER = "pass `peft_config`, or a model that has an adapter"

# Of trainers that generate.
ONLINE = {
    "_calculate_rewards": f"pass `reward_funcs`, or {CREDIT}",
    "_compute_loss": ONLINE_LOSS,
    "_forward": ONLINE_LOSS,
    "_generate": GENERATE,
    "_generate_and_score_completions": "override `collect(rows, mode)`, or, for advantages alone, "
    "`credit(step)`",
    "_generate_single_turn": GENERATE,
    "_get_eval_sampler": "order the dataset",
    "_get_last_hidden_state": ONLINE_LOSS,
    "_get_per_token_logps": ONLINE_LOSS,
    "_get_per_token_logps_and_entropies": ONLINE_LOSS,
    "_get_train_sampler": "order the dataset, and set `shuffle_dataset` to False",
    "_move_model_to_vllm": GENERATE,
    "_prepare_dataset": "change the dataset before it is passed",
    "_prepare_peft_model": ADAPTER,
    "_tool_call_loop": "pass `tools` or `rollout_func`",
    "compute_liger_loss": ONLINE_LOSS,
    # Hooks of earlier versions of this package.
    "clipped_losses": ONLINE_LOSS,
    "compares_entropies": NEEDS,
    "compute_advantages": CREDIT,
    "has_token_losses": NEEDS,
    "needs_entropy": NEEDS,
    "per_micro_batch": ONLINE_LOSS + ", which returns sums and totals",
    "prepare": TAKE,
    "ratio_level": NEEDS,
    "policy_loss": ONLINE_LOSS,
    "shape_rewards": CREDIT,
    "generate_completions": "add `LogCompletionsCallback`",
    "get_gamma_weights": ONLINE_LOSS,
    "get_high_entropy_mask": ONLINE_LOSS,
    "get_off_policy_mask": ONLINE_LOSS,
}
# Of trainers that learn from a dataset.
OFFLINE = {
    "_compute_loss": LOSS,
    "_get_eval_sampler": "override `get_eval_dataloader(eval_dataset)`",
    "_get_train_sampler": "override `get_train_dataloader()`",
    "_prepare_dataset": PREPARE_DATASET,
    "_prepare_non_packed_dataloader": PREPARE_DATASET,
    "_prepare_packed_dataloader": PREPARE_DATASET,
    "_prepare_peft_model": ADAPTER,
    "_set_signature_columns_if_needed": PREPARE_DATASET,
    "before_step": CREDIT,
    "loss_of": LOSS,
    "per_micro_batch": LOSS + ", which returns sums and totals",
    "prepare": TAKE,
    "process_row": PREPARE_DATASET,
    "rows_class": "override `collate(examples)`",
    "statistic": NEEDS,
    "tokenize_row": PREPARE_DATASET,
    "visualize_samples": "call `predict(test_dataset)`",
    "weigh": LOSS + ", which returns sums and totals",
}
# Of those that compare a policy with a reference, besides.
PREFERENCE = {
    "_compute_loss_liger": LOSS,
    "answer_logps": "override `make_algorithm()`, and return an algorithm with another "
    "`answer_logps`",
    "build_tokenized_answer": PREPARE_DATASET,
    "compute_ref_log_probs": REFERENCE,
    "compute_reference_log_probs": REFERENCE,
    "concatenated_forward": SCORE,
    "concatenated_inputs": SCORE,
    "dpo_loss": LOSS,
    "forward": SCORE,
    "frozen": REFERENCE,
    "generate_from_model_and_ref": "add `LogCompletionsCallback`",
    "get_batch_logps": SCORE,
    "get_batch_loss_metrics": LOSS,
    "kto_loss": LOSS,
    "null_ref_context": REFERENCE,
    "store_metrics": LOSS + ", which may add to `metrics`",
}


class OverrideCheck:
    """Warns of methods of a subclass that override nothing."""

    uncalled_methods: ClassVar[Mapping[str, str]] = MappingProxyType({})  # with what to do instead

    def __init_subclass__(cls, **options: Any) -> None:
        """Name the methods that the class, but none of its bases, defines in vain."""
        super().__init_subclass__(**options)
        inherited = [base for base in cls.__bases__ if issubclass(base, OverrideCheck)]
        advice = []
        for name, hook in cls.uncalled_methods.items():
            method = getattr(cls, name, None)
            is_new = all(getattr(base, name, None) is not method for base in inherited)
            if method is not None and is_new:
                advice.append(f"`{name}`: {hook}")
        if advice:
            warnings.warn(
                f"{cls.__name__} defines methods that are never called, so it trains as if they "
                f"were not there. Instead of {'; instead of '.join(advice)}. See "
                "docs/coming_from_trl.md.",
                stacklevel=2,
            )

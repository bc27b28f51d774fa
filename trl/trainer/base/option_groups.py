"""Options that trainers of every kind share, in groups that their configurations inherit."""

from __future__ import annotations

from dataclasses import dataclass

from .options import option


@dataclass
class LoopOptions:
    """What the loop does: numbers that are not finite, checkpoints, resuming."""

    non_finite: str = option(
        "raise",
        "What to do when a loss or gradient is NaN or infinite: stop, or skip that update.",
        choices=("raise", "skip"),
    )
    resume_with_changes: bool = option(
        False, "Resume from a checkpoint although settings differ from those of its run."
    )
    checkpoint_checksums: str = option(
        "sampled",
        "Take checksums of all bytes of checkpoints, or of samples of large files.",
        choices=("sampled", "all"),
    )


@dataclass
class PolicyOptions:
    """How the model that is trained is loaded and changed."""

    model_init_kwargs: dict | str | None = option(
        None, "Keyword arguments of from_pretrained when the model is given by name (JSON)."
    )
    trust_remote_code: bool = option(
        False, "Whether code shipped with a model or tokenizer may be executed."
    )
    disable_dropout: bool = option(False, "Set the probability of every dropout layer to zero.")
    router_aux_loss_coef: float | None = option(
        None, "Weight of the load-balancing loss of mixture-of-experts models. None: its config's."
    )
    cast_lm_head_to_fp32: bool = option(
        False, "Compute the output projection in float32, whatever the precision of the rest."
    )


@dataclass
class ReferenceOptions:
    """The reference policy, and whether it moves."""

    beta: float = option(
        0.0,
        "Coefficient of the KL penalty; 0 needs no reference policy.",
        ge=0,
        hint="0: no KL penalty",
    )
    sync_ref_model: bool = option(False, "Move the reference policy towards the policy.")
    ref_model_mixup_alpha: float = option(
        0.6, "Share of the policy in each reference update.", ge=0, le=1
    )
    ref_model_sync_steps: int = option(512, "Optimizer steps between two reference updates.", ge=1)


@dataclass
class MemoryOptions:
    """What saves memory, measures it, and makes do with less of it."""

    shared_prefix: bool = option(
        True, "Compute a prompt once for all its completions that are in one forward."
    )
    logits_chunk_size: int | None = option(
        None,
        "Logits (tokens x vocabulary) held at once. None: the device's default; 0: all.",
        ge=0,
    )
    empty_cache: str = option(
        "auto",
        "Return cached blocks to the device after inference; auto: when they are fragmented.",
        choices=("never", "auto", "always"),
    )
    log_memory: bool = option(
        True, "Log the peak memory of each phase, also to memory.jsonl in output_dir."
    )
    recover_from_oom: bool = option(
        True, "After running out of memory, go on with smaller pieces of the same data."
    )

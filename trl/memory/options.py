"""Options for memory: saving it, measuring it, and recovering when it runs out."""

from dataclasses import dataclass

from ..options import option


@dataclass
class MemoryOptions:
    """Saving memory, measuring it, and recovering when it runs out."""

    pad_to_multiple_of: int | str | None = option(
        "auto",
        "Pad rows to a multiple of this many tokens, for the few models that need padded rows.",
    )
    shared_prefix: bool = option(True, "Compute a prompt once for all its completions.")
    logits_chunk_size: int | None = option(
        None, "Logits (tokens x vocabulary) held at once. None: the device's default; 0: all.", ge=0
    )
    activation_offloading: bool = option(
        False, "Keep activations in host memory until the backward pass needs them."
    )
    max_tokens_per_piece: int | None = option(
        None,
        "Split micro-batches into chunks of at most this many tokens, each with its own backward "
        "pass; the gradient is the same. 0: do not split. None: 2,048 on a CPU (DPO, Reward: "
        "1,024) and 8,192 on other devices; trainers that generate do not split.",
        ge=0,
    )
    empty_cache: str = option(
        "auto",
        "Return cached blocks to the device after generation and scoring; auto: if fragmented.",
        choices=("never", "auto", "always"),
    )
    log_memory: bool = option(True, "Log the peak memory of each phase, also to memory.jsonl.")
    recover_from_oom: bool = option(True, "If memory runs out, continue with fewer rows at once.")

"""Which checkpoint a run resumes from, and whether its run had the settings of this one."""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.utils import logging

from ...distributed import Ranks
from ...json_files import json_values
from ...models.sharded import local_shard
from ...redaction import without_secrets
from .base_config import BaseConfig
from .checkpoint import checkpoints_in, clean_up, facts_of, find_fault

logger = logging.get_logger(__name__)

PROCESSES = "number of processes"
# Options that change where a run ends, what it shows and keeps, or how its memory is used, but
# not the mathematics of its steps.
FREE = {
    "activation_offloading",
    "batch_eval_metrics",
    "checkpoint_checksums",
    "ddp_timeout",
    "debug",
    "disable_tqdm",
    "ds3_gather_for_generation",
    "empty_cache",
    "enable_jit_checkpoint",
    "greater_is_better",
    "load_best_model_at_end",
    "local_rank",
    "logits_chunk_size",
    "max_steps",
    "max_tokens_per_piece",
    "metric_for_best_model",
    "num_completions_to_print",
    "num_generations_eval",
    "num_train_epochs",
    "output_dir",
    "per_device_eval_batch_size",
    "prediction_loss_only",
    "project",
    "push_to_hub",
    "recover_from_oom",
    "report_to",
    "restore_callback_states_from_checkpoint",
    "reward_dry_run",
    "reward_timeout",
    "run_name",
    "skip_memory_metrics",
    "torch_empty_cache_steps",
    "vllm_enable_sleep_mode",
    "vllm_gpu_memory_utilization",
    "vllm_probe_syncs",
    "vllm_sync_adapter_only",
    "vllm_tensor_parallel_size",
}
FREE_PREFIXES = (
    "activation_checkpointing",
    "dataloader_",
    "do_",
    "eval_",
    "generation_max_",
    "gradient_checkpointing",
    "hub_",
    "include_",
    "log_",
    "logging_",
    "resume_",
    "save_",
    "trackio_",
    "vllm_group_",
    "vllm_server_",
)

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SAMPLED_ROWS = 1000
_SAMPLED_VALUES = 64


def choose_checkpoint(
    wanted: str | bool | None, args: BaseConfig, settings: dict[str, Any], ranks: Ranks
) -> str | None:
    """Find the checkpoint to resume from, None if none is wanted; every rank must call this.

    `wanted` is True for the newest intact one in the output folder, or the path of one. If it is
    not there, or a rank does not find it, or its run had other `settings`, all ranks raise.
    """
    # The first rank alone reads all checkpoints; what it finds, or misses, holds for all ranks.
    chosen: Any = None
    with ranks.fail_together("looking for a checkpoint"):
        if ranks.rank == 0:
            clean_up(args.output_dir)
        if ranks.rank == 0 and wanted:
            chosen = _newest_intact(args.output_dir) if wanted is True else _named(Path(wanted))
            _compare(chosen, args, settings)
    chosen = ranks.gather_objects(chosen)[0]
    if args.local_process_index == 0:
        clean_up(args.output_dir)  # of a disk of its own; on that of rank 0 all is done
    # A process that finds nothing would begin anew while the others go on.
    with ranks.fail_together("looking for the checkpoint"):
        if chosen is not None and not (chosen / "trainer_state.json").is_file():
            raise ValueError(
                f"{chosen} cannot be resumed from: rank {ranks.rank} cannot find it. Put "
                "output_dir on a disk that all nodes share, or train with save_on_each_node=True."
            )
    return None if chosen is None else str(chosen)


def warn_of_earlier_run(folder: str) -> None:
    """Warn that a run that begins at the start will overwrite an earlier one."""
    if earlier := checkpoints_in(folder):
        logger.warning(
            f"{folder} has {earlier[0].name} of an earlier run, but this run begins at the start, "
            "and will write over it. To continue the earlier run, set "
            "resume_from_checkpoint=True; to keep both, choose another output_dir."
        )


def _newest_intact(folder: str) -> Path:
    problems: list[str] = []
    for checkpoint in checkpoints_in(folder):
        if (problem := _why_not(checkpoint)) is None:
            for problem_text in problems:
                logger.warning(f"{problem_text} Resuming from {checkpoint.name} instead.")
            return checkpoint
        problems.append(f"{checkpoint.name} cannot be resumed from: {problem}.")
    reason = " ".join(problems) or "There is no checkpoint there."
    raise ValueError(
        f"resume_from_checkpoint=True: nothing to resume in output_dir={folder!r}. {reason} "
        "Without the option, training begins at the start."
    )


def _named(checkpoint: Path) -> Path:
    option = f"resume_from_checkpoint={str(checkpoint)!r}"
    if not checkpoint.is_dir():
        raise ValueError(f"{option}: there is no such folder.")
    if (problem := _why_not(checkpoint)) is None:
        return checkpoint
    inside = checkpoints_in(checkpoint)
    siblings = [path for path in checkpoints_in(checkpoint.parent) if path != checkpoint]
    alternatives = inside or siblings
    nearby = next((str(path) for path in alternatives if _why_not(path) is None), None)
    advice = f" {nearby} is intact." if nearby else ""
    raise ValueError(f"{option} cannot be resumed from: {problem}.{advice}")


def _why_not(checkpoint: Path) -> str | None:
    fault = find_fault(checkpoint)
    if fault is None and (facts_of(checkpoint) or {}).get("weights_only"):
        return "it was saved with save_only_model=True, so it has no optimizer"
    return fault


def _compare(checkpoint: Path, args: BaseConfig, settings: dict[str, Any]) -> None:
    if (facts := facts_of(checkpoint)) is None:
        logger.warning(
            f"{checkpoint} was written by another program: its files have no checksums, and "
            "its settings cannot be compared with those of this run."
        )
        return
    if not (changes := differences(facts["settings"], settings)):
        return
    listed = "".join(f"\n  - {change}" for change in changes)
    message = f"{checkpoint} was written by a run with other settings:{listed}\n"
    written = facts["settings"].get(PROCESSES, settings[PROCESSES])
    if written != settings[PROCESSES] and args.deepspeed_plugin is not None:
        raise ValueError(
            f"{message}DeepSpeed splits optimizer states by the number of processes and cannot "
            f"split them anew: resume with --num_processes {written}, or begin a new run with the "
            "checkpoint as model_name_or_path."
        )
    if not args.resume_with_changes:
        raise ValueError(
            f"{message}Restore them, or accept the changes with resume_with_changes=True."
        )
    logger.warning(f"{checkpoint} is resumed with other settings:{listed}")


def describe_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the options that matter, as JSON values by name, without secrets."""
    return {
        name: json_values(json.loads(_json(value)))
        for name, value in without_secrets(args.to_dict()).items()
        if name not in FREE and not name.startswith(FREE_PREFIXES)
    }


def describe_dataset(dataset: Dataset | IterableDataset) -> dict[str, Any]:
    """Return the number of rows and a fingerprint of up to a thousand; of a stream, of one row."""
    if isinstance(dataset, IterableDataset):
        first: dict[str, Any] = next(iter(dataset), {})
        return {"train_dataset's first row (fingerprint)": _digest([_json(first)])}
    count = len(dataset)
    chosen = sorted({i * count // _SAMPLED_ROWS for i in range(_SAMPLED_ROWS)})
    rows = dataset.with_format("arrow")[chosen].to_pylist()  # as stored: nothing is decoded
    return {
        "train_dataset's number of rows": count,
        "train_dataset's contents (fingerprint)": _digest(map(_json, rows)),
    }


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Describe what is trained: the adapters, all shapes, and a fingerprint of frozen weights."""
    adapters = getattr(model, "peft_config", {}).values()
    adapter_texts = [
        f"{config.peft_type.value} adapter of rank {getattr(config, 'r', '-')}"
        for config in adapters
    ]
    weights = sorted(model.named_parameters())
    shapes = [f"{name} {tuple(getattr(p, 'ds_shape', p.shape))} {p.dtype}" for name, p in weights]
    frozen = {name: p for name, p in weights if not p.requires_grad}
    return {
        "what is trained": ", ".join(adapter_texts) or "the model itself",
        "the model's weights (names, shapes and types)": _digest(shapes),
        "the model's frozen weights (fingerprint)": fingerprint(frozen),
    }


@torch.no_grad()
def fingerprint(weights: dict[str, Tensor]) -> str:
    """A digest of some values of each tensor: equal for equal weights, cheap for large ones."""
    texts = []
    for name, weight in sorted(weights.items()):
        values = local_shard(weight).flatten()  # of a weight that is sharded, this rank's part
        step = max(1, values.numel() // _SAMPLED_VALUES)
        texts.append(f"{name} {values[::step].cpu().tolist()}")
    return _digest(texts)


def differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Describe each difference, in the order of names.

    Settings that only one of the two has, and secrets, are left out.
    """
    # Earlier releases wrote secrets into checkpoints, and infinity as JSON does not know it.
    before, now = (json_values(without_secrets(settings)) for settings in (saved, current))
    return [
        f"{name}: {_short(before[name])} in the checkpoint, {_short(value)} now"
        for name, value in sorted(now.items())
        if name in before and before[name] != value
    ]


def _json(value: object) -> str:
    """Return the same text for equal values: addresses of objects are left out."""
    return json.dumps(value, sort_keys=True, default=lambda other: _ADDRESS.sub("", str(other)))


def _digest(texts: Iterable[str]) -> str:
    whole = b"".join(text.encode("utf-8", "surrogatepass") + b"\0" for text in texts)
    return hashlib.sha256(whole).hexdigest()[:16]


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."

"""What a run's outcome depends on, to compare a checkpoint's run with the one that resumes it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

import torch
from datasets import IterableDataset
from torch import Tensor, nn

from ...models.sharded import local_shard

PROCESSES = "number of processes"
# Options that change where a run ends, what it shows and keeps, or how its memory is used, but
# not the mathematics of its steps.
FREE = {
    *("output_dir", "run_name", "project", "report_to", "disable_tqdm", "debug"),
    *("max_steps", "num_train_epochs", "do_train", "do_eval", "do_predict", "push_to_hub"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("resume_from_checkpoint", "resume_with_changes", "restore_callback_states_from_checkpoint"),
    *("local_rank", "ddp_timeout", "enable_jit_checkpoint", "skip_memory_metrics"),
    *("per_device_eval_batch_size", "num_generations_eval", "prediction_loss_only"),
    *("batch_eval_metrics", "include_for_metrics", "include_num_input_tokens_seen"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    *("activation_checkpointing", "activation_checkpointing_kwargs"),
    *(
        "checkpoint_checksums",
        "logits_chunk_size",
        "empty_cache",
        "torch_empty_cache_steps",
        "recover_from_oom",
    ),
    *("generation_max_rows", "generation_max_kv_gb", "ds3_gather_for_generation"),
    *("reward_timeout", "reward_dry_run", "num_completions_to_print"),
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout"),
    *("vllm_group_port", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode"),
    *("vllm_tensor_parallel_size", "vllm_probe_syncs", "vllm_sync_adapter_only"),
}
FREE_PREFIXES = ("logging_", "log_", "save_", "eval_", "hub_", "trackio_", "dataloader_")

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SAMPLED_ROWS = 1000
_SAMPLED_VALUES = 64


def describe_run(trainer: str, args: Any, dataset: Any, model: nn.Module) -> dict[str, Any]:
    """Collect the settings that a resumed run must share.

    Args:
        trainer (`str`): name of its class.
        args (`TrainingArguments`): options.
        dataset: that training draws from.
        model: that is trained, before anything wraps it.
    """
    return {
        "trainer": trainer,
        PROCESSES: args.world_size,
        **describe_options(args),
        **describe_dataset(dataset),
        **describe_model(model),
    }


def describe_options(args: Any) -> dict[str, Any]:
    """The options that matter, as JSON values by name.

    Args:
        args (`TrainingArguments`): all options.
    """
    return {
        name: _as_json(value)
        for name, value in args.to_dict().items()
        if name not in FREE and not name.startswith(FREE_PREFIXES)
    }


def describe_dataset(dataset: Any) -> dict[str, Any]:
    """The number of rows, and a fingerprint of up to a thousand of them.

    Args:
        dataset (`Dataset` or `IterableDataset`): of a stream, only the first row is read. Of items
            made of such a dataset, it is their attribute `rows`.
    """
    dataset = getattr(dataset, "rows", dataset)
    if isinstance(dataset, IterableDataset):
        first: dict[str, Any] = next(iter(dataset), {})
        return {"train_dataset's first row (fingerprint)": _digest([_text(first)])}
    count = len(dataset)
    chosen = sorted({i * count // _SAMPLED_ROWS for i in range(_SAMPLED_ROWS)})
    rows = dataset.with_format("arrow")[chosen].to_pylist()  # as stored: nothing is decoded
    return {
        "train_dataset's number of rows": count,
        "train_dataset's contents (fingerprint)": _digest(map(_text, rows)),
    }


def describe_model(model: nn.Module) -> dict[str, Any]:
    """The shapes of all weights, and a fingerprint of those that no checkpoint changes."""
    parameters = sorted(model.named_parameters())
    shapes = [
        f"{name} {tuple(getattr(p, 'ds_shape', p.shape))} {p.dtype}" for name, p in parameters
    ]
    frozen = {name: p for name, p in parameters if not p.requires_grad}
    return {
        "the model's weights (names, shapes and types)": _digest(shapes),
        "the model's frozen weights (fingerprint)": fingerprint(frozen),
    }


@torch.no_grad()
def fingerprint(weights: dict[str, Tensor]) -> str:
    """A digest of some values of each tensor: equal for equal weights, cheap for large ones."""

    def text(name: str, weight: Tensor) -> str:
        values = local_shard(weight).flatten()  # of a weight that is sharded, this rank's part
        step = max(1, values.numel() // _SAMPLED_VALUES)
        return f"{name} {values[::step].cpu().tolist()}"

    return _digest(text(name, weight) for name, weight in sorted(weights.items()))


def differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Name what differs; what only one of the two knows of does not count."""
    return [
        f"{name}: {_short(saved[name])} in the checkpoint, {_short(value)} now"
        for name, value in current.items()
        if name in saved and saved[name] != value
    ]


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=_without_address))


def _text(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, default=_without_address)


def _without_address(value: Any) -> str:
    return _ADDRESS.sub("", str(value))


def _digest(texts: Iterable[str]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return found.hexdigest()[:16]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."

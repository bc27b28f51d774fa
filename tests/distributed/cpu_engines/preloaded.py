"""Imported once, by the process that ranks are forked from: see `Job` in `engines.py`."""

import contextlib
import gc
import importlib

MODULES = (
    *("deepspeed", "peft", "bitsandbytes", "rounding", "online_runs", "trl.trainer.grpo_trainer"),
    *("accelerate.utils.fsdp_utils", "torch.distributed.checkpoint.state_dict"),
)

for name in MODULES:
    with contextlib.suppress(ImportError):  # a test says what it misses itself
        importlib.import_module(name)
gc.collect()
gc.freeze()  # otherwise each trainer of a rank has all of this looked through

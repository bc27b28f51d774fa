"""What each rank holds between updates and at one; `held_bytes.py ENGINE...`, run by `engines`."""

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from engines import finish, report, use
from tiny import tiny_model
from transformers import Trainer, TrainerCallback, TrainingArguments

SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 6, "head_dim": 16}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 320}
BUCKET = 30_000  # entries: buffers that are small, but not small enough to be overlooked
LOOKS, PAUSE = 5, 0.02  # seconds
ZERO = {"reduce_bucket_size": BUCKET, "stage3_param_persistence_threshold": 0}


def live_bytes():
    """Bytes of all tensors made since `gc.freeze()`; each storage counts once."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if torch.Tensor in type(x).__mro__]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    found = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type == "cpu" and not hasattr(local, "_local_tensor"):
            storage = local.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def pauses():
    """A few moments: a thread of gloo lets go of what it has sent only when it next runs.

    Nothing else changes meanwhile, so what is held for good is seen at each of them.
    """
    for _ in range(LOOKS):
        yield
        time.sleep(PAUSE)


class Record(TrainerCallback):
    """Bytes at some moments of an update."""

    def __init__(self):
        self.found = {}
        self.trainer = None

    def on_step_begin(self, *args, **kwargs):
        """DeepSpeed updates before the trainer's own callback: look before its step instead."""
        engine = self.trainer.model_wrapped
        step = getattr(engine, "step", None)
        if step is not None and "update" not in self.found:
            engine.step = lambda *a, **k: (self.look("update"), step(*a, **k))

    def on_substep_end(self, *args, **kwargs):
        self.look("waiting")

    def on_pre_optimizer_step(self, *args, **kwargs):
        if not hasattr(self.trainer.model_wrapped, "step"):
            self.look("update")

    def on_step_end(self, *args, **kwargs):
        self.look("rest")

    def look(self, moment):
        torch.distributed.barrier()  # what is being sent is held until it has arrived
        self.found[moment] = min(live_bytes() for _ in pauses())


def config_file(engine, folder):
    """Options of DeepSpeed that no option of accelerate stands for."""
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    options = auto | {"gradient_accumulation_steps": "auto", "zero_allow_untested_optimizer": True}
    path = Path(folder, "deepspeed.json")
    path.write_text(json.dumps(options | {"zero_optimization": ZERO | {"stage": int(engine[-1])}}))
    return {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}


def measure(engine, folder, accumulation):
    """Train two updates of a model from scratch."""
    use(engine)
    if engine.startswith("zero"):
        os.environ.update(config_file(engine, folder))
    gc.collect()
    gc.freeze()  # what there is already is not looked at
    record = Record()
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
        optim="adamw_torch",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        bf16=False,
    )
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 16
    trainer = Trainer(
        tiny_model("llama", **SHAPE),
        arguments,
        train_dataset=Dataset.from_list(rows),
        callbacks=[record],
    )
    record.trainer = trainer
    trainer.train()
    return record.found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        report({name: measure(name, folder, 2) for name in sys.argv[1:]})
    finish()

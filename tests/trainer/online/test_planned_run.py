"""The run of a configuration, as the memory plan takes it."""

from types import SimpleNamespace

import torch
from online_runs import config

from trl.memory.settings import RunSettings
from trl.trainer.online.planned_run import device_bytes, planned_run


def test_each_number_comes_from_its_option(tmp_path):
    args = config(
        tmp_path,
        per_device_train_batch_size=6,
        num_generations=3,
        gradient_accumulation_steps=4,
        steps_per_generation=2,
        num_iterations=5,
        max_completion_length=7,
        optim="adafactor",
        optim_args="scale_parameter=False",
        gradient_checkpointing=False,
        shared_prefix=False,
        logits_chunk_size=11,
        generation_max_rows=13,
        generation_max_kv_gb=0.5,
        ds3_gather_for_generation=False,
        beta=0.1,
    )
    assert planned_run(args, prompt=17, product_bytes=2, completion=8) == RunSettings(
        group_size=3,
        prompt=17,
        completion=8,
        micro_batch=6,
        slices=2,
        accumulation=4,
        passes=5,
        product_bytes=2,
        optimizer="adafactor",
        optimizer_args="scale_parameter=False",
        gradient_checkpointing=False,
        reference=True,
        scores_policy=True,
        shared_prefix=False,
        logits_chunk=11,
        generation_rows=13,
        generation_kv_gb=0.5,
        gathers=False,
    )
    assert planned_run(args, prompt=1).completion == 7


def test_the_memory_of_a_device(monkeypatch):
    sizes = {torch.device("cuda", 1): SimpleNamespace(total_memory=80 * 2**30)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", sizes.__getitem__)
    assert device_bytes(torch.device("cuda", 1)) == 80 * 2**30
    with open("/proc/meminfo", encoding="utf-8") as file:
        total = int(file.readline().split()[1])
    assert device_bytes(torch.device("cpu")) == 1024 * total

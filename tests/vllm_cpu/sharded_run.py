"""Run by two processes that divide the weights: trains two steps with an engine on each rank.

`sharded_run.py FOLDER KIND`: "whole" trains all weights; "apart" an adapter on a base model in 4
bits, and sends the adapter alone.
"""

import os
import sys
from pathlib import Path

import torch
from engines import finish, report
from online_runs import make_trainer
from shared_vllm import four_bits, policy_model


def options(folder, kind):
    if kind == "whole":
        return {"model": policy_model(), "learning_rate": 1e-2}
    found = four_bits(folder / f"base of {os.environ['RANK']}")
    found["quantization_config"].bnb_4bit_quant_storage = torch.float32  # so that it is divided
    return found | {"vllm_sync_adapter_only": True}


place = Path(sys.argv[1])
trainer = make_trainer(
    place,
    **options(place, sys.argv[2]),
    script=None,
    use_vllm=True,
    use_cpu=False,
    vllm_probe_syncs=1,
    max_steps=2,
    optim="adamw_torch",
    per_device_train_batch_size=4,
)
trainer.train()
report([entry["vllm/logp_gap"] for entry in trainer.state.log_history if "vllm/logp_gap" in entry])
finish()

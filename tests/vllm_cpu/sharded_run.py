"""Run by two processes that divide the weights: trains two steps with an engine on each rank."""

import sys
from pathlib import Path

from engines import finish, report
from online import make_trainer
from shared_vllm import policy_model

trainer = make_trainer(
    Path(sys.argv[1]),
    model=policy_model(),
    script=None,
    use_vllm=True,
    use_cpu=False,
    vllm_probe_syncs=1,
    max_steps=2,
    optim="adamw_torch",
    learning_rate=1e-2,
    per_device_train_batch_size=4,
)
trainer.train()
report([entry["vllm/logp_gap"] for entry in trainer.state.log_history if "vllm/logp_gap" in entry])
finish()

"""Run by two processes that train with servers, until one of these is killed."""

import sys
import time
from pathlib import Path

from engines import finish, report
from vllm_cpu.test_server_training import logged, trainer_of

from trl.generation.vllm.server.client import VLLMClient

folder, urls, file = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
trainer = trainer_of(
    folder,
    vllm_server_base_url=urls,
    vllm_server_timeout=60,
    use_cpu=False,
    max_steps=3,
    per_device_train_batch_size=8,
    num_generations=4,
)
served = []
pool = trainer.backend._pool
if pool is not None:
    for place, server in enumerate(pool.servers):
        ask = server.request_with_retries
        server.request_with_retries = lambda *a, place=place, ask=ask: (
            served.append(place) or ask(*a)
        )


def complete(*args):
    """Before the third generation: each step of the second server's model hangs from now on."""
    if trainer.state.global_step == 2 and pool is not None:
        file.touch()
        VLLMClient(urls.split(",")[1], 20.0).call_workers("trl_test_hang", str(file))
    return own_complete(*args)


own_complete = trainer.backend._complete
trainer.backend._complete = complete
started = error = None
try:
    started = time.monotonic()
    trainer.train()
except Exception as caught:
    error = caught
report(
    {
        "steps": trainer.state.global_step,
        "gaps": logged(trainer, "vllm/logp_gap"),
        "kind": type(error).__name__,
        "error": str(error),
        "seconds": time.monotonic() - started,
        "served": [served.count(0), served.count(1)],
    }
)
finish()

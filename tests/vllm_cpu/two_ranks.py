"""Run by two processes, which hold one engine together."""

import torch
from accelerate import Accelerator
from backend_contract import model_logps
from engines import finish, report
from shared_vllm import ForgetfulEngine, fresh_engine, model_policy, nudge, policy_model

from trl.distributed import RankError, Ranks
from trl.generation.base import Sampling
from trl.generation.vllm.backend import VLLMColocateBackend
from trl.generation.vllm.weight_verifier import WeightSyncError
from trl.types import Prompts

Q = "model.layers.0.self_attn.q_proj.weight"


class FaultyEngine(ForgetfulEngine):
    """Leaves one weight as it is, when told to."""

    faulty = False

    def load(self, name, weight):
        if not (self.faulty and name == Q):
            super().load(name, weight)


def main() -> None:
    ranks = Ranks(Accelerator(cpu=True))
    torch.manual_seed(ranks.rank)
    model = policy_model()
    llm = fresh_engine(model, ranks=ranks, tensor_parallel_size=2)._llm
    engine = FaultyEngine(llm, sleeps=True)
    found = VLLMColocateBackend(
        engine, model_policy(model, ranks=ranks), tensor_parallel=2, probe_syncs=1
    )
    # The first prompts, with which syncs are probed, differ in text and length.
    ids = [[20 + n for n in range(40 - 7 * ranks.rank)]] * 2 + [[30 + ranks.rank]] * 2
    seeds = tuple(4 * ranks.rank + n for n in range(4))
    prompts = Prompts(messages=["x"] * 4, token_ids=ids)
    written = []
    for step in range(2):
        found.sync_weights(step)
        drawn = found.generate(prompts, Sampling(max_tokens=8, seeds=seeds), 2)
        gaps = [
            (torch.tensor(logps) - model_logps(model, prompt, row, 1.0)).abs().max().item()
            for prompt, row, logps in zip(
                ids, drawn.completion_ids, drawn.sampling_logps, strict=True
            )
        ]
        written.append({"ids": drawn.completion_ids, "gap": max(gaps)})
        nudge(model, 0.02)
    engine.faulty = ranks.rank == 1
    found.sync_weights(2)
    try:
        found.generate(prompts, Sampling(max_tokens=8, seeds=seeds), 2)
        error = None
    except (WeightSyncError, RankError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    numbers = [p.numel() for p in engine.model.parameters()]
    report({"steps": written, "error": error, "entries": sum(numbers)})
    finish()


if __name__ == "__main__":
    main()

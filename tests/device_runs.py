"""Short trainings on the pretend device and without it: `device_runs.py FOLDER`.

Writes `found.pt`: for each case and place the weights, the logged history, and how often the host
waited for the device in the second update.
"""

import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import torch
from online_runs import dataset, make_trainer, weights
from pretend_device import DEVICE, PretendDevice, pretending
from transformers import TrainerCallback

from trl.models import layout_check as sharing
from trl.models import packed_attention as shared_attention
from trl.ops.attention_kernels import CpuFlash
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

COMMON = {
    "script": None,
    "beta": 0.1,
    "max_steps": 2,
    "max_grad_norm": 1.0,
    "max_completion_length": 6,
    "gradient_accumulation_steps": 2,
    "gradient_checkpointing": True,
    "generation_kwargs": {"eos_token_id": [1, *range(20, 40)]},  # rows end at different times
}
CASES = {
    "shared prompts": (RLOOTrainer, {"logits_chunk_size": 4096, "repetition_penalty": 1.2}),
    "plain rows": (
        GRPOTrainer,
        {
            "shared_prefix": False,
            "num_iterations": 2,
            "top_entropy_quantile": 0.5,
            "off_policy_mask_threshold": 0.5,
            "mask_truncated_completions": True,
            "top_p": 0.9,
        },
    ),
}


class Waits(TrainerCallback):
    """How often the host waited from the end of one update to the end of the next, log included."""

    def __init__(self, device: PretendDevice):
        self.seen = [device.waits]

    def on_step_end(self, *args, **kwargs):
        self.seen.append(Counter(self.seen[0]))


def train(folder: Path, kind: type, changes: dict, device: PretendDevice | None = None) -> dict:
    """Two updates and an evaluation."""
    waits = None if device is None else Waits(device)
    with device or nullcontext():
        trainer = make_trainer(
            folder,
            kind=kind if device is None else pretending(kind),
            eval_dataset=dataset(),
            callbacks=[waits] if waits else [],
            **(COMMON | changes),
        )
        trainer.train()
        trainer.evaluate()
        return {
            "device": trainer.model.device.type,
            "weights": weights(trainer.model).cpu(),
            "history": trainer.state.log_history,
            "waits": dict(waits.seen[2] - waits.seen[1]) if waits else {},
        }


def use_cpu_kernels() -> None:
    """The device has no kernels of its own; those of CPUs read what it holds."""
    shared_attention.choose_kernel = lambda *_: CpuFlash()
    known = sharing.why_not_shared

    def why_not_shared(model, longest):
        reason = known(model, longest)
        return None if reason and "no attention kernel" in reason else reason

    sharing.why_not_shared = why_not_shared


def probe() -> dict:
    """What the device says of single operations."""
    refused, device = {}, PretendDevice()
    with device:
        here, there = torch.arange(4.0), torch.arange(4.0).to(DEVICE, non_blocking=True)
        index = torch.tensor([0, 2]).to(DEVICE, non_blocking=True)
        mixed = {
            "sum": lambda: here + there,
            "joined": lambda: torch.stack([there.sum(), here.sum()]),
            "in place": lambda: here.sum().add_(there.sum()),
            "index": lambda: here[index],
            "number": lambda: there * here.sum() + there[index].sum(),
        }
        for name, work in mixed.items():
            try:
                work()
            except RuntimeError as error:
                refused[name] = str(error)
        before = device.waits.total()
        awaited = (
            lambda: there[there > 1],
            lambda: there[torch.tensor([1])],
            lambda: (there > 1).nonzero(),
            lambda: float(there.sum()),
            lambda: there.tolist(),
            lambda: there.cpu(),
            lambda: torch.zeros(4).copy_(there),
            lambda: here.to(DEVICE),
            lambda: torch.tensor([1.0], device=DEVICE),
        )
        counts = []
        for work in awaited:
            start = device.waits.total()
            work()
            counts.append(device.waits.total() - start)
    return {"refused": sorted(refused), "before": before, "counts": counts}


def main(folder: Path) -> None:
    found = {}
    for case, (kind, changes) in CASES.items():
        found[case, "cpu"] = train(folder / case / "cpu", kind, changes)
    use_cpu_kernels()
    found["probe"] = probe()
    for case, (kind, changes) in CASES.items():
        found[case, "pretend"] = train(folder / case / "pretend", kind, changes, PretendDevice())
    torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""SFT on the pretend device, with and without offloading: `offload_runs.py FOLDER`.

Writes `found.pt`: for each case the weights after two updates, and the bytes of activations that
the device holds when the backward pass begins.
"""

import gc
import sys
from pathlib import Path

import torch
from device_runs import use_cpu_kernels
from pretend_device import PretendDevice, PretendTensor, pretending
from sft_runs import make_trainer, weights

from trl.trainer.sft_trainer import SFTTrainer


def held(model) -> int:
    """Bytes of tensors on the device that are no parameters, nor their gradients."""
    known = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    own = {tensor.held.untyped_storage().data_ptr() for tensor in known}
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) is PretendTensor:
            storage = thing.held.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(size for place, size in found.items() if place not in own)


class Measuring(SFTTrainer):
    """Looks at the device between forward and backward."""

    seen = 0

    def compute_loss(self, model, inputs, **options):
        loss = super().compute_loss(model, inputs, **options)
        self.seen = max(self.seen, held(self.model))
        return loss


def train(folder: Path, **changes) -> dict:
    with PretendDevice():
        kind = pretending(Measuring)
        trainer = make_trainer(folder, kind=kind, max_steps=2, **changes)
        trainer.train()
        return {"weights": weights(trainer.model).cpu(), "held": trainer.seen}


def main(folder: Path) -> None:
    """Train with and without, recomputing layers or not."""
    use_cpu_kernels()
    found = {
        (recomputes, offloads): train(
            folder, gradient_checkpointing=recomputes, activation_offloading=offloads
        )
        for recomputes in (False, True)
        for offloads in (False, True)
    }
    torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""What ranks hold while a moving reference is saved and read: `moving_reference.py FOLDER`."""

import sys
from pathlib import Path
from typing import Any

import torch
from engines import finish, report, use
from online_runs import make_trainer
from tensor_bytes import TensorBytes
from tiny import tiny_model

from trl.models.reference import whole_weights
from trl.models.sharded import local_shard

ENGINES = ("ddp", "fsdp1", "fsdp2", "zero3")
SHAPE = {"num_hidden_layers": 8, "hidden_size": 32, "intermediate_size": 96}


def run(folder: Path) -> dict[str, Any]:
    """Save the reference of a trainer, change it and read it again."""
    trainer = make_trainer(
        folder, model=tiny_model(**SHAPE), beta=0.1, sync_ref_model=True, use_cpu=False
    )
    moving = trainer._moving_reference
    before = dict(whole_weights(moving.ref_model))
    folder.mkdir(parents=True, exist_ok=True)
    with TensorBytes() as written:
        moving.write(folder, trainer.args.should_save)
    trainer.accelerator.wait_for_everyone()
    with torch.no_grad():
        for parameter in moving.ref_model.parameters():
            local_shard(parameter).zero_()
    moving.read(folder, trainer.ranks)
    after = dict(whole_weights(moving.ref_model))
    return {
        "all": sum(weight.nbytes for weight in before.values()),
        "written": written.peak,
        "same": all(torch.equal(before[name], after[name]) for name in before),
    }


def main(folder: str) -> None:
    found = {}
    for engine in ENGINES:
        use(engine)
        found[engine] = run(Path(folder, engine))
    report(found)
    finish()


if __name__ == "__main__":
    main(sys.argv[1])

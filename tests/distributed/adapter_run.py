"""Adapters under an engine; `adapter_run.py FOLDER ENGINE KIND...`, run by `engines`."""

import sys
from pathlib import Path

import torch
from engines import finish, report, use

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))

from kinds import KINDS, dataset, trainer_of
from online import rows_of
from rollouts import rollout_of

from trl.models.shards import gathered

PROMPTS = ["ab", "cdefghijk", "lmn", "opqrstu"]
RATE = 10.0  # large, so that the gradient can be read from how far weights move
COMMON = {
    "data": dataset(PROMPTS),
    "use_cpu": False,
    "per_device_train_batch_size": 8,
    "learning_rate": RATE,
    "beta": 1e-6,
}


def whole(trainer):
    """All weights, each in one piece: what is trained, and the rest."""
    bare = trainer.accelerator.unwrap_model(trainer.model)
    found = {}, {}
    with gathered(trainer.model_wrapped):
        for name, parameter in bare.named_parameters():
            value = parameter.detach()
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[not parameter.requires_grad][name] = value.clone()
    return found


def reference_logps(trainer):
    with trainer.reference.active(trainer.model) as reference:
        return trainer.scorer.logps(reference, rollout_of(rows_of(PROMPTS, 1)))


class Start:
    """Keeps weights and reference as they are when all is wrapped and no step is done."""

    def __init__(self, trainer):
        self.trainer, self.step = trainer, trainer.collect
        trainer.collect = self.collect

    def collect(self, rows):
        if not hasattr(self, "weights"):
            self.weights, self.logps = whole(self.trainer), reference_logps(self.trainer)
        return self.step(rows)


def measure(folder, kind, **changes):
    """Train a step: where the adapter started and ended, and what has stayed."""
    trainer = trainer_of(KINDS[kind], Path(folder), **COMMON | changes)
    start = Start(trainer)
    trainer.train()
    adapter, base = whole(trainer)
    return {
        "start": start.weights[0],
        "end": adapter,
        "base stays": all(torch.equal(base[n], v) for n, v in start.weights[1].items()),
        "reference stays": torch.equal(reference_logps(trainer), start.logps),
        "reference": start.logps,
        "steps": trainer.state.global_step,
    }


def resume(folder, engine):
    """Two steps at once, and two with an interruption; what each ended with."""
    settings = {"max_steps": 2, "learning_rate": 0.01, "optim": "adamw_torch", "save_steps": 1}
    use(engine)
    at_once = measure(folder, "lora", **settings, save_strategy="steps")
    use(engine)
    checkpoint = f"{folder}/out/checkpoint-1"
    trainer = trainer_of(KINDS["lora"], Path(folder), **COMMON | settings)
    trainer.train(resume_from_checkpoint=checkpoint)
    names = sorted(path.name for path in Path(checkpoint).glob("*.safetensors"))
    return {
        "at once": at_once,
        "resumed": whole(trainer)[0],
        "reference": reference_logps(trainer),
        "files": names,
        "steps": trainer.state.global_step,
    }


def main(folder, engine, kinds):
    found = {}
    for kind in kinds:
        use(engine)
        found[kind] = measure(f"{folder}/{kind}", kind)
    found["resume"] = resume(f"{folder}/resume", engine)
    report(found)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
    finish()

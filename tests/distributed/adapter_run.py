"""Adapters under each engine, and a mixture of experts; `adapter_run.py FOLDER`, in `engines`."""

import sys
from pathlib import Path

import rounding
import torch
from engines import ENGINES, finish, report, use

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))

from kinds import KINDS, dataset, mixture, trainer_of
from online_runs import make_trainer, rows_of
from rollouts import rollout_of

from trl.models.sharded import gathered

PROMPTS = ["ab", "cdefghijk", "lmn", "opqrstu"]
RATE = 10.0  # large, so that the gradient can be read from how far weights move
COMMON = {
    "data": dataset(PROMPTS),
    "use_cpu": False,
    "per_device_train_batch_size": 8,
    "learning_rate": RATE,
    "beta": 1e-6,
}


NEW = ("lora", "dora", "head", "target_parameters", "modules_to_save", "4-bit")
# Adapters that were stored, and are loaded by name with what they belong to.
BROUGHT = {"brought": "modules_to_save", "brought on 4 bits": "4-bit"}
STILL = "brought, and no sync"
KIND_OF = BROUGHT | {STILL: "modules_to_save"}
FOLLOWING = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.25}
CELLS = dict.fromkeys(ENGINES, (*BROUGHT,))
CELLS |= {
    "zero3": (*BROUGHT, *NEW, "8-bit", "resume", "router"),
    "fsdp1": (*BROUGHT, STILL, "8-bit"),
    "fsdp2": (*BROUGHT, *NEW, "8-bit", "resume", "router"),
}


def whole(trainer):
    """All weights, each in one piece: what is trained, what stays, and the reference's copy."""
    bare = trainer.accelerator.unwrap_model(trainer.model)
    found = {}, {}, {}
    with gathered(trainer.model_wrapped):
        for name, parameter in bare.named_parameters():
            name = name.replace("_fsdp_wrapped_module.", "")
            value = parameter.detach()
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            kind = 2 if ".ref." in name else int(not parameter.requires_grad)
            found[kind][name] = value.clone()
    return found


def reference_logps(trainer):
    """In the layout of training: before ranks have agreed on one, they score plain rows."""
    rows = rollout_of(rows_of(PROMPTS, 1))
    trainer.scoring.agree_on(rows)
    with trainer.reference.active(trainer.model) as reference:
        return trainer.scorer.logps(reference, rows)


class Start:
    """Keeps weights and reference as they are when all is wrapped and no step is done."""

    def __init__(self, trainer):
        self.trainer, self.step = trainer, trainer.collect
        trainer.collect = self.collect

    def collect(self, rows, mode):
        if not hasattr(self, "weights"):
            self.weights = whole(self.trainer)
            self.logps = reference_logps(self.trainer) if self.trainer.reference else None
        return self.step(rows, mode)


def measure(trainer):
    """Train: where what is trained started and ended, and what has stayed."""
    start = Start(trainer)
    trainer.train()
    end, base, copy = whole(trainer)
    return {
        "start": start.weights[0],
        "end": end,
        "copy": copy,
        "base stays": all(torch.equal(base[n], v) for n, v in start.weights[1].items()),
        "reference": start.logps,
        "reference at the end": reference_logps(trainer) if trainer.reference else None,
        "steps": trainer.state.global_step,
    }


def adapted(folder, cell):
    """A trainer of a new adapter, or of one that was brought, whose reference follows it."""
    kind, changes = KINDS[KIND_OF.get(cell, cell)], dict(COMMON)
    if cell in KIND_OF:
        changes |= {} if cell == STILL else FOLLOWING
        changes["model"] = str(folder / "adapter")
        changes["quantization_config"] = kind.quantization()
        changes["model_init_kwargs"] = {"dtype": "float32"}
    return trainer_of(kind, folder, **changes)


def resume(folder, engine):
    """Two steps at once, and two with an interruption; what each ended with."""
    settings = {"max_steps": 2, "learning_rate": 0.01, "optim": "adamw_torch", "save_steps": 1}
    options = COMMON | settings
    at_once = measure(trainer_of(KINDS["lora"], folder, **options, save_strategy="steps"))
    use(engine)
    checkpoint = f"{folder}/out/checkpoint-1"
    trainer = trainer_of(KINDS["lora"], folder, **options)
    trainer.train(resume_from_checkpoint=checkpoint)
    names = sorted(path.name for path in Path(checkpoint).glob("*.safetensors"))
    return {
        "at once": at_once,
        "resumed": whole(trainer)[0],
        "reference": reference_logps(trainer),
        "files": names,
        "steps": trainer.state.global_step,
    }


def mixed(folder, rows, accumulation=1, **changes):
    """One update of all weights of a mixture of experts, its routers balanced.

    The balance is that of the rows of a micro-batch: `rows` of them, at one time and place.
    """
    trainer = make_trainer(
        folder,
        model=mixture(),
        data=dataset(PROMPTS),
        router_aux_loss_coef=0.3,
        learning_rate=RATE,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        **changes,
    )
    return measure(trainer)


def run(folder, engine, cell):
    """What is measured in a cell; a message where it is refused."""
    use(engine)
    try:
        if cell == "resume":
            return resume(folder, engine)
        if cell == "router":
            return mixed(folder, 8, use_cpu=False)
        return measure(adapted(folder, cell))
    except ValueError as error:
        return str(error)


def main(folder):
    found = {}
    for engine, cells in CELLS.items():
        for cell in cells:
            found[engine, cell] = run(folder / cell, engine, cell)
    report(found)


if __name__ == "__main__":
    rounding.install()  # on every machine as on the one where rounding depends on most
    main(Path(sys.argv[1]))
    finish()

"""All savings at once, resuming, layerwise generation: `savings_run.py FOLDER [ENGINE...]`.

Two updates on one round, so that the checkpoint after the first lies within the round.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from engines import ENGINES, SHARDED, finish, report, use
from one_step import MANY
from online_runs import dataset, make_trainer
from tiny import tiny_model

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))

from kinds import KINDS

from trl.models import activations

ADAPTERS = {"none": None, "lora": "lora", "qlora": "4-bit"}
ON: dict[str, Any] = {
    "activation_offloading": True,
    "generation_max_rows": 3,
    "gradient_checkpointing": True,
    "logits_chunk_size": 200,
    "recover_from_oom": True,
    "reuse_sampling_logps": True,
    "shared_prefix": True,
    "skip_zero_advantages": True,
}
OFF: dict[str, Any] = {
    "activation_offloading": False,
    "generation_max_rows": None,
    "gradient_checkpointing": False,
    "logits_chunk_size": 0,
    "recover_from_oom": False,
    "reuse_sampling_logps": False,
    "shared_prefix": False,
    "skip_zero_advantages": False,
}
TWICE = {"num_iterations": 2, "max_steps": 2}
# Log-probabilities are reused where the weights that sampled are those that train.
ONCE = {"num_iterations": 1, "max_steps": 1}


TARGETS = {"q_proj", "down_proj"}  # engines gather each factor by itself, which takes time


def bases(folder: Path) -> None:
    """Write what the ranks load; they would write it at the same time."""
    KINDS["4-bit"].load(folder / "base")


def run(
    adapter: str,
    base: Path,
    folder: Path,
    saves: bool = False,
    resume: bool = False,
    **changes: Any,
) -> Any:
    """Train, from the first checkpoint if `resume`: the trained weights and all completions."""
    kind = KINDS[ADAPTERS[adapter] or "lora"]
    model = tiny_model(tie_word_embeddings=True) if adapter == "none" else kind.load(base / "base")
    config = kind.config
    config.target_modules = TARGETS
    trainer = make_trainer(
        folder,
        script=None,
        model=model,
        data=dataset(MANY),
        gradient_accumulation_steps=2,
        shuffle_dataset=True,
        num_generations=8,
        beta=0.1,
        optim="adamw_torch",
        adam_epsilon=1.0,  # so large that rounding is not amplified
        learning_rate=1.0,
        save_strategy="steps" if saves else "no",
        save_steps=1,
        **({} if adapter == "none" else {"peft_config": config}),
        **TWICE | changes,
    )
    if trainer.args.recover_from_oom and trainer.ranks.rank == trainer.ranks.count - 1:
        run_out_of_memory(trainer.backend)
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1" if resume else None)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not trainer.is_world_process_zero():
        return None
    lines = (folder / "completions" / "train.jsonl").read_text().splitlines()
    completions = [json.loads(line)["completion_ids"] for line in lines]
    return torch.cat([state[name].flatten() for name in sorted(trained)]), completions


def run_out_of_memory(backend: Any) -> None:
    """Let calls for more than two rows fail."""
    right = backend._complete

    def complete(model: Any, prompts: Any, sampling: Any) -> Any:
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("more than two rows")
        return right(model, prompts, sampling)

    backend._complete = complete


def measure(engine: str, adapter: str, folder: Path) -> dict[str, Any]:
    """What an engine makes of a kind of policy."""
    options = {"use_cpu": False, "per_device_train_batch_size": 4}
    # One layer at a time, a rank that runs out of memory would leave the others waiting.
    layerwise = {"ds3_gather_for_generation": False, "recover_from_oom": False}
    found = {}
    for name, changes in {
        "at once": ON | {"saves": True},
        "resumed": ON | {"resume": True},
        "on-policy": ON | ONCE | (layerwise if engine in SHARDED else {}),
    }.items():
        use(engine)
        place = folder / engine / adapter / ("once" if name == "resumed" else name.split()[-1])
        try:
            found[name] = run(adapter, folder, place, **options, **changes)
        except ValueError as error:
            found[name] = str(error)
    return found


def main(folder: Path) -> None:
    """Each kind of policy under each engine."""
    activations.HOST = "none of the devices"  # tensors of CPUs are moved, too
    found = {}
    for engine in sys.argv[2:] or ENGINES:
        for adapter in ADAPTERS:
            found[engine, adapter] = measure(engine, adapter, folder)
    report(found)
    finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

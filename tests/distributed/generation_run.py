"""Sharded weights, whole for a while; `generation_run.py FOLDER ENGINE...`, run by `engines`."""

import json
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from engines import finish, report, use
from generation_peaks import Peak
from held_bytes import live_bytes
from online_runs import dataset, make_trainer, token_sum
from tiny import tiny_model, tiny_tokenizer
from transformers import LlamaForSequenceClassification

from trl.models.weights import full_weights

# Prompts of the ranks differ in length, and completions end early on some.
PROMPTS = ["a", "bc", "hijk" * 9, "lm" * 20, "d", "efg", "q" * 30, "rs" * 8]
MANY_STOPS = [1, *range(40, 75)]


def policy():
    """A model with tied weights, whose completions end soon."""
    model = tiny_model(num_hidden_layers=3, tie_word_embeddings=True)
    model.generation_config.eos_token_id = MANY_STOPS
    return model


def adapted():
    """A model with an adapter that matters, and a head that is trained in full."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "down_proj", "embed_tokens"]
    config = LoraConfig(
        target_modules=targets, modules_to_save=["lm_head"], init_lora_weights=False
    )
    model = get_peft_model(tiny_model(), config)
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
    return model


@cache  # once there are ranks, only the first one saves
def judge():
    """A folder with a reward model."""
    folder = Path(tempfile.mkdtemp()) / "judge"
    config = tiny_model().config
    config.num_labels = 1
    torch.manual_seed(3)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def trained(folder, model=None, **changes):
    """A trainer after two updates, on the engine of the environment."""
    before = live_bytes()
    trainer = make_trainer(
        folder,
        model=policy() if model is None else model,
        script=None,
        reward=[token_sum, judge()],
        reward_weights=[1.0, 0.0],
        data=dataset(PROMPTS),
        max_completion_length=16,
        **({"max_steps": 2, "use_cpu": False, "per_device_train_batch_size": 8} | changes),
    )
    peak = Peak(trainer, before)
    trainer.train()
    return trainer, peak.bytes


def completions(folder):
    """What all ranks have generated, and how the reward model likes it."""
    lines = (Path(folder) / "completions" / "train.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [r["completion_ids"] for r in records], [r["rewards"]["judge"] for r in records]


def streamed(model):
    """All weights; they are valid for a moment only."""
    return {name: weight.clone() for name, weight in full_weights(model)}


def run(folder, engine):
    """Both ways to generate, then weights as one stream."""
    found, trainer = {}, None
    for gather in (True, False):
        trainer = None  # it must be gone when bytes are counted
        use(engine)
        place = f"{folder}/{engine} {gather}"
        options = {"ds3_gather_for_generation": gather, "generation_max_rows": 3}
        trainer, peak = trained(place, **options)
        found[gather] = (completions(place) if trainer.ranks.rank == 0 else None, peak)
        check = trainer.backend._check
        found["shared", gather] = check.enabled and check._checked_length > 0
    saved = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    found["streamed"], found["saved"] = streamed(trainer.model_wrapped), saved
    trainer = None
    use(engine)
    torch.manual_seed(5)
    trainer, _ = trained(f"{folder}/adapter", adapted(), learning_rate=0.0, max_steps=1)
    found["merged"] = streamed(trainer.model_wrapped)
    found["again"] = streamed(trainer.model_wrapped)
    return found


if __name__ == "__main__":
    report({engine: run(sys.argv[1], engine) for engine in sys.argv[2:]})
    finish()

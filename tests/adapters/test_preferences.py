"""DPO, KTO and reward models train adapters of every kind as peft alone would."""

import sys
from pathlib import Path

import dpo_runs
import kto_runs
import pytest
import reward_runs
import torch
from transformers import AutoModelForSequenceClassification

sys.path.insert(0, str(Path(__file__).parent))

from dataclasses import replace

from kinds import KINDS, WIDE, Watch, exact_base, frozen, independent, same, trained

RUNS = {"DPO": dpo_runs, "KTO": kto_runs, "Reward": reward_runs}
# Of sums over answers, as for all weights.
BOUNDS = {"DPO": dpo_runs.BOUND, "KTO": 5e-6, "Reward": 5e-6}


def expected_gradient(name, kind, folder, adapter, trainer):
    """That of rows computed singly, from weights that peft has put together."""
    policy = independent(kind, folder, adapter)
    if name == "Reward":
        return reward_runs.by_hand(policy.get_base_model())[1]
    base = exact_base(kind, folder)
    if name == "DPO":
        return dpo_runs.by_hand(policy, base)[1]
    return kto_runs.by_hand(policy, base, kto_runs.partners_of(trainer))[1]


@pytest.mark.parametrize("adapter", ["dora", "4-bit", "4-bit dora"])
@pytest.mark.parametrize("name", RUNS)
def test_the_gradient_is_that_of_single_rows(tmp_path, name, adapter):
    kind = KINDS[adapter]
    if name == "Reward":
        kind = replace(
            kind,
            base=lambda: reward_runs.classifier(**WIDE),
            loader=AutoModelForSequenceClassification,
            lora=kind.lora | {"task_type": "SEQ_CLS"},
        )
    model = kind.load(tmp_path / "base")
    changes = {"peft_config": kind.config}
    if kind.bits is not None:
        model, changes["quantization_config"] = str(tmp_path / "base"), kind.quantization()
    if name == "KTO":
        changes["ref_model"] = False
    trainer, watch = RUNS[name].make_trainer(tmp_path / "run", model=model, **changes), Watch()
    trainer.add_callback(watch)
    start, base = trained(trainer.model), frozen(trainer.model)
    trainer.train()
    assert same(frozen(trainer.model), base) and not same(trained(trainer.model), start)
    found = torch.cat([x.flatten() for x in watch.gradients[0].values()])
    expected = expected_gradient(name, kind, tmp_path, start, trainer)
    assert float((found - expected).norm() / expected.norm()) <= BOUNDS[name]

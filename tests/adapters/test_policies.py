"""Who generates and who scores: the policy with its adapter, the reference without it."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from kinds import GROUP, KINDS, PROMPTS, dense, independent, same, trained, trainer_of
from online_runs import completion_logps, rows_of
from rollouts import rollout_of

from trl.trainer.base import policy
from trl.types import Prompts

MOVED = ["lora", "dora", "target_parameters", "modules_to_save", "head", "4-bit", "8-bit"]
NOISE = {"8-bit": 0.1}  # nats: bitsandbytes rounds the activations of each layer to 8 bits
STEPS = {"beta": 0.5, "max_steps": 2, "learning_rate": 0.1}


def probe(rows=None):
    """Rows to score; by default those of the script."""
    return rollout_of(rows_of(PROMPTS, GROUP) if rows is None else rows)


def reference_logps(trainer):
    with trainer.reference.active() as reference:
        return trainer.scorer.logps(reference, probe())


@torch.no_grad()
def slow_logps(model, rows):
    """Row by row from full logits."""
    found = [completion_logps(model.eval(), prompt, ids).float() for prompt, ids in rows]
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True)


@pytest.mark.parametrize("name", MOVED)
def test_the_reference_is_the_base_model(tmp_path, name):
    kind = KINDS[name]
    trainer = trainer_of(kind, tmp_path, **STEPS)
    before = reference_logps(trainer)
    model = independent(kind, tmp_path, {})
    with model.disable_adapter():
        expected = slow_logps(model, rows_of(PROMPTS, GROUP))
    assert (before - expected).abs().max() < NOISE.get(name, 1e-5)
    start = trained(trainer.model)
    trainer.train()
    assert not same(trained(trainer.model), start)
    assert torch.equal(reference_logps(trainer), before)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", MOVED)
def test_completions_come_from_the_adapter(tmp_path, name, shared):
    """What generation reports of its tokens is what the moved policy gives them."""
    kind = KINDS[name]
    trainer = trainer_of(kind, tmp_path, script=None, shared_prefix=shared, learning_rate=0.1)
    trainer.train()
    ids = [ids for ids, _ in rows_of(PROMPTS, GROUP)]
    generations = trainer.backend.generate(
        Prompts(messages=ids, token_ids=ids), trainer.sampling, GROUP
    )
    rows = list(zip(ids, generations.completion_ids, strict=True))
    model = independent(kind, tmp_path, trained(trainer.model))
    expected, scored = slow_logps(model, rows), trainer.scorer.logps(trainer.model, probe(rows))
    bound = NOISE.get(name, 1e-5)
    assert (scored - expected).abs().max() < bound
    with model.disable_adapter():
        assert (slow_logps(model, rows) - expected).abs().max() > 10 * bound
    assert (generations.sampling_logps is not None) == shared
    if shared:
        found = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row) for row in generations.sampling_logps], batch_first=True
        )
        assert (found - scored).abs().max() < bound


@pytest.mark.parametrize("disable", [True, False])
def test_dropout_acts_in_training_alone(tmp_path, disable):
    kind = KINDS["lora"]
    config = kind.config
    config.lora_dropout = 0.5
    trainer = trainer_of(kind, tmp_path, peft_config=config, disable_dropout=disable)
    trainer.model.train()
    batch = probe()
    scored = trainer.scorer.logps(trainer.model, batch)
    expected = slow_logps(independent(kind, tmp_path, trained(trainer.model)), rows_of(PROMPTS, 4))
    assert (scored - expected).abs().max() < 1e-5
    assert trainer.model.training
    with torch.no_grad():
        training = trainer.scorer(trainer.model, batch).logps
    assert ((training - scored).abs().max() > 0.01) is not torch.tensor(disable).item()
    ids = [ids for ids, _ in rows_of(PROMPTS, GROUP)]
    prompts = Prompts(messages=ids, token_ids=ids)
    first, second = (trainer.generate(prompts).completion_ids for _ in range(2))
    assert first == second


# --- An adapter that was brought ---


def brought(kind, tmp_path):
    torch.manual_seed(0)
    return independent(kind, tmp_path, {}).train()


@pytest.mark.parametrize("name", MOVED)
def test_the_reference_of_a_brought_adapter_is_its_copy(tmp_path, name):
    kind = KINDS[name]
    model = brought(kind, tmp_path)
    expected = slow_logps(model, rows_of(PROMPTS, GROUP))
    trainer = trainer_of(kind, tmp_path, model=model, **STEPS)
    before = reference_logps(trainer)
    assert (before - expected).abs().max() < NOISE.get(name, 1e-5)
    start = trained(trainer.model)
    trainer.train()
    assert not same(trained(trainer.model), start)
    assert torch.equal(reference_logps(trainer), before)


def test_a_reference_can_follow_a_brought_adapter(tmp_path):
    """reference <- 0.25 policy + 0.75 reference, for each factor, after every second step."""
    kind = KINDS["modules_to_save"]
    model = brought(kind, tmp_path)
    start = trained(model)
    trainer = trainer_of(
        kind,
        tmp_path,
        model=model,
        **STEPS,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=0.25,
    )
    trainer.train()
    end, states = trained(model), dict(model.named_parameters())
    assert not same(start, end)
    for name, value in end.items():
        copy = states[name.replace(".default", ".ref")]
        torch.testing.assert_close(copy, 0.75 * start[name] + 0.25 * value)


def test_no_reference_follows_where_the_adapter_is_off(tmp_path):
    with pytest.raises(
        NotImplementedError, match="sync_ref_model=True: the reference is the base model"
    ):
        trainer_of(KINDS["lora"], tmp_path, **STEPS, sync_ref_model=True)


def test_no_copy_without_a_reference(tmp_path):
    model = brought(KINDS["lora"], tmp_path)
    trainer = trainer_of(KINDS["lora"], tmp_path, model=model, beta=0.0)
    assert trainer.reference is None
    assert list(model.peft_config) == ["default"]


def test_a_start_that_changes_the_base_is_copied(tmp_path):
    """PiSSA moves the largest directions of the base into the adapter."""
    kind = KINDS["lora"]
    config = kind.config
    config.init_lora_weights = "pissa"
    trainer = trainer_of(kind, tmp_path, peft_config=config, **STEPS)
    expected = slow_logps(dense(), rows_of(PROMPTS, GROUP))
    assert (reference_logps(trainer) - expected).abs().max() < 1e-4
    trainer.train()
    assert (reference_logps(trainer) - expected).abs().max() < 1e-4


def test_trained_biases_leave_no_reference(tmp_path):
    config = KINDS["lora"].config
    config.bias = "all"
    with pytest.raises(ValueError, match="bias='all' trains biases of the base model"):
        trainer_of(KINDS["lora"], tmp_path, peft_config=config, beta=0.5)


# --- What is said before time is spent ---


@pytest.mark.parametrize("name", ["4-bit", "8-bit"])
def test_quantized_weights_need_an_adapter(tmp_path, name):
    with pytest.raises(ValueError, match=r"add an adapter with peft_config \(--use_peft\)"):
        trainer_of(KINDS[name], tmp_path, peft_config=None)


def test_the_learning_rate_of_all_weights_is_mentioned(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(policy.logger, "warning", said.append)
    trainer_of(KINDS["lora"], tmp_path, learning_rate=1e-6)
    assert [words for words in said if "learning_rate=1e-06 is the default for training" in words]
    said.clear()
    trainer_of(KINDS["lora"], tmp_path, learning_rate=1e-5)
    assert said == []

"""Whole training runs over a real engine."""

import re

import pytest
from datasets import Dataset
from online_runs import dataset, make_trainer, token_sum, weights
from peft import LoraConfig
from reward_runs import classifier
from shared_vllm import ForgetfulEngine, engine, four_bits, fresh_engine, needs_vllm, policy_model
from tiny import tiny_tokenizer
from transformers import BitsAndBytesConfig
from vllm_runs import (
    check_environments,
    check_reward_rises,
    check_seeds,
    completions,
    logged,
)

from examples.quickstart import copying
from trl.generation.vllm import factory
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.online_dpo_trainer import OnlineDPOTrainer
from trl.trainer.ppo_trainer import PPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

pytestmark = [needs_vllm, pytest.mark.vllm]
TRAINERS = pytest.mark.parametrize("kind", [RLOOTrainer, GRPOTrainer])


@pytest.fixture
def running(monkeypatch):
    """Trainers take the engine that runs already; the fixture gives what they asked for."""
    asked = []

    def start(model, tokenizer, arguments, ranks, kind):
        asked.append(arguments)
        found = engine(ForgetfulEngine, arguments["enable_sleep_mode"])
        asked.append(found)
        return found

    monkeypatch.setattr(factory, "start_engine", start)
    return asked


@pytest.fixture
def can_sleep(monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda self: True)


def trainer_of(folder, kind=RLOOTrainer, **changes):
    settings = {"script": None, "use_vllm": True, "max_steps": 2, "vllm_probe_syncs": 1}
    settings |= {"model": policy_model(), "optim": "adamw_torch", "learning_rate": 1e-2}
    return make_trainer(folder, kind, **(settings | changes))


@pytest.mark.slow
def test_copying_is_learned_by_an_engine_that_the_options_start(tmp_path):
    """The task of the quickstart; chance gives 0.01 of the digits, out of 95 symbols."""
    rows = [copying.row(f"{n:04d}") for n in range(0, 10000, 13)]
    trainer = trainer_of(
        tmp_path,
        reward=lambda completions, answer, **kwargs: [
            len(set(text) & set(right)) / len(set(right))
            for text, right in zip(completions, answer, strict=True)
        ],
        data=Dataset.from_list(rows),
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=4,
        max_steps=20,
        vllm_probe_syncs=5,
    )
    trainer.train()
    rewards = logged(trainer, "reward")
    assert sum(rewards[-3:]) / 3 > 3 * sum(rewards[:3]) / 3, rewards
    gaps = logged(trainer, "vllm/logp_gap")
    assert len(gaps) == 4 and max(gaps) <= 1e-4
    assert len(logged(trainer, "vllm/sync_seconds")) == 20


@TRAINERS
def test_the_reward_rises(tmp_path, running, kind):
    check_reward_rises(trainer_of, tmp_path, kind)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (PPOTrainer, {"num_generations": 1, "num_ppo_epochs": 1}),
        (PPOTrainer, {"num_generations": 1, "num_ppo_epochs": 1, "value_model": classifier}),
        (OnlineDPOTrainer, {"num_generations": 2, "temperature": 0.9}),
    ],
    ids=["ppo", "ppo-value-model", "online-dpo"],
)
def test_other_methods_send_their_policy(tmp_path, running, kind, changes):
    """The engine holds the policy of each step, without the value model."""
    given = {name: value() if callable(value) else value for name, value in changes.items()}
    model = policy_model()
    settings = {"per_device_train_batch_size": 4, "beta": 0.1, "max_steps": 3, "model": model}
    trainer = trainer_of(tmp_path, kind, **(settings | given))
    before = weights(model)
    trainer.train()
    assert (weights(model) - before).abs().max() > 1e-3
    for name in ("vllm/logp_gap", "sampling/sampling_logp_difference/max"):
        found = logged(trainer, name)
        assert len(found) == 3 and max(found) <= 1e-4


def test_rows_act_in_environments(tmp_path, running):
    """The engine writes a call, and goes on behind the answer; each row has its own state."""
    check_environments(trainer_of, tmp_path)


def test_same_seed_same_completions(tmp_path, running):
    check_seeds(trainer_of, tmp_path)


@TRAINERS
def test_sleeping_changes_nothing_but_memory(tmp_path, running, can_sleep, kind):
    """Two rounds and an evaluation in each optimizer step; all weights are NaN in between."""
    rounds = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
    for name, sleeps in (("awake", False), ("asleep", True)):
        trainer = trainer_of(
            tmp_path / name,
            kind,
            vllm_enable_sleep_mode=sleeps,
            vllm_probe_syncs=0,
            eval_dataset=dataset(),
            eval_strategy="steps",
            eval_steps=1,
            per_device_eval_batch_size=8,
            num_generations_eval=2,
            **rounds,
        )
        trainer.train()
    for mode in ("train", "eval"):
        assert completions(tmp_path / "awake", mode) == completions(tmp_path / "asleep", mode)
    calls = running[-1].calls
    assert calls == ["sleep"] + ["wake weights", "load", "wake kv_cache", "generate", "sleep"] * 6
    assert running[1].calls.count("load") == 3, "once a step, and after the last"


def test_merged_adapters_are_sent(tmp_path, running):
    targets = ["q_proj", "down_proj"]
    adapter = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    trainer = trainer_of(tmp_path, peft_config=adapter, learning_rate=0.05, max_steps=3)
    trainer.train()
    gaps = logged(trainer, "vllm/logp_gap")
    assert len(gaps) == 3 and max(gaps) <= 1e-4
    assert not any(layer.merged for layer in trainer.model.modules() if hasattr(layer, "lora_A"))


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_weights_of_4_bits_are_sent_with_their_adapter(tmp_path, running, dora):
    """What the engine holds of a layer is the dequantized weight with the change by the adapter."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    trainer = trainer_of(tmp_path, **four_bits(tmp_path / "base", use_dora=dora), max_steps=3)
    trainer.train()
    gaps = logged(trainer, "vllm/logp_gap")
    assert len(gaps) == 3 and max(gaps) <= 1e-4
    trainer.generate(trainer.encode([{"prompt": "ab"}] * 4))
    layer = trainer.model.base_model.model.model.layers[1].mlp.down_proj
    packed = layer.base_layer.weight
    base = bitsandbytes.functional.dequantize_4bit(packed.data, packed.quant_state)
    a, b = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
    wanted = base + b @ a * layer.scaling["default"]
    if dora:
        size = layer.lora_magnitude_vector["default"].weight
        wanted = wanted * (size / wanted.norm(dim=1))[:, None]
    held = running[-1].model.model.layers[1].mlp.down_proj.weight
    assert (held - wanted).abs().max() <= 1e-6 < (held - base).abs().max()


def test_8_bits_are_refused_before_the_engine_starts(tmp_path, running):
    pytest.importorskip("bitsandbytes")
    settings = four_bits(tmp_path / "base")
    settings["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ValueError, match=r"in 8 bits, which round the inputs.*\(--load_in_4bit\)"):
        trainer_of(tmp_path, **settings)
    assert running == []


def test_completions_match_the_regular_expression(tmp_path, running):
    trainer_of(tmp_path, vllm_structured_outputs_regex="[0-9]{3}", max_steps=1).train()
    tokenizer = tiny_tokenizer()
    for ids in completions(tmp_path):
        assert re.fullmatch("[0-9]{3}", tokenizer.decode(ids, skip_special_tokens=True))
    assert not running[0]["skip_tokenizer_init"]


def test_the_reported_log_probabilities_do_not_replace_the_policys(tmp_path, running):
    trainer = trainer_of(tmp_path, beta=0.1, max_steps=1)
    assert not trainer.backend.reports_policy_logps
    batch = trainer.collect([{"prompt": "ab"}] * 8)
    assert batch.columns["sampling_logps"].shape == batch.columns["ref_logps"].shape


def test_the_engine_is_as_large_as_the_round_needs(tmp_path, running):
    trainer_of(tmp_path, steps_per_generation=2, gradient_accumulation_steps=2, reward=token_sum)
    arguments, names = running[0], ("max_num_seqs", "max_model_len", "dtype")
    assert [arguments[name] for name in names] == [16, 256, "float32"]
    assert arguments["kv_cache_memory_bytes"] >= 16 * 2**20 and arguments["skip_tokenizer_init"]


@pytest.mark.slow
def test_vllm_itself_accepts_sleep_mode_and_its_calls(tmp_path, can_sleep, monkeypatch):
    """With an engine of its own, built with `enable_sleep_mode=True`."""
    found = fresh_engine(policy_model(), enable_sleep_mode=True)
    monkeypatch.setattr(
        factory, "start_engine", lambda *args: ForgetfulEngine(found._llm, sleeps=True)
    )
    trainer = trainer_of(tmp_path, vllm_enable_sleep_mode=True)
    trainer.train()
    assert max(logged(trainer, "vllm/logp_gap")) <= 1e-4

"""An adapter is sent by itself to a real engine that holds the base weights."""

from functools import cache

import pytest
import torch
from online_runs import make_trainer
from peft import LoraConfig, get_peft_model
from shared_vllm import four_bits, fresh_engine, model_policy, needs_vllm, policy_model
from transformers import BitsAndBytesConfig
from vllm_rows import PROMPTS, gap, sampling

from trl.generation.vllm import factory
from trl.generation.vllm.adapter_engine import AdapterBackend, AdapterEngine
from trl.generation.vllm.weight_verifier import WeightSyncError

pytestmark = [needs_vllm, pytest.mark.vllm]
LAYERS = ["q_proj", "v_proj", "down_proj"]  # a part of what vLLM fuses


@cache
def started():
    """An engine with room for an adapter; starting it takes seconds."""
    model = policy_model()
    model.config.quantization_config = BitsAndBytesConfig(load_in_4bit=True)  # not the engine's
    room = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8, "lora_target_modules": LAYERS}
    return fresh_engine(model, AdapterEngine, **room)._llm


class CountingEngine(AdapterEngine):
    """`calls` lists what was sent."""

    faulty = False

    def __init__(self, llm, sleeps=False):
        super().__init__(llm, sleeps)
        self.calls = []

    def load(self, name, weight):
        super().load(name, weight)
        if self.calls[-1:] != ["base"]:
            self.calls.append("base")

    def load_adapter(self, factors):
        self.calls.append("adapter")
        if not self.faulty:
            super().load_adapter(factors)


def adapted(seed=0, **options):
    torch.manual_seed(seed)
    settings = {"r": 3, "lora_alpha": 12, "target_modules": LAYERS, "init_lora_weights": False}
    return get_peft_model(policy_model(), LoraConfig(**(settings | options))).eval()


def backend(model):
    return AdapterBackend(CountingEngine(started()), model_policy(model), probe_syncs=0)


def move(model, word="lora_"):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if word in name:
                parameter.add_(torch.randn_like(parameter) / 10)


def complete(found, step):
    found.sync_weights(step)
    return found.generate(PROMPTS, sampling(), 4)


@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True, "rank_pattern": {"down_proj": 8}}], ids=["lora", "ranks"]
)
def test_base_weights_are_sent_once_and_the_adapter_after_each_step(options):
    model = adapted(**options)
    found, texts = backend(model), []
    for step in range(3):
        drawn = complete(found, step)
        assert gap(model, drawn) <= 1e-4
        texts.append(drawn.completion_ids)
        move(model)
    assert found._engine.calls == ["base", "adapter", "adapter", "adapter"]
    assert texts[0] != texts[1] != texts[2]
    assert gap(model, drawn) > 1e-3, "the last move is too small to show"


def test_another_adapter_leaves_nothing_of_the_one_before():
    complete(backend(adapted()), 0)
    model = adapted(r=2, target_modules=["q_proj"])
    assert gap(model, complete(backend(model), 0)) <= 1e-4


def test_base_weights_that_moved_are_sent_again():
    model = adapted()
    found = backend(model)
    complete(found, 0)
    move(model, "gate_proj")
    assert gap(model, complete(found, 0)) <= 1e-4
    assert found._engine.calls == ["base", "adapter"] * 2


def test_an_adapter_that_did_not_arrive_stops_training_and_is_sent_with_all_weights_then():
    model = adapted()
    found = backend(model)
    complete(found, 0)
    move(model)
    found._engine.faulty = True
    words = "Step 1.* adapter in model.layers.0.self_attn.q_proj and 5 more layers differs from"
    with pytest.raises(WeightSyncError, match=words):
        complete(found, 1)
    found._engine.faulty = False
    assert gap(model, complete(found, 1)) <= 1e-4
    assert found._engine.calls == ["base", "adapter", "adapter", "base", "adapter"]


def test_layers_for_which_vllm_has_no_adapter_are_named():
    with pytest.raises(ValueError, match="vLLM applies no adapter to model.layers.0.mlp.up_proj"):
        backend(adapted(target_modules=["up_proj"]))


def test_an_adapter_on_4_bits_is_trained_with_the_engine_that_options_start(tmp_path, monkeypatch):
    """The base is dequantized once, and the adapter is never rounded together with it."""
    settings = four_bits(tmp_path / "base")
    asked = []

    def start(model, tokenizer, wanted, ranks, kind):
        asked.append(wanted)
        return CountingEngine(started())

    monkeypatch.setattr(factory, "start_engine", start)
    trainer = make_trainer(
        tmp_path,
        **settings,
        script=None,
        use_vllm=True,
        vllm_sync_adapter_only=True,
        vllm_probe_syncs=1,
        max_steps=3,
        beta=0.1,
    )
    trainer.train()
    logs = trainer.state.log_history
    gaps = [entry["vllm/logp_gap"] for entry in logs if "vllm/logp_gap" in entry]
    assert len(gaps) == 3 and max(gaps) <= 1e-4
    assert trainer.backend._engine.calls == ["base", "adapter", "adapter", "adapter"]
    assert asked[0]["max_lora_rank"] == 8
    assert asked[0]["lora_target_modules"] == ["down_proj", "q_proj"]

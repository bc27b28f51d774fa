"""When an adapter can be sent alone, and whether it arrived; tests/vllm_cpu has an engine."""

from dataclasses import replace

import pytest
import torch
from online_runs import config, make_trainer
from peft import IA3Config, LoraConfig, get_peft_model
from tiny import tiny_model

from trl.generation.vllm.adapter_engine import (
    LoraFactors,
    adapter_arguments,
    adapter_mismatch,
    base_weights_version,
    lora_factors,
    why_not_plain_lora,
)
from trl.models.value_model import add_value_model
from trl.models.weights import full_weights

SENT = [
    LoraFactors("a.q", torch.ones(2, 3), torch.full((4, 2), 2.0)),
    LoraFactors("b.q", torch.ones(1, 3), torch.full((4, 1), 3.0)),
]

Q = {"target_modules": ["q_proj"]}


def held():
    """Room for rank 4, and a layer without adapter."""
    slots = {name: (torch.zeros(4, 3), torch.zeros(4, 4)) for name in ("a.q", "b.q", "a.k")}
    for factors in SENT:
        first, second = slots[factors.layer]
        first[: len(factors.a)] = factors.a
        second[:, : len(factors.a)] = factors.b
    return slots


def test_what_was_sent_is_held():
    assert adapter_mismatch(held(), SENT) is None


@pytest.mark.parametrize("name", ["a.q", "b.q", "a.k"])
@pytest.mark.parametrize("factor", [0, 1])
@pytest.mark.parametrize("place", [(0, 0), (3, 2)])
def test_one_wrong_number_is_found(name, factor, place):
    slots = held()
    slots[name][factor][place] += 1e-6
    assert adapter_mismatch(slots, SENT) == f"the adapter in {name} differs from what was sent"


def test_the_first_of_several_is_named():
    slots = {name: (a * 2, b) for name, (a, b) in held().items()}
    assert (
        adapter_mismatch(slots, SENT)
        == "the adapter in a.q and 1 more layers differs from what was sent"
    )


# --- Settings ---


def arguments_of(folder, adapter):
    return adapter_arguments(make_trainer(folder, peft_config=adapter).policy, "float32")


def test_the_engine_has_room_for_the_layers_of_the_adapter(tmp_path):
    adapter = LoraConfig(r=9, target_modules=["q_proj", "up_proj"], rank_pattern={"up_proj": 33})
    found = arguments_of(tmp_path, adapter)
    assert found["enable_lora"] and found["max_lora_rank"] == 64
    assert found["lora_target_modules"] == ["q_proj", "up_proj"]


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (129, 256), (512, 512)])
def test_room_is_what_vllm_offers(tmp_path, rank, room):
    assert arguments_of(tmp_path, LoraConfig(r=rank, **Q))["max_lora_rank"] == room


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (None, "the policy has no adapter"),
        (IA3Config(target_modules=["v_proj"], feedforward_modules=[]), "of type IA3, not LoRA"),
        (LoraConfig(use_dora=True, **Q), "an adapter with use_dora"),
        (LoraConfig(modules_to_save=["lm_head"], **Q), "an adapter with modules_to_save"),
        (LoraConfig(bias="all", **Q), "an adapter with bias"),
        (LoraConfig(target_modules=["q_proj", "lm_head"]), "an adapter on lm_head, which is no"),
        (LoraConfig(target_modules=["embed_tokens"]), "an adapter on model.embed_tokens, which"),
        (LoraConfig(r=600, **Q), "up to rank 512, and this one has 600"),
    ],
)
def test_what_is_more_than_vllm_applies_is_refused(tmp_path, adapter, words):
    with pytest.raises(ValueError, match=f"vllm_sync_adapter_only=True.*{words}"):
        arguments_of(tmp_path, adapter)


def test_a_gpu_needs_half_precision(tmp_path):
    trainer = make_trainer(tmp_path, peft_config=LoraConfig(**Q))
    policy = replace(trainer.policy, device=torch.device("cuda"))
    with pytest.raises(ValueError, match="bfloat16 and float16 only: set bf16=True"):
        adapter_arguments(policy, "float32")
    adapter_arguments(policy, "bfloat16")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode=True: base weights would"),
        ({"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size above 1"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, options, words):
    with pytest.raises(ValueError, match=f"cannot be used with {words}"):
        config(tmp_path, use_vllm=True, vllm_sync_adapter_only=True, **options)


# --- Base weights and factors ---


LAYERS = ["q_proj", "down_proj"]


def adapted(**options):
    torch.manual_seed(1)
    settings = {"target_modules": LAYERS, "init_lora_weights": False, "r": 4}
    return get_peft_model(tiny_model(), LoraConfig(**(settings | options)))


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True, "lora_alpha": 5}, {"rank_pattern": {"q_proj": 2}}],
    ids=["lora", "rslora", "ranks"],
)
def test_factors_on_base_weights_are_the_merged_weights(options):
    model = adapted(**options)
    assert why_not_plain_lora(model) is None
    found = {name: weight.clone() for name, weight in full_weights(model, with_adapter=False)}
    plain = tiny_model().state_dict()
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], value) for name, value in plain.items())
    all_factors = list(lora_factors(model))
    assert len(all_factors) == 4
    for factors in all_factors:
        found[f"{factors.layer}.weight"] += factors.b @ factors.a
    for name, weight in full_weights(model):
        assert torch.allclose(found[name], weight, atol=1e-6)


def test_reading_base_weights_leaves_the_adapter_on():
    model, ids = adapted(), torch.arange(5, 15)[None]
    before = model(ids).logits
    trained = [p for p in model.parameters() if p.requires_grad]
    next(full_weights(model, with_adapter=False))
    list(full_weights(model, with_adapter=False))
    assert torch.equal(model(ids).logits, before)
    assert all(p.requires_grad for p in trained)


def test_the_stamp_of_the_base_changes_with_base_weights_alone():
    model = adapted()
    model.add_adapter("ref", LoraConfig(target_modules=LAYERS))
    before = base_weights_version(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(1)
        assert base_weights_version(model) == before
        model.get_input_embeddings().weight.add_(1)
        assert base_weights_version(model) > before
        between = base_weights_version(model)
        model.base_model.model.model.layers[0].mlp.down_proj.base_layer.weight.add_(1)
        assert base_weights_version(model) > between


def test_steps_of_a_value_model_send_no_base_weights():
    model = adapted()
    add_value_model(model, None, torch.device("cpu"))
    before = base_weights_version(model)
    values = [p for name, p in model.named_parameters() if "value_model" in name]
    optimizer = torch.optim.SGD(values, lr=0.1)
    for parameter in values:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert len(values) == 2 and values[0].any() and base_weights_version(model) == before

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny import tiny_model

from trl.models.reference import (
    AdapterOff,
    FrozenCopy,
    create_reference_model,
    is_peft_model,
    load_weights,
    make_reference,
    whole_weights,
)
from trl.models.unwrap import run_inside

IDS = torch.tensor([[8, 9, 10, 11]])


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def adapted():
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"]))
    move(model)
    return model


def move(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


def test_a_copy_that_has_moved_is_restored_bit_by_bit():
    moved, again = FrozenCopy(tiny_model()), FrozenCopy(tiny_model())
    with torch.no_grad():
        for parameter in moved.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    load_weights(again.model, dict(whole_weights(moved.model)))
    assert torch.equal(logits(again.model), logits(moved.model))
    assert not torch.equal(logits(again.model), logits(tiny_model()))


def test_the_copy_is_of_the_object_passed_in():
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)  # an edit in memory
    edited = logits(model)
    reference = create_reference_model(model)
    move(model)
    assert torch.equal(logits(reference), edited) and not torch.equal(logits(model), edited)
    assert not reference.training and not any(p.requires_grad for p in reference.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_full_models_get_a_copy():
    reference = make_reference(tiny_model(), had_adapter=False)
    assert isinstance(reference, FrozenCopy) and not is_peft_model(reference.model)


def test_a_new_adapter_is_switched_off():
    model = adapted()
    base = logits(tiny_model())
    reference = make_reference(model, had_adapter=False)
    assert isinstance(reference, AdapterOff)
    with reference.active() as scored:
        assert torch.equal(logits(scored), base)
    assert not torch.equal(logits(model), base)


def test_virtual_tokens_are_left_out_where_the_forward_is_replaced():
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    reference = make_reference(get_peft_model(tiny_model(), config), had_adapter=False)
    with torch.no_grad(), reference.active() as scored:
        found = run_inside(scored, {"input_ids": IDS}, lambda forward, given: forward(**given))
    assert torch.equal(found.logits, logits(tiny_model()))


def test_an_adapter_that_was_brought_is_frozen():
    model = adapted()
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    start = logits(model)
    reference = make_reference(model, had_adapter=True)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == trainable
    move(model)
    moved = logits(model)
    with reference.active() as scored:
        assert torch.equal(logits(scored), start)
    assert torch.equal(logits(model), moved) and not torch.equal(moved, start)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == trainable


def trainable_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("brought", [False, True])
def test_the_trained_adapter_is_back_even_after_an_error(brought):
    model = adapted()
    trainable, policy = trainable_names(model), logits(model)
    reference = make_reference(model, had_adapter=brought)
    assert reference.prepare(Accelerator(cpu=True)) is reference
    with pytest.raises(KeyError), reference.active():
        raise KeyError
    assert trainable_names(model) == trainable
    assert model.active_adapter == "default"
    assert torch.equal(logits(model), policy)


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"use_rslora": True, "target_modules": "all-linear"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_kind_of_adapter_weight_is_copied(options):
    torch.manual_seed(0)
    settings = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | options
    model = get_peft_model(tiny_model(), LoraConfig(**settings)).eval()
    move(model)
    start, trainable = logits(model), trainable_names(model)
    reference = make_reference(model, had_adapter=True)
    move(model)
    with reference.active() as scored:
        assert torch.equal(logits(scored), start)
    assert not torch.equal(logits(model), start)
    assert trainable_names(model) == trainable


def test_training_leaves_the_frozen_adapter():
    model = adapted()
    reference = make_reference(model, had_adapter=True)
    frozen = {n: p.clone() for n, p in model.named_parameters() if ".ref." in n}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        with reference.active() as scored, torch.no_grad():
            target = scored(IDS).logits
        (model(IDS).logits - 2 * target).square().mean().backward()
        optimizer.step()
    assert len(frozen) == 4, "two factors in each of two layers"
    found = dict(model.named_parameters())
    assert all(torch.equal(found[n], p) and found[n].grad is None for n, p in frozen.items())


@pytest.mark.parametrize("tied", [False, True])
def test_weights_go_out_and_in_again(tied):
    model = tiny_model(tie_word_embeddings=tied)
    state = dict(whole_weights(model))
    assert state.keys() == model.state_dict().keys()
    doubled = {name: 2 * weight for name, weight in state.items()}
    load_weights(model, doubled)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, 2 * state[name]), "what came out does not change with the model"


def test_other_weights_are_refused():
    model = tiny_model()
    state = dict(whole_weights(model))
    with pytest.raises(RuntimeError, match="more.weight"):
        load_weights(model, state | {"more.weight": torch.ones(1)})
    state.pop("lm_head.weight")
    with pytest.raises(RuntimeError, match="lm_head.weight"):
        load_weights(model, state)


def test_a_copy_is_its_own():
    model = tiny_model(tie_word_embeddings=True)
    copied = create_reference_model(model)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert torch.equal(copied.lm_head.weight, model.lm_head.weight)
    assert copied.lm_head.weight.data_ptr() != model.lm_head.weight.data_ptr()


def test_one_process_keeps_the_model_as_it_is():
    model = tiny_model()
    assert FrozenCopy(model).prepare(Accelerator(cpu=True)).model is model

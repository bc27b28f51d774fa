import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from trl.models.reference import (
    AdapterOff,
    FrozenCopy,
    create_reference_model,
    is_peft_model,
    make_reference,
)

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
    reference = make_reference(tiny_model(), brought_adapter=False)
    assert isinstance(reference, FrozenCopy) and not is_peft_model(reference.model)


def test_a_new_adapter_is_switched_off():
    model = adapted()
    base = logits(tiny_model())
    reference = make_reference(model, brought_adapter=False)
    assert isinstance(reference, AdapterOff)
    with reference.active() as scored:
        assert torch.equal(logits(scored), base)
    assert not torch.equal(logits(model), base)


def test_an_adapter_that_was_brought_is_frozen():
    model = adapted()
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    start = logits(model)
    reference = make_reference(model, brought_adapter=True)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == trainable
    move(model)
    moved = logits(model)
    with reference.active() as scored:
        assert torch.equal(logits(scored), start)
    assert torch.equal(logits(model), moved) and not torch.equal(moved, start)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == trainable

import pytest
import torch
from rollouts import rollout_of
from tiny import lora_model, tiny_model
from transformers import LlamaForSequenceClassification

from trl.models.scorer import Scorer
from trl.models.value_model import (
    add_value_model,
    load_values,
    save_values,
    split_state,
    value_reader,
    without_values,
)
from trl.models.weights import full_weights


@pytest.mark.parametrize("make", [tiny_model, lora_model], ids=["plain", "adapter"])
def test_it_is_a_part_of_the_policy_that_engines_do_not_see(make, tmp_path):
    policy = make()
    before = {name: weight.clone() for name, weight in full_weights(policy)}
    add_value_model(policy, None, torch.device("cpu"))
    assert all(p.requires_grad for n, p in policy.named_parameters() if "value_model" in n)
    assert {name: weight.shape for name, weight in full_weights(policy)} == {
        name: weight.shape for name, weight in before.items()
    }
    own, values = split_state(policy.state_dict())
    assert set(values) == {"weight", "bias"}
    with without_values(policy):
        assert set(own) == set(policy.state_dict())
    assert not any(p.any() for p in value_reader(policy).module.parameters())
    torch.nn.init.ones_(value_reader(policy).module.weight)
    save_values(policy, split_state(policy.state_dict())[1], tmp_path)
    torch.nn.init.zeros_(value_reader(policy).module.weight)
    load_values(policy, tmp_path)
    assert value_reader(policy).module.weight.min() == 1.0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_its_own_attention_sees_the_layout(attention):
    """Also where that is not what the policy attends with."""
    policy = tiny_model()
    classifier = LlamaForSequenceClassification(tiny_model(seed=1, num_labels=1).config)
    classifier.set_attn_implementation(attention)
    torch.nn.init.normal_(classifier.score.weight)
    add_value_model(policy, classifier, torch.device("cpu"))
    prompt = [20, 21, 22]
    batch = rollout_of([(prompt, [30, 31, 32]), (prompt, [40, 41, 42])])
    found = {}
    for shared in (True, False):
        options = {"temperature": 1.0, "device": torch.device("cpu"), "shared_prefix": shared}
        scorer = Scorer(pad_id=0, **options)
        found[shared] = scorer(policy, batch, values=value_reader(policy)).values
        assert value_reader(policy).can_pack
    assert (found[True] - found[False]).abs().max() < 1e-5


def test_what_gives_no_value(tmp_path):
    policy = tiny_model()
    with pytest.raises(TypeError, match="must be a sequence classifier .* not LlamaForCausalLM"):
        add_value_model(policy, tiny_model(), torch.device("cpu"))
    add_value_model(policy, None, torch.device("cpu"))
    with pytest.raises(ValueError, match="has no value_model"):
        load_values(policy, tmp_path)

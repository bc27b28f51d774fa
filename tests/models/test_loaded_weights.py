"""Weights that lack what is trained, or that do not fit, are refused by name."""

import json

import pytest
from tiny import save_tiny, tiny_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaForSequenceClassification

from trl.models.loaded_weights import check_one_label, from_pretrained
from trl.models.loading import load_policy


def test_a_checkpoint_without_a_head_is_refused(tmp_path):
    tiny_model().model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no weights for lm_head.weight, which would be rand"):
        load_policy(str(tmp_path), None)


def test_a_head_that_is_tied_to_the_embedding_is_not_missing(tmp_path):
    tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    model = load_policy(str(tmp_path), None)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_what_is_learned_by_a_reward_model_may_be_missing(tmp_path):
    model = load_policy(save_tiny(tmp_path), None, gives_rewards=True)
    assert isinstance(model, LlamaForSequenceClassification)
    assert model.config.num_labels == 1


def test_classifiers_of_several_classes_give_no_reward(tmp_path):
    config = tiny_model().config
    config.num_labels = 3
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="classifies into 3 classes"):
        load_policy(str(tmp_path), None, gives_rewards=True)
    options = {"ignore_mismatched_sizes": True}
    assert load_policy(str(tmp_path), options, gives_rewards=True).config.num_labels == 1
    check_one_label("a", tiny_model().config, ["LlamaForCausalLM"])  # has labels by default


def test_weights_of_other_shapes(tmp_path):
    save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(ValueError, match="have other shapes than its config.json says"):
        from_pretrained(LlamaForCausalLM, str(tmp_path), {})


def test_arguments_that_the_model_does_not_take(tmp_path):
    with pytest.raises(TypeError, match="model_init_kwargs: .* unexpected keyword argument 'x'"):
        from_pretrained(AutoModelForCausalLM, save_tiny(tmp_path), {"x": 1})

import pytest
from tiny import save_tiny, tiny_model

from trl.trainer.offline.given_reference import given_reference
from trl.trainer.offline.offline_config import PreferenceConfig


def test_a_reference_by_name_or_loaded(tmp_path):
    name = save_tiny(tmp_path / "ref")
    args = PreferenceConfig(str(tmp_path), use_cpu=True, ref_model_init_kwargs={"dtype": "float16"})
    assert given_reference(None, "model", args) is None
    assert str(given_reference(name, name, args).dtype) == "torch.float16"
    model = tiny_model(attention_dropout=0.5)
    found = given_reference(model, tiny_model(), args)
    assert found is model and found.model.layers[0].self_attn.attention_dropout == 0.0


def test_what_cannot_be_a_reference(tmp_path):
    args, model = PreferenceConfig(str(tmp_path), use_cpu=True), tiny_model()
    with pytest.raises(ValueError, match="ref_model is the model that is trained"):
        given_reference(model, model, args)
    with pytest.raises(TypeError, match="must be a name or a transformers model, not int"):
        given_reference(3, model, args)

"""Names of modules in a peft configuration are compared with the model."""
# ruff: noqa: E501

import logging

import pytest
from peft import LoraConfig
from tiny import tiny_model

from trl.models.adapter_targets import check_adapter_modules
from trl.models.loading import add_adapter

ALL = "embed_tokens, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head."


@pytest.mark.parametrize(
    "targets",
    [
        None,
        "all-linear",
        ["q_proj", "v_proj"],
        ["self_attn.q_proj"],
        ["layers.0.self_attn.q_proj", "lm_head"],
        r".*\.(q|v)_proj",
    ],
)
def test_targets_that_exist_get_an_adapter(targets):
    model = add_adapter(tiny_model(), LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
    assert any("lora_A" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["q_porj", "v_proj"]}, "no module 'q_porj'. Did you mean q_proj?"),
        ({"target_modules": ["query_key"]}, f"no module 'query_key'. Modules with weight matrices are {ALL}"),
        ({"target_modules": "q_proj"}, "for names give a list: ['q_proj']."),
        ({"target_modules": "q_proj, v_proj"}, "for names give a list: ['q_proj', 'v_proj']."),
        ({"target_modules": ".*_prj"}, "target_modules (--lora_target_modules): the model has no module '.*_prj'."),
        ({"modules_to_save": ["lm_heda"]}, "modules_to_save (--lora_modules_to_save): the model has no module 'lm_heda'. Did you mean lm_head?"),
    ],
)  # fmt: skip
def test_names_that_no_module_has(options, message):
    with pytest.raises(ValueError) as error:
        check_adapter_modules(tiny_model(), LoraConfig(task_type="CAUSAL_LM", **options))
    assert message in str(error.value)


def test_a_list_for_several_architectures_is_a_warning(caplog):
    config = LoraConfig(target_modules=["q_proj", "W_pack"], task_type="CAUSAL_LM")
    with caplog.at_level(logging.WARNING):
        check_adapter_modules(tiny_model(), config)
    assert "the model has no module 'W_pack'." in caplog.text

"""What is trained: model, tokenizer, adapter; and the reference."""

import peft
import pytest
import torch
from datasets import Dataset
from mixtures import EXPERTS, mixture
from online_runs import ONE_UPDATE, PROMPTS, config, make_trainer, rows_of, step_direction, weights
from tiny import save_tiny, tiny_model, tiny_tokenizer
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CLIPImageProcessor,
    LlavaProcessor,
)

from trl.models.reference import make_reference
from trl.trainer.base.policy import (
    check_optimizer,
    checked_args,
    load_reference,
    prepare_policy,
    router_coefficient,
)
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.offline.offline_config import PreferenceConfig
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer


def balance(model, rows):
    """The load-balancing loss of rows, each forwarded alone: experts times sum of share x mean."""
    found = []
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [
        gate.register_forward_pre_hook(
            lambda module, given: found.append(given[0].flatten(0, -2) @ module.weight.T)
        )
        for gate in gates
    ]
    with torch.no_grad():
        for prompt, completion in rows:
            model(torch.tensor([prompt + completion]))
    for hook in hooks:
        hook.remove()
    assert len(gates) == 2
    probabilities = torch.cat(found).softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(2).indices, 1.0)
    return float(EXPERTS * (chosen.mean(0) * probabilities.mean(0)).sum())


@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_a_step_of_a_mixture_of_experts_logs_its_balance(tmp_path, kind):
    model = mixture(kind)
    expected = balance(model, rows_of(PROMPTS[:2], 4))
    trainer = make_trainer(tmp_path, model=model)
    assert trainer.router_coefficient == 0.5
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["aux_loss"] == pytest.approx(expected, rel=1e-5)
    # On-policy the value of the policy's own loss depends on advantages and lengths alone.
    assert entry["loss"] == pytest.approx(0.5 * expected + _policy_part(tmp_path), rel=1e-4)


def _policy_part(folder):
    trainer = make_trainer(folder / "plain", model=mixture("qwen3"), router_aux_loss_coef=0.0)
    trainer.train()
    return trainer.state.log_history[0]["loss"]


def test_the_option_weighs_the_balance(tmp_path):
    """The update is linear in the weight; with zero the router logits are not asked for."""
    directions = []
    for weight in (0.0, 1.0, 3.0):
        trainer = make_trainer(
            tmp_path / str(weight), model=mixture("qwen3"), router_aux_loss_coef=weight
        )
        directions.append(step_direction(trainer))
        assert ("aux_loss" in trainer.state.log_history[0]) == (weight > 0)
    plain, one, three = directions
    assert (one - plain).norm() > 0.01 * plain.norm()
    assert (three - plain - 3 * (one - plain)).norm() < 1e-3 * (three - plain).norm()


def test_router_coefficient(tmp_path):
    assert router_coefficient(mixture("mixtral", 0.25), config(tmp_path)) == 0.25
    chosen = config(tmp_path, router_aux_loss_coef=2.0)
    assert router_coefficient(mixture("qwen3"), chosen) == 2.0
    assert router_coefficient(tiny_model(), config(tmp_path)) == 0.0
    assert router_coefficient(tiny_model(), config(tmp_path, router_aux_loss_coef=0.0)) == 0.0
    with pytest.raises(ValueError, match="LlamaConfig is not a mixture of experts"):
        router_coefficient(tiny_model(), chosen)


def test_float64_with_eager_attention_is_refused(tmp_path):
    eager = tiny_model(attn_implementation="eager").double()
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        prepare_policy(eager, config(tmp_path), tiny_tokenizer())
    for model in (tiny_model(attn_implementation="eager"), tiny_model().double()):
        assert prepare_policy(model, config(tmp_path), tiny_tokenizer()).model is model


class Dropping(type(tiny_model())):
    """A model with a dropout layer besides that of attention."""

    def __init__(self, settings):
        super().__init__(settings)
        self.model.norm = nn.Sequential(self.model.norm, nn.Dropout(0.5))


@pytest.mark.parametrize("adapter", [False, True])
def test_dropout_can_be_disabled(tmp_path, adapter):
    """In layers, in attention and in a new adapter; training forwards then repeat exactly."""
    extra = {}
    if adapter:
        peft = pytest.importorskip("peft")
        extra["peft_config"] = peft.LoraConfig(
            task_type="CAUSAL_LM",
            lora_dropout=0.5,
            target_modules=["q_proj"],
            init_lora_weights=False,
        )
    ids = torch.arange(10, 20)[None]
    for disable in (True, False):
        model = Dropping(tiny_model(attention_dropout=0.5).config)
        args = config(tmp_path, disable_dropout=disable)
        policy = prepare_policy(model, args, tiny_tokenizer(), **extra).model.train()
        with torch.no_grad():
            assert torch.equal(policy(ids).logits, policy(ids).logits) is disable
        found = {m.p for m in policy.modules() if isinstance(m, nn.Dropout)}
        assert found == {0.0 if disable else 0.5}


def test_a_processor_is_refused(tmp_path):
    processor = LlavaProcessor(CLIPImageProcessor(), tiny_tokenizer(), patch_size=14)
    with pytest.raises(TypeError, match="Pass its tokenizer to train on text"):
        prepare_policy(tiny_model(), config(tmp_path), processor)
    with pytest.raises(TypeError, match="must be a tokenizer, not dict"):
        prepare_policy(tiny_model(), config(tmp_path), {})


def test_a_model_by_name_brings_its_tokenizer(tmp_path):
    name = save_tiny(tmp_path / "model")
    policy = prepare_policy(name, config(tmp_path))
    assert policy.tokenizer.padding_side == "left"
    assert policy.model.dtype == torch.float32
    assert policy.had_adapter is False
    half = prepare_policy(name, config(tmp_path, model_init_kwargs={"dtype": "bfloat16"}))
    assert half.model.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="pass its tokenizer as processing_class"):
        prepare_policy(tiny_model(), config(tmp_path))


def test_what_is_no_model_is_refused(tmp_path):
    for model in (3, nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=f"not {type(model).__name__}"):
            prepare_policy(model, config(tmp_path), tiny_tokenizer())


def test_the_head_can_compute_in_float32(tmp_path):
    args = config(tmp_path, cast_lm_head_to_fp32=True)
    policy = prepare_policy(tiny_model().bfloat16(), args, tiny_tokenizer())
    assert policy.model(torch.tensor([[10, 11]])).logits.dtype == torch.float32
    assert policy.model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


def test_an_adapter_that_was_there_is_told_from_a_new_one(tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    new = prepare_policy(tiny_model(), config(tmp_path), tiny_tokenizer(), peft_config=lora)
    old = prepare_policy(
        peft.get_peft_model(tiny_model(), lora), config(tmp_path), tiny_tokenizer()
    )
    assert isinstance(new.model, peft.PeftModel)
    assert (new.had_adapter, old.had_adapter) == (False, True)


def test_options_of_loading_stay_as_they_were_given(tmp_path):
    args = config(tmp_path, model_init_kwargs={"dtype": "bfloat16"})
    found = prepare_policy(save_tiny(tmp_path / "model"), args)
    assert found.model.dtype == torch.bfloat16
    assert args.model_init_kwargs == {"dtype": "bfloat16"}


def test_options_for_loading_are_ignored_with_a_warning(tmp_path, caplog):
    from trl.trainer.base.policy import logger

    logger.addHandler(caplog.handler)
    args = config(tmp_path, model_init_kwargs={"dtype": "bfloat16"})
    policy = prepare_policy(tiny_model(), args, tiny_tokenizer())
    logger.removeHandler(caplog.handler)
    assert policy.model.dtype == torch.float32
    assert "model_init_kwargs ignored: the given model is already loaded" in caplog.text


def test_one_process_must_not_see_several_gpus(tmp_path):
    args = config(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match=r"One process sees 2 GPUs.*CUDA_VISIBLE_DEVICES=0"):
        checked_args("model", args, RLOOConfig)


def test_options_of_another_trainer(tmp_path):
    with pytest.raises(TypeError, match="must be an instance of GRPOConfig, not of RLOOConfig"):
        checked_args("model", config(tmp_path), GRPOConfig)
    args = config(tmp_path)
    assert checked_args("model", args, RLOOConfig) is args


@pytest.mark.parametrize("loaded", [False, True])
def test_the_output_may_not_replace_the_model(tmp_path, loaded):
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    model.config._name_or_path = str(tmp_path / "model")
    given = model if loaded else f"{tmp_path}/model"
    with pytest.raises(ValueError, match="output_dir=.* is the folder of the model"):
        checked_args(given, config(f"{tmp_path}/./model/"), RLOOConfig)
    assert checked_args(given, config(tmp_path / "out"), RLOOConfig)


def test_a_path_that_leads_nowhere(tmp_path):
    (tmp_path / "smollm").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no such folder. Did you mean \S+/smollm\?"):
        prepare_policy(str(tmp_path / "smolm"), config(tmp_path / "out"))
    with pytest.raises(FileNotFoundError, match="'./nowhere/x': there is no such folder."):
        prepare_policy("./nowhere/x", config(tmp_path / "out"))


def test_an_adapter_without_a_tokenizer_takes_that_of_its_base(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "base"))
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    policy = prepare_policy(str(tmp_path / "adapter"), config(tmp_path / "out"))
    assert policy.tokenizer.name_or_path == str(tmp_path / "base")
    assert policy.had_adapter


def test_an_adapter_whose_base_has_moved(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "base"))
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "base").rename(tmp_path / "bases")
    with pytest.raises(OSError) as error:
        prepare_policy(str(tmp_path / "adapter"), config(tmp_path / "out"))
    assert f"there is no such folder. Did you mean {tmp_path / 'bases'}?" in str(error.value)
    file = tmp_path / "adapter" / "adapter_config.json"
    assert f"set base_model_name_or_path in {file}" in str(error.value)


def test_a_reference_that_is_given_is_not_copied(tmp_path):
    args, policy = config(tmp_path), tiny_model()
    named = load_reference(save_tiny(tmp_path / "model", seed=3), policy, args)
    assert torch.equal(weights(named), weights(tiny_model(seed=3)))
    assert load_reference(named, policy, args) is named
    reference = make_reference(policy, had_adapter=False, ref_model=named)
    assert reference.model is named
    assert not any(parameter.requires_grad for parameter in named.parameters())
    assert load_reference(None, policy, args) is None


def test_a_reference_by_name_or_loaded(tmp_path):
    name = save_tiny(tmp_path / "ref")
    args = PreferenceConfig(str(tmp_path), use_cpu=True, ref_model_init_kwargs={"dtype": "float16"})
    assert load_reference(None, "model", args) is None
    assert str(load_reference(name, name, args).dtype) == "torch.float16"
    model = tiny_model(attention_dropout=0.5)
    found = load_reference(model, tiny_model(), args)
    assert found is model and found.model.layers[0].self_attn.attention_dropout == 0.0


def test_what_cannot_be_a_reference(tmp_path):
    args, model = PreferenceConfig(str(tmp_path), use_cpu=True), tiny_model()
    with pytest.raises(ValueError, match="ref_model is the model that is trained"):
        load_reference(model, model, args)
    with pytest.raises(TypeError, match="must be a name or a transformers model, not int"):
        load_reference(3, model, args)


def test_tokens_that_the_model_does_not_know_are_told(tmp_path, log):
    tokenizer = tiny_tokenizer()
    make_trainer(tmp_path, model=tiny_model(), processing_class=tokenizer)
    assert "resize_token_embeddings" not in log.text
    known = tiny_model().config.vocab_size
    tokenizer.add_tokens([f"<extra {i}>" for i in range(known)])
    make_trainer(tmp_path, model=tiny_model(), processing_class=tokenizer)
    words = f"The tokenizer has {len(tokenizer)} tokens, and the model knows {known}: rows with"
    assert words in log.text


def test_an_optimizer_of_other_weights_is_refused(tmp_path):
    model = tiny_model()
    for weights_of in (tiny_model(), model.requires_grad_(False)):
        optimizer = torch.optim.SGD(weights_of.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="optimizer holds none of the weights that are train"):
            check_optimizer(model, optimizer)
    model.requires_grad_(True)
    check_optimizer(model, torch.optim.SGD(model.lm_head.parameters(), lr=0.1))
    other = torch.optim.SGD(tiny_model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer holds none of the weights that are trained"):
        make_trainer(tmp_path, model=model, optimizers=(other, None))
    with pytest.raises(ValueError, match="optimizer holds none of the weights that are trained"):
        SFTTrainer(
            model, SFTConfig(str(tmp_path), **ONE_UPDATE),
            train_dataset=Dataset.from_dict({"text": ["a"]}),
            processing_class=tiny_tokenizer(), optimizers=(other, None),
        )  # fmt: skip

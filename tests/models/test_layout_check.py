"""Which models may share prompts, and that those which only seem to are found out."""

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from rollouts import rollout_of, token_mask
from tiny import SIZES, tiny_model
from transformers import (
    AttentionInterface,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from trl.models.layout_check import disagreement, why_not_shared
from trl.models.packed_attention import KEYWORD
from trl.models.scorer import Scorer, two_longest
from trl.ops.matmul_precision import matmul_precision_kept
from trl.types import Rows

CPU = torch.device("cpu")


def build(config_class, model_class, **changes):
    torch.manual_seed(0)
    return model_class(config_class(**(SIZES | changes)))


def rollout(prompts, completions) -> Rows:
    return rollout_of(list(zip(prompts, completions, strict=True)))


def group(prompt_length=3, length=4, rows=2) -> Rows:
    """Rows of one prompt with unlike completions of a length."""
    prompt = [8 + i % 40 for i in range(prompt_length)]
    completions = [[50 + (7 * row + i) % 40 for i in range(length)] for row in range(rows)]
    return rollout([prompt] * rows, completions)


# --- What is refused at sight ---


def eager():
    model = tiny_model()
    model.set_attn_implementation("eager")
    return model


def dropout():
    return tiny_model(attention_dropout=0.1).train()


def gpt2(**dropouts):
    """Its layers hold a module that drops weights of attention, and one behind it."""
    sizes = {"vocab_size": 95, "n_embd": 32, "n_layer": 1, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts)).train()


def adapter(config):
    return get_peft_model(tiny_model(), config)


def flex():
    model = tiny_model()
    model.config._attn_implementation = "flex_attention"
    return model


def gemma2():
    return build(Gemma2Config, Gemma2ForCausalLM, sliding_window=16, attn_logit_softcapping=0.2)


def gpt_oss():
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 9}
    return build(GptOssConfig, GptOssForCausalLM, initializer_range=0.1, **sizes)


def latent():
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "num_key_value_heads": 4, "n_routed_experts": 4}
    sizes = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 4}
    experts = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    return build(DeepseekV3Config, DeepseekV3ForCausalLM, **ranks, **sizes, **experts)


def mistral(window):
    return build(MistralConfig, MistralForCausalLM, sliding_window=window)


def qwen(**changes):
    return build(Qwen2Config, Qwen2ForCausalLM, **changes)


def rotating(kind, border):
    """A model whose rotary frequencies change with the longest row, from a border on."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"original_max_position_embeddings": border}
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    limit = {"max_position_embeddings": border if kind == "dynamic" else 4 * border}
    return build(LlamaConfig, LlamaForCausalLM, rope_parameters=rope, **limit)


WINDOWED = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
REFUSED = {
    "flex": (flex, "attention implementation is 'flex_attention'"),
    "dropout": (dropout, "its attention has dropout"),
    "dropout of a module": (lambda: gpt2(resid_pdrop=0.0), "its attention has dropout"),
    "longrope": (lambda: rotating("longrope", 20), "depends on the longest row from 20 tokens"),
    "dynamic": (lambda: rotating("dynamic", 20), "depends on the longest row from 20 tokens"),
    "prompt": (
        lambda: adapter(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        "virtual tokens",
    ),
    "prefix": (
        lambda: adapter(PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        "virtual tokens",
    ),
}
ALLOWED = {
    "llama": tiny_model,
    "qwen3": lambda: tiny_model("qwen3"),
    "eager": eager,
    "mistral": lambda: mistral(16),
    "mistral without window": lambda: mistral(None),
    "gemma3": lambda: build(Gemma3TextConfig, Gemma3ForCausalLM, sliding_window=8),
    "gemma2": gemma2,
    "gpt-oss": gpt_oss,
    "latent attention": latent,
    "qwen": lambda: qwen(**WINDOWED),
    "qwen off": lambda: qwen(**(WINDOWED | {"use_sliding_window": False})),
    "qwen late": lambda: qwen(**(WINDOWED | {"max_window_layers": 1})),
    "longrope": lambda: rotating("longrope", 21),
    "dynamic": lambda: rotating("dynamic", 21),
    "dropout off": lambda: dropout().eval(),
    "dropout behind attention": lambda: gpt2(attn_pdrop=0.0),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_rules_sharing_out(kind):
    model, words = REFUSED[kind]
    assert words in why_not_shared(model(), 20)


@pytest.mark.parametrize("kind", ALLOWED)
def test_what_does_not(kind):
    assert why_not_shared(ALLOWED[kind](), 20) is None


def gradient(model, batch, **options):
    """Of weighted log-probabilities, all parameters together."""
    logps = Scorer(pad_id=0, temperature=1.0, device=CPU, **options)(model, batch).logps
    weights = torch.linspace(-1, 1, logps.numel()).view(logps.shape)
    parameters = list(model.parameters())
    found = torch.autograd.grad((logps * weights).sum(), parameters, allow_unused=True)
    zeros = zip(found, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zeros])


@pytest.mark.parametrize("kind", ["eager", "mistral", "gemma3", "gemma2", "gpt-oss", "qwen late"])
def test_what_layers_may_see_is_learned_from_their_calls(log, kind):
    """Windows of some layers, sinks, bounded products: the gradient is that of plain rows."""
    model = ALLOWED[kind]()
    batch = rollout(
        [[8 + i % 40 for i in range(21)]] * 3 + [[9, 10]] * 2 + [[11, 12, 13]],
        [[50 + (7 * row + i) % 40 for i in range(n)] for row, n in enumerate((5, 19, 2, 30, 4, 8))],
    )
    calls = packed_rows(model)
    ours = gradient(model, batch)
    assert not said(log) and calls[-1]
    theirs = gradient(model, batch, shared_prefix=False)
    assert (ours - theirs).norm() / theirs.norm() < 5e-6


@pytest.mark.parametrize("told", [None, 8, 10])
def test_a_layer_that_names_another_window_than_it_masks(log, told):
    """Rows that fit the window cannot tell; the first that do not are compared again."""
    model, score = build(MistralConfig, MistralForCausalLM, sliding_window=9), scorer()
    for name, layer in model.named_modules():
        if name.endswith("self_attn"):
            layer.config = copy.copy(model.config)
            layer.config.sliding_window = told
            layer.q_proj.weight.data *= 20  # so that it matters what a token sees
    score(model, group(3, 5))
    assert not said(log)
    batch = group(7, 9)
    assert (score(model, batch).logps - alone(model, batch)).abs().max() < 1e-5
    assert len(said(log)) == 1 and "differed by" in said(log)[0]


def test_recurrent_models():
    torch.manual_seed(0)
    sizes = {"vocab_size": 95, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
    assert why_not_shared(MambaForCausalLM(MambaConfig(**sizes)), 20) is not None
    model = tiny_model()
    model.config.layer_types = ["linear_attention", "full_attention"]
    assert "layers of other kinds: linear_attention" in why_not_shared(model, 20)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("is_encoder_decoder", True, "encoder-decoder"), ("vision_config", object(), "images")],
)
def test_other_kinds_of_models(name, value, words):
    model = tiny_model()
    setattr(model.config, name, value)
    assert words in why_not_shared(model, 20)


# --- The check ---


class Ignorant(LlamaForCausalLM):
    """Its attention never hears of the layout, so it takes a packed row for one sequence."""

    def __init__(self, config):
        super().__init__(config)
        self.forwards = 0
        for layer in self.model.layers:
            layer.self_attn.register_forward_pre_hook(self._forget, with_kwargs=True)
        self.model.register_forward_pre_hook(self._count)

    def _count(self, module, args):
        self.forwards += 1

    def _forget(self, module, args, kwargs):
        return args, {
            name: None if name == "attention_mask" else value
            for name, value in kwargs.items()
            if name != KEYWORD
        }


def ignorant() -> Ignorant:
    torch.manual_seed(0)
    return Ignorant(tiny_model().config)


def scorer() -> Scorer:
    return Scorer(pad_id=0, temperature=1.0, device=CPU)


def alone(model, batch):
    """Log-probabilities of each row by itself, from full logits."""
    found = torch.zeros(token_mask(batch).shape)
    rows = zip(batch.prompt_ids, batch.completion_ids, strict=True)
    for row, (prompt, completion) in enumerate(rows):
        every = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        places = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
        found[row, : len(completion)] = every[places, torch.tensor(completion)]
    return found


def said(log):
    return [r.getMessage() for r in log.records if "shared_prefix" in r.getMessage()]


def test_a_model_that_ignores_the_layout_is_found_out(log):
    """One warning; rows carry their own prompts, and results are right."""
    model, score = ignorant(), scorer()
    # Its own attention drops masks, so rows of one length, which need no padding.
    batch = group()
    for _ in range(3):
        scores = score(model, batch).logps
        assert (scores - alone(model, batch)).abs().max() < 1e-5
    assert not score.check.enabled
    assert len(said(log)) == 1
    assert "Ignorant" in said(log)[0] and "did not call the attention function" in said(log)[0]
    before = model.forwards
    score(model, group(30, 30))
    assert model.forwards == before + 1, "what is switched off is not tried again"


def test_refusals_are_said_once_for_each_reason(log):
    model, score = rotating("dynamic", 20), scorer()
    for length in (4, 20, 20, 24, 4):
        batch = group(3, length)
        assert (score(model, batch).logps - alone(model, batch)).abs().max() < 1e-5
    assert len(said(log)) == 1
    assert "depends on the longest row" in said(log)[0]
    assert score.check.enabled, "short rows are shared"


def packed_rows(model):
    """Note whether each forward of a model is packed."""
    calls = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(KEYWORD in kwargs), with_kwargs=True
    )
    return calls


def test_the_check_comes_first_and_when_rows_have_doubled():
    """Two rows alone, the same packed, then what was asked for."""
    model, score = tiny_model(), scorer()
    calls = packed_rows(model)
    score(model, group(4, 6))
    assert calls[1:] == [False, False, True, True]
    for prompt, completion in ((4, 6), (10, 10), (2, 3), (12, 8)):
        calls.clear()
        score(model, group(prompt, completion))
        assert calls == [True], "up to twice the length of the first ten tokens"
    calls.clear()
    score(model, group(10, 11))
    assert calls == [False, False, True, True]
    calls.clear()
    score(model, group(20, 22))
    assert calls == [True]
    score(model, group(20, 23))
    assert calls == [True, False, False, True, True]


@pytest.mark.parametrize("setting", ["high", "medium"])
def test_the_check_is_in_full_precision_and_the_rest_as_set(setting):
    """TF32 rounds by more than any error that the check should find."""
    model, score, seen = tiny_model(), scorer(), []
    model.model.register_forward_pre_hook(
        lambda *args: seen.append(torch.get_float32_matmul_precision())
    )
    with matmul_precision_kept():
        torch.set_float32_matmul_precision(setting)
        score.heads.find(model)
        seen.clear()
        score(model, group())
        assert torch.get_float32_matmul_precision() == setting
    # Two rows alone and the same packed, then what was asked for.
    assert seen == ["highest"] * 3 + [setting]


def test_a_group_of_one_is_checked_too():
    model, score = tiny_model(), scorer()
    calls = packed_rows(model)
    batch = group(rows=1)
    assert (score(model, batch).logps - alone(model, batch)).abs().max() < 1e-5
    assert calls[1:4] == [False, True, True]


@pytest.mark.parametrize("error", [TypeError("keyword"), AttributeError("None"), KeyError("mask")])
def test_a_model_that_fails_in_the_check_takes_plain_rows(log, error):
    """Whatever it raises, and the reason is given once."""

    class Refuses(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model.register_forward_pre_hook(self._look, with_kwargs=True)

        def _look(self, module, args, kwargs):
            if KEYWORD in kwargs:
                raise error

    model, batch, score = Refuses(tiny_model().config), group(), scorer()
    for _ in range(2):
        assert (score(model, batch).logps - alone(model, batch)).abs().max() < 1e-5
    assert len(said(log)) == 1
    assert f"a check of log-probabilities failed ({error})" in said(log)[0]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_running_out_of_memory_in_the_check_is_no_refusal(error):
    class Large(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.most = 8
            self.model.register_forward_pre_hook(self._look, with_kwargs=True)

        def _look(self, module, args, kwargs):
            if KEYWORD in kwargs and kwargs["input_ids"].numel() > self.most:
                raise error

    model, score = Large(tiny_model().config), scorer()
    with pytest.raises(type(error)):
        score(model, group())
    assert score.check.enabled
    model.most, batch = 100, group()
    calls = packed_rows(model)
    assert (score(model, batch).logps - alone(model, batch)).abs().max() < 1e-5
    assert calls[:4] == [False, False, True, True], "the check was not passed over"


def test_a_router_or_the_option_switch_sharing_off_silently(log):
    for options in ({"shared_prefix": False}, {"router_logits": True}):
        score = Scorer(pad_id=0, temperature=1.0, device=CPU, **options)
        model = tiny_model()
        assert not score.packs(model, group(), [score.token_reader(model)])
    assert not said(log)


# --- Small parts ---


def test_the_two_rows_of_the_check():
    """The longest row and its longest sibling, or else another document, in their order."""
    a, b = [8, 9], [10, 11, 12]
    batch = rollout([a, a, b, b, b], [[20] * n for n in (9, 8, 1, 2, 7)])
    assert two_longest(batch) == [0, 1]
    batch = rollout([a, a, b, b, b], [[20] * n for n in (4, 8, 5, 2, 9)])
    assert two_longest(batch) == [2, 4]
    assert two_longest(rollout([a, b, a], [[20], [21, 22], [23] * 2])) == [1, 2]
    assert two_longest(rollout([b], [[20]])) == [0]


@pytest.mark.parametrize(
    ("dtype", "gap", "found"),
    [
        (torch.float32, 5e-4, None),
        (torch.float32, 2e-3, 2e-3),
        (torch.float64, 2e-3, 2e-3),
        (torch.bfloat16, 0.15, None),
        (torch.bfloat16, 0.5, 0.25),
        (torch.float16, torch.nan, torch.nan),
        (torch.float32, torch.nan, torch.nan),
    ],
)
def test_how_much_rounding_explains(dtype, gap, found):
    """Half the entries differ; half precision looks at the mean. NaN is a difference."""
    first = torch.zeros(2, 2)
    second = torch.tensor([[0.0, gap], [gap, 0.0]])
    expected = None if found is None else pytest.approx(found, nan_ok=True)
    assert disagreement((first, second, dtype)) == expected
    assert disagreement((first[:, :0], second[:, :0], dtype)) is None


def test_attention_of_other_models_is_untouched():
    """What is installed for one model serves all that use the implementation."""
    scorer()(tiny_model(), group())
    installed = AttentionInterface._global_mapping["sdpa"]
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False)
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))
    ours, _ = installed(module, query, key, value, None, dropout=0.0, scaling=0.3)
    theirs, _ = installed.trl_original(module, query, key, value, None, dropout=0.0, scaling=0.3)
    assert torch.equal(ours, theirs)

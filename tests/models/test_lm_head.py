import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import SIZES, tiny_model
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
)

from trl.models.lm_head import (
    Float32Linear,
    HeadFinder,
    NotCausalError,
    OutputHead,
    cast_head_to_float32,
    chunked_log_probs,
    summing_in_float32,
)
from trl.models.unwrap import capture_hidden, causal_model, evaluating
from trl.ops.linear_logprobs import LogitTransform

IDS = torch.tensor([[8, 9, 10, 11, 12], [13, 14, 15, 16, 17]])
TARGETS = torch.arange(20, 30)
ROW = torch.tensor([[8, 9, 10, 11]])


def build(config_class, model_class, **changes):
    torch.manual_seed(0)
    return model_class(config_class(**(SIZES | changes)))


def gemma(config_class, model_class, cap, **changes):
    """Logits far beyond the soft cap, so that leaving it out, or applying it twice, shows."""
    model = build(config_class, model_class, final_logit_softcapping=cap, **changes)
    with torch.no_grad():
        model.model.norm.weight.fill_(60.0)
    return model


def unusual():
    """A model that does something to its logits which no configuration tells about."""

    class Custom(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = 0.1 * torch.sin(output.logits)
            return output

    return Custom(tiny_model().config)


MODELS = {
    "llama": lambda: tiny_model(),
    "qwen3 tied": lambda: tiny_model("qwen3", tie_word_embeddings=True),
    "gemma2": lambda: gemma(Gemma2Config, Gemma2ForCausalLM, 5.0, attn_logit_softcapping=50.0),
    "gemma3": lambda: gemma(Gemma3TextConfig, Gemma3ForCausalLM, 3.0),
    "cohere": lambda: build(CohereConfig, CohereForCausalLM, logit_scale=0.25),
    "granite": lambda: build(GraniteConfig, GraniteForCausalLM, logits_scaling=3.0),
    "neox": lambda: build(GPTNeoXConfig, GPTNeoXForCausalLM),
}


def definition(model, temperature, dtype=torch.float64):
    """From the model's own logits: log-probabilities (10,), entropies (10,) and logits."""
    logits = model(IDS).logits.flatten(0, 1).to(dtype)
    every = (logits / temperature).log_softmax(-1)
    chosen = every[torch.arange(10), TARGETS]
    return chosen, -(every.exp() * every).sum(-1), logits


def ours(model, finder, with_entropy=True):
    head = finder.find(model)
    none = torch.empty(0, dtype=torch.long)
    with capture_hidden(model) as capture:
        model(IDS, logits_to_keep=none if head.is_plain else 1)
    hidden = capture.hidden.flatten(0, 1)
    return head.scores(hidden, TARGETS, capture.autocast, with_entropy)[:2]


def gradients(model, values):
    model.zero_grad()
    values.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("chunk", [None, 200, 0])
@pytest.mark.parametrize("kind", MODELS)
def test_log_probabilities_are_those_of_the_models_own_logits(kind, chunk):
    model = MODELS[kind]().double()
    weights = torch.linspace(-1, 1, 10).double()
    logps, entropies, logits = definition(model, 0.7)
    expected = gradients(model, (logps * weights + 0.3 * entropies).sum())
    found, found_entropies = ours(model, HeadFinder(0.7, chunk))
    assert (found - logps).abs().max() < 1e-9
    assert (found_entropies - entropies).abs().max() < 1e-9
    got = gradients(model, (found * weights + 0.3 * found_entropies).sum())
    assert (got - expected).norm() / expected.norm() < 1e-9
    if kind.startswith("gemma"):
        cap = model.config.final_logit_softcapping
        assert 0.95 * cap < logits.abs().max() <= cap, "the cap must matter"


@pytest.mark.parametrize(
    ("kind", "scale", "softcap"),
    [
        ("llama", 1.0, None),
        ("gemma2", 1.0, 5.0),
        ("gemma3", 1.0, 3.0),
        ("cohere", 0.25, None),
        ("granite", 1 / 3, None),
    ],
)
def test_the_transform_is_what_the_configuration_says(kind, scale, softcap):
    head = HeadFinder(0.7, 100).find(MODELS[kind]())
    assert (head.transform.temperature, head.transform.softcap) == (0.7, softcap)
    assert head.transform.scale == pytest.approx(scale)
    assert (head.vocabulary, head.chunk) == (95, 100)


def test_a_scale_that_a_model_multiplies_by():
    """Some models multiply by what others divide by, under the same name."""

    class Multiplies(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * self.config.logits_scaling
            return output

    model = Multiplies(tiny_model(logits_scaling=4.0).config).double()
    expected, _, _ = definition(model, 1.0)
    assert HeadFinder(1.0).find(model).transform.scale == 4.0
    assert (ours(model, HeadFinder(1.0))[0] - expected).abs().max() < 1e-9


def test_logits_that_cannot_be_reproduced_have_no_head():
    assert HeadFinder(1.0).find(unusual()) is None


def test_a_model_that_sees_what_it_is_to_predict_is_refused():
    sizes = {"vocab_size": 95, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(**sizes, intermediate_size=64, is_decoder=True, initializer_range=0.2)
    torch.manual_seed(0)
    model = BertLMHeadModel(config)
    assert HeadFinder(1.0).find(model) is None, "causal, but not by its hidden states"
    config.is_decoder = False
    with pytest.raises(
        NotCausalError, match="what follows a token changes the logits at that token"
    ):
        HeadFinder(1.0).find(BertLMHeadModel(config))


def test_models_without_the_two_parts_have_no_head():
    assert HeadFinder(1.0).find(tiny_model().model) is None


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3", "cohere", "granite"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_recognized(kind, dtype):
    """Logits rounded to half precision still tell which transform is right."""
    model = MODELS[kind]().to(dtype)
    expected = HeadFinder(1.0).find(MODELS[kind]()).transform
    assert HeadFinder(1.0).find(model).transform == expected


class OffByFivePercent(LlamaForCausalLM):
    """Scales its logits by something other than its configuration says."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * (1.05 * self.config.logit_scale)
        return output


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_scale_that_is_off_by_five_percent_has_no_head(dtype):
    """What the model does to its logits shows in full precision, whatever its weights have."""
    config = tiny_model(logit_scale=0.25).config
    assert HeadFinder(1.0).find(OffByFivePercent(config).to(dtype)) is None


@pytest.mark.parametrize(
    "error", [KeyError("position"), AttributeError("no cache"), ZeroDivisionError()]
)
def test_a_search_that_fails_in_any_way_finds_no_head(log, error):
    class Fails(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            raise error

    model, finder = Fails(tiny_model().config), HeadFinder(1.0)
    assert finder.find(model) is None and finder.find(model) is None
    found = [r.getMessage() for r in log.records if "Fails" in r.getMessage()]
    assert len(found) == 1 and f"search for its output projection failed ({error})" in found[0]


def test_running_out_of_memory_in_the_search_is_no_finding():
    class Large(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    finder = HeadFinder(1.0)
    with pytest.raises(torch.OutOfMemoryError):
        finder.find(Large(tiny_model().config))
    assert not finder._transforms


def test_a_model_of_the_same_class_is_not_probed_again():
    finder, calls = HeadFinder(1.0), []
    first, second = tiny_model(), tiny_model(seed=1)
    for model in (first, second):
        model.model.register_forward_hook(lambda *args: calls.append(1))
    assert finder.find(first).module is first.lm_head
    assert finder.find(second).module is second.lm_head
    finder.find(first)
    assert len(calls) == 1


def test_probing_leaves_mode_gradients_and_random_numbers_alone():
    model = tiny_model(attention_dropout=0.5).train()
    state = torch.get_rng_state()
    HeadFinder(1.0).find(model)
    assert model.training and all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


# --- Precision ---


@pytest.mark.parametrize("chunk", [None, 300, 0])
@pytest.mark.parametrize("tied", [False, True])
def test_a_float32_head_under_bfloat16(tied, chunk):
    """From the hidden states in bfloat16, everything after is in float32, autocast or not."""
    model = tiny_model(tie_word_embeddings=tied).to(torch.bfloat16)
    cast_head_to_float32(model)
    assert type(model.lm_head) is Float32Linear
    finder = HeadFinder(0.7, chunk)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected, entropies, logits = definition(model, 0.7)
            found, found_entropies = ours(model, finder)
        assert logits.float().equal(logits.to(torch.bfloat16).float()) is False
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() < 1e-5
        assert (found_entropies - entropies).abs().max() < 1e-5
        reference = gradients(model, expected.sum())
        got = gradients(model, found.sum())
        assert (got - reference).norm() / reference.norm() < 1e-2, "bfloat16 below the head"


@pytest.mark.parametrize("chunk", [None, 300, 0])
def test_the_precision_of_autocast_is_recorded_and_used(chunk):
    """A float32 model under autocast multiplies in bfloat16, as its own head does."""
    model, finder = tiny_model(), HeadFinder(1.0, chunk)
    exact, _, _ = definition(model, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        expected, _, _ = definition(model, 1.0)
        with capture_hidden(model) as capture:
            model(IDS)
        found, _ = ours(model, finder)
    assert capture.autocast == torch.bfloat16
    assert (found - expected).abs().max() < 1e-5 < (exact - expected).abs().max() / 10
    with capture_hidden(model) as capture:
        model(IDS)
    assert capture.autocast is None


def test_autocast_at_the_call_of_the_head_changes_nothing():
    """What counts is the precision of the model's forward."""
    model = tiny_model()
    head = HeadFinder(1.0).find(model)
    with capture_hidden(model) as capture:
        model(IDS)
    hidden = capture.hidden.flatten(0, 1)
    plain, _ = head.scores(hidden, TARGETS, capture.autocast)[:2]
    with torch.autocast("cpu", torch.bfloat16):
        inside, _ = head.scores(hidden, TARGETS, capture.autocast)[:2]
    assert torch.equal(plain, inside)


# --- Wrappers ---


def test_hidden_states_are_captured_through_distributed_wrappers(process_group):
    model = tiny_model()
    outer = nn.parallel.DistributedDataParallel(model)
    expected, _, _ = definition(model, 1.0)
    reference = gradients(model, expected.sum())
    assert causal_model(outer) is model
    found, _ = ours(outer, HeadFinder(1.0))
    assert (gradients(model, found.sum()) - reference).norm() / reference.norm() < 1e-5


def test_hidden_states_are_captured_through_adapters():
    torch.manual_seed(0)
    model = get_peft_model(
        tiny_model(), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    expected, _, _ = definition(model, 1.0)
    reference = gradients(model, expected.sum())
    assert type(causal_model(model)) is LlamaForCausalLM
    found, _ = ours(model, HeadFinder(1.0))
    assert (found - expected).abs().max() < 1e-5
    assert (gradients(model, found.sum()) - reference).norm() / reference.norm() < 1e-5
    assert reference.numel() == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_hidden_states_are_captured_through_compilation():
    """The wrapper of `torch.compile`; what it compiles is tested elsewhere."""
    model = tiny_model()
    outer = torch.compile(model, backend="eager")
    assert causal_model(outer) is model
    with capture_hidden(outer) as capture:
        model(IDS)
    assert capture.hidden.shape == (2, 5, 32)


def test_no_hook_stays_behind():
    model = tiny_model()
    with pytest.raises(KeyError), capture_hidden(model):
        raise KeyError
    assert not model.model._forward_hooks


def test_evaluating_restores_the_mode():
    model = tiny_model().train()
    with evaluating(model) as inside:
        assert inside is model and not model.training
    assert model.training
    with pytest.raises(KeyError), evaluating(model):
        raise KeyError
    assert model.training
    with evaluating(model.eval()):
        pass
    assert not model.training


# --- The projection in float32 ---


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_a_float32_head(tied):
    model = tiny_model(tie_word_embeddings=tied).to(torch.bfloat16)
    hidden = model.model(ROW).last_hidden_state
    expected = hidden.float() @ model.lm_head.weight.float().T
    rough = model(ROW).logits
    cast_head_to_float32(model)
    assert model.lm_head.weight.dtype == torch.float32
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        found = model(ROW).logits
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-5 < (rough - expected).abs().max()


@pytest.mark.parametrize("tied", [False, True])
def test_copies_have_their_own_head(tied):
    model = tiny_model(tie_word_embeddings=tied)
    cast_head_to_float32(model)
    copied = copy.deepcopy(model)
    assert (copied.lm_head.weight is copied.model.embed_tokens.weight) == tied
    before = copied(ROW).logits
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    assert torch.equal(copied(ROW).logits, before)


def test_gradients_reach_the_head():
    model = tiny_model().to(torch.bfloat16)
    cast_head_to_float32(model)
    model(ROW).logits.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.float32
    assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("tied", [False, True])
def test_layers_keep_their_precision(tied):
    model = tiny_model(tie_word_embeddings=tied).to(torch.bfloat16)
    before = model.model(ROW).last_hidden_state
    cast_head_to_float32(model)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert before.dtype == torch.bfloat16
    assert torch.equal(model.model(ROW).last_hidden_state, before)


def test_models_without_head_are_refused():
    with pytest.raises(ValueError, match="needs a model with an output projection"):
        cast_head_to_float32(tiny_model().model)


def test_adapters_on_the_head_are_refused():
    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="target_modules"):
        cast_head_to_float32(model)


# --- Projections that must be called: values and gradients are those of full logits ---


TOKENS, HIDDEN, VOCABULARY = 23, 32, 95
TRANSFORM = LogitTransform(temperature=0.7, scale=1.5, softcap=4.0)
STEPS = [1, 2, 7, 22, 23, 100]


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = 2 * torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    return hidden.to(dtype).requires_grad_(), ids


def definition_of_called(module, hidden, ids, transform=TRANSFORM):
    logits = module(hidden).double() * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    every = (logits / transform.temperature).log_softmax(-1)
    return every[torch.arange(len(ids)), ids], -(every.exp() * every).sum(-1)


def lora_head(dropout=0.0):
    torch.manual_seed(0)
    config = LoraConfig(
        target_modules=["lm_head"], r=4, init_lora_weights=False, lora_dropout=dropout
    )
    return get_peft_model(tiny_model(), config).get_base_model().lm_head


def hooked_head():
    """A hook that changes what the projection returns."""
    torch.manual_seed(0)
    module = nn.Linear(HIDDEN, VOCABULARY)
    module.register_forward_hook(lambda module, args, output: output * 1.5 + 0.1)
    return module


def hooked_before():
    torch.manual_seed(0)
    module = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    module.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    return module


def with_bias():
    """A module of two projections, both with bias."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(HIDDEN, 16), nn.Tanh(), nn.Linear(16, VOCABULARY))


MODULES = {
    "lora": lora_head,
    "hook": hooked_head,
    "hook before": hooked_before,
    "bias": with_bias,
    "plain": lambda: nn.Linear(HIDDEN, VOCABULARY),
}


def gradients_of_called(value, hidden, module):
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.autograd.grad(value, [hidden, *trained], retain_graph=True)


def close(ours, theirs, bound):
    pairs = list(zip(ours, theirs, strict=True))
    return all((a.double() - b.double()).norm() <= bound * b.double().norm() for a, b in pairs)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("step", STEPS)
def test_heads_that_are_called_equal_full_logits(kind, step):
    """Gradients of hidden states and of all trained parameters, those of adapters among them."""
    module = MODULES[kind]().double()
    hidden, ids = data()
    logps, entropies = definition_of_called(module, hidden, ids)
    weights = torch.linspace(-1, 1, TOKENS).double()
    expected = gradients_of_called((logps * weights + 0.3 * entropies).sum(), hidden, module)
    assert len(expected) > 1
    head = OutputHead(module, TRANSFORM, VOCABULARY, step * VOCABULARY)
    assert head.is_plain == (kind == "plain")
    found, none = head.scores(hidden, ids)[:2]
    assert none is None and (found - logps).abs().max() < 1e-10
    ours, spread = head.scores(hidden, ids, with_entropy=True)[:2]
    assert (ours - logps).abs().max() < 1e-10 and (spread - entropies).abs().max() < 1e-10
    got = gradients_of_called((ours * weights + 0.3 * spread).sum(), hidden, module)
    assert close(got, expected, 1e-10)
    alone = gradients_of_called((entropies * weights).sum(), hidden, module)
    assert close(gradients_of_called((spread * weights).sum(), hidden, module), alone, 1e-10)


@pytest.mark.parametrize("kind", ["lora", "bias", "plain"])
@pytest.mark.parametrize("step", STEPS)
def test_heads_of_sharded_weights_are_called_once(kind, step):
    """In one call, in which the weight is whole; the calls of submodules are theirs."""
    module, calls = MODULES[kind]().double(), []
    hidden, ids = data()
    logps, entropies = definition_of_called(module, hidden, ids)
    weights = torch.linspace(-1, 1, TOKENS).double()
    expected = gradients_of_called((logps * weights + 0.3 * entropies).sum(), hidden, module)
    module.register_forward_hook(lambda *args: calls.append(len(args[1][0])))
    head = OutputHead(module, TRANSFORM, VOCABULARY, step * VOCABULARY, sharded=True)
    ours, spread = head.scores(hidden, ids, with_entropy=True)[:2]
    assert calls == [TOKENS] and "forward" not in vars(module)
    assert (ours - logps).abs().max() < 1e-10 and (spread - entropies).abs().max() < 1e-10
    got = gradients_of_called((ours * weights + 0.3 * spread).sum(), hidden, module)
    assert close(got, expected, 1e-10)


def test_only_so_many_tokens_are_projected_at_once():
    sizes = []
    module = hooked_head()
    module.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    hidden, ids = data(torch.float32)
    found, _ = OutputHead(module, TRANSFORM, VOCABULARY, 5 * VOCABULARY).scores(hidden, ids)[:2]
    assert sizes == [5, 5, 5, 5, 3]
    found.sum().backward()
    assert sizes[5:] == [3, 5, 5, 5, 5], "projected again for the backward pass"


def test_frozen_weights_get_no_gradient():
    module = lora_head()
    hidden, ids = data(torch.float32)
    OutputHead(module, TRANSFORM, VOCABULARY, 300).scores(hidden, ids)[0].sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    assert [name for name in grads if grads[name] is not None] == [
        name for name in grads if "lora_" in name
    ]


def test_gradients_of_chunks_are_added_in_float32():
    """A bfloat16 sum over 23 chunks would round 23 times."""
    torch.manual_seed(0)
    module = nn.Linear(HIDDEN, VOCABULARY).bfloat16()
    exact = nn.Linear(HIDDEN, VOCABULARY).double()
    exact.load_state_dict(module.state_dict())
    hidden, ids = data(torch.bfloat16)
    wide = hidden.detach().double().requires_grad_()
    expected = gradients_of_called(definition_of_called(exact, wide, ids)[0].sum(), wide, exact)
    full = gradients_of_called(definition_of_called(module, hidden, ids)[0].sum(), hidden, module)
    module.register_forward_hook(lambda module, args, output: None)
    head = OutputHead(module, TRANSFORM, VOCABULARY, VOCABULARY)
    found = gradients_of_called(head.scores(hidden, ids)[0].sum(), hidden, module)
    for ours, theirs, wanted in zip(found, full, expected, strict=True):
        error = (ours.double() - wanted).norm() / wanted.norm()
        assert error < 1.3 * (theirs.double() - wanted).norm() / wanted.norm() + 1e-6


@pytest.mark.parametrize(
    ("kind", "chunks", "bound"),
    [
        ("called", 1000, 0.004),
        # Autograd adds these in bfloat16: with chunks of 220 tokens, as many as 8,000 tokens have.
        ("sharded", 40, 0.01),
    ],
)
def test_chunks_that_add_up_to_a_long_sum_in_bfloat16(kind, chunks, bound):
    """All of one sign, so that no error is balanced by another."""
    generator = torch.Generator().manual_seed(0)
    hidden = (1 + 0.3 * torch.randn(1000, 8, generator=generator)).bfloat16()
    weight = (torch.randn(60, 8, generator=generator) / 4).bfloat16()
    ids = torch.zeros(1000, dtype=torch.long)
    wide = weight.float().requires_grad_()
    every = (hidden.float() @ wide.T).log_softmax(-1)
    (exact,) = torch.autograd.grad(every[:, 0].mean(), wide)
    head = nn.Linear(8, 60, bias=False)
    head.weight = nn.Parameter(weight)
    run = summing_in_float32(head) if kind == "called" else head
    logps, *_ = chunked_log_probs(run, hidden.requires_grad_(), ids, 1000 // chunks)
    (found,) = torch.autograd.grad(logps.mean(), head.weight)
    assert found.dtype is torch.bfloat16
    assert (found.float() - exact).norm() < bound * exact.norm()


def test_chunks_of_autocast_add_up_in_the_precision_of_the_weight():
    """A weight that autocast keeps for all chunks would sum their gradients in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    hidden = (1 + 0.3 * torch.randn(1000, 8, generator=generator)).requires_grad_()
    head = nn.Linear(8, 60, bias=False)
    head.register_forward_hook(lambda module, args, output: None)
    ids = torch.zeros(1000, dtype=torch.long)
    (exact,) = gradients_of_called(head(hidden).log_softmax(-1)[:, 0].mean(), hidden, head)[1:]
    with torch.autocast("cpu", torch.bfloat16):
        logps = OutputHead(head, LogitTransform(), 60, 60).scores(hidden, ids, torch.bfloat16)[0]
    (found,) = gradients_of_called(logps.mean(), hidden, head)[1:]
    assert (found - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("step", [23, 5])
def test_dropout_is_the_same_when_logits_are_computed_again(step):
    """An adapter with dropout: the gradient belongs to the values that were returned."""
    module = lora_head(dropout=0.5).double().train()
    hidden, ids = data()
    torch.manual_seed(7)
    pieces = [
        definition_of_called(module, hidden[at : at + step], ids[at : at + step])[0]
        for at in range(0, TOKENS, step)
    ]
    logps = torch.cat(pieces)
    expected = gradients_of_called(logps.sum(), hidden, module)
    torch.manual_seed(7)
    head = OutputHead(module, TRANSFORM, VOCABULARY, step * VOCABULARY)
    found, _ = head.scores(hidden, ids)[:2]
    torch.rand(5)  # what a loss may draw
    assert (found - logps).abs().max() < 1e-10
    assert close(gradients_of_called(found.sum(), hidden, module), expected, 1e-10)

"""Layers, heads, rounds and whole steps of small models, whose tensors are counted."""

import math
from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset
from online_runs import make_trainer, token_sum
from peft import LoraConfig, get_peft_model
from reward_runs import classifier
from tensor_bytes import TensorBytes
from tiny import tiny_model

from trl.generation.base import Sampling
from trl.generation.transformers.backend import TransformersBackend, split_into_batches
from trl.generation.transformers.sampler import sample_tokens
from trl.memory.estimate import Estimate, Head, Layer
from trl.memory.model_size import model_size
from trl.memory.rank_memory import MemoryUse
from trl.memory.settings import RunSettings
from trl.models.lm_head import OutputHead
from trl.ops.linear_logprobs import CHUNK_ON_ACCELERATOR, CHUNK_ON_CPU, LogitTransform
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.ppo_trainer import PPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.types import Prompts

CPU = torch.device("cpu")
NARROW = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
NARROW |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
PROMPT, COMPLETION, GROUP = 300, 24, 4
SHAPE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "head_dim": 16}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
ADAPTER = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def long_script(ids, place):
    """Completions of the full length that differ between rows."""
    return [10 + (place * 5 + i) % 60 for i in range(COMPLETION)]


def settings(**changes):
    fields = {"group_size": GROUP, "prompt": PROMPT, "completion": COMPLETION, "micro_batch": 4}
    fields |= {"gradient_checkpointing": False, "optimizer": "sgd", "on_cpu": True}
    return RunSettings(**(fields | changes))


def peak_of_training(folder, kind, model, **options):
    """Train two updates on completions that are given; return the most bytes at once."""
    data = Dataset.from_dict({"prompt": ["a" * PROMPT, "b" * PROMPT, "c" * PROMPT, "d" * PROMPT]})
    options = {"max_completion_length": COMPLETION, "per_device_train_batch_size": 4} | options
    tracker = TensorBytes(model.parameters())
    trainer = make_trainer(
        folder,
        kind,
        model=model,
        reward=token_sum,
        data=data,
        script=long_script,
        log_memory=False,
        max_steps=2,
        **options,
    )
    with tracker:
        for parameter in trainer.model.parameters():
            tracker.add(parameter.data)
        trainer.train()
    return tracker.peak


CASES = {
    "plain": ({}, {}),
    "checkpointing": ({"gradient_checkpointing": True}, {"gradient_checkpointing": True}),
    "rows of their own": ({"shared_prefix": False}, {"shared_prefix": False}),
    "all logits": ({"logits_chunk_size": 0}, {"logits_chunk": 0}),
    "adam": ({"optim": "adamw_torch"}, {"optimizer": "adamw_torch"}),
    "micro-batches": (
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"micro_batch": 2, "slices": 4, "accumulation": 4},
    ),
    "autocast": ({"bf16": True}, {"product_bytes": 2}),
    "autocast, checkpointing": (
        {"bf16": True, "gradient_checkpointing": True},
        {"product_bytes": 2, "gradient_checkpointing": True},
    ),
    "off-policy": (
        {"steps_per_generation": 2, "gradient_accumulation_steps": 1},
        {"slices": 2, "scores_policy": True},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_peak_of_training(tmp_path, name, tied):
    options, changes = CASES[name]
    model = tiny_model("qwen3", tie_word_embeddings=tied, **SHAPE)
    size = model_size(model.config)
    measured = peak_of_training(tmp_path, GRPOTrainer, model, **options)
    assert Estimate(size, settings(**changes)).peak == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gradients_of_a_large_vocabulary_are_added_in_place(tmp_path, tied):
    model = tiny_model("qwen3", tie_word_embeddings=tied, **SHAPE, vocab_size=8192)
    options, changes = CASES["micro-batches"]
    measured = peak_of_training(tmp_path, GRPOTrainer, model, **options)
    found = Estimate(model_size(model.config), settings(**changes))
    assert found.peak == pytest.approx(measured, rel=0.1)


def test_peak_with_a_reference(tmp_path):
    model = tiny_model("llama", **SHAPE)
    size = model_size(model.config)
    measured = peak_of_training(tmp_path, RLOOTrainer, model, beta=0.1)
    run = settings(reference=True, scores_policy=True)
    assert Estimate(size, run).peak == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_peak_with_a_value_model(tmp_path, checkpointing):
    model, values = tiny_model("llama", **SHAPE), classifier(**SHAPE)
    size, of_values = model_size(model.config), model_size(values.config, classifies=True)
    options = {"num_ppo_epochs": 1, "beta": 0.0, "num_generations": GROUP, "value_model": values}
    options |= {"gradient_checkpointing": checkpointing}
    measured = peak_of_training(tmp_path, PPOTrainer, model, **options)
    run = settings(scores_policy=True, value_model=of_values, gradient_checkpointing=checkpointing)
    assert Estimate(size, run).peak == pytest.approx(measured, rel=0.1)
    assert Estimate(size, run.replace(value_model=None)).peak < 0.85 * measured


@pytest.mark.parametrize("checkpointing", [True, False])
def test_peak_with_an_adapter(tmp_path, checkpointing):
    model = tiny_model("llama", **SHAPE)
    size = model_size(model.config, ADAPTER)
    options = {"peft_config": ADAPTER, "gradient_checkpointing": checkpointing, "beta": 0.1}
    measured = peak_of_training(tmp_path, RLOOTrainer, model, **options)
    run = settings(reference=True, scores_policy=True, gradient_checkpointing=checkpointing)
    assert Estimate(size, run).peak == pytest.approx(measured, rel=0.1)


@pytest.fixture
def size():
    return model_size(tiny_model("qwen3", **SHAPE).config)


def test_what_is_held_in_every_phase(size):
    run = settings(reference=True, optimizer="adamw_torch", accumulation=2)
    phases = Estimate(size, run).phases
    assert tuple(phases) == ("generation", "scoring", "forward + backward", "optimizer")
    weights = 4 * size.parameters
    for parts in phases.values():
        assert (parts.weights, parts.reference, parts.optimizer) == (weights, weights, 2 * weights)
    # A round is generated and scored while the first of two updates' gradients wait.
    assert [parts.gradients for parts in phases.values()][:2] == [weights, weights]
    expected = MemoryUse(weights, weights, gradients=weights, optimizer=2 * weights)
    assert phases["optimizer"] == expected


def test_phases_that_do_not_happen_are_left_out(size):
    assert "scoring" not in Estimate(size, settings()).phases
    assert "scoring" in Estimate(size, settings(scores_policy=True)).phases


def test_rows_of_a_dataset_are_not_generated(size):
    documents = {"group_size": 1, "prompt": 0, "generates": False}
    found = Estimate(size, settings(**documents)).phases
    assert tuple(found) == ("forward + backward", "optimizer")
    run = settings(**documents)
    assert sum(run.forward_passes(cuts=False)) == run.micro_batch * (run.completion - 1)


def test_a_value_model_is_trained_beside_the_policy(size):
    run = settings(optimizer="adamw_torch", accumulation=2)
    one, two = (
        Estimate(size, run.replace(value_model=n)).phases["optimizer"] for n in (None, size)
    )
    assert two.total == 2 * one.total


def test_an_adapter_has_no_reference_and_small_states():
    size = model_size(tiny_model("llama", **SHAPE).config, ADAPTER)
    run = settings(reference=True, optimizer="adamw_torch", weight_bytes=2, product_bytes=2)
    held = Estimate(size, run).phases["optimizer"]
    # Adapters are float32 whatever the base model is.
    assert held.weights == 2 * (size.parameters - size.adapter) + 4 * size.adapter
    assert held.reference == 0
    assert (held.gradients, held.optimizer) == (4 * size.adapter, 8 * size.adapter)


def test_quantized_layers(size):
    run = settings(matrix_bytes=0.5)
    expected = 0.5 * size.layer_matrices + 4 * (size.parameters - size.layer_matrices)
    assert Estimate(size, run).phases["optimizer"].weights == expected


def test_ranks_exchange_gradients_in_buckets(size):
    one, two = (Estimate(size, settings(processes=n)).phases["optimizer"] for n in (1, 2))
    assert two.gradients == 2 * one.gradients


# --- Generation ---


def round_of(prompts, **changes):
    fields = {"group_size": 4, "prompt": 100, "completion": 40, "on_cpu": True} | changes
    return RunSettings(micro_batch=prompts * fields["group_size"], optimizer="sgd", **fields)


def decode(model, run):
    """Generate a round twice; return the most bytes of the second time, weights included."""
    backend = TransformersBackend(
        lambda: nullcontext(model),
        pad_id=0,
        device=CPU,
        shared_prefix=run.shared_prefix,
        max_rows=run.generation_rows,
    )
    rows = range(run.rows)
    sampling = Sampling(max_tokens=run.completion, stop_ids=(), seeds=tuple(rows))
    for first in (3, 50):  # the first time both ways of decoding are compared
        ids = [[first + row // run.group_size] * run.prompt for row in rows]
        with torch.no_grad(), TensorBytes(model.parameters()) as tracker:
            prompts = Prompts(messages=["text"] * run.rows, token_ids=ids)
            backend.generate(prompts, sampling, run.group_size)
    return tracker.peak


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prompt": 600, "completion": 3},
        {"group_size": 16, "completion": 100},
        {"group_size": 8, "completion": 40, "generation_rows": 4},
        {"shared_prefix": False},
        {"shared_prefix": False, "prompt": 20, "completion": 100},
    ],
    ids=["balanced", "prompts", "completions", "pieces", "padded", "padded completions"],
)
def test_peak_of_a_round(changes):
    model = tiny_model("llama", **NARROW).eval()
    run = round_of(2, **changes)
    measured = decode(model, run)
    predicted = Estimate(model_size(model.config), run).phases["generation"].total
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rows", [None, 3, 5])
@pytest.mark.parametrize("tokens", [None, 50, 300, 700, 10_000])
def test_rows_in_flight_are_those_of_the_largest_piece(shared, rows, tokens):
    model = tiny_model("llama", **NARROW)
    run = round_of(3, shared_prefix=shared, generation_rows=rows)
    each = 2 * 4 * 2 * 16 * 3  # keys and values of two heads in three layers
    cache_bytes = None if tokens is None else (tokens + 0.5) * each
    run = run.replace(generation_kv_gb=None if tokens is None else cache_bytes / 1e9)
    ids = [[row // run.group_size] * run.prompt for row in range(run.rows)]
    bounds = rows or math.inf, math.inf if tokens is None else tokens + 0.5
    pieces = list(split_into_batches(ids, run.completion, shared, *bounds))
    most = max(len(piece) for piece in pieces)
    found, copies = Estimate(model_size(model.config), run).in_flight()
    # Of a group that is cut, the plan counts a part of the prompt.
    assert most <= found <= most + shared * (tokens is not None)
    assert copies == (min(found, run.groups(found)) if shared else found)


def test_prompts_are_computed_a_few_at_a_time():
    size = model_size(tiny_model("llama", **NARROW).config)
    two, many = (Estimate(size, round_of(n, prompt=2048, completion=2)).phases for n in (2, 20))
    per_token = 2 * 4 * 2 * 16 * 3
    more = many["generation"].total - two["generation"].total
    assert more == pytest.approx(18 * 2048 * per_token, rel=0.02), "the cache of prompts alone"


# --- Layer and head ---


TOKENS = 53  # divides no width
ONE_LAYER = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1}
ONE_LAYER |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
PRECISIONS = {"float32": (4, 4), "bfloat16": (2, 2), "autocast": (4, 2)}


def layer_of(kind, precision, peft_config=None, **changes):
    """A model with one layer, and what is said about that layer."""
    model = tiny_model(kind, **(ONE_LAYER | changes))
    size = model_size(model.config, peft_config)
    if precision == "bfloat16":
        model = model.bfloat16()
    if peft_config is not None:
        model = get_peft_model(model, peft_config).base_model.model
    model.train()
    return model, Layer(size, precise(precision)), size


def run_layer(model, precision, hidden):
    decoder = model.model
    places = torch.arange(hidden.shape[1])[None]
    rotation = decoder.rotary_emb(hidden, places)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        return decoder.layers[0](hidden, position_embeddings=rotation, attention_mask=None)


def saved_bytes(model, precision, hidden):
    """Bytes that autograd keeps and that grow with the tokens, rotation tables excepted."""
    storages = {}

    def pack(tensor):
        if TOKENS in tensor.shape or TOKENS in tensor.squeeze().shape:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tables = model.model.rotary_emb(hidden, torch.arange(TOKENS)[None])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder = model.model
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            result = decoder.layers[0](hidden, position_embeddings=tables, attention_mask=None)
    for table in tables:
        storages.pop(table.untyped_storage().data_ptr(), None)
    assert result.requires_grad
    return sum(storages.values())


def inputs(model, tokens=TOKENS):
    generator = torch.Generator().manual_seed(0)
    width = model.config.hidden_size
    hidden = torch.randn(1, tokens, width, generator=generator).to(model.dtype)
    return hidden.requires_grad_()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_autograd_keeps(kind, precision):
    model, layer, _ = layer_of(kind, precision)
    found = saved_bytes(model, precision, inputs(model))
    assert TOKENS * layer.saved == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["o_proj", "gate_proj", "down_proj"]])
@pytest.mark.parametrize("precision", ["float32", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_autograd_keeps_with_an_adapter(precision, targets, dropout):
    config = LoraConfig(r=1, target_modules=targets, lora_dropout=dropout, task_type="CAUSAL_LM")
    model, layer, size = layer_of("llama", precision, config)
    found = saved_bytes(model, precision, inputs(model))
    assert size.adapted == set(targets)
    # A tensor that two linear layers read is counted twice.
    assert TOKENS * layer.saved == pytest.approx(found, rel=0.15)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_working_set_without_gradient(precision):
    tokens = 1024
    model, layer, _ = layer_of("llama", precision)
    hidden = inputs(model, tokens).detach()
    with torch.no_grad(), TensorBytes([hidden]) as tracker:
        before = tracker.live - hidden.untyped_storage().nbytes()  # the input counts
        run_layer(model, precision, hidden)
    assert tracker.peak - before == pytest.approx(layer.inference * tokens, rel=0.1)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_working_set_of_the_backward_pass(precision, kind):
    tokens = 4096  # next to which gradients of weights are small
    model, layer, _ = layer_of(kind, precision)
    hidden = inputs(model, tokens)
    with TensorBytes([hidden]) as tracker:
        result = run_layer(model, precision, hidden)
        upstream = torch.ones_like(result)
        tracker.boundary()
        result.backward(upstream)
    held = layer.stream * tokens  # the result
    assert tracker.peak == pytest.approx((layer.saved + layer.backward) * tokens + held, rel=0.1)


def test_keys_of_shared_prompts_are_as_narrow_as_values():
    size = model_size(tiny_model("llama", **ONE_LAYER).config)
    assert Layer(size, precise("autocast")).cache == 2 * 2 * 32
    assert Layer(size, precise("autocast", shared_prefix=False)).cache == (4 + 2) * 32


SIZES = {"hidden_size": 32, "vocab_size": 4096}


def head_of(precision, chunk):
    model = tiny_model("llama", **SIZES)
    head = Head(model_size(model.config), precise(precision, logits_chunk=chunk))
    projection = model.lm_head.bfloat16() if precision == "bfloat16" else model.lm_head
    autocast = torch.bfloat16 if precision == "autocast" else None
    return head, OutputHead(projection, LogitTransform(), SIZES["vocab_size"], chunk), autocast


def precise(precision, **changes):
    weight, product = PRECISIONS[precision]
    return settings(weight_bytes=weight, product_bytes=product, **changes)


def peaks(tokens, real, autocast):
    """Most bytes of the forward and of the backward pass, the weight excepted."""
    weight = real.module.weight
    hidden = torch.randn(tokens, SIZES["hidden_size"]).to(weight.dtype).requires_grad_()
    ids = torch.arange(tokens)
    held = weight.untyped_storage().nbytes()
    with TensorBytes([hidden, weight]) as tracker:
        logps, entropies = real.scores(hidden, ids, autocast, with_entropy=True)[:2]
        forward = tracker.boundary()["tensors_peak"]
        del entropies
        logps.sum().backward()
    return forward - held, tracker.peak - held


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("chunk", [2**17, 2**18])
def test_tiles(precision, chunk):
    head, real, autocast = head_of(precision, chunk)
    forward, backward = peaks(512, real, autocast)
    assert head.forward(512) == pytest.approx(forward, rel=0.1)
    assert head.backward(512) == pytest.approx(backward, rel=0.1)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tokens", [512, 4096])
def test_all_logits_at_once(precision, tokens):
    head, real, autocast = head_of(precision, 0)
    forward, backward = peaks(tokens, real, autocast)
    assert head.forward(tokens) == pytest.approx(forward, rel=0.1)
    assert head.backward(tokens) == pytest.approx(backward, rel=0.1)


def test_drawing_a_token():
    head, real, _ = head_of("float32", 0)
    hidden, draws = torch.randn(64, SIZES["hidden_size"]), torch.rand(64, dtype=torch.float64)
    with torch.no_grad(), TensorBytes() as tracker:
        logits = real.logits(hidden, None)
        every = (logits / 1.0).log_softmax(-1)
        sample_tokens(logits, draws)
    held = real.module.weight.untyped_storage().nbytes()
    assert head.sampling(64) == pytest.approx(tracker.peak - held, rel=0.05)
    assert every.shape == logits.shape


def test_the_rows_that_draw_together():
    head, _, _ = head_of("float32", 8192)
    assert head.sampling(100) == head.sampling(2)
    assert head.sampling(1) == head.sampling(2) / 2
    size = model_size(tiny_model("llama", **SIZES).config)
    padded = Head(size, settings(shared_prefix=False))
    assert padded.sampling(100) == 100 * padded.sampling(1)


def test_defaults_by_device():
    size = model_size(tiny_model("llama", **SIZES).config)
    for on_cpu, chunk in ((True, CHUNK_ON_CPU), (False, CHUNK_ON_ACCELERATOR)):
        default = Head(size, settings(on_cpu=on_cpu))
        assert default.forward(2048) == Head(size, settings(logits_chunk=chunk)).forward(2048)


def test_a_frozen_head_has_no_gradient():
    config = tiny_model("llama", **SIZES).config
    frozen = model_size(config, LoraConfig(target_modules=["q_proj"]))
    assert Head(frozen, settings()).gradient == 0
    trained = Head(model_size(config), precise("bfloat16"))
    assert trained.gradient == 2 * 32 * 4096
    assert Head(model_size(config), precise("autocast")).whole_cast == 2 * 32 * 4096
    assert trained.whole_cast == 0

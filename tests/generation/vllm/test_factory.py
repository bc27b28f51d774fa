"""Options that are checked without an engine; tests/vllm_cpu trains with a real one."""

from functools import partial

import pytest
import torch
from online_runs import config, dataset, make_trainer
from reward_runs import classifier
from shared_vllm import four_bits, model_policy, policy_model
from tiny import tiny_model

from trl.distributed import Ranks
from trl.generation.base import Sampling
from trl.generation.vllm import engine as vllm_engine
from trl.generation.vllm import factory
from trl.generation.vllm.factory import (
    check_engine_context,
    check_options,
    engine_arguments,
    engine_memory,
    max_concurrent_rows,
    server_urls,
)
from trl.imports import is_available
from trl.memory.engine_memory import EngineMemory
from trl.memory.meter import DeviceMemory
from trl.models.value_model import add_value_model

needs_vllm = pytest.mark.skipif(
    not is_available("vllm"), reason="vLLM is not installed: make test installs its CPU build"
)


def vllm_config(folder, **changes):
    return config(folder, use_vllm=True, **changes)


@pytest.mark.skipif(is_available("vllm"), reason="vLLM is installed")
def test_a_missing_package_is_named(tmp_path):
    with pytest.raises(ImportError, match=r"needs the package `vllm`.*trl\[vllm\]"):
        make_trainer(tmp_path, use_vllm=True)


@needs_vllm
def test_sleep_on_a_cpu_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ValueError, match="no sleep mode on this platform .cpu."):
        make_trainer(tmp_path, model="no-such-model", use_vllm=True, vllm_enable_sleep_mode=True)


@pytest.fixture
def no_platform(monkeypatch):
    monkeypatch.setattr(factory, "check_platform", lambda sleeps: None)


@pytest.mark.parametrize(("size", "ranks", "legal"), [(2, 1, "1"), (3, 4, "1 or 2 or 4")])
def test_the_ranks_of_an_engine_divide_all_ranks(tmp_path, no_platform, size, ranks, legal):
    args = vllm_config(tmp_path, vllm_tensor_parallel_size=size)
    kind = type("Config", (type(args),), {"world_size": ranks})
    args.__class__ = kind
    words = f"vllm_tensor_parallel_size={size} must divide .* {ranks}: choose {legal}"
    with pytest.raises(ValueError, match=words):
        check_options(args)


@pytest.mark.parametrize("context", [4, 8])
def test_the_context_has_room_for_a_prompt(tmp_path, no_platform, context):
    check_options(vllm_config(tmp_path, vllm_max_model_length=9))
    with pytest.raises(
        ValueError, match=f"context of {context} tokens, but max_completion_length=8"
    ):
        check_options(vllm_config(tmp_path, vllm_max_model_length=context))


@pytest.mark.parametrize(
    ("option", "value", "legal"),
    [
        ("vllm_model_impl", "torch", "one of vllm, transformers"),
        ("vllm_gpu_memory_utilization", 0, "above 0 and at most 1"),
        ("vllm_gpu_memory_utilization", 30, "above 0 and at most 1"),
        ("vllm_max_model_length", 0, "at least 1"),
        ("vllm_probe_syncs", -1, "at least 0 .0: never."),
    ],
)
def test_values_out_of_range(tmp_path, option, value, legal):
    with pytest.raises(ValueError, match=f"{option}={value!r} must be {legal}"):
        vllm_config(tmp_path, **{option: value})


def test_rows_are_those_of_a_round_or_an_evaluation(tmp_path):
    rounds = {"steps_per_generation": 3, "gradient_accumulation_steps": 3}
    assert max_concurrent_rows(vllm_config(tmp_path, **rounds)) == 24
    assert max_concurrent_rows(vllm_config(tmp_path, per_device_eval_batch_size=64)) == 64
    assert max_concurrent_rows(vllm_config(tmp_path, per_device_train_batch_size=4096)) == 1024


def test_the_memory_of_an_engine_that_shares_a_large_device(tmp_path, monkeypatch):
    monkeypatch.setattr(factory, "device_bytes", lambda device: 80e9)
    args, model = vllm_config(tmp_path, max_completion_length=100), tiny_model()
    found = engine_memory(args, model, torch.float32, 256)
    assert found.context == 256 and found.cache == 16 * 2**20
    wide = tiny_model(num_hidden_layers=64, head_dim=256)
    per_token = 2 * 64 * 2 * 256 * 4
    assert engine_memory(args, wide, torch.float32, 256).cache == 8 * 256 * per_token


def test_a_small_device_is_refused_in_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(factory, "device_bytes", lambda device: 1e6)
    with pytest.raises(ValueError, match="The vLLM engine does not fit beside training"):
        engine_memory(vllm_config(tmp_path), tiny_model(), torch.float32, 256)


def test_a_value_model_of_its_own_is_counted(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(factory.Engine, "memory", lambda engine, *rest: seen.append(engine))
    policy = tiny_model()
    for given in (None, classifier()):
        add_value_model(policy, given, torch.device("cpu"))
        engine_memory(vllm_config(tmp_path), policy, torch.float32, 256)
    linear, model = (engine.plan.run.value_model for engine in seen)
    assert linear is None
    assert model.parameters == sum(p.numel() for p in classifier().parameters())


def test_a_quantized_policy_needs_an_engine_with_whole_weights(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(factory.Engine, "memory", lambda engine, *rest: seen.append(engine))
    pytest.importorskip("bitsandbytes")
    options = four_bits(tmp_path / "base")
    trainer = make_trainer(tmp_path, **options)
    trainer.model.active_peft_config.inference_mode = True  # as peft stores it
    engine_memory(vllm_config(tmp_path), trainer.model, torch.bfloat16, 256)
    (engine,) = seen
    factors = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in policy_model().parameters())
    assert engine.weights == 2 * (whole + 2 * factors)
    assert engine.plan.model.trainable == factors
    assert engine.plan.run.matrix_bytes == 0.5 + 4 / 64  # bits, and a float32 scale for 64 of them


def test_engines_of_all_ranks_have_the_size_of_the_smallest(tmp_path, monkeypatch):
    class Other(Ranks):
        """Another rank has half of everything."""

        def max(self, value):
            return max(value, value / 2)

    def memory(engine, shortest, measured):
        seen.append(measured)
        return EngineMemory(2**24, 256, 2**25)

    seen, here = [], DeviceMemory(free=5e9, used=3e9)
    monkeypatch.setattr(factory.DeviceMemory, "of", lambda device: here)
    monkeypatch.setattr(factory.Engine, "memory", memory)
    handle = model_policy(tiny_model(), ranks=Other())
    found = engine_arguments(handle, vllm_config(tmp_path), Sampling(max_tokens=4))
    assert seen == [DeviceMemory(free=2.5e9, used=1.5e9)]
    assert (found["max_model_len"], found["kv_cache_memory_bytes"]) == (256, 2**24)
    assert found["dtype"] == "float32" and found["skip_tokenizer_init"]


def test_the_module_says_which_releases_it_is_for():
    assert (vllm_engine.OLDEST_RELEASE, vllm_engine.NEWEST_RELEASE) == ("0.26", "0.33")


@needs_vllm
def test_unknown_sampling_options_are_refused_before_the_engine_starts(tmp_path):
    with pytest.raises(ValueError, match="'num_beams'. cannot be used in training: beam search"):
        make_trainer(tmp_path, use_vllm=True, generation_kwargs={"num_beams": 2})


# --- Servers ---


def server_config(folder, **changes):
    return config(folder, use_vllm=True, vllm_mode="server", **changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["http://0.0.0.0:8000"]),
        ({"vllm_server_host": "a", "vllm_server_port": 81}, ["http://a:81"]),
        ({"vllm_server_host": "::1"}, ["http://[::1]:8000"]),
        ({"vllm_server_base_url": "http://a:1", "vllm_server_port": 2}, ["http://a:1"]),
        ({"vllm_server_base_url": "http://a:1, http://b:2,"}, ["http://a:1", "http://b:2"]),
    ],
)
def test_addresses(tmp_path, changes, expected):
    assert server_urls(server_config(tmp_path, **changes)) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vllm_server_base_url": ","}, "','. must be an address such as"),
        ({"vllm_server_base_url": "a:1,a:1"}, "several different ones"),
        ({"vllm_server_base_url": "ftp://a"}, "'ftp://a' is not an address"),
        ({"vllm_server_timeout": 0}, "vllm_server_timeout=0 must be above 0"),
        ({"vllm_tensor_parallel_size": 2}, "give --tensor_parallel_size to `trl vllm-serve`"),
        ({"vllm_max_model_length": 64}, "vllm_max_model_length=64 is for .*give --max_model_len"),
        ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode=True .*leave it out"),
    ],
)
def test_options_of_servers_that_are_refused(tmp_path, no_platform, changes, words):
    check_options(server_config(tmp_path))
    if "vllm_server_base_url" in changes:
        words = words.replace("'.", "'")
    with pytest.raises(ValueError, match=words):
        check_options(server_config(tmp_path, **changes))


@needs_vllm
def test_mistakes_are_found_before_anything_is_loaded(tmp_path):
    with pytest.raises(ValueError, match="'ftp://a' is not an address"):
        make_trainer(
            tmp_path,
            model="no-such-model",
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url="ftp://a",
        )


@needs_vllm
def test_a_server_that_is_not_there_ends_training_in_time(tmp_path, free_port):
    words = f"No vLLM server was ready at http://0.0.0.0:{free_port} within .*=0.3 s"
    with pytest.raises(ConnectionError, match=words):
        make_trainer(
            tmp_path,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_port=free_port,
            vllm_server_timeout=0.3,
        )


def test_long_prompts_are_found_at_the_start(tmp_path, caplog):
    data = dataset(["a" * length for length in (3, 20, 9, 4)])
    trainer = make_trainer(tmp_path, data=data, max_completion_length=8)
    longest = trainer.encode.longest["train_dataset"]
    check = partial(check_engine_context, trainer.args, longest=longest)
    factory.logger.propagate = True

    def warnings():
        return [text for text in caplog.messages if "train_dataset" in text]

    check(28)
    assert warnings() == []
    check(27)
    (message,) = warnings()
    assert "row 1 of train_dataset has 20 tokens" in message and "truncated" in message
    with pytest.raises(ValueError, match="row 1 .* context of 20 tokens, .* leaves no room"):
        check(20)

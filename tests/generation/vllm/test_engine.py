"""What needs no engine; tests/vllm_cpu runs a real one."""

import os
import random

import pytest
import torch

from trl.generation.vllm import engine as vllm_engine
from trl.generation.vllm.engine import EngineSettings, check_platform, unchanged_process


class Platform:
    device_type = "toy"

    def __init__(self, sleeps):
        self.is_sleep_mode_available = lambda: sleeps


@pytest.fixture
def installed(monkeypatch):
    """Pretend that some release of vLLM is installed, for a platform that sleeps or not."""
    import types

    def install(version, sleeps=True):
        modules = {
            "vllm": types.SimpleNamespace(__version__=version),
            "vllm.platforms": types.SimpleNamespace(current_platform=Platform(sleeps)),
        }
        monkeypatch.setattr(vllm_engine, "require", lambda name, feature: modules[name])
        vllm_engine.logger.warning_once.cache_clear()

    return install


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        ("0.25.1", False),
        ("0.26.0", True),
        ("0.32.0+cpu", True),
        ("0.33.2", True),
        ("0.33.1.dev3", True),
        ("0.34.0", False),
        ("1.0", False),
    ],
)
def test_releases_outside_the_range_are_warned_of_once(installed, caplog, version, is_tested):
    installed(version)
    vllm_engine.logger.propagate = True
    for _ in range(2):
        check_platform(sleeps=True)
    messages = [text for text in caplog.messages if "supported range 0.26 to 0.33" in text]
    assert len(messages) == (0 if is_tested else 1)


def test_sleep_mode_needs_a_platform_that_has_it(installed):
    installed("0.32.0", sleeps=False)
    check_platform(sleeps=False)
    with pytest.raises(ValueError, match="vLLM has no sleep mode on this platform .toy."):
        check_platform(sleeps=True)


def arguments(on_cpu=False, **changes):
    settings = {"context": 64, "rows": 8, "batched": 512, "dtype": torch.bfloat16}
    return EngineSettings(**(settings | changes)).arguments(on_cpu)


def test_arguments_of_one_process():
    found = arguments()
    assert found["dtype"] == "bfloat16" and found["distributed_executor_backend"] == "uni"
    assert found["load_format"] == "dummy" and found["logprobs_mode"] == "processed_logprobs"
    assert found["skip_tokenizer_init"] and not found["enable_sleep_mode"]
    assert "gpu_memory_utilization" not in found and "kv_cache_memory_bytes" not in found


def test_arguments_of_ranks_that_share_an_engine():
    found = arguments(ranks=4, rank=3, tensor_parallel=2, memory_share=0.4, sleeps=True)
    assert (found["distributed_executor_backend"], found["seed"]) == ("external_launcher", 1)
    assert (found["tensor_parallel_size"], found["gpu_memory_utilization"]) == (2, 0.4)
    assert found["enable_sleep_mode"]


def test_a_cpu_shares_prompts_in_small_blocks_without_graphs():
    found = arguments(on_cpu=True, cache_bytes=2**24)
    assert found["enforce_eager"] and found["block_size"] == 32
    assert found["kv_cache_memory_bytes"] == 2**24


def test_the_process_is_given_back(monkeypatch):
    monkeypatch.setenv("TRL_TEST_KEPT", "old")
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    function, precision = torch.set_num_threads, torch.get_float32_matmul_precision()

    def disturb():
        torch.rand(3), random.random()
        torch.set_num_threads(before[2] + 1)
        torch.set_num_threads = print
        torch.set_float32_matmul_precision("medium")
        os.environ |= {"TRL_TEST_KEPT": "new", "TRL_TEST_ADDED": "1", "VLLM_TRL_TEST": "1"}
        raise KeyError

    with pytest.raises(KeyError), unchanged_process():
        disturb()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), torch.get_num_threads()) == before[1:]
    assert torch.set_num_threads is function
    assert torch.get_float32_matmul_precision() == precision
    assert os.environ["TRL_TEST_KEPT"] == "old" and "TRL_TEST_ADDED" not in os.environ
    assert os.environ.pop("VLLM_TRL_TEST") == "1", "vLLM reads its own again later"

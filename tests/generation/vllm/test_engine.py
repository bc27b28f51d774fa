"""What needs no engine; tests/vllm_cpu runs a real one."""

import os
import random
import types

import pytest
import torch
from tiny import tiny_model

from trl.distributed import Ranks
from trl.generation.vllm import engine as vllm_engine
from trl.generation.vllm.engine import check_platform, start_engine, unchanged_process


class Platform:
    device_type = "toy"

    def __init__(self, sleeps):
        self.is_sleep_mode_available = lambda: sleeps


@pytest.fixture
def installed(monkeypatch):
    """Pretend that some release of vLLM is installed, for a platform that sleeps or not."""

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


class Toy:
    """Takes the place of `vllm.LLM`."""

    def __init__(self, folder, **arguments):
        self.arguments = arguments
        self.llm_engine = types.SimpleNamespace(engine_core=None)


@pytest.fixture
def arguments(monkeypatch):
    """With what vLLM is started on a rank."""

    def start(rank=0, count=1, on_cpu=False, **changes):
        platform = types.SimpleNamespace(is_cpu=lambda: on_cpu)
        modules = {
            "vllm": types.SimpleNamespace(LLM=Toy),
            "vllm.platforms": types.SimpleNamespace(current_platform=platform),
            "vllm._custom_ops": types.SimpleNamespace(),
        }
        monkeypatch.setattr(vllm_engine, "require", lambda name, feature: modules[name])
        ranks = Ranks()
        ranks.rank, ranks.count = rank, count
        given = {"dtype": "bfloat16", "skip_tokenizer_init": True} | changes
        found, sleeps = start_engine(tiny_model(), None, given, ranks, lambda *both: both)
        assert sleeps == changes.get("enable_sleep_mode", False)
        return found.arguments

    return start


def test_arguments_of_one_process(arguments):
    found = arguments()
    assert found["dtype"] == "bfloat16" and found["distributed_executor_backend"] == "uni"
    assert found["load_format"] == "dummy" and found["logprobs_mode"] == "processed_logprobs"
    assert found["seed"] == 0 and "block_size" not in found


def test_arguments_of_ranks_that_share_an_engine(arguments):
    found = arguments(3, 4, tensor_parallel_size=2, enable_sleep_mode=True)
    assert (found["distributed_executor_backend"], found["seed"]) == ("external_launcher", 1)
    assert found["tensor_parallel_size"] == 2 and found["enable_sleep_mode"]


def test_a_cpu_shares_prompts_in_small_blocks_without_graphs(arguments):
    found = arguments(on_cpu=True)
    assert found["enforce_eager"] and found["block_size"] == 32


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="an older torch")
def test_an_engine_can_start_with_tf32():
    """Reading the older setting of torch is an error while the newer one differs."""
    torch.backends.fp32_precision = "tf32"  # as transformers does for tf32=True
    try:
        with unchanged_process():
            torch.set_float32_matmul_precision("highest")
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.fp32_precision = "none"


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

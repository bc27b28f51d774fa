"""One real vLLM engine on the CPU for all tests of a process, since starting it takes seconds."""

from contextlib import nullcontext
from functools import cache

import pytest
import torch
from peft import LoraConfig
from tiny import tiny_model, tiny_tokenizer
from transformers import BitsAndBytesConfig

from trl.distributed import Ranks
from trl.generation.base import PolicyHandle
from trl.generation.vllm.backend import VLLMColocateBackend
from trl.generation.vllm.engine import VLLMEngine, start_engine
from trl.imports import is_available

needs_vllm = pytest.mark.skipif(
    not is_available("vllm"), reason="vLLM is not installed: make test installs its CPU build"
)
# vLLM's attention on the CPU has no kernel for the heads of 8 of other tests.
SHAPE = {"head_dim": 32, "hidden_size": 64}
EOS = 1


def policy_model(seed: int = 0, **changes):
    return tiny_model(seed=seed, **(SHAPE | changes)).eval()


def fresh_engine(model, kind=VLLMEngine, ranks=None, **changes) -> VLLMEngine:
    """An engine of its own, for a model of another shape."""
    arguments = {"max_model_len": 128, "max_num_seqs": 64, "max_num_batched_tokens": 4096}
    arguments |= {"dtype": "float32", "kv_cache_memory_bytes": 16 * 2**20}
    arguments |= {"skip_tokenizer_init": False} | changes
    return start_engine(model, tiny_tokenizer(), arguments, ranks or Ranks(), kind)


def four_bits(folder, **lora):
    """Options of a trainer whose policy is an adapter on a base model in 4 bits."""
    policy_model().save_pretrained(folder)
    targets = ["q_proj", "down_proj"]
    return {
        "model": str(folder),
        "quantization_config": BitsAndBytesConfig(load_in_4bit=True),
        "model_init_kwargs": {"dtype": "float32"},
        "peft_config": LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **lora),
        "learning_rate": 0.05,
    }


@cache
def shared_llm():
    return fresh_engine(policy_model())._llm


def engine(kind: type[VLLMEngine] = VLLMEngine, sleeps: bool = False) -> VLLMEngine:
    """The shared engine, awake and with an empty cache."""
    llm = shared_llm()
    if llm.llm_engine.is_sleeping():  # where another wrapper left it
        llm.wake_up()
    for tensor in llm.llm_engine.model_executor.driver_worker.worker.model_runner.kv_caches:
        tensor.zero_()
    found = kind(llm, sleeps)
    found.reset_prefix_cache()
    return found


def model_policy(model, **changes) -> PolicyHandle:
    """A plain model as the backend sees it."""

    def logps(prompt, completion):
        with torch.no_grad():
            every = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        places = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
        return every[places, torch.tensor(completion)].tolist()

    parts = {
        "current": lambda: model,
        "tokenizer": tiny_tokenizer(),
        "ranks": Ranks(),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "logps": logps,
        "inference": nullcontext,
    }
    return PolicyHandle(**(parts | changes))


def backend(model, kind=VLLMEngine, sleeps=False, engine_=None, **options) -> VLLMColocateBackend:
    """A backend over the shared engine, unless another is given."""
    return VLLMColocateBackend(
        engine_ or engine(kind, sleeps),
        model_policy(model),
        **({"probe_syncs": 1} | options),
    )


def nudge(model, size: float = 0.1, seed: int = 5) -> None:
    """Move all weights, as an optimizer step would."""
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=stream) * size)


class ForgetfulEngine(VLLMEngine):
    """On a CPU vLLM's sleep frees nothing; here what sleeps becomes NaN, so that use shows.

    `calls` lists what was done, in order.
    """

    def __init__(self, llm, sleeps=False):
        super().__init__(llm, sleeps)
        self.calls = []

    def _caches(self):
        runner = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        return runner.kv_caches

    def wake(self, part):
        if part not in self._awake:
            self.calls.append(f"wake {part}")
        super().wake(part)
        if part == "kv_cache":
            for cache_ in self._caches():
                cache_.zero_()

    def sleep(self):
        if self._sleeps and self._awake:
            self.calls.append("sleep")
            for tensor in (*self.model.parameters(), *self._caches()):
                tensor.detach().fill_(torch.nan)
        return super().sleep()

    def load(self, name, weight):
        super().load(name, weight)
        if self.calls[-1:] != ["load"]:
            self.calls.append("load")

    def generate(self, requests, sampling):
        self.calls.append("generate")
        return super().generate(requests, sampling)

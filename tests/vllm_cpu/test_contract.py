"""The suite of every backend, over a real engine."""

import pytest
from backend_contract import BackendContract, model_logps
from shared_vllm import ForgetfulEngine, backend, needs_vllm, policy_model

pytestmark = [needs_vllm, pytest.mark.vllm]


class TestVLLM(BackendContract):
    model = policy_model(seed=3)

    @pytest.fixture
    def backend(self):
        return backend(self.model)

    def logps(self, prompt, completion, temperature):
        return model_logps(self.model, prompt, completion, temperature)


class TestSleepingVLLM(TestVLLM):
    @pytest.fixture
    def backend(self):
        return backend(self.model, ForgetfulEngine, sleeps=True)

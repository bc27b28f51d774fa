"""What vLLM reads of a trainer; tests/vllm_cpu trains with real engines."""

import pytest
from online_runs import make_trainer
from shared_vllm import needs_vllm


@needs_vllm
def test_unknown_sampling_options_are_refused_before_the_engine_starts(tmp_path):
    with pytest.raises(ValueError, match="'num_beams'. is no sampling option of vLLM"):
        make_trainer(tmp_path, use_vllm=True, generation_kwargs={"num_beams": 2})

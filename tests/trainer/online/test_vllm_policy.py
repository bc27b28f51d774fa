"""What vLLM reads of a trainer; tests/vllm_cpu trains with real engines."""

import pytest
import torch
from online_runs import config, dataset, make_trainer
from shared_vllm import needs_vllm
from tiny import tiny_model

from trl.trainer.online import vllm_policy
from trl.trainer.online.vllm_policy import check_prompts, compute_dtype


@needs_vllm
def test_unknown_sampling_options_are_refused_before_the_engine_starts(tmp_path):
    with pytest.raises(ValueError, match="'num_beams'. is no sampling option of vLLM"):
        make_trainer(tmp_path, use_vllm=True, generation_kwargs={"num_beams": 2})


def test_the_engine_computes_as_the_policy_does(tmp_path):
    args, model = config(tmp_path, use_vllm=True), tiny_model()
    assert compute_dtype(args, model) is torch.float32
    assert compute_dtype(args, model.half()) is torch.float16
    args.bf16 = True
    assert compute_dtype(args, model) is torch.bfloat16


def prompts_trainer(folder, lengths):
    data = dataset(["a" * length for length in lengths])
    return make_trainer(folder, data=data, max_completion_length=8)


def test_long_prompts_are_found_at_the_start(tmp_path, caplog):
    trainer = prompts_trainer(tmp_path, [3, 20, 9, 4])
    vllm_policy.logger.propagate = True

    def warnings():
        return [text for text in caplog.messages if "train_dataset" in text]

    check_prompts(trainer, 28)
    assert warnings() == []
    check_prompts(trainer, 27)
    (message,) = warnings()
    assert "row 1 of train_dataset has 20 tokens" in message and "cut earlier" in message
    with pytest.raises(ValueError, match="row 1 .* than the 20 .* leaves no room"):
        check_prompts(trainer, 20)

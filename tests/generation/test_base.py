from contextlib import nullcontext

import pytest
import torch
from backend_contract import BackendContract, model_logps
from online_runs import completion_logps, make_trainer
from scripted import ScriptedBackend
from tiny import tiny_model

from trl.generation.base import (
    BackendWrapper,
    Generations,
    Sampling,
    cut_at_stop,
    generations_from_rows,
    row_seeds,
)
from trl.generation.transformers.backend import TransformersBackend
from trl.generation.transformers.continuous import ContinuousBackend
from trl.types import Prompts


class ModelContract(BackendContract):
    model = tiny_model(eos_token_id=None).eval()

    def policy(self):
        return nullcontext(self.model)

    def logps(self, prompt, completion, temperature):
        return model_logps(self.model, prompt, completion, temperature)


class TestTransformers(ModelContract):
    @pytest.fixture(params=[True, False], ids=["shared", "padded"])
    def backend(self, request):
        return TransformersBackend(
            self.policy, pad_id=0, device=torch.device("cpu"), shared_prefix=request.param
        )


@pytest.mark.slow
class TestContinuous(ModelContract):
    @pytest.fixture
    def backend(self):
        return ContinuousBackend(self.policy, pad_id=0)


class TestScripted(BackendContract):
    scripted = True

    @pytest.fixture
    def backend(self):
        def script(ids, place):
            return [2 + (7 * sum(ids) + 11 * place + 5 * n + n * n) % 90 for n in range(40)]

        return ScriptedBackend(script)


def test_seeds_do_not_depend_on_how_rows_are_dealt():
    whole = row_seeds((42, "train", 7, 0), 0, 8)
    assert row_seeds((42, "train", 7, 0), 4, 4) == whole[4:]
    assert len(set(whole)) == 8 and all(0 <= seed < 2**63 for seed in whole)


def test_seeds_differ_between_rounds():
    keys = [
        (s, mode, step, sub)
        for s in (1, 2)
        for mode in ("train", "eval")
        for step in (0, 1)
        for sub in (0, 1)
    ]
    assert len({row_seeds(key, 0, 1) for key in keys}) == len(keys)


def test_cut_behind_the_first_stop_token():
    assert cut_at_stop([5, 9, 7, 1, 7], (7, 9), 10) == ([5, 9], "stop")
    assert cut_at_stop([7, 7], (7,), 10) == ([7], "stop")
    assert cut_at_stop([5, 6, 8], (7,), 3) == ([5, 6, 8], "length")
    assert cut_at_stop([5, 6, 7], (7,), 2) == ([5, 6], "length")
    assert cut_at_stop([5, 6, 7], (7,), 3) == ([5, 6, 7], "stop")
    assert cut_at_stop([], (7,), 3) == ([], "length")


def test_engines_that_do_not_sleep_are_always_awake_and_in_sync():
    backend = TransformersBackend(nullcontext, pad_id=0, device=torch.device("cpu"))
    backend.sync_weights(3)
    with backend.awake():
        assert backend.context_length is None, "as the policy"


def test_generations_are_cut():
    drawing = Sampling(max_tokens=3, stop_ids=(7,))
    found = generations_from_rows([[5, 7, 5], [5, 5, 5, 7]], drawing, [[0.0, -1.0], [0.0] * 3])
    assert found.completion_ids == [[5, 7], [5, 5, 5]] and found.finish_reasons == [
        "stop",
        "length",
    ]
    assert found.sampling_logps == [[0.0, -1.0], [0.0] * 3]


# --- What engines read of a policy ---


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        (torch.float32, {}, torch.float32),
        (torch.float16, {}, torch.float16),
        (torch.float32, {"bf16": True}, torch.bfloat16),
    ],
)
def test_the_precision_is_that_of_training(tmp_path, dtype, options, expected):
    trainer = make_trainer(tmp_path, model=tiny_model().to(dtype), **options)
    assert trainer.policy.dtype is expected


def test_the_handle_follows_the_policy(tmp_path):
    trainer = make_trainer(tmp_path, temperature=0.7)
    policy, first = trainer.policy, trainer.model
    prompt, completion = [20, 21], [30, 31, 1]
    assert policy.model is first
    trainer.model = tiny_model(seed=1)  # as engines that shard weights do
    assert policy.model is trainer.model is not first
    expected = completion_logps(trainer.model, prompt, completion, 0.7)
    assert torch.allclose(torch.tensor(policy.logps(prompt, completion)), expected, atol=1e-5)


def test_the_policy_is_whole_and_evaluates_for_inference(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.model.train()
    with trainer.policy.inference() as bare:
        assert not bare.training and bare is trainer.accelerator.unwrap_model(trainer.model)
    assert trainer.model.training


def test_generations_may_replace_prompts_and_add_columns():
    prompts = Prompts(messages=["a", "b"], token_ids=[[1], [2]])
    plain = Generations(completion_ids=[[5, 6], [7]], finish_reasons=["stop", "stop"])
    assert plain.completed_prompts(prompts) is prompts and plain.with_extra_columns(
        [{"x": 1}, {}]
    ) == [{"x": 1}, {}]
    assert plain.policy_token_counts() == [2, 1]
    changed = Generations(
        completion_ids=[[5, 6], [7]],
        finish_reasons=["stop", "stop"],
        policy_mask=[[True, False], [True]],
        prompt_ids=[[3], [4]],
        extra_columns=[{"x": 2}, {"y": 3}],
    )
    assert changed.completed_prompts(prompts).token_ids == [[3], [4]]
    assert changed.with_extra_columns([{"x": 1}, {"x": 1}]) == [{"x": 2}, {"x": 1, "y": 3}]
    assert changed.policy_token_counts() == [1, 1]
    both = Generations.concatenate([changed, changed])
    assert both.extra_columns == changed.extra_columns * 2 and both.messages is None


def test_options_that_are_not_replayed():
    extra = {"presence_penalty": 0.5, "min_tokens": 0, "stop": ["x"], "logit_bias": {3: 1.0}}
    drawing = Sampling(max_tokens=4, repetition_penalty=1.1, top_p=0.5, extra=extra)
    expected = ["presence_penalty=0.5", "logit_bias={3: 1.0}", "repetition_penalty=1.1"]
    assert drawing.unreproducible_options() == expected
    likeliest = Sampling(max_tokens=4, extra={"do_sample": False})
    assert likeliest.unreproducible_options() == ["do_sample=False"]


def test_a_wrapper_hands_on_what_its_engine_measured():
    class Measuring(ScriptedBackend):
        def take_metrics(self):
            return [("seconds", 2.0)]

    class Wrapper(BackendWrapper):
        def generate(self, prompts, sampling, group_size):
            return self.engine.generate(prompts, sampling, group_size)

    engine = Measuring(lambda ids, place: [1])
    assert Wrapper(engine).take_metrics() == [("seconds", 2.0)]
    assert ScriptedBackend(lambda ids, place: [1]).take_metrics() == []

import json
from pathlib import Path

import ppo_runs
import pytest
import torch
from datasets import Dataset
from online_runs import (
    completion_logps,
    config,
    gradients,
    relative,
    step_direction,
)
from scripted import ScriptedBackend
from tiny import tiny_model, tiny_tokenizer
from tool_chat import END, add, call, fail, ids, tool_tokenizer, user

from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.online_dpo_config import OnlineDPOConfig
from trl.trainer.online_dpo_trainer import OnlineDPOTrainer
from trl.trainer.ppo_config import PPOConfig
from trl.trainer.ppo_trainer import PPOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer

KINDS = {"rloo": (RLOOTrainer, RLOOConfig), "grpo": (GRPOTrainer, GRPOConfig)}
OTHERS = {
    "online-dpo": (OnlineDPOTrainer, OnlineDPOConfig),
    "ppo": (PPOTrainer, PPOConfig),
}
BOUND = 5e-6
TURNS = [
    [call("add", '{"a": 2, "b": 3}'), "five"],
    ["dunno"],
    [call("fail", '{"why": "x"}'), call("add", '{"a": 1}'), "no"],
    ["it is 5"],
]


def model():
    made = tiny_model(max_position_embeddings=1024)
    made.generation_config.eos_token_id = [1, END]
    return made


def script(seen, place):
    """The rows of a group differ; later turns go on with the turns of the row they belong to."""
    written = tool_tokenizer().decode(seen).split("<assistant>")[1:]
    for turns in TURNS:
        if written[0].startswith(turns[0]):
            return [*ids(turns[len(written) - 1]), END]
    return [*ids(TURNS[place][0]), END]


def trainer_of(folder, kind="rloo", reward=None, data=None, tokenizer=None, **changes):
    trainer_class, config_class = (KINDS | OTHERS)[kind]
    names = ("tools", "rollout_func", "environment_factory", "eval_dataset")
    given = {name: changes.pop(name) for name in names if name in changes}
    settings = {"max_completion_length": 800, "reward_dry_run": False, "learning_rate": 1.0}
    return trainer_class(
        model=model(),
        reward_funcs=by_length if reward is None else reward,
        args=config(folder, config_class, **(settings | changes)),
        train_dataset=None
        if data == "none"
        else data or Dataset.from_dict({"prompt": [user("ab"), user("cd")]}),
        processing_class=tokenizer or tool_tokenizer(),
        **given,
    )


def scripted(folder, kind="rloo", **changes):
    trainer = trainer_of(folder, kind, **({"tools": [add, fail]} | changes))
    trainer.backend.engine = ScriptedBackend(script)
    return trainer


def by_length(completion_ids, **kwargs):
    return [len(row) % 7 / 3 for row in completion_ids]


def records(folder, mode="train"):
    lines = Path(folder, "completions", f"{mode}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def by_hand(kind, rows):
    """The gradient of one on-policy step, from one unpadded forward a row and a mask a token."""
    policy = model()
    scores = torch.tensor(by_length([completion for _, completion, _ in rows])).view(-1, 4)
    if kind == "rloo":
        credit = (scores - scores.mean(1, keepdim=True)) * 4 / 3
        weights = [1 / len(rows)] * len(rows)
    else:
        spread = scores.std(1, keepdim=True) + 1e-4
        credit = (scores - scores.mean(1, keepdim=True)) / spread
        weights = [1 / sum(sum(mask) for _, _, mask in rows)] * len(rows)
    loss = torch.zeros(())
    for row, (prompt, completion, mask) in enumerate(rows):
        logps = completion_logps(policy, prompt, completion)
        for place in range(len(mask)):
            if mask[place]:
                loss = loss - credit.flatten()[row] * weights[row] * logps[place]
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def expected_rows():
    """Prompts, completions and masks of a round, put together by hand."""
    rows = []
    for text in ("ab", "cd"):
        prompt = ids(f"<system>add fail <end><user>{text}<end><assistant>")
        for turns in TURNS:
            completion, mask = [], []
            for place, turn in enumerate(turns):
                completion += [*ids(turn), END]
                mask += [True] * (len(ids(turn)) + 1)
                if place + 1 < len(turns):
                    answer = ids(ANSWERS[turn])
                    completion += answer
                    mask += [False] * len(answer)
            rows.append((prompt, completion, mask))
    return rows


MISSING = "TypeError: add() missing 1 required positional argument: 'b'"
ANSWERS = {
    TURNS[0][0]: "(tool add: 5)<assistant>",
    TURNS[2][0]: '(tool fail: {"error": "RuntimeError: x"})<assistant>',
    TURNS[2][1]: f'(tool add: {{"error": "{MISSING}"}})<assistant>',
}


@pytest.mark.parametrize("kind", KINDS)
def test_tool_tokens_do_not_train(tmp_path, kind):
    rows = expected_rows()
    trainer = scripted(tmp_path, kind)
    found = step_direction(trainer)
    assert [r["completion_ids"] for r in records(tmp_path)] == [row[1] for row in rows]
    assert relative(found, by_hand(kind, rows)) < BOUND
    everything = [(prompt, ids_, [True] * len(ids_)) for prompt, ids_, _ in rows]
    assert relative(found, by_hand(kind, everything)) > 0.01, "the mask matters"


def test_tool_tokens_of_pairs_do_not_train(tmp_path):
    every = expected_rows()
    rows = [*every[:2], *every[4:6]]  # of each prompt the first two
    options = {"num_generations": 2, "per_device_train_batch_size": 2, "temperature": 1.0}
    found = step_direction(scripted(tmp_path, "online-dpo", beta=0.3, **options))
    policy, loss = model(), torch.zeros(())
    scores = by_length([completion for _, completion, _ in rows])
    for place in (0, 2):
        sums = [
            completion_logps(policy, prompt, completion)[torch.tensor(mask)].sum()
            for prompt, completion, mask in rows[place : place + 2]
        ]
        better = 1.0 if scores[place] >= scores[place + 1] else -1.0
        # The reference is the policy, so the margin is 0 and its slope a half.
        loss = loss - 0.5 * 0.3 * better * (sums[0] - sums[1]) / 2
    loss.backward()
    assert relative(found, gradients(policy)) < BOUND


def test_tool_tokens_have_no_credit(tmp_path):
    rows = expected_rows()
    options = {"num_ppo_epochs": 1, "temperature": 1.0, "beta": 0.0, "num_generations": 4}
    trainer = scripted(tmp_path, "ppo", **options)
    ppo_runs.fill(trainer.model.value_model)
    policy = model()
    policy.value_model = torch.nn.Linear(32, 1)
    ppo_runs.fill(policy.value_model)
    scores = by_length([completion for _, completion, _ in rows])
    loop = ppo_runs.Loop(policy, None, rows, scores, beta=0.0, vf_coef=0.1)
    assert relative(step_direction(trainer), loop.gradient(loop.credit())) < BOUND
    whole = ppo_runs.Loop(policy, None, [row[:2] for row in rows], scores, beta=0.0, vf_coef=0.1)
    assert relative(whole.gradient(whole.credit()), loop.gradient(loop.credit())) > 0.01


def test_metrics_rewards_and_log_see_the_turns(tmp_path):
    seen = []

    def reward(completions, **kwargs):
        seen.extend(completions)
        return [float(i) for i in range(len(completions))]

    trainer = scripted(tmp_path, reward=reward)
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["tools/call_frequency"] == pytest.approx(3 / 4)
    assert logs["tools/failure_frequency"] == pytest.approx(2 / 3)
    written = [sum(mask) for _, _, mask in expected_rows()]
    assert logs["completions/mean_length"] == pytest.approx(sum(written) / len(written))
    assert [m["role"] for m in seen[0]] == ["assistant", "tool", "assistant"]
    assert seen[0][0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert seen[0][1:] == [
        {"role": "tool", "name": "add", "content": "5"}, {"role": "assistant", "content": "five"},
    ]  # fmt: skip
    assert seen[1] == [{"role": "assistant", "content": "dunno"}]
    assert [r["completion"] for r in records(tmp_path)] == seen


def test_evaluation_calls_tools(tmp_path):
    data = Dataset.from_dict({"prompt": [user("ab")]})
    trainer = scripted(tmp_path, eval_dataset=data, per_device_eval_batch_size=4)
    assert trainer.evaluate()["eval_tools/call_frequency"] == pytest.approx(3 / 4)


def test_the_policy_itself_generates_with_tools(tmp_path):
    trainer = trainer_of(tmp_path, tools=[add], max_completion_length=6, beta=0.1)
    assert trainer.backend.context_length == trainer.model.config.max_position_embeddings
    trainer.train()
    assert [len(r["completion"]) for r in records(tmp_path)] == [1] * 8
    assert "kl" in trainer.state.log_history[0]


def test_tool_options_reach_the_loop(tmp_path):
    trainer = scripted(tmp_path, max_tool_calling_iterations=1)
    trainer.train()
    assert trainer.state.log_history[0]["tools/call_frequency"] == pytest.approx(2 / 4)


# --- Rollout functions ---


def rollout(prompts, trainer):
    """Completions whose second token comes from an environment."""
    encoded = trainer.encode([{"prompt": prompt} for prompt in prompts])
    completions = [[20 + row, 30, 40, END] for row in range(len(prompts))]
    return {
        "prompt_ids": [[*row, 50] for row in encoded.token_ids],
        "completion_ids": completions,
        "logprobs": [[-1.0] * 4] * len(prompts),
        "env_mask": [[1, 0, 1, 1]] * len(prompts),
        "bonus": [row / 2 for row in range(len(prompts))],
        "name": "env",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_functions(tmp_path, kind):
    seen = {}

    def reward(completions, bonus, name, **kwargs):
        seen.update(completions=completions, name=name)
        return bonus

    trainer = trainer_of(tmp_path, kind, reward=reward, rollout_func=rollout, beta=0.0)
    batches = []
    collect = trainer.collect
    trainer.collect = lambda *given: batches.append(collect(*given)) or batches[-1]
    trainer.train()
    record = records(tmp_path)[3]
    assert record["completion_ids"] == [23, 30, 40, END] and record["rewards"]["reward"] == 1.5
    assert record["finish"] == "stop" and seen["name"] == ["env"] * 8
    assert isinstance(seen["completions"][0], list)
    assert trainer.state.log_history[0]["completions/mean_length"] == 3.0
    assert batches[0].rows.prompt_ids[0] == [*ids("<user>ab<end><assistant>"), 50]
    assert batches[0].loss_mask[0].tolist() == [True, False, True, True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("written", [0, 4], ids=["all empty", "some empty"])
def test_completions_may_be_empty(tmp_path, kind, written):
    def function(prompts, trainer):
        completions = [[20 + row, END] if row < written else [] for row in range(len(prompts))]
        logps = [[-1.0] * len(row) for row in completions]
        return {"prompt_ids": [[9]] * 8, "completion_ids": completions, "logprobs": logps}

    trainer = trainer_of(tmp_path, kind, rollout_func=function, beta=0.1)
    trainer.train()
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == (8 - written) / 8


def test_rollout_functions_may_use_the_engine(tmp_path):
    def function(prompts, trainer):
        encoded = trainer.encode([{"prompt": prompt} for prompt in prompts])
        found = trainer.backend.engine.generate(encoded, trainer.sampling, 1)
        return {
            "prompt_ids": encoded.token_ids,
            "completion_ids": found.completion_ids,
            "logprobs": found.sampling_logps,
        }

    trainer = trainer_of(tmp_path, rollout_func=function, max_completion_length=5)
    trainer.train()
    assert {len(r["completion_ids"]) for r in records(tmp_path)} <= {1, 2, 3, 4, 5}


# --- Environments ---


class Mute:
    """Has no tools and gives no reward."""

    def reset(self, **kwargs):
        return None


class Counter(Mute):
    """Counts what is said to it; an episode begins at the length of the prompt."""

    def reset(self, prompt, **kwargs):
        self.count = len(prompt[-1]["content"])
        return f"{self.count}"

    def add(self, a: int, b: int) -> int:
        """
        Count on.

        Args:
            a: how far
            b: how much further
        """
        self.count += a + b
        return self.count

    def get_reward(self):
        return float(self.count)


def acting(folder, kind="rloo", **changes):
    settings = {"environment_factory": Counter, "reward": [], **changes}
    trainer = trainer_of(folder, kind, **settings)
    trainer.backend.engine.engine = ScriptedBackend(script)
    return trainer


@pytest.mark.parametrize("kind", KINDS)
def test_rows_act_in_environments_of_their_own(tmp_path, kind):
    seen = []

    def asked(environments, prompts, **kwargs):
        seen.extend(zip(environments, prompts, strict=True))
        return [0.5] * len(prompts)

    trainer = acting(tmp_path, kind, reward=asked, reward_weights=[2.0])
    trainer.train()
    found = records(tmp_path)
    # Only the first row's call can be made: the third names no tool, and then misses an argument.
    assert [r["rewards"]["Counter"] for r in found] == [7.0, 2.0, 2.0, 2.0] * 2
    assert [r["reward"] for r in found] == [8.0, 3.0, 3.0, 3.0] * 2
    assert [r["prompt"] for r in found] == [
        user(f"{text}2") for text in ("ab", "cd") for _ in "1234"
    ]
    assert len({id(own) for own, _ in seen}) == 8
    assert [prompt for _, prompt in seen] == [r["prompt"] for r in found]
    logs = trainer.state.log_history[0]
    assert logs["rewards/Counter/mean"] == pytest.approx(13 / 4)
    assert logs["tools/call_frequency"] == pytest.approx(3 / 4)


def test_environments_bring_their_own_data_and_serve_evaluation(tmp_path):
    trainer = acting(
        tmp_path,
        data="none",
        eval_dataset=Dataset.from_dict({"prompt": [user("wxyz")]}),
        per_device_eval_batch_size=4,
        max_steps=1,
    )
    trainer.train()
    assert {r["prompt"][0]["content"] for r in records(tmp_path)} == {"0"}
    assert trainer.evaluate()["eval_rewards/Counter/mean"] == pytest.approx(4 + 5 / 4)


@pytest.mark.parametrize("factory", [Counter, Mute])
def test_completions_in_environments_come_from_the_same_random_streams(tmp_path, factory):
    """Alike in each run; and without tools those of a run whose prompts are what is shown."""
    settings = {"environment_factory": factory, "max_completion_length": 6, "max_steps": 2}
    written = []
    for place in range(2):
        trainer_of(tmp_path / str(place), **settings).train()
        written.append([r["completion_ids"] for r in records(tmp_path / str(place))])
    if factory is Mute:
        trainer_of(tmp_path / "plain", max_completion_length=6, max_steps=2).train()
        written.append([r["completion_ids"] for r in records(tmp_path / "plain")])
    assert all(found == written[0] for found in written)


# --- What is refused ---


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"environment_factory": dict}, ValueError, "dict has no method 'reset'"),
        ({"environment_factory": Counter, "rollout_func": rollout}, ValueError,
         "environment_factory cannot be used with rollout_func"),
        ({"environment_factory": Counter, "data": Dataset.from_dict({"prompt": ["ab", "cd"]})},
         ValueError, "conversational prompts.*'ab'"),
        ({"environment_factory": Mute, "reward": []}, ValueError, "reward_funcs is empty"),
        ({"tools": [add], "rollout_func": rollout}, ValueError, "tools cannot be used with"),
        ({"rollout_func": 3}, TypeError, "rollout_func must be a function, not 3"),
        ({"tools": [add, 3]}, TypeError, "3 is not a function"),
        ({"tools": [add], "data": Dataset.from_dict({"prompt": ["ab", "cd"]})}, ValueError,
         "conversational prompts.*'ab'"),
        ({"tools": [add], "tokenizer": tiny_tokenizer()}, ValueError, "does not render tool calls"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_before_training(tmp_path, kind, changes, error, words):
    with pytest.raises(error, match=words):
        trainer_of(tmp_path, kind, **changes)

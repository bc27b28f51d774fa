"""What runs with a vLLM engine wrote, and the reward that they learn by."""

import json

import torch
from datasets import Dataset
from online_runs import records
from shared_vllm import policy_model
from tool_chat import END, EOS, tool_tokenizer, user

CALL = r'<tool_call>\{"name": "go", "arguments": \{"by": [2-9]\}\}</tool_call>'


def completions(folder, mode="train"):
    lines = (folder / "completions" / f"{mode}.jsonl").read_text().splitlines()
    return [json.loads(line)["completion_ids"] for line in lines]


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def share_of_digits(completions, **kwargs):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def check_reward_rises(trainer_of, folder, kind):
    """Learn to write digits in 20 steps; returns the trainer."""
    settings = {"per_device_train_batch_size": 32, "num_generations": 8, "max_steps": 20}
    trainer = trainer_of(folder, kind, reward=share_of_digits, **settings)
    trainer.train()
    rewards = logged(trainer, "reward")
    assert sum(rewards[:3]) / 3 < 0.3 and sum(rewards[-3:]) / 3 > 0.6, rewards
    return trainer


def check_seeds(trainer_of, folder):
    """The completions of a run depend on its seed, and on no state of the process."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(len(name) + seed)
        trainer_of(folder / name, seed=seed).train()
    assert completions(folder / "a") == completions(folder / "b")
    assert completions(folder / "a") != completions(folder / "c")


class Walk:
    """Goes on from where an episode begins."""

    def reset(self, prompt, **kwargs):
        self.begin = self.place = len(prompt[-1]["content"])
        return str(self.place)

    def go(self, by: int) -> int:
        """
        Go on.

        Args:
            by: how far
        """
        self.place += by
        return self.place

    def get_reward(self):
        return float(self.place - self.begin)


def check_environments(trainer_of, folder):
    """Whatever the policy writes is a call, of which the second one has no room to end."""
    model = policy_model()
    model.generation_config.eos_token_id = [EOS, END]
    trainer = trainer_of(
        folder,
        model=model,
        environment_factory=Walk,
        reward=[],
        data=Dataset.from_dict({"prompt": [user("ab"), user("c")]}),
        processing_class=tool_tokenizer(),
        vllm_structured_outputs_regex=CALL,
        max_completion_length=100,
    )
    trainer.train()
    found = records(folder)
    assert len(found) == 2 * 8 and {r["step"] for r in found} == {0, 1}
    for row in found:
        first, answer, second = row["completion"]
        by = first["tool_calls"][0]["function"]["arguments"]["by"]
        assert row["reward"] == by >= 2
        begin = int(row["prompt"][-1]["content"][-1])
        assert answer == {"role": "tool", "name": "go", "content": str(begin + by)}
        assert second["role"] == "assistant" and row["finish"] == "length"
    assert len({row["reward"] for row in found}) > 1
    assert logged(trainer, "tools/call_frequency") == [1.0, 1.0]
    assert max(logged(trainer, "vllm/logp_gap")) <= 1e-4

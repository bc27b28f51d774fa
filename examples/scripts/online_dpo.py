"""Online DPO: a judge or a reward model compares pairs of completions of the policy.

    python examples/scripts/online_dpo.py --model_name_or_path Qwen/Qwen3-0.6B --output_dir output
        [--dataset_name ID] [--reward_model_name_or_path PATH] [--judge_url URL --judge_model ID]

A judge is any object with `judge(prompts, completions)`, such as a `ServerJudge`.
"""

import json
import os
import urllib.request
from dataclasses import dataclass

from trl import ModelConfig, OnlineDPOConfig, OnlineDPOTrainer, TrlParser, get_peft_config
from trl.cli.files import load_dataset_source

QUESTION = "Which answer is better? Reply with the number alone.\n\nQuestion: {}\n\n0: {}\n\n1: {}"


@dataclass
class Options:
    dataset_name: str = "trl-lib/ultrafeedback-prompt"
    reward_model_name_or_path: str | None = None
    judge_url: str = "https://api.openai.com/v1"
    judge_model: str = "gpt-4o-mini"


class ServerJudge:
    """Asks a model behind an API like OpenAI's. A reply other than 0 or 1 is no decision (-1)."""

    def __init__(self, url: str, model: str):
        self.url = url.rstrip("/") + "/chat/completions"
        self.model = model

    def judge(self, prompts, completions):
        return [self.ask(prompt, *pair) for prompt, pair in zip(prompts, completions, strict=True)]

    def ask(self, prompt, first, second):
        message = {"role": "user", "content": QUESTION.format(prompt, first, second)}
        body = json.dumps({"model": self.model, "messages": [message]}).encode()
        api_key = os.environ.get("OPENAI_API_KEY", "")
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
        with urllib.request.urlopen(urllib.request.Request(self.url, body, headers)) as reply:
            text = json.load(reply)["choices"][0]["message"]["content"].strip()
        return {"0": 0, "1": 1}.get(text, -1)


options, args, model = TrlParser((Options, OnlineDPOConfig, ModelConfig)).parse_args_and_config()
reward_model = options.reward_model_name_or_path
judge = None if reward_model else ServerJudge(options.judge_url, options.judge_model)
trainer = OnlineDPOTrainer(
    model=model.model_name_or_path,
    reward_funcs=reward_model,
    judge=judge,
    args=args,
    train_dataset=load_dataset_source(options.dataset_name)["train"],
    peft_config=get_peft_config(model),
)
trainer.train()
trainer.save_model()

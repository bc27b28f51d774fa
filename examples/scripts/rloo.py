"""RLOO: learn to give the right final answer. The other completions of a prompt are the baseline.

    python examples/scripts/rloo.py --model_name_or_path Qwen/Qwen3-0.6B --output_dir output
        [--dataset_name FOLDER_OR_HUB_ID] [--num_generations 8] [--use_vllm] [--use_peft]

The dataset needs the columns `prompt` and `answer`.
"""

from dataclasses import dataclass

from datasets import load_dataset

from trl import ModelConfig, RLOOConfig, RLOOTrainer, TrlParser, get_peft_config


@dataclass
class Options:
    dataset_name: str = "json"
    data_files: str | None = "prompts.jsonl"


def ends_with_answer(completions, answer, **kwargs):
    """Reward 1 if a completion, text or messages, ends with the answer, else 0."""
    rewards = []
    for completion, expected in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        rewards.append(float(text.strip().endswith(str(expected))))
    return rewards


def main() -> None:
    options, args, model = TrlParser((Options, RLOOConfig, ModelConfig)).parse_args_and_config()
    files = {"data_files": options.data_files} if options.dataset_name == "json" else {}
    trainer = RLOOTrainer(
        model=model.model_name_or_path,
        reward_funcs=ends_with_answer,
        args=args,
        train_dataset=load_dataset(options.dataset_name, split="train", **files),
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

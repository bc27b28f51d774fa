"""GRPO: learn to give the right final answer, with advantages relative to the group of siblings.

    python examples/scripts/grpo.py --model_name_or_path Qwen/Qwen3-0.6B --output_dir output
        [--dataset_name FOLDER_OR_HUB_ID] [--num_generations 8] [--use_vllm] [--use_peft]

The dataset has the columns `prompt` and `answer`.
"""

from dataclasses import dataclass

from datasets import load_dataset

from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config


@dataclass
class Options:
    dataset_name: str = "json"
    data_files: str | None = "prompts.jsonl"


def right(completions, answer, **kwargs):
    """1 where a completion, a string or messages, ends with the answer."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [
        float(text.strip().endswith(str(wanted)))
        for text, wanted in zip(texts, answer, strict=True)
    ]


def main() -> None:
    options, args, model = TrlParser((Options, GRPOConfig, ModelConfig)).parse_args_and_config()
    files = {"data_files": options.data_files} if options.dataset_name == "json" else {}
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=right,
        args=args,
        train_dataset=load_dataset(options.dataset_name, split="train", **files),
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

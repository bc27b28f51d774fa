"""PPO: train with a reward model, or by default on the toy task of writing digits.

python examples/scripts/ppo.py --model_name_or_path HuggingFaceTB/SmolLM2-135M --output_dir output
    [--dataset_name FOLDER_OR_HUB_ID] [--reward_model_name_or_path MODEL] [--value_model MODEL]
"""

from dataclasses import dataclass

from datasets import Dataset

from trl import ModelConfig, PPOConfig, PPOTrainer, TrlParser, get_peft_config
from trl.cli.files import load_dataset_source


@dataclass
class Options:
    dataset_name: str | None = None
    reward_model_name_or_path: str | None = None
    value_model: str | None = None


def digits(completions: list[str], **columns) -> list[float]:
    """Reward the share of characters that are digits."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


def main() -> None:
    parser = TrlParser((Options, PPOConfig, ModelConfig))
    options, args, model = parser.parse_args_and_config()
    if options.dataset_name is None:
        dataset = Dataset.from_dict({"prompt": [f"{i}+{j}=" for i in range(8) for j in range(8)]})
    else:
        dataset = load_dataset_source(options.dataset_name)["train"]
    trainer = PPOTrainer(
        model=model.model_name_or_path,
        value_model=options.value_model,
        reward_funcs=options.reward_model_name_or_path or digits,
        args=args,
        train_dataset=dataset,
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

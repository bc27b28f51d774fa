"""GRPO: learn to think before answering. The reward depends only on the format of completions.

    python examples/scripts/grpo.py --model_name_or_path Qwen/Qwen3-0.6B --output_dir output
        [--dataset_name trl-lib/DeepMath-103K] [--num_generations 8] [--use_vllm] [--use_peft]

The dataset needs the column `prompt`.
"""

from trl import (
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    rewards,
)
from trl.cli.files import load_dataset_source


def main() -> None:
    script, args, model = TrlParser(
        (ScriptArguments, GRPOConfig, ModelConfig)
    ).parse_args_and_config()
    dataset = load_dataset_source(script.dataset_name or "trl-lib/DeepMath-103K")
    trainer = GRPOTrainer(
        model.model_name_or_path,
        rewards.think_format_reward,
        args,
        train_dataset=dataset[script.dataset_train_split],
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

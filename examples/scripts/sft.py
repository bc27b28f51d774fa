"""SFT: train on conversations or texts. Rows are packed, so there is no padding.

python examples/scripts/sft.py --model_name_or_path Qwen/Qwen3-0.6B-Base --output_dir output
    [--dataset_name trl-lib/Capybara] [--assistant_only_loss] [--max_length 2048] [--use_peft]
"""

from dataclasses import dataclass

from datasets import load_dataset

from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config


@dataclass
class Options:
    dataset_name: str = "trl-lib/Capybara"
    data_files: str | None = None
    eval_share: float = 0.01


def main() -> None:
    parser = TrlParser((Options, SFTConfig, ModelConfig))
    parser.set_defaults(packing=True, eval_strategy="epoch")
    options, args, model = parser.parse_args_and_config()
    files = {} if options.data_files is None else {"data_files": options.data_files}
    dataset = load_dataset(options.dataset_name, split="train", **files)
    splits = dataset.train_test_split(options.eval_share, seed=args.seed)
    trainer = SFTTrainer(
        model=model.model_name_or_path,
        args=args,
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

"""`trl grpo`: train a policy with GRPO. The file can also be run by its path."""

from trl.cli.parser import TrlParser
from trl.cli.train import make_online_parser, run_online
from trl.trainer.grpo_config import GRPOConfig


def make_parser() -> TrlParser:
    """The options of `trl grpo`."""
    return make_online_parser("grpo", GRPOConfig)


def main() -> None:
    """Run in each worker."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    run_online(make_parser(), GRPOTrainer)


if __name__ == "__main__":
    main()

"""`trl grpo`: train a policy with GRPO."""

from ..cli.parser import TrlParser
from ..trainer.grpo_config import GRPOConfig
from .run import make_online_parser, run_online


def make_parser() -> TrlParser:
    """The options of `trl grpo`."""
    return make_online_parser("grpo", GRPOConfig)


def main() -> None:
    """Run in each worker."""
    from ..trainer.grpo_trainer import GRPOTrainer

    run_online(make_parser(), GRPOTrainer)


if __name__ == "__main__":
    main()

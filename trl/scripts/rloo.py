"""`trl rloo`: train a policy with RLOO. The file can also be run by its path."""

from trl.cli.parser import TrlParser
from trl.cli.train import make_online_parser, run_online
from trl.trainer.rloo_config import RLOOConfig


def make_parser() -> TrlParser:
    """The options of `trl rloo`."""
    return make_online_parser("rloo", RLOOConfig)


def main() -> None:
    """Run in each worker."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    run_online(make_parser(), RLOOTrainer)


if __name__ == "__main__":
    main()

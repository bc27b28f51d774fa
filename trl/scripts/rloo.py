"""`trl rloo`: train a policy with RLOO."""

from ..cli.parser import TrlParser
from ..trainer.rloo_config import RLOOConfig
from .run import make_online_parser, run_online


def make_parser() -> TrlParser:
    """The options of `trl rloo`."""
    return make_online_parser("rloo", RLOOConfig)


def main() -> None:
    """Run in each worker."""
    from ..trainer.rloo_trainer import RLOOTrainer

    run_online(make_parser(), RLOOTrainer)


if __name__ == "__main__":
    main()

"""`trl reward` in each worker. The file can also be run by its path."""

from trl.cli.commands import TRAINING

make_parser, main = TRAINING["reward"].make_parser, TRAINING["reward"].work

if __name__ == "__main__":
    main()

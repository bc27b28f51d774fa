"""The program that each worker of `trl reward` runs. The file can also be run by its path."""

from trl.cli.commands import TRAINING

make_parser = TRAINING["reward"].make_parser
main = TRAINING["reward"].work

if __name__ == "__main__":
    main()

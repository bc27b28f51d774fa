"""`trl sft` in each worker. The file can also be run by its path."""

from trl.cli.commands import TRAINING

make_parser, main = TRAINING["sft"].make_parser, TRAINING["sft"].work

if __name__ == "__main__":
    main()

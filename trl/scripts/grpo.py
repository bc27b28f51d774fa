"""`trl grpo` in each worker. The file can also be run by its path."""

from trl.cli.commands import TRAINING

make_parser, main = TRAINING["grpo"].make_parser, TRAINING["grpo"].work

if __name__ == "__main__":
    main()

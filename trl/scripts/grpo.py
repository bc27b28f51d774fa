"""The program that each worker of `trl grpo` runs. The file can also be run by its path."""

from trl.cli.commands import TRAINING

make_parser = TRAINING["grpo"].make_parser
main = TRAINING["grpo"].work

if __name__ == "__main__":
    main()

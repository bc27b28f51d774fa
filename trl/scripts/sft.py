"""The program that each worker of `trl sft` runs. The file can also be run by its path."""

from trl.cli.commands import TRAINING

make_parser = TRAINING["sft"].make_parser
main = TRAINING["sft"].work

if __name__ == "__main__":
    main()

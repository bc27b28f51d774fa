"""`trl dpo` in each worker. The file can also be run by its path."""

from trl.cli.commands import TRAINING

make_parser, main = TRAINING["dpo"].make_parser, TRAINING["dpo"].work

if __name__ == "__main__":
    main()

"""`trl rloo` in each worker. The file can also be run by its path."""

from trl.cli.commands import TRAINING

make_parser, main = TRAINING["rloo"].make_parser, TRAINING["rloo"].work

if __name__ == "__main__":
    main()

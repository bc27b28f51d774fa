"""The program that each worker of `trl rloo` runs. The file can also be run by its path."""

from trl.cli.commands import TRAINING

make_parser = TRAINING["rloo"].make_parser
main = TRAINING["rloo"].work

if __name__ == "__main__":
    main()

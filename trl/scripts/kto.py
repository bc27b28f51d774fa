"""The program that each worker of `trl kto` runs. The file can also be run by its path."""

from trl.cli.commands import TRAINING

make_parser = TRAINING["kto"].make_parser
main = TRAINING["kto"].work

if __name__ == "__main__":
    main()

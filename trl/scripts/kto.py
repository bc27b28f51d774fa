"""`trl kto` in each worker. The file can also be run by its path."""

from trl.cli.commands import TRAINING

make_parser, main = TRAINING["kto"].make_parser, TRAINING["kto"].work

if __name__ == "__main__":
    main()

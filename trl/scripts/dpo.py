"""The program that each worker of `trl dpo` runs. The file can also be run by its path."""

from trl.cli.commands import TRAINING

make_parser = TRAINING["dpo"].make_parser
main = TRAINING["dpo"].work

if __name__ == "__main__":
    main()

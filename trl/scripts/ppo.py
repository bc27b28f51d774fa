"""The program that each worker of `trl ppo` runs. The file can also be run by its path."""

from trl.cli.commands import TRAINING

make_parser = TRAINING["ppo"].make_parser
main = TRAINING["ppo"].work

if __name__ == "__main__":
    main()

"""`trl ppo` in each worker. The file can also be run by its path."""

from trl.cli.commands import TRAINING

make_parser, main = TRAINING["ppo"].make_parser, TRAINING["ppo"].work

if __name__ == "__main__":
    main()

"""Run the command line as `python -m trl`."""

from .cli.main import main

if __name__ == "__main__":
    main()

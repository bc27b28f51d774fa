"""The command line."""

from .main import main as main

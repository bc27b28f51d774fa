"""Everything about the package stands in pyproject.toml; this serves tools that look here."""

from setuptools import setup

setup()

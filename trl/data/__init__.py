"""Prompts: their order, formats and files."""

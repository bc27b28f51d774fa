"""Completions that call tools."""

"""Supervised and reinforcement-learning post-training for transformer language models.

Names are imported when they are first used, so that `import trl` is quick. The stub file
`__init__.pyi` lists every name with its module.
"""

import ast
from importlib import import_module
from pathlib import Path

_SUBMODULES = ("chat_template_utils", "data_utils", "models", "rewards", "scripts", "trainer")
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
# For each exported name, its module below `trl`, such as "trainer.dpo_trainer".
_HOME = {
    imported.name: str(node.module)
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for imported in node.names
}

__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from .imports import version_of

        return version_of("trl")
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        from .imports import raise_unknown_name

        raise_unknown_name(name, _HOME)
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *_SUBMODULES, "__version__"])

"""Fail when a module imports what it must not.

Layers import only from themselves and from layers below. Imports inside functions count, and so do
names of modules in strings, which are imported later.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from structure import imported, named_modules

# For each part of the package: the parts it may import, besides itself.
ALLOWED = {
    "torch_internals": set(),
    "ops": {"torch_internals"},
    "types": set(),
    "imports": {"text"},
    "random_numbers": set(),
    "text": set(),
    "options": set(),
    "timed_calls": set(),
    "process_group": set(),
    "progress": set(),
    "json_files": set(),
    "redaction": set(),
    "sources": set(),
    "rewards": {"imports", "text"},
    "data": {"ops", "types", "imports", "text"},
    "distributed": {"ops", "types", "imports", "text", "timed_calls", "torch_internals"},
    "models": {
        *("ops", "types", "imports", "text", "data", "distributed", "torch_internals", "sources"),
    },
    "memory": {
        *("ops", "types", "imports", "text", "data", "distributed", "models"),
        *("options", "random_numbers", "json_files", "torch_internals"),
    },
    "generation": {
        *("ops", "types", "imports", "text", "data", "distributed", "models", "memory"),
        *("options", "random_numbers", "progress", "timed_calls", "torch_internals", "json_files"),
    },
    "online": {
        *("ops", "types", "imports", "text", "data", "distributed", "models"),
        *("rewards", "timed_calls", "json_files", "sources"),
    },
    "trainer": {
        *("ops", "types", "imports", "text", "data", "distributed", "models", "memory"),
        *("generation", "online", "rewards", "random_numbers", "progress"),
        *("options", "process_group", "json_files", "redaction", "sources"),
    },
    "cli": {
        *("imports", "options", "text", "trainer", "data", "models", "online", "rewards", "memory"),
        "generation",  # by name, for vLLM's own server
        *("process_group", "json_files", "redaction", "sources"),
    },
    "scripts": {"imports", "trainer", "cli"},
    "__main__": {"cli"},
}
FACADES = {"chat_template_utils", "data_utils", "import_utils"}
TORCH_ONLY = {"ops", "torch_internals", "types"}
OPTIONAL = {"vllm", "peft", "deepspeed", "liger_kernel", "bitsandbytes", "wandb", "trackio",
            "math_verify", "matplotlib", "rich"}  # fmt: skip
# Names of trainers, alone or in front of others; "supported" and "endpoint" hold two of them.
ALGORITHMS = re.compile("(?<![a-z])(rloo|grpo|ppo|dpo|kto|sft)|online[ _]?dpo")


def main(root: Path) -> int:
    """Check every module below `root`; return the number of violations."""
    problems = []
    for path in sorted(root.rglob("*.py")):
        problems += check(path, root)
    for problem in problems:
        print(problem)
    print(f"check_layers: {len(problems)} violations")
    return len(problems)


def check(path: Path, root: Path) -> list[str]:
    """Return what is wrong in one module."""
    relative = path.relative_to(root)
    part = relative.parts[0].removesuffix(".py")
    text = path.read_text(encoding="utf-8")
    if part == "__init__" or part in FACADES:
        return []
    problems = []
    tree = ast.parse(text)
    for line, module in [*imported(tree, relative), *named_modules(tree)]:
        where = f"{path}:{line}: "
        if module.split(".")[0] == "trl":
            target = [*module.split("."), ""][1]
            if target in FACADES:
                problems.append(f"{where}imports the facade {target}")
            elif target and target != part and target not in ALLOWED.get(part, set()):
                problems.append(f"{where}{part} must not import {target}")
        elif module.split(".")[0] in OPTIONAL:
            problems.append(f"{where}{module} is optional: use trl.imports.require")
        elif part in TORCH_ONLY and not _is_plain(module):
            problems.append(f"{where}{part} imports torch and the standard library only")
    return problems + _named_algorithms(relative, text, path)


def _is_plain(module: str) -> bool:
    top = module.split(".")[0]
    return top in ("torch", "__future__") or top in sys.stdlib_module_names


def _named_algorithms(relative: Path, text: str, path: Path) -> list[str]:
    skeleton = ("generation",), ("online",), ("trainer", "online")
    if relative.parts[:1] not in skeleton and relative.parts[:2] not in skeleton:
        return []
    return [
        f"{path}:{number}: names the algorithm {found[0]}"
        for number, line in enumerate(text.lower().splitlines(), 1)
        for found in ALGORITHMS.finditer(line)
    ]


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1] if len(sys.argv) > 1 else "trl"))))

"""Fail when a module imports what it must not.

Layers import only from themselves and from layers below. Imports inside functions count, and so do
module names in strings, which are imported later.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from structure import imported, named_modules

# Top-level modules that any layer above `ops` and `types` may use.
MESSAGES = {"imports", "number_format", "suggestions", "transcripts"}
# For each part of the package: the parts it may import, besides itself.
ALLOWED = {
    "ops": set(),
    "types": set(),
    "imports": {"suggestions"},
    "number_format": set(),
    "suggestions": set(),
    "transcripts": set(),
    "options": set(),
    "timed_calls": set(),
    "process_group": set(),
    "json_files": set(),
    "redaction": set(),
    "sources": set(),
    "rewards": MESSAGES,
    "batch": {"distributed", "ops", "types"},
    "algorithms": {"batch", "distributed", "online", "ops", "types"},
    "data": {"batch", "ops", "types"} | MESSAGES,
    "distributed": {"ops", "types", "timed_calls"} | MESSAGES,
    "models": {
        "batch",
        "data",
        "distributed",
        "ops",
        "sources",
        "types",
    }
    | MESSAGES,
    "memory": {
        "data",
        "distributed",
        "json_files",
        "models",
        "ops",
        "options",
        "types",
    }
    | MESSAGES,
    "generation": {
        "data",
        "distributed",
        "json_files",
        "memory",
        "models",
        "ops",
        "options",
        "timed_calls",
        "types",
    }
    | MESSAGES,
    "online": {
        "batch",
        "data",
        "distributed",
        "json_files",
        "models",
        "ops",
        "rewards",
        "sources",
        "timed_calls",
        "types",
    }
    | MESSAGES,
    "trainer": {
        "algorithms",
        "batch",
        "data",
        "distributed",
        "generation",
        "json_files",
        "memory",
        "models",
        "online",
        "ops",
        "options",
        "process_group",
        "redaction",
        "rewards",
        "sources",
        "types",
    }
    | MESSAGES,
    "cli": {
        "data",
        "generation",  # by name, for vLLM's own server
        "json_files",
        "memory",
        "models",
        "online",
        "options",
        "process_group",
        "redaction",
        "rewards",
        "sources",
        "trainer",
    }
    | MESSAGES,
    "scripts": {"imports", "trainer", "cli"},
    "__main__": {"cli"},
}
FACADES = {"chat_template_utils", "data_utils", "import_utils"}
TORCH_ONLY = {"ops", "torch_internals", "types"}
OPTIONAL = {
    "bitsandbytes",
    "deepspeed",
    "liger_kernel",
    "math_verify",
    "matplotlib",
    "peft",
    "rich",
    "trackio",
    "vllm",
    "wandb",
}
# Names of algorithms. The lookbehind spares "supported" and "endpoint", which contain two of them.
ALGORITHMS = re.compile("(?<![a-z])(rloo|grpo|ppo|dpo|kto|sft)|online[ _]?dpo")


def main(root: Path) -> int:
    """Check every module below `root`; return the number of violations."""
    violations = []
    for path in sorted(root.rglob("*.py")):
        violations += check(path, root)
    for violation in violations:
        print(violation)
    print(f"check_layers: {len(violations)} violations")
    return len(violations)


def check(path: Path, root: Path) -> list[str]:
    """Return the violations in one module."""
    relative = path.relative_to(root)
    part = relative.parts[0].removesuffix(".py")
    source = path.read_text(encoding="utf-8")
    if part == "__init__" or part in FACADES:
        return []
    violations = []
    tree = ast.parse(source)
    for line, module in [*imported(tree, relative), *named_modules(tree)]:
        problem = _forbidden_import(part, module)
        if problem is not None:
            violations.append(f"{path}:{line}: {problem}")
    return violations + _named_algorithms(relative, source, path)


def _forbidden_import(part: str, module: str) -> str | None:
    """Return why a part of the package must not import a module; None if it may."""
    package, *submodules = module.split(".")
    if package == "trl":
        target = submodules[0] if submodules else ""
        if target in FACADES:
            return f"imports the facade {target}"
        if target and target != part and target not in ALLOWED.get(part, set()):
            return f"{part} must not import {target}"
    elif package in OPTIONAL:
        return f"{module} is optional: use trl.imports.require"
    elif part in TORCH_ONLY and not _is_torch_or_standard(package):
        return f"{part} imports torch and the standard library only"
    return None


def _is_torch_or_standard(package: str) -> bool:
    return package in ("torch", "__future__") or package in sys.stdlib_module_names


def _named_algorithms(relative: Path, source: str, path: Path) -> list[str]:
    """Return mentions of algorithms in code that all online algorithms share."""
    shared_code = ("generation",), ("online",), ("trainer", "online")
    if relative.parts[:1] not in shared_code and relative.parts[:2] not in shared_code:
        return []
    return [
        f"{path}:{number}: names the algorithm {match[0]}"
        for number, line in enumerate(source.lower().splitlines(), 1)
        for match in ALGORITHMS.finditer(line)
    ]


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1] if len(sys.argv) > 1 else "trl"))))

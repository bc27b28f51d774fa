"""Print the size bars of the package, and fail when one is exceeded."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import structure

RUN = 6  # lines that two files must not share in a row
BRANCHES = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.Assert),
    *(ast.comprehension, ast.match_case),
)

LOADED = 88  # modules that `from trl import RLOOTrainer` may load


@dataclass(frozen=True)
class Function:
    """What is measured of one function."""

    place: str
    name: str
    lines: int
    complexity: int
    parameters: int


@dataclass(frozen=True)
class Bar:
    """A measured figure and its limit."""

    name: str
    measured: float
    limit: float
    where: str = ""

    @property
    def holds(self) -> bool:
        return self.measured <= self.limit


def main(root: Path) -> int:
    """Measure, print a table, and return the number of bars that do not hold."""
    bars = measure(root)
    width = max(len(bar.name) for bar in bars)
    print(f"{'bar':<{width}}  {'limit':>7}  {'measured':>8}")
    for bar in bars:
        note = "" if bar.holds else f"  <- over {bar.where}"
        print(f"{bar.name:<{width}}  {bar.limit:>7g}  {round(bar.measured, 3):>8g}{note}")
    broken = [bar for bar in bars if not bar.holds]
    print(f"check_budgets: {len(broken)} bars exceeded")
    return len(broken)


def measure(root: Path) -> list[Bar]:
    """Take all figures of the package below `root`."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))}
    functions = [f for path, text in texts.items() for f in functions_of(path, text)]
    lengths = sorted(f.lines for f in functions)
    longest = max(functions, key=lambda f: f.lines)
    branched = max(functions, key=lambda f: f.complexity)
    wide = max((f for f in functions if f.name != "__init__"), key=lambda f: f.parameters)
    file = max(texts, key=lambda path: len(texts[path].splitlines()))
    shared = shared_runs(texts)
    undocumented = [place for path, text in texts.items() for place in undocumented_in(path, text)]
    lines = [(len(line), path) for path, text in texts.items() for line in text.splitlines()]
    bars = [
        Bar("longest function, lines", longest.lines, 60, longest.place),
        Bar("function p90, lines", lengths[int(0.9 * (len(lengths) - 1))], 25),
        Bar("highest complexity", branched.complexity, 10, branched.place),
        Bar("most parameters", wide.parameters, 6, wide.place),
        Bar("mean parameters", sum(f.parameters for f in functions) / len(functions), 2.2),
        Bar("longest file, lines", len(texts[file].splitlines()), 400, str(file)),
        Bar("longest line, characters", *_longest(lines)),
        Bar("runs of six lines shared by files", len(shared), 0, "; ".join(shared[:3])),
        Bar("public names without docstring", len(undocumented), 0, "; ".join(undocumented[:5])),
        Bar("configuration lines a field", config_lines(root), 6),
        Bar("comment lines per code line", comment_share(texts), 0.12),
    ]
    return bars + structure_bars(root)


def structure_bars(root: Path) -> list[Bar]:
    """Measure what modules import and what classes know of each other."""
    bars = []
    for name, inside_functions in (
        ("circles of imports", False),
        ("circles of imports, with those in functions", True),
    ):
        found = structure.circles(structure.import_graph(root, inside_functions))
        bars.append(Bar(name, len(found), 0, "; ".join(" <-> ".join(group) for group in found)))
    shared = structure.attributes_set_elsewhere(root)
    bars.append(Bar("attributes set by another class", len(shared), 0, "; ".join(shared)))
    untyped = structure.untyped_trainers(root)
    bars.append(Bar("trainers of type Any", len(untyped), 0, "; ".join(untyped)))
    if (root / "__init__.py").exists():
        loaded = structure.modules_loaded(root, "RLOOTrainer")
        bars.append(Bar("modules loaded by RLOOTrainer", len(loaded), LOADED))
    return bars


def _longest(lines: list[tuple[int, Path]]) -> tuple[int, int, str]:
    length, path = max(lines, key=lambda line: line[0])
    return length, 100, str(path)


def functions_of(path: Path, text: str) -> list[Function]:
    """Measure every function of a module."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            count = parameters_of(node)
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            place = f"{path}:{node.lineno} {node.name}"
            found.append(Function(place, node.name, lines, complexity(node), count))
    return found


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters of a function; a tuple that bundles several counts as all of them.

    Tuples of any length, as of tensors that a backward pass is handed, count as one.
    """
    given = function.args
    count = 0
    for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs):
        kind = ast.unparse(argument.annotation) if argument.annotation else ""
        if argument.arg not in ("self", "cls"):
            unpacked = 1 if "..." in kind else unpacked_to(function, argument.arg)
            count += max(bundled_in(argument.annotation), unpacked)
    return count


def bundled_in(annotation: ast.expr | None) -> int:
    """Length of a tuple of fixed length, 1 for any other type."""
    if isinstance(annotation, ast.BinOp):  # such as `tuple[int, int] | None`
        return max(bundled_in(annotation.left), bundled_in(annotation.right))
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "tuple":
        return 1
    inside = annotation.slice
    parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    return 1 if ast.unparse(parts[-1]) == "..." else len(parts)


def unpacked_to(function: ast.AST, name: str) -> int:
    """How many names a parameter is unpacked to, as in `a, b = bundle`."""
    targets = [
        target
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
        for target in node.targets
    ]
    return max((len(t.elts) for t in targets if isinstance(t, ast.Tuple)), default=1)


def complexity(function: ast.AST) -> int:
    """Cyclomatic complexity: one, plus one for each branch; nested functions have their own."""
    total = 1
    nodes = list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        total += isinstance(node, BRANCHES)
        total += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        nodes += ast.iter_child_nodes(node)
    return total


def shared_runs(texts: dict[Path, str]) -> list[str]:
    """Find runs of lines that stand in more than one file; imports and short runs excepted."""
    places: dict[tuple[str, ...], set[Path]] = defaultdict(set)
    for path, text in texts.items():
        stripped = [line.strip() for line in text.splitlines()]
        lines = [x for x in stripped if x and not x.startswith(("#", "import ", "from "))]
        for start in range(len(lines) - RUN + 1):
            run = tuple(lines[start : start + RUN])
            if sum(map(len, run)) > 120:
                places[run].add(path)
    return [
        f"{', '.join(map(str, sorted(paths)))}: {run[0][:40]}"
        for run, paths in places.items()
        if len(paths) > 1
    ]


def undocumented_in(path: Path, text: str) -> list[str]:
    """Find public functions, classes and methods without a docstring.

    Methods that only fill in a described interface (overrides named with a leading underscore,
    hooks of callbacks in private classes, dunders) need none.
    """
    found = []
    tree = ast.parse(text)
    nodes: list[tuple[ast.AST, str]] = [(node, "") for node in tree.body]
    while nodes:
        node, owner = nodes.pop()
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None and len(node.body) > 2:
            found.append(f"{path}:{node.lineno} {owner}{node.name}")
        if isinstance(node, ast.ClassDef):
            nodes += [(child, f"{node.name}.") for child in node.body]
    return found


def config_lines(root: Path) -> float:
    """Lines of the configuration files for each field they declare, help included."""
    worst = 0.0
    for path in (root / "trainer").glob("*_config.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign):
                worst = max(worst, (node.end_lineno or node.lineno) - node.lineno + 1)
    return worst


def code_lines(text: str) -> set[int]:
    """Lines that hold code, docstrings excepted."""
    skipped = (
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT),
        *(tokenize.DEDENT, tokenize.ENDMARKER),
    )
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(text)


def docstring_lines(text: str) -> set[int]:
    """Lines of docstrings."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def comment_share(texts: dict[Path, str]) -> float:
    """Comment lines divided by lines of code."""
    comments = sum(
        line.strip().startswith("#") for text in texts.values() for line in text.splitlines()
    )
    return comments / sum(len(code_lines(text)) for text in texts.values())


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1] if len(sys.argv) > 1 else "trl"))))

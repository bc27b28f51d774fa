"""Print the size limits of the package with the measured values; fail if a limit is exceeded."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import structure

SHARED_RUN = 6  # two files must not share as many consecutive lines
# Nodes that add a branch to the cyclomatic complexity.
BRANCHES = (
    ast.Assert,
    ast.AsyncFor,
    ast.ExceptHandler,
    ast.For,
    ast.If,
    ast.IfExp,
    ast.While,
    ast.comprehension,
    ast.match_case,
)
# Tokens that are not code.
IGNORED_TOKENS = (
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
)
LOADED = 104  # modules that `from trl import RLOOTrainer` may load


@dataclass(frozen=True)
class Function:
    """The measurements of a function."""

    location: str  # file, line and name
    name: str
    lines: int
    complexity: int
    parameters: int


@dataclass(frozen=True)
class Bar:
    """A measured value and its limit."""

    name: str
    measured: float
    limit: float
    where: str = ""

    @property
    def holds(self) -> bool:
        """Whether the value is within the limit."""
        return self.measured <= self.limit


def main(root: Path) -> int:
    """Measure, print a table, and return the number of exceeded limits."""
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
    """Measure the package below `root`."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))}
    functions: list[Function] = []
    undocumented: list[str] = []
    for path, text in texts.items():
        functions += functions_of(path, text)
        undocumented += undocumented_in(path, text)
    lengths = sorted(function.lines for function in functions)
    longest = max(functions, key=lambda function: function.lines)
    most_complex = max(functions, key=lambda function: function.complexity)
    # Constructors may have many parameters.
    ordinary = [function for function in functions if function.name != "__init__"]
    widest = max(ordinary, key=lambda function: function.parameters)
    mean_parameters = sum(function.parameters for function in functions) / len(functions)
    longest_file = max(texts, key=lambda path: len(texts[path].splitlines()))
    file_lines = len(texts[longest_file].splitlines())
    shared = shared_runs(texts)
    bars = [
        Bar("longest function, lines", longest.lines, 60, longest.location),
        Bar("function p90, lines", lengths[int(0.9 * (len(lengths) - 1))], 25),
        Bar("highest complexity", most_complex.complexity, 10, most_complex.location),
        Bar("most parameters", widest.parameters, 6, widest.location),
        Bar("mean parameters", mean_parameters, 2.2),
        Bar("longest file, lines", file_lines, 400, str(longest_file)),
        longest_line_bar(texts),
        Bar("runs of six lines shared by files", len(shared), 0, "; ".join(shared[:3])),
        Bar("public names without docstring", len(undocumented), 0, "; ".join(undocumented[:5])),
        Bar("configuration lines a field", config_lines(root), 6),
        Bar("comment lines per code line", comment_share(texts), 0.12),
    ]
    return bars + structure_bars(root)


def structure_bars(root: Path) -> list[Bar]:
    """Measure the imports of modules, and attributes that classes share."""
    bars = []
    for name, inside_functions in (
        ("circles of imports", False),
        ("circles of imports, with those in functions", True),
    ):
        circles = structure.circles(structure.import_graph(root, inside_functions))
        where = "; ".join(" <-> ".join(group) for group in circles)
        bars.append(Bar(name, len(circles), 0, where))
    shared = structure.attributes_set_elsewhere(root)
    bars.append(Bar("attributes set by another class", len(shared), 0, "; ".join(shared)))
    untyped = structure.untyped_trainers(root)
    bars.append(Bar("trainers of type Any", len(untyped), 0, "; ".join(untyped)))
    if (root / "__init__.py").exists():
        loaded = structure.modules_loaded(root, "RLOOTrainer")
        bars.append(Bar("modules loaded by RLOOTrainer", len(loaded), LOADED))
    return bars


def longest_line_bar(texts: dict[Path, str]) -> Bar:
    """Measure the longest line."""
    length = 0
    longest_path = Path()
    for path, text in texts.items():
        for line in text.splitlines():
            if len(line) > length:
                length = len(line)
                longest_path = path
    return Bar("longest line, characters", length, 100, str(longest_path))


def functions_of(path: Path, text: str) -> list[Function]:
    """Measure every function of a module."""
    functions = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = Function(
                location=f"{path}:{node.lineno} {node.name}",
                name=node.name,
                lines=(node.end_lineno or node.lineno) - node.lineno + 1,
                complexity=complexity(node),
                parameters=parameters_of(node),
            )
            functions.append(function)
    return functions


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the parameters of a function; a tuple of fixed length counts as all its elements.

    Tuples of any length count as one.
    """
    arguments = function.args
    count = 0
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if argument.arg in ("self", "cls"):
            continue
        annotation = ast.unparse(argument.annotation) if argument.annotation else ""
        unpacked_names = 1 if "..." in annotation else count_unpacked_names(function, argument.arg)
        count += max(tuple_length(argument.annotation), unpacked_names)
    return count


def tuple_length(annotation: ast.expr | None) -> int:
    """Return the length of a tuple type of fixed length; 1 for any other type."""
    if isinstance(annotation, ast.BinOp):  # such as `tuple[int, int] | None`
        return max(tuple_length(annotation.left), tuple_length(annotation.right))
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "tuple":
        return 1
    inside = annotation.slice
    elements = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    return 1 if ast.unparse(elements[-1]) == "..." else len(elements)


def count_unpacked_names(function: ast.AST, name: str) -> int:
    """Count the names that a parameter is unpacked to, as in `a, b = bundle`; at least 1."""
    targets = [
        target
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
        for target in node.targets
    ]
    lengths = [len(target.elts) for target in targets if isinstance(target, ast.Tuple)]
    return max(lengths, default=1)


def complexity(function: ast.AST) -> int:
    """Return the cyclomatic complexity: 1, plus 1 per branch. Nested functions do not count."""
    total = 1
    nodes = list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, BRANCHES):
            total += 1
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        nodes += ast.iter_child_nodes(node)
    return total


def shared_runs(texts: dict[Path, str]) -> list[str]:
    """Return runs of lines that several files share, except imports, comments and short runs."""
    paths_of_run: dict[tuple[str, ...], set[Path]] = defaultdict(set)
    for path, text in texts.items():
        stripped = [line.strip() for line in text.splitlines()]
        ignored = ("#", "import ", "from ")
        lines = [line for line in stripped if line and not line.startswith(ignored)]
        for start in range(len(lines) - SHARED_RUN + 1):
            run = tuple(lines[start : start + SHARED_RUN])
            if sum(map(len, run)) > 120:
                paths_of_run[run].add(path)
    return [
        f"{', '.join(map(str, sorted(paths)))}: {run[0][:40]}"
        for run, paths in paths_of_run.items()
        if len(paths) > 1
    ]


def undocumented_in(path: Path, text: str) -> list[str]:
    """Return public functions, classes and methods without a docstring.

    Names with a leading underscore, what is in private classes, and bodies of at most two
    statements need none.
    """
    locations = []
    tree = ast.parse(text)
    nodes: list[tuple[ast.AST, str]] = [(node, "") for node in tree.body]
    while nodes:
        node, owner = nodes.pop()
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None and len(node.body) > 2:
            locations.append(f"{path}:{node.lineno} {owner}{node.name}")
        if isinstance(node, ast.ClassDef):
            nodes += [(child, f"{node.name}.") for child in node.body]
    return locations


def config_lines(root: Path) -> float:
    """Return the most lines that a field of a configuration takes, including its help."""
    most_lines = 0.0
    for path in (root / "trainer").glob("*_config.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                most_lines = max(most_lines, lines)
    return most_lines


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines with code, without docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in IGNORED_TOKENS:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(text)


def docstring_lines(text: str) -> set[int]:
    """Return the numbers of the lines of docstrings."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def comment_share(texts: dict[Path, str]) -> float:
    """Return the number of comment lines divided by lines of code."""
    comments = sum(
        line.strip().startswith("#") for text in texts.values() for line in text.splitlines()
    )
    return comments / sum(len(code_lines(text)) for text in texts.values())


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1] if len(sys.argv) > 1 else "trl"))))

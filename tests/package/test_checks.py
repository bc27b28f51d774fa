"""Each check of the build catches what it is for."""

import ast
import sys

import pytest
from workspace import ROOT

sys.path.append(str(ROOT / "scripts"))

import check_budgets as budgets
import check_layers as layers
import check_mirror as mirror
import structure

CLEAN = '"""A module."""\n\n\ndef public(a):\n    """Add one."""\n    b = a + 1\n    return b\n'


def plant(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_the_package_keeps_its_layers(capsys):
    assert layers.main(ROOT / "trl") == 0, capsys.readouterr().out


def test_the_tests_mirror_the_package(capsys):
    assert mirror.main(ROOT / "trl", ROOT / "tests") == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("ops/a.py", "from ..trainer import x", "ops must not import trainer"),
        ("ops/a.py", "def f():\n    from ..online.guard import x", "ops must not import online"),
        ("ops/a.py", "import numpy", "ops imports torch and the standard library only"),
        (
            "online/a.py",
            "from trl.trainer.callbacks import x",
            "online must not import trainer",
        ),
        ("online/a.py", "from .. import trainer", "online must not import trainer"),
        ("generation/a.py", "import trl.cli.env", "generation must not import cli"),
        ("trainer/a.py", "from ..cli.parser import x", "trainer must not import cli"),
        ("trainer/a.py", "from ..data_utils import x", "imports the facade data_utils"),
        ("models/a.py", "import peft", "peft is optional"),
        ("models/a.py", "from vllm.sampling import x", "vllm.sampling is optional"),
        ("online/a.py", "# as in RLOO", "names the algorithm rloo"),
        ("trainer/online/a.py", "x = 'grpo'", "names the algorithm grpo"),
        ("online/a.py", "x = PPOConfig", "names the algorithm ppo"),
        ("generation/a.py", "# as in OnlineDPO", "names the algorithm onlinedpo"),
        ("new/a.py", "from ..ops import x", "new must not import ops"),
        ("trainer/a.py", "x = locate('trl.cli.env.main')", "trainer must not import cli"),
    ],
)
def test_layers_catch(tmp_path, capsys, path, text, problem):
    plant(tmp_path, path, text)
    assert layers.main(tmp_path) == 1
    assert problem in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("ops/a.py", "import math\nimport torch.nn\nfrom .stats import x"),
        ("trainer/a.py", "from ..online import x\nfrom ..ops.kl import y\nimport datasets"),
        ("online/a.py", "if TYPE_CHECKING:\n    from ..trainer import x"),
        ("trainer/rloo_a.py", "x = 'grpo'"),
        ("online/a.py", "supported = endpoint"),
        ("data_utils.py", "from .trainer import x"),
        ("models/a.py", '"""trl.cli.env"""\nx = "trl.cli is below"'),
        ("__init__.py", "from .trainer import x"),
    ],
)
def test_layers_allow(tmp_path, path, text):
    plant(tmp_path, path, text)
    assert layers.main(tmp_path) == 0


def test_mirror_catches_both_directions(tmp_path, capsys):
    package, tests = tmp_path / "trl", tmp_path / "tests"
    plant(package, "ops/a.py", CLEAN)
    plant(package, "ops/names.py", "X = 1\n")
    plant(package, "ops/__init__.py", CLEAN)
    plant(tests, "cli/test_end_to_end.py", "")
    plant(tests, "package/test_anything.py", "")
    plant(tests, "ops/test_b.py", "")
    assert mirror.main(package, tests) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{package / 'ops/a.py'}: no {tests / 'ops/test_a.py'}"
    assert lines[1] == f"{tests / 'ops/test_b.py'}: no {package / 'ops/b.py'}"
    plant(tests, "ops/test_a.py", "")
    plant(package, "ops/b.py", CLEAN)
    assert mirror.main(package, tests) == 0


def long_function(lines, header="def public(a):"):
    body = "".join(f"    a = a + {i}\n" for i in range(lines))
    return f'"""A module."""\n\n\n{header}\n    """Add."""\n{body}'


def branches(count):
    return "".join(f"    if a == {i}:\n        return {i}\n" for i in range(count))


BLOCK = "".join(f"    value_{i} = compute_something_long_enough({i})\n" for i in range(6))
BASE = "class Base:\n    def f(self):\n        self.value = 1\n"
MIDDLE = "class Middle(Base):\n    def g(self):\n        self.other = self.value\n"
LEAF = "class Leaf(Middle):\n    def h(self):\n        return self.other\n"
CIRCLE = {"a.py": "from .b import x\n", "b.py": "from .c import x\n", "c.py": "from .a import x\n"}
VIOLATIONS = {
    "longest function, lines": {"a.py": long_function(60)},
    "function p90, lines": {f"{i}.py": long_function(26 + i) for i in range(5)},
    "highest complexity": {"a.py": f"{CLEAN}\n\ndef _f(a):\n{branches(10)}"},
    "most parameters": {"a.py": "def _f(a, b, c, d, *, e, f, g):\n    return a\n"},
    "mean parameters": {"a.py": "def _f(a, b, c, d, e, f):\n    return a\n"},
    "longest file, lines": {"a.py": "X = 1\n" * 401},
    "longest line, characters": {"a.py": f'X = "{"a" * 96}"\n'},
    "runs of six lines shared by files": {
        "a.py": f"def _f():\n{BLOCK}",
        "b.py": f"def _g():\n    a = 1\n{BLOCK}",
    },
    "public names without docstring": {
        "a.py": "class _C:\n    pass\n\n\ndef f(a):\n    b = a\n    c = b\n    return c\n"
    },
    "configuration lines a field": {
        "trainer/a_config.py": "class _C:\n    a: int = 1\n    b: int = (\n        1\n"
        "        + 1\n        + 1\n        + 1\n        + 1\n    )\n"
    },
    "comment lines per code line": {"a.py": "# one\n# two\n"},
    "circles of imports": CIRCLE,
    "circles of imports, with those in functions": {
        "a.py": "def _f():\n    from .b import x\n    return x\n",
        "b.py": "from . import a\n",
    },
    "attributes set by another class": {"a.py": BASE + MIDDLE + LEAF},
    "trainers of type Any": {"a.py": "def _f(a, trainer: Any):\n    return trainer\n"},
    "modules loaded by RLOOTrainer": {
        "__init__.py": "class RLOOTrainer:\n    pass\n\n\n"
        + "".join(f"from . import m{i} as m{i}\n" for i in range(120)),
        **{f"m{i}.py": "" for i in range(120)},
    },
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_budgets_catch(tmp_path, name, capsys):
    for place in range(4):  # so that one function alone does not decide a mean
        plant(tmp_path, f"clean_{place}.py", f"def _f():\n    return {place}\n")
    before = {bar.name: bar for bar in budgets.measure(tmp_path)}
    assert all(bar.holds for bar in before.values())
    for path, text in VIOLATIONS[name].items():
        plant(tmp_path, path, text)
    if name.startswith("mean"):
        for place in range(4):
            (tmp_path / f"clean_{place}.py").unlink()
    after = {bar.name: bar for bar in budgets.measure(tmp_path)}
    assert not after[name].holds, after[name]
    assert budgets.main(tmp_path) >= 1
    assert any(
        line.startswith(name) and "<- over" in line for line in capsys.readouterr().out.splitlines()
    )


def test_every_bar_has_a_violation(tmp_path):
    plant(tmp_path, "__init__.py", "class RLOOTrainer:\n    pass\n")
    plant(tmp_path, "a.py", CLEAN)
    assert {bar.name for bar in budgets.measure(tmp_path)} == set(VIOLATIONS)


@pytest.mark.parametrize(
    ("parameters", "body", "count"),
    [
        ("a, b", "pass", 2),
        ("self, a: tuple[int, float], b", "pass", 3),
        ("a: tuple[int, int] | None", "pass", 2),
        ("a: tuple[int, ...]", "b, c = a", 1),
        ("a: list[tuple[int, int]], b: dict[str, int]", "pass", 2),
        ("*, a", "b, c, d = a", 3),
        ("a: Sequence[int]", "first, second = a[:2]", 1),
    ],
)
def test_what_a_tuple_bundles_counts(parameters, body, count):
    assert budgets.parameters_of(ast.parse(f"def f({parameters}):\n    {body}").body[0]) == count


def test_a_chain_may_read_what_its_root_sets(tmp_path):
    """A class in its middle, or one below, may set nothing that another one reads."""
    plant(tmp_path, "a.py", BASE + MIDDLE)
    assert structure.attributes_set_elsewhere(tmp_path) == []
    plant(tmp_path, "a.py", "class Base:\n    def f(self):\n        return self.other\n" + MIDDLE)
    assert structure.attributes_set_elsewhere(tmp_path) == ["Middle.other in Base"]
    plant(tmp_path, "a.py", f"@dataclass\n{BASE}@dataclass\n{MIDDLE}{LEAF}")
    assert structure.attributes_set_elsewhere(tmp_path) == []


def test_a_package_may_import_what_is_in_it(tmp_path):
    """That is no circle: what a package's `__init__` is run for does not count."""
    plant(tmp_path, "ops/__init__.py", "from .a import x\n")
    plant(tmp_path, "ops/a.py", "from .b import x\n")
    plant(tmp_path, "ops/b.py", "if TYPE_CHECKING:\n    from .a import y\n")
    graph = structure.import_graph(tmp_path, inside_functions=True)
    assert graph["trl.ops"] == {"trl.ops.a"} and graph["trl.ops.a"] == {"trl.ops.b"}
    assert structure.circles(graph) == []


def test_names_of_modules_in_strings_are_imports_inside_of_functions(tmp_path):
    plant(tmp_path, "cli/a.py", "def f():\n    import_module('trl.cli.b.Class').x\n")
    plant(tmp_path, "cli/b.py", "from .a import f\n")
    assert structure.circles(structure.import_graph(tmp_path)) == []
    graph = structure.import_graph(tmp_path, inside_functions=True)
    assert structure.circles(graph) == [["trl.cli.a", "trl.cli.b"]]

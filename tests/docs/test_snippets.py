"""The code on every page runs, its commands are legal, its options exist."""

import re
import shlex
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from workspace import ROOT, option_problems, run_forked, run_trl_forked, write_inputs

PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
LANGUAGES = {"python", "bash", "yaml", "text", "json", "console", "toml"}
FENCE = re.compile(r"^( *)```(.*)$")
PROGRAMS = {"git", "make", "pip", "trl"}  # of which only trl is run
MOST_EXCLUDED = 3
EXCLUDED = re.compile(r"^\s*<!-- not run: (.+) -->$")
TRAIN = {
    "model_name_or_path": "tiny-model",
    "dataset_name": "prompts.jsonl",
    "reward_funcs": ["rewards.exact"],
    "output_dir": "output",
    "num_generations": 4,
    "max_completion_length": 4,
    "max_steps": 1,
    "report_to": "none",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    is_excluded: bool


def blocks_of(page: Path) -> list[Block]:
    found, opened, previous = [], None, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if fence and opened is None:
            opened = (fence[2].strip(), number, bool(EXCLUDED.match(previous)), [])
        elif fence:
            language, start, is_excluded, lines = opened
            text = textwrap.dedent("\n".join(lines)) + "\n"
            found.append(Block(language, text, start, is_excluded))
            opened = None
        elif opened is not None:
            opened[3].append(line)
        previous = line if line.strip() else previous
    assert opened is None, f"{page.name}:{opened and opened[1]}: the block has no end"
    return found


def run_blocks(page: Path, language: str) -> list[Block]:
    return [b for b in blocks_of(page) if b.language == language and not b.is_excluded]


def pages_with(language: str):
    pages = [page for page in PAGES if run_blocks(page, language)]
    return pytest.mark.parametrize("page", pages, ids=[page.name for page in pages])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(TRAIN))
    return write_inputs(tmp_path)


def commands_of(block: Block) -> list[list[str]]:
    """The words of each line, comments dropped and continued lines joined."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_blocks_are_of_a_known_kind(page):
    strange = [(b.line, b.language) for b in blocks_of(page) if b.language not in LANGUAGES]
    assert strange == []


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_to_files_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    local = [t for t in targets if not t.startswith(("http://", "https://", "mailto:"))]
    assert [t for t in local if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_sources_that_are_named_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.py)`", text)
    assert [x for x in named if not ((ROOT / x).exists() or (ROOT / "trl" / x).exists())] == []


def test_few_blocks_are_not_run(capsys):
    excluded = [f"{page.name}:{b.line}" for page in PAGES for b in blocks_of(page) if b.is_excluded]
    with capsys.disabled():
        print(f"\nblocks of the documentation that are not run: {', '.join(excluded) or 'none'}")
    assert len(excluded) <= MOST_EXCLUDED


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\nx\n```", [("python", "x\n", False)]),
        ("<!-- not run: needs a GPU -->\n```bash\nx\n```", [("bash", "x\n", True)]),
        ("<!-- not run: needs a GPU -->\nwords\n```bash\nx\n```", [("bash", "x\n", False)]),
        ("<!-- not run -->\n```bash\nx\n```", [("bash", "x\n", False)]),
        ("- x\n  ```yaml\n  a:\n    b: 1\n  ```", [("yaml", "a:\n  b: 1\n", False)]),
    ],
    ids=["plain", "excluded", "words between", "no reason", "indented"],
)
def test_blocks_are_found(tmp_path, text, expected):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert [(b.language, b.text, b.is_excluded) for b in blocks_of(page)] == expected


@pytest.mark.slow
@pages_with("python")
def test_python(page, folder):
    parts = [f"# {page.name}:{b.line}\n{b.text}" for b in run_blocks(page, "python")]
    (folder / "page_as_script.py").write_text("\n".join(parts))
    done = run_forked(["page_as_script.py"], folder)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]


def test_pip_accepts_what_the_pages_tell_to_install():
    """Of this environment, whose version of pip refuses `git+file:///` with extras."""
    parser = pytest.importorskip("pip._vendor.packaging.requirements")
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r'pip install "([^"]*@[^"]*)"', text))
    named = {re.sub("<url[^>]*>", "https://host/trl", x).replace("<branch>", "b") for x in named}
    assert len(named) >= 3
    for requirement in named:
        parser.Requirement(requirement)


def test_times_of_the_readme_are_those_of_the_benchmarks():
    page = (ROOT / "docs" / "benchmarks" / "preferences.md").read_text(encoding="utf-8")
    row = r"^\| (DPO|KTO|Reward|SFT) \| [^|]*\) \| [^|]*\) \| ([\d.]+) \|"
    times = dict(re.findall(row, page, flags=re.MULTILINE))
    assert len(times) == 4
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for name, time in times.items():
        assert f"{name.replace('Reward', 'reward models')} {time}" in readme
    steps = (ROOT / "docs" / "benchmarks" / "step.md").read_text(encoding="utf-8")
    ratio = re.search(r"^\| RLOO 512/64/8 \| ([\d.]+) ", steps, flags=re.MULTILINE)[1]
    for place in ("README.md", "docs/index.md"):
        assert f"{float(ratio):.0f} times as long" in (ROOT / place).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_plan_of_the_recipe_is_what_the_command_prints():
    page = ROOT / "docs" / "recipe.md"
    (plan,) = (b.text for b in run_blocks(page, "text") if b.text.startswith("Model: "))
    config = ROOT / "examples" / "cli_configs" / "rloo_math_1_gpu.yaml"
    done = run_trl_forked(["rloo", "--config", str(config), "--plan"], ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.rstrip() for line in done.stdout.strip().splitlines()] == plan.splitlines()


@pytest.mark.slow
def test_the_script_makes_what_the_pages_use(tmp_path):
    """Other tests here run pages on files of `write_inputs`; readers have those of the script."""
    page = ROOT / "docs" / "quickstart.md"
    (script,) = (b.text for b in run_blocks(page, "python") if "tiny-model" in b.text)
    (tmp_path / "script").mkdir()
    (tmp_path / "script.py").write_text(script)
    done = run_forked(["../script.py"], tmp_path / "script")
    assert done.returncode == 0, done.stderr[-3000:]
    (tmp_path / "inputs").mkdir()
    inputs = write_inputs(tmp_path / "inputs")
    names = {path.name for path in inputs.iterdir()}
    assert names == {path.name for path in (tmp_path / "script").iterdir()} - {"hf-home"}
    for name in names - {"tiny-model", "rewards.py"}:
        assert (tmp_path / "script" / name).read_text() == (inputs / name).read_text()
    for block in run_blocks(page, "bash"):
        for program, *words in commands_of(block):
            if program == "trl":
                done = run_trl_forked(words, tmp_path / "script")
                assert done.returncode == 0, f"{words}\n{done.stderr[-3000:]}"


@pytest.mark.slow
@pages_with("bash")
def test_bash(page, folder):
    files = (ROOT / "Makefile", *ROOT.glob("*/*.mk"), *ROOT.glob("*/*/*.mk"))
    rules = "\n".join(file.read_text() for file in files)
    targets = set(re.findall(r"^([a-z-]+):", rules, flags=re.MULTILINE))
    for block in run_blocks(page, "bash"):
        checked = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
        assert checked.returncode == 0, f"{page.name}:{block.line}: {checked.stderr}"
        for program, *words in commands_of(block):
            place = f"{page.name}:{block.line}: {program} {' '.join(words)}"
            assert program in PROGRAMS, f"{place}: what is it, and should it be run?"
            if program == "make":
                goals = {w for w in words if "=" not in w and not w.startswith("-")}
                assert goals <= targets, place
            if program == "trl":
                done = run_trl_forked(words, folder)
                assert done.returncode == 0, f"{place}\n{done.stderr[-3000:]}"


@pages_with("yaml")
def test_yaml(page):
    for block in run_blocks(page, "yaml"):
        config = yaml.safe_load(block.text)
        assert isinstance(config, dict), f"{page.name}:{block.line}"
        assert option_problems(config) == [], f"{page.name}:{block.line}"

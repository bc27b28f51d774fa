"""What is said of mistakes: one line, that names what is wrong and what would be right."""

import ast
import dataclasses
import json
import re
import shlex
import shutil
import warnings
from functools import partial

import pytest
from bad_inputs import (
    ACCELERATE_FILES,
    FILES,
    LABELLED,
    MODELS,
    OPTIONS,
    PAIRS,
    PROMPTS,
    REWARD,
    RUNS,
    TRAINERS,
    WARNED,
    WARNED_TRAINERS,
    WORDS,
    constant,
    rows,
    three_classes,
)
from reward_runs import classifier
from tiny import lora_model, tiny_model, tiny_tokenizer
from workspace import write_inputs

import trl
from trl.cli.commands import TRAINING
from trl.cli.exit import as_command_line
from trl.cli.main import main
from trl.cli.train import run_training
from trl.scripts import rloo

MISTAKES = (TypeError, ValueError, OSError, NotImplementedError)
QUIET = {"use_cpu": True, "report_to": "none"}
TINY = QUIET | {"max_steps": 1, "save_strategy": "no", "disable_tqdm": True, "bf16": False}
ONLINE = {"per_device_train_batch_size": 4, "max_completion_length": 4}
DATA = {"SFT": rows(text="ab"), "DPO": PAIRS, "KTO": LABELLED, "Reward": PAIRS}
RUN = {
    **{"model_name_or_path": "tiny-model", "dataset_name": "prompts.jsonl"},
    **{"reward_funcs": "rewards.py:exact", "output_dir": "out", "use_cpu": "true"},
    **{"num_generations": 4, "max_completion_length": 4, "max_steps": 1, "bf16": "false"},
    **{"save_strategy": "no", "report_to": "none"},
}
IN_FILE = ["rloo", *REWARD.split(), "--config", "c.yaml"]


def error_of(call):
    """What the error of a call says: one line."""
    warnings.simplefilter("ignore")
    with pytest.raises(MISTAKES) as found:
        call()
    return single(str(found.value))


def ending_of(call, capsys):
    """The one line that a command prints before it ends with status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        call()
    assert end.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    bars = ("it/s]", "examples/s]")
    return single("\n".join(line for line in lines if not line.endswith(bars)))


def single(text):
    assert len(text.strip().splitlines()) == 1, text
    return text


def config_of(name, options):
    options = options if name == "Model" else {"output_dir": "out"} | QUIET | options
    return getattr(trl, f"{name}Config")(**options)


def trainer_of(name, changes, folder):
    """Make a tiny trainer with other arguments, and other options of its configuration."""
    given = {
        "model": classifier() if name == "Reward" else tiny_model(),
        "processing_class": tiny_tokenizer(),
        "train_dataset": DATA.get(name, PROMPTS),
        "reward_funcs": None if name in DATA else constant,
    }
    made = {n: v() if v in MODELS else v for n, v in changes.items()}
    given |= {n: v(str(folder), **QUIET) if v is trl.GRPOConfig else v for n, v in made.items()}
    if isinstance(options := given.get("args", {}), dict):
        options = TINY | ({} if name in DATA else ONLINE) | options
        given["args"] = getattr(trl, f"{name}Config")(str(folder), **options)
    if name in DATA:
        del given["reward_funcs"]
    return getattr(trl, f"{name}Trainer")(**given)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what commands need, and with what is damaged, empty or misplaced."""
    folder = write_inputs(tmp_path_factory.mktemp("place"))
    for name in ("run", "damaged", "empty"):
        (folder / name / "completions").mkdir(parents=True)
    record = {"step": 1, "group": 0, "prompt": "p", "completion": "c", "finish": "stop"}
    record |= {"rewards": {}, "reward": 1.0, "advantage": 0.0}
    (folder / "run" / "completions" / "train.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "damaged" / "completions" / "train.jsonl").write_text("{\n")
    (folder / "broken.jsonl").write_text("{\n")
    (folder / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    (folder / "commas.jsonl").write_text('{"prompt": "a"},\n{"prompt": "b"},\n')
    (folder / "blank.jsonl").write_text("\n\n")
    (folder / "broken.py").write_text("1 / 0\n")
    for name, data in DATA.items():
        data.to_json(folder / f"{name.lower()}.jsonl")
    shutil.copytree(folder / "tiny-model", folder / "damaged-model")
    (folder / "damaged-model" / "model.safetensors").write_bytes(b"x")
    shutil.copytree(folder / "tiny-model", folder / "above-model" / "checkpoint-1")
    shutil.copytree(
        folder / "tiny-model",
        folder / "no-tokenizer",
        ignore=shutil.ignore_patterns("tokenizer*"),
    )
    for name, model in {"headless": tiny_model().model, "three-classes": three_classes()}.items():
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    lora_model().save_pretrained(folder / "moved-adapter")
    config = folder / "moved-adapter" / "adapter_config.json"
    facts = json.loads(config.read_text()) | {"base_model_name_or_path": "/nowhere/model"}
    config.write_text(json.dumps(facts))
    return folder


@pytest.fixture
def inside(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


@pytest.mark.parametrize(("name", "options", "expected"), OPTIONS)
def test_options_in_python(name, options, expected):
    assert expected in error_of(partial(config_of, name, options))


@pytest.mark.parametrize(("name", "options", "expected"), WARNED)
def test_options_that_are_told_of(name, options, expected):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        config_of(name, options)
    assert expected in [f"{one.category.__name__}: {one.message}" for one in found]


@pytest.mark.parametrize(("name", "changes", "expected"), WARNED_TRAINERS)
def test_what_trainers_tell_of(tmp_path, caplog, name, changes, expected):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer_of(name, changes, tmp_path)
    told = [*caplog.messages, *(str(one.message) for one in found)]
    assert [words for words in told if expected in words], told


@pytest.mark.parametrize(("words", "expected"), WORDS)
def test_words(inside, capsys, words, expected):
    assert expected in ending_of(lambda: main(words.split()), capsys)


@pytest.mark.parametrize(("text", "expected"), FILES)
def test_files(inside, capsys, text, expected):
    (inside / "c.yaml").write_text(text)
    assert expected in ending_of(lambda: main(IN_FILE), capsys)


@pytest.mark.parametrize(("text", "expected"), ACCELERATE_FILES)
def test_accelerate_files(inside, capsys, text, expected):
    (inside / "a.yaml").write_text(text)
    words = ["rloo", *REWARD.split(), "--accelerate_config", "a.yaml"]
    assert expected in ending_of(lambda: main(words), capsys)


@pytest.mark.parametrize(("changes", "expected"), RUNS)
def test_runs(inside, monkeypatch, capsys, changes, expected):
    options = {name: value for name, value in (RUN | changes).items() if value is not None}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    monkeypatch.setattr("sys.argv", ["trl rloo", *words])
    run = partial(run_training, rloo.make_parser(), trl.RLOOTrainer)
    assert expected in ending_of(run, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("command", TRAINING.values(), ids=TRAINING)
@pytest.mark.parametrize("debug", ["0", "1"])
def test_late_errors(inside, tmp_path, monkeypatch, capsys, command, debug):
    """What goes wrong amid training is one line, whatever is trained."""
    options = RUN | {"output_dir": str(tmp_path), "learning_rate": 1e30, "max_steps": 9}
    if command.name in ("sft", "dpo", "kto", "reward"):
        options |= {"dataset_name": f"{command.name}.jsonl", "reward_funcs": None}
        options |= {"num_generations": None, "max_completion_length": None}
    if command.name == "online-dpo":
        options["num_generations"] = 2
    if command.name == "ppo":
        options["missing_eos_penalty"] = 1.0  # or all rewards might be 0, and nothing be trained
    given = {name: value for name, value in options.items() if value is not None}
    words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    monkeypatch.setattr("sys.argv", [f"trl {command.name}", *words])
    monkeypatch.setenv("TRL_DEBUG", debug)
    if debug == "1":
        with pytest.raises(RuntimeError):
            command.work()
    else:
        shown = ending_of(command.work, capsys)
        assert shown.startswith(f"trl {command.name}: error: ")
        assert shown.endswith(f"The trace is in {tmp_path / 'error.txt'}.")


@pytest.mark.parametrize(("name", "changes", "expected"), TRAINERS)
def test_arguments_of_trainers(tmp_path, name, changes, expected):
    assert expected in error_of(partial(trainer_of, name, changes, tmp_path))


# --- Hints of messages are themselves accepted ---

ASSIGNMENT = re.compile(
    r"\b(\w+)=('[^']*'|\{[^}]*\}|\([^)]*\)|\[[^]]*\]|-?\d+(?:\.\d+)?|True|False|None)"
)


def hints_of(name, options, message):
    """Options that a message proposes: those that it names with a value that was not given."""
    kind = getattr(trl, f"{name}Config")
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    if chosen := re.match(r"(\w+)='.*' must be one of .* Did you mean ([\w-]+)\?$", message):
        yield chosen[1], chosen[2]
    if nearest := re.match(r"(\w+)=.* the nearest is (\d+)\.$", message):
        yield nearest[1], int(nearest[2])
    if nearest := re.match(r"(\w+)=.* Nearest legal: (\d+) or (\d+)\.$", message):
        yield nearest[1], int(nearest[2])
        yield nearest[1], int(nearest[3])
    for option, literal in ASSIGNMENT.findall(message):
        value = ast.literal_eval(literal)
        if option in defaults and value not in (options.get(option), defaults[option]):
            yield option, value


def without_option(options, message):
    """The options less the one that a message begins with."""
    return {name: value for name, value in options.items() if not message.startswith(name)}


@pytest.mark.parametrize(("name", "options", "expected"), OPTIONS)
def test_hints_in_python_are_accepted(name, options, expected):
    message = error_of(partial(config_of, name, options))
    if renamed := re.search(r"has no argument '\w+'. Did you mean (\w+)\?", message):
        fields = dataclasses.fields(getattr(trl, f"{name}Config"))
        assert renamed[1] in {field.name for field in fields}
    for option, value in hints_of(name, options, message):
        # A hint replaces the option that is wrong, or stands beside it.
        errors = []
        for others in (options, without_option(options, message)):
            try:
                config_of(name, others | {option: value})
                break
            except MISTAKES as error:
                errors.append(str(error))
        else:
            raise AssertionError(f"{option}={value!r} is refused: {errors}")


@pytest.mark.parametrize(("name", "options", "expected"), OPTIONS)
def test_hints_can_be_pasted_into_a_command(name, options, expected):
    """A shell and the parser read the values that Python has."""
    command = {"OnlineDPO": "online-dpo", "Model": "sft"}.get(name, name.lower())
    parser = TRAINING[command].option_parser()
    message = error_of(partial(config_of, name, options))
    shown = as_command_line(message, parser.names)
    hints = dict(hints_of(name, options, message))
    for option, literal in ASSIGNMENT.findall(message):
        if option in hints and option in parser.names and literal != repr(options.get(option)):
            words = as_command_line(f"{option}={literal}", parser.names)
            assert words in shown
            values = parser.read(shlex.split(words)).values
            assert values == {option: ast.literal_eval(literal)}


def test_the_table_has_no_row_twice():
    table = [
        *OPTIONS,
        *WORDS,
        *FILES,
        *ACCELERATE_FILES,
        *RUNS,
        *TRAINERS,
        *WARNED,
        *WARNED_TRAINERS,
    ]
    assert len({str(row) for row in table}) == len(table) >= 150

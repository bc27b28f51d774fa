import ast
import pydoc
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import trl


@pytest.mark.parametrize("name", trl.__all__)
def test_names_resolve(name):
    value = getattr(trl, name)
    assert value.__name__ == name
    assert value.__module__.startswith("trl.")
    assert value.__doc__


@pytest.mark.parametrize("name", ["data_utils", "models", "rewards", "scripts", "trainer"])
def test_submodules_are_attributes(name):
    assert getattr(trl, name).__name__ == f"trl.{name}"


@pytest.mark.parametrize("name", ["data_utils", "chat_template_utils"])
def test_modules_of_data_have_all_that_concerns_it(name):
    module = getattr(trl, name)
    assert module.pack_dataset is trl.pack_dataset
    assert module.add_response_schema is trl.add_response_schema
    assert module.get_dataset is trl.get_dataset


def test_star_import():
    names = {}
    exec("from trl import *", names)
    assert set(trl.__all__) <= set(names)


def test_names_stand_once():
    assert len(trl.__all__) == len(set(trl.__all__))


def test_dir():
    names = dir(trl)
    assert {*trl.__all__, "trainer", "rewards", "__version__", "__doc__"} <= set(names)
    assert all(hasattr(trl, name) for name in names)


def test_version():
    try:
        expected = metadata.version("trl")
    except metadata.PackageNotFoundError:
        expected = "unknown"
    assert trl.__version__ == expected


def test_unknown_names():
    with pytest.raises(AttributeError, match="module 'trl' has no attribute 'ORPOTrainer'"):
        trl.ORPOTrainer  # noqa: B018
    with pytest.raises(ImportError):
        from trl import NoSuchThing  # noqa: F401


def test_the_stub_declares_the_same_names():
    tree = ast.parse(Path(trl.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    declared = {(node.module, alias.asname) for node in imports for alias in node.names}
    assert {name for _, name in declared} == set(trl.__all__)
    for module, name in declared:
        assert getattr(pydoc.locate(f"trl.{module}"), name) is getattr(trl, name)


@pytest.mark.parametrize(
    "words",
    [
        "trl.trainer import RLOOTrainer, GRPOConfig, ModelConfig",
        "trl.models import create_reference_model",
        "trl.scripts import ScriptArguments",
    ],
)
def test_parts_have_the_public_names_of_their_modules(words):
    names: dict = {}
    exec(f"from {words}", names)
    found = {name: value for name, value in names.items() if name in trl.__all__}
    assert found and all(value is getattr(trl, name) for name, value in found.items())
    part = words.split()[0]
    with pytest.raises(ImportError, match="cannot import name 'is_conversational'"):
        exec(f"from {part} import is_conversational", {})


UPSTREAM = {
    "trl.chat_template_utils": "add_response_schema, clone_chat_template, "
    "get_training_chat_template, has_generation_markers, is_chat_template_prefix_preserving, "
    "supports_tool_calling",
    "trl.cli": "main",
    "trl.data_utils": "apply_chat_template, common_prefix_length, pack_dataset, extract_prompt",
    "trl.import_utils": "is_deepspeed_available, is_vllm_available, is_weave_available",
    "trl.models": "create_reference_model, unwrap_model_for_generation",
    "trl.models.utils": "create_reference_model, unwrap_model_for_generation",
    "trl.scripts": "DatasetMixtureConfig, ScriptArguments, TrlParser, get_dataset",
    "trl.scripts.sft": "main, make_parser",
    "trl.scripts.utils": "DatasetConfig, DatasetMixtureConfig, TrlParser, init_zero_verbose",
    "trl.trainer": "BEMACallback, LogCompletionsCallback, WeaveCallback, KTOTrainer, "
    "disable_dropout_in_model, get_peft_config",
    "trl.trainer.callbacks": "BEMACallback, LogCompletionsCallback, RichProgressCallback, "
    "SyncRefModelCallback, WeaveCallback",
    "trl.trainer.grpo_trainer": "GRPOTrainer, EnvironmentFactory, RewardFunc, RolloutFunc",
    "trl.trainer.kto_config": "KTOConfig",
    "trl.trainer.model_config": "ModelConfig",
    "trl.trainer.rloo_trainer": "RLOOTrainer, RewardFunc, RolloutFunc",
    "trl.trainer.utils": "RepeatSampler, disable_dropout_in_model, entropy_from_logits, "
    "get_peft_config, get_quantization_config, remove_none_values, selective_log_softmax",
}


@pytest.mark.parametrize("module", UPSTREAM)
def test_scripts_of_hugging_face_trl_find_what_they_import(module):
    names: dict = {}
    exec(f"from {module} import {UPSTREAM[module]}", names)
    del names["__builtins__"]
    for name, value in names.items():
        assert callable(value) or name in ("EnvironmentFactory", "RewardFunc"), name
        if name in trl.__all__:
            assert value is getattr(trl, name)


def test_the_command_line_is_a_function_that_returns_a_status(capsys):
    from trl.cli import main

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{trl.__version__}\n"


IMPORTS = """
import importlib, pkgutil, sys, warnings
import trl
for name in ("filterwarnings", "simplefilter"):
    def noted(*args, original=getattr(warnings, name), **options):
        caller = sys._getframe(1).f_globals["__name__"]
        assert not caller.startswith("trl"), f"{caller}: {args}"
        return original(*args, **options)
    setattr(warnings, name, noted)
from trl import RLOOTrainer
print("a trainer:", *sorted(sys.modules))
for module in pkgutil.walk_packages(trl.__path__, "trl."):
    # Guard and worker are loaded by vLLM alone.
    if not module.name.endswith(("__main__", "server.guard", "server.worker")):
        importlib.import_module(module.name)
trl.RLOOConfig("x", use_cpu=True, bf16=False)
print("every module:", *sorted(sys.modules))
"""


@pytest.fixture(scope="module")
def loaded():
    """Modules that a trainer loads, and those that all of `trl` loads, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # a module that changes filters stops it, too
    return [line.partition(": ")[2].split() for line in done.stdout.splitlines()]


def test_a_trainer_loads_no_module_of_vllm(loaded):
    of_a_trainer, _ = loaded
    assert "trl.trainer.rloo_trainer" in of_a_trainer
    assert [name for name in of_a_trainer if "vllm" in name] == []


def test_nothing_of_vllm_is_imported_without_being_asked_for(loaded):
    _, of_all = loaded
    assert "trl.generation.vllm.server.backend" in of_all
    assert [name for name in of_all if name.split(".")[0] == "vllm"] == []

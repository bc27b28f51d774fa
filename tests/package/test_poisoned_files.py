"""Checkpoints, models, adapters and datasets are data: no code that lies in them is run."""

import json
import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from online_runs import make_trainer
from peft import LoraConfig, get_peft_model
from tiny import save_tiny

from trl.cli.files import load_dataset_source
from trl.models.loading import load_policy
from trl.trainer.base.checkpoint import MANIFEST, facts_of, seal


class Poison:
    """Leaves a mark when a pickle of it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def mark(tmp_path):
    """A file that is there once code has run; that nothing else makes it is checked as well."""
    found = tmp_path / "ran"
    yield found
    assert not found.exists()


@pytest.fixture(params=["zip", "pickle"])
def poison(request, mark):
    """Writes a file that runs code when it is loaded without care."""

    def write(path):
        if request.param == "zip":
            torch.save({"weight": Poison(mark)}, path)
        else:
            path.write_bytes(pickle.dumps({"weight": Poison(mark)}))

    return write


def test_the_poison_works(tmp_path, mark, poison):
    poison(tmp_path / "file")
    with suppress(RuntimeError, pickle.UnpicklingError):  # after the first pickle in it
        torch.load(tmp_path / "file", weights_only=False)
    assert mark.exists()
    mark.unlink()


# --- Checkpoints ---

TRAINING = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
REFERENCE = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_trainer(folder, **TRAINING, **REFERENCE, optim="adamw_torch").train()
    return folder / "checkpoint-1"


POISONED = ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trl_state_0.pt", "reference.pt"]


@pytest.mark.parametrize("name", [*POISONED, "training_args.bin"])
def test_checkpoints(tmp_path, checkpoint, poison, name):
    folder = tmp_path / "run" / checkpoint.name
    shutil.copytree(checkpoint, folder)
    assert (folder / name).exists()
    facts = facts_of(folder)
    poison(folder / name)
    (folder / MANIFEST).unlink()
    seal(folder, facts)  # as whoever poisons it would
    trainer = make_trainer(tmp_path / "run", **TRAINING, **REFERENCE, optim="adamw_torch")
    if name == "training_args.bin":  # which is never read
        trainer.train(resume_from_checkpoint=str(folder))
        return
    # Files that are read in place must be archives: a bare pickle is refused unread.
    with pytest.raises(Exception, match=r"(?i)weights.only|unpickling|unsupported|mmap"):
        trainer.train(resume_from_checkpoint=str(folder))


# --- Models and adapters ---


def test_models(tmp_path, poison):
    save_tiny(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    poison(tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights.only|unpickling|unsupported"):
        load_policy(str(tmp_path / "model"), {})


def test_adapters(tmp_path, poison):
    save_tiny(tmp_path / "base")
    base = load_policy(str(tmp_path / "base"), {})
    get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "lora")
    (tmp_path / "lora" / "adapter_model.safetensors").unlink()
    poison(tmp_path / "lora" / "adapter_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights.only|unpickling|unsupported"):
        make_trainer(tmp_path / "run", model=str(tmp_path / "lora"))


def test_code_beside_a_model(tmp_path, mark):
    folder = tmp_path / "model"
    save_tiny(folder)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config |= {"model_type": "unknown-kind", "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(mark)!r}, 'w')\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_policy(str(folder), {})


# --- Datasets ---


@pytest.mark.parametrize("kind", ["files", "saved"])
@pytest.mark.parametrize("streaming", [False, True])
def test_datasets(tmp_path, mark, poison, kind, streaming):
    folder = tmp_path / "rows"
    if kind == "saved":
        Dataset.from_dict({"prompt": ["a"]}).save_to_disk(folder)
    else:
        folder.mkdir()
        (folder / "train.jsonl").write_text('{"prompt": "a"}\n')
    for name in ("train.pkl", "train.pickle", "cache.pt", "state.bin"):
        poison(folder / name)
    for name in ("rows.py", "train.py", "__init__.py", "dataset.py"):
        (folder / name).write_text(f"open({str(mark)!r}, 'w')\n")
    (split,) = load_dataset_source(str(folder), streaming=streaming).values()
    assert [row["prompt"] for row in split] == ["a"]


@pytest.mark.parametrize("name", ["rows.pkl", "rows.pickle", "rows.py", "rows.tar"])
def test_files_that_hold_no_rows(tmp_path, poison, name):
    poison(tmp_path / name)
    with pytest.raises(ValueError, match="cannot be read"):
        load_dataset_source(str(tmp_path / name))


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "parquet"])
def test_files_under_a_wrong_name(tmp_path, poison, suffix):
    poison(tmp_path / f"rows.{suffix}")
    with pytest.raises(ValueError, match="cannot be read"):
        load_dataset_source(str(tmp_path / f"rows.{suffix}"))

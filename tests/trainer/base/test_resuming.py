"""Which checkpoint a run resumes from."""

import json

import pytest
from datasets import Dataset
from online_runs import dataset, make_trainer, token_sum
from tiny import tiny_model

from trl.trainer.base.checkpoint import MANIFEST, find_fault


def saving(folder, **changes):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "beta": 0.1}
    return make_trainer(folder, **(settings | changes))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run with checkpoints 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("written")
    saving(folder).train()
    return folder


@pytest.fixture
def folder(written, tmp_path):
    """A copy that may be damaged."""
    for path in written.glob("checkpoint-*/**/*"):
        if path.is_file():
            copy = tmp_path / path.relative_to(written)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return tmp_path


@pytest.fixture
def warnings(monkeypatch):
    """What was logged as a warning."""
    found = []
    monkeypatch.setattr("trl.trainer.base.resuming.logger.warning", found.append)
    return found


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def remove(path):
    path.unlink()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trl_state_0.pt", MANIFEST])
@pytest.mark.parametrize("damage", [truncate, flip, remove])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder, warnings, name, damage):
    damage(folder / "checkpoint-3" / name)
    trainer = saving(folder)
    assert trainer.find_checkpoint(True) == str(folder / "checkpoint-2")
    (message,) = warnings
    assert message.startswith(f"checkpoint-3 cannot be resumed from: {name} ")
    assert message.endswith("Resuming from checkpoint-2 instead.")


def test_a_run_continues_over_damaged_checkpoints(folder, warnings):
    truncate(folder / "checkpoint-3" / "model.safetensors")
    remove(folder / "checkpoint-2" / "optimizer.pt")
    trainer = saving(folder)
    trainer.train(resume_from_checkpoint=True)
    assert len(warnings) == 2 and trainer.state.global_step == 3
    # Written anew on the way, in place of the damaged ones.
    assert all(find_fault(folder / f"checkpoint-{step}") is None for step in (1, 2, 3))


def test_a_named_checkpoint_that_is_damaged_is_refused(folder):
    flip(folder / "checkpoint-2" / "model.safetensors")
    trainer = saving(folder)
    with pytest.raises(ValueError, match="model.safetensors is not what was written") as error:
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert str(error.value).endswith(f"{folder / 'checkpoint-3'} is intact.")
    with pytest.raises(ValueError, match="trainer_state.json is missing.*checkpoint-3 is intact"):
        trainer.train(resume_from_checkpoint=str(folder))
    with pytest.raises(ValueError, match="no such folder"):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-7"))


def test_all_are_damaged(folder):
    for step in (1, 2, 3):
        truncate(folder / f"checkpoint-{step}" / "model.safetensors")
    with pytest.raises(ValueError, match=r"nothing to resume.*checkpoint-3.*checkpoint-1 cannot"):
        saving(folder).train(resume_from_checkpoint=True)


def test_nothing_to_resume(tmp_path):
    trainer = saving(tmp_path / "new")
    with pytest.raises(ValueError, match="There is no checkpoint there. Without the option"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.find_checkpoint(None) is None
    assert trainer.find_checkpoint(False) is None


def test_weights_alone_cannot_be_resumed(tmp_path):
    saving(tmp_path, save_only_model=True, max_steps=1).train()
    with pytest.raises(ValueError, match="save_only_model=True, so it has no optimizer"):
        saving(tmp_path).train(resume_from_checkpoint=True)


def other_reward(completion_ids, **kwargs):
    return token_sum(completion_ids)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_generations": 8}, "num_generations: 4 in the checkpoint, 8 now"),
        ({"seed": 7}, "seed: 42 in the checkpoint, 7 now"),
        ({"data": dataset(["ab", "cde", "f"])}, "number of rows: 4 in the checkpoint, 3 now"),
        ({"data": dataset(["ab", "cde", "f", "x"])}, "contents (fingerprint): "),
        ({"model": tiny_model("qwen3")}, "the model's weights (names, shapes and types): "),
        ({"model": tiny_model(seed=5)}, "the reference's weights (fingerprint): "),
        ({"reward": other_reward}, 'reward functions: ["token_sum"] in the checkpoint'),
        ({"learning_rate": 0.2}, "learning_rate: 0.1 in the checkpoint, 0.2 now"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_run_with_other_settings_is_refused(folder, changes, words):
    trainer = saving(folder, **changes)
    with pytest.raises(ValueError, match="resume_with_changes=True") as error:
        trainer.train(resume_from_checkpoint=True)
    assert words in str(error.value)
    assert trainer.state.global_step == 0


def test_all_differences_are_listed_and_may_be_accepted(folder, warnings):
    changes = {"seed": 7, "temperature": 0.5}
    with pytest.raises(ValueError, match=r"\n  - seed: .*\n  - temperature: |\n  - temp.*\n  - se"):
        saving(folder, **changes).find_checkpoint(True)
    trainer = saving(folder, **changes, resume_with_changes=True, max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    assert "seed: 42 in the checkpoint, 7 now" in warnings[0]


def test_harmless_settings_may_change(folder, tmp_path, warnings):
    free = {
        "max_steps": 4,
        "logging_steps": 3,
        "save_steps": 5,
        "save_total_limit": 1,
        "run_name": "other",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_dataset": Dataset.from_dict({"prompt": ["xy"]}),
        "per_device_eval_batch_size": 4,
        "gradient_checkpointing": True,
        "logits_chunk_size": 0,
        "generation_max_rows": 3,
    }
    trainer = saving(tmp_path / "elsewhere", **free)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    assert trainer.state.global_step == 4 and warnings == []


def test_a_checkpoint_of_another_program_is_taken_with_a_warning(folder, warnings):
    checkpoint = folder / "checkpoint-3"
    for name in (MANIFEST, "trl_state_0.pt"):
        remove(checkpoint / name)
    trainer = saving(folder, max_steps=4)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 4
    assert "written by another program" in warnings[0]


def test_the_number_of_processes_must_stay(folder):
    path = folder / "checkpoint-3" / MANIFEST
    facts = json.loads(path.read_text())["content"]["facts"]
    assert facts["settings"]["number of processes"] == 1
    trainer = saving(folder)
    trainer.run_settings["number of processes"] = 2
    with pytest.raises(ValueError, match="number of processes: 1 in the checkpoint, 2 now"):
        trainer.find_checkpoint(True)


def test_a_resumed_run_says_from_where(tmp_path, capsys):
    saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    make_trainer(tmp_path, **saved).train()
    assert "resumed" not in capsys.readouterr().out
    make_trainer(tmp_path, max_steps=3).train(resume_from_checkpoint=True)
    place = tmp_path / "checkpoint-2"
    assert f"resumed from {place}: step 2 of 3, epoch 1.00" in capsys.readouterr().out

"""Which checkpoint a run resumes from, and what it must share with the run that wrote it."""

import json
from dataclasses import fields

import pytest
import torch
from datasets import Dataset, IterableDataset
from online_runs import config, dataset, make_trainer, token_sum
from peft import LoraConfig
from tiny import tiny_model

from trl.trainer.base.checkpoint import MANIFEST, find_fault
from trl.trainer.base.resuming import (
    FREE,
    FREE_PREFIXES,
    describe_dataset,
    describe_model,
    describe_options,
    differences,
    fingerprint,
)
from trl.trainer.grpo_config import GRPOConfig


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
        (
            {"peft_config": LoraConfig(r=2)},
            'what is trained: "the model itself" in the checkpoint, "LORA adapter of rank 2',
        ),
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
    with pytest.raises(ValueError, match=r"\n  - seed: .*\n  - temperature: "):
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


# --- Settings ---


def test_free_options_exist():
    known = {field.name for field in fields(GRPOConfig)}
    assert known >= FREE
    assert all(any(name.startswith(prefix) for name in known) for prefix in FREE_PREFIXES)


def test_options_of_the_mathematics_are_not_free():
    described = describe_options(config("out", GRPOConfig))
    for name in (
        *("seed", "num_generations", "learning_rate", "beta", "temperature", "loss_type"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"),
        *("optim", "max_grad_norm", "reward_weights", "sync_ref_model", "shuffle_dataset"),
        *("weight_decay", "lr_scheduler_type", "warmup_steps", "bf16", "ignore_data_skip"),
    ):
        assert name in described, name


def test_the_same_options_are_described_alike():
    class Odd:
        """Shows where it is in memory."""

    first, second = (config("out", generation_kwargs={"x": Odd()}) for _ in range(2))
    assert describe_options(first) == describe_options(second)


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        (["a", "b", "c"], True),
        (["a", "b"], False),
        (["a", "b", "d"], False),
        (["b", "a", "c"], False),
    ],
)
def test_datasets_are_told_apart(changed, same):
    plain = {"prompt": ["a", "b", "c"]}
    mine = describe_dataset(Dataset.from_dict(plain))
    other = describe_dataset(Dataset.from_dict({"prompt": changed}))
    assert (mine == other) is same
    extra = Dataset.from_dict(plain | {"answer": [b"1", b"2", b"3"]})
    assert describe_dataset(extra) != mine
    assert describe_dataset(extra.with_transform(lambda rows: {"prompt": ["?"]})) == (
        describe_dataset(extra)
    )


def test_a_large_dataset_is_sampled_to_its_end():
    rows = {"prompt": [str(i) for i in range(5000)]}
    mine = describe_dataset(Dataset.from_dict(rows))
    assert mine["train_dataset's number of rows"] == 5000
    rows["prompt"][2500] = "changed"
    assert describe_dataset(Dataset.from_dict(rows)) != mine


def test_of_a_stream_the_first_row_is_read():
    read = []

    def rows(first):
        for prompt in (first, "b", "c"):
            read.append(prompt)
            yield {"prompt": prompt}

    def stream(first):
        return IterableDataset.from_generator(rows, gen_kwargs={"first": first})

    mine = describe_dataset(stream("a"))
    assert read == ["a"]
    assert describe_dataset(stream("a")) == mine != describe_dataset(stream("z"))


def test_models_are_told_apart_by_what_no_checkpoint_holds():
    mine = describe_model(tiny_model(seed=0))
    assert describe_model(tiny_model(seed=0)) == mine
    assert describe_model(tiny_model(seed=1)) == mine, "trained weights come from the checkpoint"
    assert describe_model(tiny_model(num_hidden_layers=1)) != mine
    assert describe_model(tiny_model().to(torch.bfloat16)) != mine
    frozen = [tiny_model(seed=seed).requires_grad_(False) for seed in (0, 0, 1)]
    first, again, other = map(describe_model, frozen)
    assert first == again != other


def test_a_fingerprint_sees_each_tensor():
    weights = {"a": torch.zeros(1000), "b": torch.zeros(3)}
    plain = fingerprint(weights)
    for name, place in (("a", 0), ("b", 2)):
        changed = {key: value.clone() for key, value in weights.items()}
        changed[name][place] = 1.0
        assert fingerprint(changed) != plain
    assert fingerprint({"b": weights["b"], "a": weights["a"]}) == plain


def test_differences_name_both_values():
    saved = {"seed": 1, "gone": 2, "same": [1]}
    assert differences(saved, {"seed": 3, "new": 4, "same": [1]}) == [
        "seed: 1 in the checkpoint, 3 now"
    ]
    assert "..." in differences({"x": "a" * 200}, {"x": "b"})[0]
    in_order = differences({"a": 1, "b": 1, "c": 1}, {"c": 2, "a": 2, "b": 2})
    assert [change[0] for change in in_order] == ["a", "b", "c"]


def test_processes_rewards_and_reference_count(tmp_path):
    settings = {"model": tiny_model(seed=3), "beta": 0.1}
    mine = make_trainer(tmp_path, **settings).run_settings
    assert mine["number of processes"] == 1
    assert mine["reward functions"] == ["token_sum"]
    settings["model"] = tiny_model(seed=4)
    changes = differences(mine, make_trainer(tmp_path, **settings).run_settings)
    assert [change.split(":")[0] for change in changes] == ["the reference's weights (fingerprint)"]


SECRETS = {
    "hub_token": "hidden-1",
    "model_init_kwargs": {"token": "hidden-2", "dtype": "float32"},
    "chat_template_kwargs": {"api_key": "hidden-3", "proxy": "https://me:hidden-4@host"},
}


def test_no_file_of_a_run_holds_a_secret(tmp_path):
    trainer = saving(tmp_path, max_steps=1, **SECRETS)
    trainer.train()
    trainer.save_model(str(tmp_path))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "trl_manifest.json", "training_args.bin"} <= {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        if path.name == "training_args.bin":  # an archive, not compressed
            assert b"chat_template_kwargs" in content
        assert b"hidden-" not in content, path
    assert "hidden" not in str(trainer.args)
    assert trainer.args.hub_token == "hidden-1", "the run itself keeps it"
    assert trainer.args.model_init_kwargs["token"] == "hidden-2"


def test_a_run_is_resumed_with_other_secrets(tmp_path):
    saving(tmp_path, max_steps=1, **SECRETS).train()
    kwargs = {"chat_template_kwargs": {"api_key": "hidden-6", "proxy": "https://you:@host"}}
    other = saving(tmp_path, max_steps=2, model_init_kwargs={"dtype": "float32"}, **kwargs)
    assert other.args.hub_token is None
    other.train(resume_from_checkpoint=True)
    assert other.state.global_step == 2
    loading = {"dtype": "bfloat16", "token": "hidden-5"}
    changed = saving(tmp_path, model_init_kwargs=loading, **kwargs)
    with pytest.raises(ValueError, match="model_init_kwargs") as error:
        changed.find_checkpoint()
    assert "hidden" not in str(error.value)


def test_secrets_in_checkpoints_of_earlier_releases_are_no_difference():
    saved = {"a": {"token": "x", "n": 1}, "b": {"token": "x"}, "c": float("inf"), "d": None}
    now = {"a": {"n": 1}, "b": None, "c": None, "d": {"token": "y"}}
    assert differences(saved, now) == []
    assert differences(saved, now | {"a": {"n": 2}}) == [
        'a: {"n": 1} in the checkpoint, {"n": 2} now'
    ]

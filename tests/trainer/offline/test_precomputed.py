import datasets
import pytest
import torch
from dpo_runs import BOUND, by_hand, gradient_of, make_trainer, other_model, pairs
from peft import LoraConfig
from sft_runs import logged, relative
from tiny import tiny_model

from trl.trainer.offline.precomputed import in_order


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "trl"


def files(cache):
    return {path.name: path.stat().st_mtime_ns for path in cache.glob("*")}


def make(folder, **changes):
    options = {"precompute_ref_log_probs": True, "ref_model": other_model()} | changes
    return make_trainer(folder, **options)


def test_the_update_is_the_same_and_the_reference_is_let_go(tmp_path):
    expected = by_hand(tiny_model(), other_model())
    split = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}
    trainer = make(tmp_path, precompute_ref_batch_size=5, eval_dataset=pairs(), **split)
    assert trainer.train_dataset.values["ref_logps"].shape == (8, 2)
    assert relative(gradient_of(trainer), expected[1]) <= BOUND
    assert trainer.reference is None
    found = trainer.evaluate()["eval_rewards/margins"]
    live = make_trainer(tmp_path, ref_model=other_model(), eval_dataset=pairs(), **split)
    live.train()
    assert found == pytest.approx(live.evaluate()["eval_rewards/margins"], abs=1e-5)
    with pytest.raises(ValueError, match="only evaluation sets that were passed to the trainer"):
        trainer.evaluate(pairs())


def test_equal_layouts_give_equal_numbers(tmp_path):
    """The reference is the policy as it was, so that nothing has moved: no bit differs."""
    trainer = make(tmp_path, ref_model=None)
    trainer.train()
    assert logged(trainer, "rewards/margins") == [0.0] and logged(trainer, "rewards/ties") == [1.0]


CHANGES = {
    "the same": {},
    "dataset": {"data": pairs([("a", "b", "c"), ("d", "e", "f")])},
    "weights": {"ref_model": tiny_model(seed=2)},
    "lengths": {"max_length": 12},
    "truncation": {"max_length": 12, "truncation_mode": "keep_end"},
    "ld_alpha": {"ld_alpha": 0.5},
    "precision": {"bf16": True},
    "layout": {"shared_prefix": False},
    "batches": {"precompute_ref_batch_size": 2},
}


def test_a_changed_key_computes_anew(tmp_path, cache):
    make(tmp_path)
    (first,) = files(cache).items()
    for count, changes in enumerate(CHANGES.values(), 1):
        make(tmp_path, **changes)
        found = files(cache)
        assert len(found) == count and found[first[0]] == first[1], changes
    path = cache / first[0]
    path.write_bytes(path.read_bytes()[:40])  # damaged
    make(tmp_path)
    assert files(cache)[first[0]] != first[1] and len(files(cache)) == len(CHANGES)


def test_without_an_adapter(tmp_path, cache):
    peft_config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    for folder in ("first", "again"):
        trainer = make(tmp_path / folder, ref_model=None, peft_config=peft_config, max_steps=2)
        trainer.train()
        assert logged(trainer, "rewards/margins")[0] == 0.0 and len(files(cache)) == 1
    assert trainer.reference is not None
    trainer.evaluate(pairs())


def test_what_cannot_be_precomputed(tmp_path):
    with pytest.raises(ValueError, match="needs datasets of known length, but train_dataset is"):
        make(tmp_path, data=pairs().to_iterable_dataset())
    with pytest.raises(ValueError, match="cannot be used with sync_ref_model=True: the ref"):
        make(tmp_path, sync_ref_model=True)


def test_shares_of_ranks_are_joined_in_order():
    first, second = [[torch.tensor([1]), torch.tensor([3])], [torch.tensor([2]), torch.tensor([])]]
    assert in_order([first, second]).tolist() == [1, 2, 3]

"""Which prompts are read, in which order."""

import pytest
import torch
from datasets import Dataset, IterableDataset
from online_runs import PROMPTS, dataset, make_trainer, prompts_seen, records, weights


def eval_stream():
    return IterableDataset.from_generator(lambda: ({"prompt": p} for p in ("xy", "z", "w")))


@pytest.mark.parametrize("given", ["at construction", "to evaluate", "to predict"])
def test_iterable_evaluation(tmp_path, given):
    """Whoever gives the stream: it is read in this process, and training keeps its workers."""
    early = {"eval_dataset": eval_stream()} if given == "at construction" else {}
    trainer = make_trainer(
        tmp_path, **early, per_device_eval_batch_size=8, dataloader_num_workers=2
    )
    if given == "to predict":
        found = trainer.predict(eval_stream()).metrics
        assert found["test_reward"] == found["test_rewards/token_sum/mean"]
    else:
        found = trainer.evaluate(*([] if early else [eval_stream()]))
        assert "eval_reward" in found
    assert [r["prompt"] for r in records(tmp_path, "eval")] == ["xy"] * 4 + ["z"] * 4 + ["w"] * 4
    assert trainer.args.dataloader_num_workers == 2
    trainer.train()
    assert prompts_seen(tmp_path) == {0: PROMPTS[:2]}


def test_what_predict_collects_is_not_in_the_next_evaluation(tmp_path):
    """Nor does it matter to training that something was predicted."""
    trainer = make_trainer(tmp_path / "a", eval_dataset=dataset("xy"), per_device_eval_batch_size=8)
    plain = make_trainer(tmp_path / "b", eval_dataset=dataset("xy"), per_device_eval_batch_size=8)
    trainer.predict(dataset("z"))
    for name in ("eval_reward", "eval_completions/mean_length"):
        assert trainer.evaluate()[name] == plain.evaluate()[name]
    trainer.train()
    plain.train()
    assert torch.equal(weights(trainer.model), weights(plain.model))


def test_a_dataset_given_to_evaluate_is_checked(tmp_path):
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=8)
    with pytest.raises(ValueError, match="eval_dataset has no 'prompt' column; it has text"):
        trainer.evaluate(Dataset.from_dict({"text": ["a"]}))
    with pytest.raises(NotImplementedError, match="eval_dataset has the column 'image'"):
        trainer.evaluate(dataset("z", image=["x"]))

"""Functions of users get the logits that a plain forward of each row gives."""

import math

import numpy as np
import pytest
import torch
from sft_runs import PAIRS, encoded, logged, make_trainer, pairs
from tiny import tiny_model

ROWS = PAIRS[:5]


def keep(store):
    def compute(prediction):
        store.append(prediction)
        return {"rows": float(len(prediction.label_ids))}

    return compute


def likeliest(logits, labels):
    assert logits.shape[:2] == labels.shape and logits.shape[0] == 1
    return logits.argmax(-1)


def accuracy(prediction):
    """As users write it: predictions of a token are those of the place before it."""
    guesses, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    known = labels != -100
    return {"accuracy": float((guesses == labels)[known].mean())}


def evaluated(tmp_path, **changes):
    data = pairs(ROWS)
    return make_trainer(tmp_path, data, eval_dataset=data, **changes)


def hide_the_head(model):
    """Give logits that are not made of the last hidden states alone."""
    plain = type(model).forward

    def forward(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        shift = torch.linspace(0, 1, output.logits.shape[-1])
        output.logits = output.logits + shift * output.logits.mean(-1, keepdim=True)
        return output

    model.__class__ = type("Hidden" + type(model).__name__, (type(model),), {"forward": forward})


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize(
    "changes", [{}, {"packing": True}, {"shared_prefix": False}, {"per_device_eval_batch_size": 2}]
)
def test_logits_and_labels_are_those_of_a_plain_forward(tmp_path, changes, has_head):
    model = tiny_model()
    if not has_head:
        hide_the_head(model)
    seen = []
    trainer = evaluated(tmp_path, model=model, compute_metrics=keep(seen), **changes)
    metrics = trainer.evaluate()
    assert metrics["eval_rows"] == len(ROWS) and metrics["eval_loss"] > 0
    (found,) = seen
    for row, pair in enumerate(ROWS):
        ids, first = encoded(*pair)
        with torch.no_grad():
            expected = model.eval()(torch.tensor([ids])).logits[0].numpy()
        trained = slice(first - 1, len(ids) - 1)
        difference = np.abs(found.predictions[row, trained] - expected[trained]).max()
        assert difference <= 2e-5 * np.abs(expected).max()
        labels = found.label_ids[row]
        assert labels[first : len(ids)].tolist() == ids[first:]
        assert set(labels[:first].tolist()) | set(labels[len(ids) :].tolist()) <= {-100}


def test_logits_can_be_made_smaller_row_by_row(tmp_path):
    options = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": likeliest}
    trainer = evaluated(
        tmp_path,
        **options,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
    )
    trainer.train()
    ours, known = (logged(trainer, f"eval_{name}") for name in ("accuracy", "mean_token_accuracy"))
    assert ours == pytest.approx(known) and len(ours) == 2
    assert trainer.state.best_metric == pytest.approx(max(ours))


def test_an_evaluation_that_fails_leaves_no_rows_to_the_next(tmp_path):
    calls, seen = [], []

    def failing(logits, labels):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("planned")
        return logits.argmax(-1)

    options = {"compute_metrics": keep(seen), "preprocess_logits_for_metrics": failing}
    trainer = evaluated(tmp_path, **options)
    with pytest.raises(RuntimeError, match="planned"):
        trainer.evaluate()
    assert trainer.evaluate()["eval_rows"] == len(ROWS)


def test_several_results_of_a_row_and_several_sets(tmp_path):
    seen = []

    def sums(logits, labels):
        return logits.logsumexp(-1), (labels >= 0).sum(1)

    sets = {"a": pairs(ROWS[:2]), "b": pairs(ROWS)}
    options = {"compute_metrics": keep(seen), "preprocess_logits_for_metrics": sums}
    trainer = make_trainer(tmp_path, pairs(ROWS), eval_dataset=sets, **options)
    metrics = trainer.evaluate()
    assert metrics["eval_a_rows"] == 2 and metrics["eval_b_rows"] == len(ROWS)
    assert trainer.predict(pairs(ROWS[:3])).metrics["test_rows"] == 3
    masses, counts = seen[1].predictions
    assert masses.shape == seen[1].label_ids.shape
    assert counts.tolist() == (seen[1].label_ids >= 0).sum(1).tolist()
    assert all(math.isfinite(x) for x in masses.ravel())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_eval_metrics": True}, "cannot be used with batch_eval_metrics"),
        ({"include_for_metrics": ["inputs"]}, "cannot be used with include_for_metrics"),
    ],
)
def test_what_metrics_cannot_be_given(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        evaluated(tmp_path, compute_metrics=accuracy, **changes)

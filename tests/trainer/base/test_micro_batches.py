"""Running out of memory in any phase gives the result of a run that had smaller chunks."""

import gc
from types import SimpleNamespace

import pytest
import torch
from mixtures import mixture
from online_runs import config, dataset, make_trainer, relative, token_sum, weights
from tiny import tiny_model, tiny_tokenizer
from torch import nn

from trl.memory.adaptive_batch import RowTooLargeError
from trl.memory.phases import Phases
from trl.models.packed_attention import KEYWORD
from trl.models.packed_layout import runs_within
from trl.online.metrics import MetricStore
from trl.online.rewards import RewardError
from trl.trainer.base.micro_batches import MicroBatchRunner
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.types import Rows

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."
# The script makes completions of 1, 2, 3 and 4 tokens for each prompt of 6 tokens: packed, the last
# token of each left out, 12 tokens for a group, and at most 11 for two of its rows.
MANY = [6 * letter for letter in "abcdefgh"]
TWO_ROWS = 11


@pytest.fixture(scope="module", autouse=True)
def little_garbage():
    """Keep what other modules have made out of the collections after each shortage."""
    gc.freeze()
    yield
    gc.unfreeze()


class Shortage:
    """Raises from inside a model when a call of a kind has more than `most` rows or tokens.

    Args:
        model: its first layer is where memory runs out, in the backward pass after the gradients
            of all that stands behind it have been added.
        phase: "generation", "scoring", "forward" or "backward".
        most: rows (of a padded batch) or tokens (of a packed row) that fit.
        spared: calls of the kind that succeed before.
    """

    def __init__(self, model, phase, most, spared=0):
        self.phase, self.most, self.spared = phase, most, spared
        self.failures = 0
        self._decoder = model.model
        self._decoder.layers[0].register_forward_hook(self._look, with_kwargs=True)

    def _look(self, layer, args, kwargs, output):
        rows, width = args[0].shape[:2]
        size = width if KEYWORD in kwargs else rows
        if kwargs.get("past_key_values") is not None:
            kind, size = "generation", rows
        elif not torch.is_grad_enabled():
            kind = "scoring"
        else:
            kind = "backward" if self.phase == "backward" else "forward"
        if kind != self.phase:
            return
        if kind == "backward":
            output.register_hook(lambda grad: self._fail(size))
        else:
            self._fail(size)

    def _fail(self, size):
        if self.spared:
            self.spared -= 1
        elif size > self.most:
            self.failures += 1
            raise torch.OutOfMemoryError(MESSAGE)


ACCUMULATED = {
    "data": dataset(MANY),
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "learning_rate": 0.01,
    "optim": "adamw_torch",
    "max_steps": 2,
}


def run(folder, shortage=None, sizes=None, kind=RLOOTrainer, **changes):
    """Train with a shortage of memory, or with pieces that are small from the start."""
    model = tiny_model(attention_dropout=changes.pop("dropout", 0.0))
    trainer = make_trainer(folder, kind, model, **(ACCUMULATED | changes))
    found = None if shortage is None else Shortage(trainer.model, *shortage)
    for name, size in (sizes or {}).items():
        trainer.phases.batches[name].size = size
    trainer.train()
    return trainer, found


def check_equal(tmp_path, phase, shortage, bound=0.0, **changes):
    """The weights are those of the run with small pieces, if no bound is given to the last bit.

    Returns both trainers.
    """
    short, injected = run(tmp_path / "short", shortage, **changes)
    piece = short.phases.batches[phase]
    assert injected.failures == piece.failures >= 1
    small, _ = run(tmp_path / "small", sizes={phase: piece.size}, **changes)
    assert small.phases.batches[phase].failures == 0
    expected = weights(small.model)
    assert (weights(short.model) - expected).norm() <= bound * expected.norm()
    assert not torch.equal(weights(short.model), weights(tiny_model()))
    return short, small


SAME = ("loss", "grad_norm", "reward", "entropy", "clip_ratio/region_mean", "num_tokens")
PADDED = {"shared_prefix": False}
TRAINING = [
    ("forward", 0, {}),
    ("forward", 3, {}),
    ("backward", 0, {}),
    ("backward", 1, {}),
    ("backward", 3, {}),
    ("backward", 3, {"gradient_checkpointing": True}),
    ("backward", 2, {"kind": GRPOTrainer, "loss_type": "bnpo", "beta": 0.1}),
    ("forward", 1, {"kind": GRPOTrainer, "loss_type": "dapo", "num_iterations": 2}),
    ("backward", 2, PADDED),
    ("forward", 2, PADDED | {"dropout": 0.5}),
    ("backward", 3, PADDED | {"dropout": 0.5}),
    ("backward", 1, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}),
]


@pytest.mark.parametrize(("phase", "spared", "changes"), TRAINING)
def test_training_goes_on_in_smaller_pieces(tmp_path, phase, spared, changes):
    """Memory runs out after `spared` micro-batches of an update."""
    most = 2 if "shared_prefix" in changes else TWO_ROWS
    short, small = check_equal(tmp_path, "training", (phase, most, spared), **changes)
    assert short.phases.batches["training"].size == 2
    logs = [[e for e in t.state.log_history if "loss" in e] for t in (short, small)]
    for ours, theirs in zip(*logs, strict=True):
        for name in set(SAME) & set(theirs) - ({"entropy"} if "dropout" in changes else set()):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-6), name


def test_micro_batches_that_are_no_multiple_of_a_piece(tmp_path):
    """Five rows in pieces of two: cut elsewhere the second time, so equal up to rounding."""
    odd = {"per_device_train_batch_size": 5, "max_steps": 1, "optim": "sgd", "learning_rate": 1.0}
    short, injected = run(tmp_path / "short", ("backward", 15, 2), **odd)
    assert injected.failures == 1 and short.phases.batches["training"].size == 2
    small, _ = run(tmp_path / "small", sizes={"training": 2}, **odd)
    start = weights(tiny_model())
    assert relative(weights(short.model) - start, weights(small.model) - start) < 5e-6


def test_the_entropy_coefficient_does_not_count_what_was_undone(tmp_path):
    """It moves with the entropy of the micro-batches of an update, each once."""
    measured = []
    for name, shortage, sizes in (
        ("short", ("backward", TWO_ROWS, 2), None),
        ("small", None, {"training": 2}),
    ):
        trainer, _ = run(
            tmp_path / name,
            shortage,
            sizes,
            GRPOTrainer,
            use_adaptive_entropy=True,
            entropy_coef=0.3,
            entropy_target=5.0,
            max_steps=1,
        )
        measured.append(trainer.entropy.measured)
        assert trainer.entropy.coefficient == pytest.approx(0.305)
    assert measured[0] == measured[1]


def test_micro_batches_of_an_interrupted_update_are_forgotten(tmp_path):
    """Training that starts again after an error does not do them when memory runs out."""
    calls = []

    def reward(completion_ids, **kwargs):
        calls.append(len(completion_ids))
        if len(calls) == 2:
            raise KeyError("the second round of the update")
        return token_sum(completion_ids)

    again = {"reward": reward, "reward_dry_run": False, "steps_per_generation": 2}
    trainer = make_trainer(tmp_path / "short", **(ACCUMULATED | again))
    with pytest.raises(RewardError):
        trainer.train()
    trainer.model.zero_grad()
    injected = Shortage(trainer.model, "backward", TWO_ROWS)
    trainer.train()
    assert injected.failures == 1
    small, _ = run(tmp_path / "small", sizes={"training": 2}, steps_per_generation=2)
    assert torch.equal(weights(trainer.model), weights(small.model))


# --- Phases without gradients ---


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"beta": 0.2},
        {"beta": 0.2, "reuse_sampling_logps": False, "shared_prefix": False},
        {"repetition_penalty": 1.2, "kind": GRPOTrainer, "num_iterations": 2},
    ],
)
def test_generation_goes_on_with_fewer_rows(tmp_path, changes):
    short, _ = check_equal(tmp_path, "generation", ("generation", 4, 1), script=None, **changes)
    assert short.phases.batches["generation"].size == 4
    lines = [(tmp_path / x / "completions" / "train.jsonl").read_text() for x in ("short", "small")]
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    ("spared", "changes"),
    [
        (0, {"num_iterations": 2}),
        (2, {"steps_per_generation": 4, "gradient_accumulation_steps": 2}),
        (1, {"num_iterations": 2} | PADDED),
        (2, {"kind": GRPOTrainer, "beta": 0.1, "num_iterations": 2}),
    ],
)
def test_scoring_goes_on_with_fewer_rows(tmp_path, spared, changes):
    """The first four calls find out what the model does; padded rows need but one of them."""
    most = 2 if "shared_prefix" in changes else TWO_ROWS
    spared += 0 if "shared_prefix" in changes else 4
    # What was scored before the shortage had more rows, and may be rounded otherwise.
    short, _ = check_equal(tmp_path, "scoring", ("scoring", most, spared), 5e-6, **changes)
    assert short.phases.batches["scoring"].size == 2


def test_the_load_balancing_loss_is_that_of_smaller_micro_batches(tmp_path):
    """It looks at all rows of a forward pass; pieces of 2 rows are micro-batches of 2 rows."""
    runs = []
    for name, changes, size in (
        ("pieces", {}, 2),
        ("slices", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, None),
    ):
        changes |= {"router_aux_loss_coef": 0.5}
        trainer = make_trainer(tmp_path / name, model=mixture("qwen3"), **changes)
        trainer.phases.batches["training"].size = size
        trainer.train()
        runs.append(trainer)
    pieces, slices = (weights(trainer.model) - weights(mixture("qwen3")) for trainer in runs)
    assert relative(pieces, slices) <= 5e-6 < relative(pieces, 0 * slices)
    assert runs[0].state.log_history[0]["loss"] == pytest.approx(
        runs[1].state.log_history[0]["loss"], rel=1e-4
    )


class Judge(nn.Module):
    """A reward model for which more than `most` rows are a shortage; padding changes nothing."""

    def __init__(self, most=None):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 99))
        self.most, self.failures, self.seen = most, 0, []

    def forward(self, input_ids, attention_mask):
        if self.most is not None and len(input_ids) > self.most:
            self.failures += 1
            raise torch.OutOfMemoryError(MESSAGE)
        self.seen.append(len(input_ids))
        scores = (self.weight[input_ids].double() * attention_mask).sum(1, keepdim=True)
        return SimpleNamespace(logits=scores)


def test_reward_models_score_a_micro_batch_at_once_and_go_on_with_fewer_rows(tmp_path):
    """A round is 16 rows; the second round begins with the size that the first found."""
    runs = []
    for name, judge in (("usual", Judge()), ("short", Judge(most=3))):
        model = tiny_model()
        args = config(tmp_path / name, **{k: v for k, v in ACCUMULATED.items() if k != "data"})
        trainer = RLOOTrainer(
            model, judge, args, dataset(MANY), None, tiny_tokenizer(), tiny_tokenizer()
        )
        trainer.train()
        runs.append((trainer, judge))
    (usual, whole), (short, cut) = runs
    assert whole.seen == [4] * 8
    assert cut.failures == short.phases.batches["rewards"].failures == 1
    assert cut.seen == [2] * 16
    assert torch.equal(weights(short.model), weights(usual.model))
    assert not torch.equal(weights(short.model), weights(tiny_model()))


# --- What cannot be helped ---


@pytest.mark.parametrize(
    ("phase", "name", "changes", "words"),
    [
        ("forward", "training", {}, "training with only row .* gradient_checkpointing=True"),
        (
            "backward",
            "training",
            PADDED,
            "training with only row .* gradient_checkpointing=True",
        ),
        ("scoring", "scoring", PADDED | {"num_iterations": 2}, "scoring with only row"),
        (
            "generation",
            "generation",
            {"script": None},
            "generation with only row .* generation_max",
        ),
    ],
)
def test_a_row_that_does_not_fit_alone_is_an_error(tmp_path, phase, name, changes, words):
    with pytest.raises(RowTooLargeError, match=words) as caught:
        run(tmp_path, (phase, 0, 2), **changes)
    assert MESSAGE in str(caught.value)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize("phase", ["generation", "scoring", "forward", "backward"])
def test_recovery_can_be_switched_off(tmp_path, phase):
    changes = {"script": None, "num_iterations": 2, "recover_from_oom": False}
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(tmp_path, (phase, 2), **(PADDED | changes))
    assert not isinstance(caught.value, RowTooLargeError) and str(caught.value) == MESSAGE


def test_other_errors_pass(tmp_path):
    trainer = make_trainer(tmp_path, **ACCUMULATED)

    def fail(*args):
        raise RuntimeError("CUDA error: device-side assert triggered")

    trainer.model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="device-side assert"):
        trainer.train()
    assert trainer.phases.batches["training"].failures == 0


def test_sizes_stay_small_and_are_said_once(tmp_path, log):
    trainer, injected = run(tmp_path, ("forward", TWO_ROWS))
    said = [r.getMessage() for r in log.records if "Out of memory" in r.getMessage()]
    assert len(said) == injected.failures == 1
    assert "4 rows at once: continuing with 2" in said[0]
    assert "per_device_train_batch_size=2" in said[0]
    assert trainer.state.global_step == 2


# --- Chunks ---


@pytest.mark.parametrize("kind", [RLOOTrainer, GRPOTrainer])
def test_pieces_give_the_same_update(tmp_path, kind):
    """Micro-batches of 8 rows, 12 tokens for each prompt with its 4 completions."""
    found, calls = [], []
    for most in (None, 12, 5):
        trainer = make_trainer(
            tmp_path, kind=kind, per_device_train_batch_size=8, max_tokens_per_piece=most
        )
        counted = []
        step = trainer.compute_loss
        trainer.compute_loss = lambda m, rows, *a, **k: (
            counted.append(len(rows)) or step(m, rows, *a, **k)  # noqa: B023
        )
        trainer.train()
        calls.append(len(counted))
        found.append(weights(trainer.model))
    assert calls[0] < calls[1] < calls[2]
    assert all(relative(other, found[0]) <= 1e-6 for other in found[1:])


def test_runs_of_rows_hold_at_most_so_many_tokens():
    sizes = [3, 4, 9, 1, 1, 2, 30]
    assert runs_within(8, sizes) == [2, 1, 3, 1]
    assert runs_within(10**6, sizes) == [7]
    rows = Rows.of([([1, 2], [4]), ([1, 2], [5, 6]), ([3], [7])])
    assert rows.computed_tokens() == [3, 2, 2]


@pytest.mark.parametrize("count", [1, 2])
def test_no_rank_goes_back_alone_where_others_wait_for_it(tmp_path, count):
    ranks = SimpleNamespace(count=count, allows_uneven_passes=True, per_row=1)
    args = config(tmp_path)
    phases = Phases(args, args.device)
    MicroBatchRunner(args, ranks, MetricStore(), tiny_model(), phases)
    assert phases.batches["training"].disabled == (count > 1)
    assert phases.adaptive("scoring", alone=True).disabled
    assert not phases.adaptive("rewards").disabled


def test_gradients_that_wait_are_not_allocated_after_memory_ran_out(tmp_path):
    """The first chunk leaves gradients of lookups; the second one fails."""
    trainer = make_trainer(tmp_path, per_device_train_batch_size=8, max_tokens_per_piece=12)
    weight = trainer.model.get_input_embeddings().weight
    grads = []
    trainer.runner.reset_hooks.insert(0, lambda: grads.append(weight.grad))
    calls = []
    compute = trainer.compute_loss

    def scarce(*args, **kwargs):
        calls.append(len(calls))
        if len(calls) == 2:
            raise torch.OutOfMemoryError(MESSAGE)
        return compute(*args, **kwargs)

    trainer.compute_loss = scarce
    grads.clear()
    trainer.train()
    failed = [grad for grad in grads if grad is not None]
    assert trainer.phases.batches["training"].failures == 1
    assert failed == []

import json
from itertools import pairwise

import pytest
import torch
from tiny import tiny_model
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from trl.memory.callback import MemoryCallback
from trl.memory.meter import PhaseMeter
from trl.step_lines import StepLines

MB = 1_000_000


class Rows(Dataset):
    """Eight rows of twelve tokens, the labels equal to them."""

    def __init__(self):
        self.ids = torch.randint(7, 60, (8, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, place):
        return {"input_ids": self.ids[place], "labels": self.ids[place]}


def make(folder, callbacks=(), trainer_class=Trainer, **options):
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "learning_rate": 0.1,
    }
    return trainer_class(
        model=tiny_model(),
        args=TrainingArguments(str(folder), **settings | options),
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=list(callbacks),
    )


def phases(folder, step=None):
    records = StepLines(folder / "memory.jsonl").read()
    return [r["phase"] for r in records if step in (None, r["step"])]


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


ONE_STEP = ["forward", "backward", "forward", "backward", "optimizer"]


def test_phases_of_a_plain_trainer_in_order(tmp_path):
    make(tmp_path, [MemoryCallback(chart=False)]).train()
    assert phases(tmp_path, step=1) == ONE_STEP
    assert phases(tmp_path, step=2) == ONE_STEP
    assert len(phases(tmp_path)) == 10
    records = list(StepLines(tmp_path / "memory.jsonl").read())
    for before, after in pairwise(records):
        assert before["start"] <= before["end"] <= after["start"]


def test_passes_are_where_they_should_be(tmp_path):
    """What the model's code, autograd and the optimizer allocate is found in their phases."""
    held, meter = [], PhaseMeter("cpu")
    trainer = make(
        tmp_path,
        [MemoryCallback(meter, chart=False)],
        max_steps=1,
        gradient_accumulation_steps=1,
    )
    head = trainer.model.lm_head
    head.register_forward_hook(lambda *_: held.append(_block(20)))
    head.register_full_backward_hook(lambda *_: held.append(_block(40)))
    trainer.create_optimizer().register_step_post_hook(lambda *_: held.append(_block(60)))
    trainer.train()
    ends = {r["phase"]: r.get("tensors_gb") for r in StepLines(tmp_path / "memory.jsonl").read()}
    if None in ends.values():
        pytest.skip("the system does not tell")
    assert ends["backward"] - ends["forward"] == pytest.approx(0.04, abs=0.002)
    assert ends["optimizer"] - ends["backward"] == pytest.approx(0.06, abs=0.002)


def _block(megabytes):
    return torch.ones(megabytes * MB // 4)


def test_metrics_are_logged_and_remembered(tmp_path):
    trainer = make(tmp_path, [MemoryCallback(chart=False)])
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2
    by_step = {1: {}, 2: {}}
    for record in StepLines(tmp_path / "memory.jsonl").read():
        for name in ("peak_gb", "tensors_gb"):
            if name in record:
                key = f"memory/{record['phase']}/{name}"
                known = by_step[record["step"]]
                known[key] = max(known.get(key, 0), record[name])
    for entry in logged:
        found = {name: value for name, value in entry.items() if name.startswith("memory/")}
        assert found == by_step[entry["step"]]
        assert "memory/backward/peak_gb" in found


class Watch(TrainerCallback):
    """Stands for a tracker."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


def test_trackers_see_the_metrics_if_the_callback_goes_first(tmp_path):
    first, watch = MemoryCallback(chart=False), Watch()
    trainer = make(tmp_path, [watch])
    assert first.attach(trainer) is first
    trainer.train()
    assert "memory/optimizer/peak_gb" in watch.seen[0]


def test_evaluation_has_metrics_of_its_own(tmp_path):
    meter = PhaseMeter("cpu")

    class Scores(Trainer):
        def prediction_step(self, *args, **kwargs):
            with meter.phase("scoring"):
                return super().prediction_step(*args, **kwargs)

    trainer = make(
        tmp_path,
        [MemoryCallback(meter, chart=False)],
        Scores,
        eval_strategy="steps",
        eval_steps=1,
        logging_steps=2,
    )
    trainer.train()
    training, evaluation = [], []
    for entry in trainer.state.log_history:
        names = {name for name in entry if "memory/" in name}
        (evaluation if "eval_loss" in entry else training).append(names)
    assert {name.split("/")[1] for name in training[0]} == {"forward", "backward", "optimizer"}
    assert len(evaluation) == 2
    for names in evaluation:
        assert {tuple(name.split("/")[:2]) for name in names} == {("eval_memory", "scoring")}


def test_metrics_and_passes_can_be_left_to_the_trainer(tmp_path):
    meter = PhaseMeter("cpu")

    class Marks(Trainer):
        def training_step(self, *args, **kwargs):
            with meter.phase("backward"):
                return super().training_step(*args, **kwargs)

        def compute_loss(self, *args, **kwargs):
            with meter.phase("forward"):
                return super().compute_loss(*args, **kwargs)

    callback = MemoryCallback(meter, passes=False, metrics=False, chart=False)
    trainer = make(tmp_path, [callback], Marks)
    trainer.train()
    assert phases(tmp_path, step=1) == ONE_STEP
    assert not any("memory" in name for entry in trainer.state.log_history for name in entry)
    assert "memory/forward/peak_gb" in meter.take()


def test_training_is_the_same_with_it(tmp_path):
    plain, measured = make(tmp_path / "a"), make(tmp_path / "b", [MemoryCallback()])
    plain.train()
    measured.train()
    assert torch.equal(weights(plain), weights(measured))
    assert (tmp_path / "b" / "memory.jsonl").exists()


def test_a_second_training_after_one_that_failed(tmp_path):
    class Fails(Trainer):
        broken = True

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            if self.broken:
                raise RuntimeError("stop")
            return loss

    callback = MemoryCallback(chart=False)
    trainer = make(tmp_path, [callback], Fails)
    with pytest.raises(RuntimeError, match="stop"):
        trainer.train()
    trainer.broken = False
    trainer.train()
    assert phases(tmp_path) == ONE_STEP * 2
    assert callback.meter.on_phase_end == []
    assert callback.meter.current is None
    assert not trainer.model._forward_hooks and not trainer.model._forward_pre_hooks


def test_resumed_training_goes_on_with_the_file(tmp_path):
    make(tmp_path, [MemoryCallback(chart=False)], save_strategy="steps", save_steps=1).train()
    before = list(StepLines(tmp_path / "memory.jsonl").read())
    make(tmp_path, [MemoryCallback(chart=False)]).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-1")
    )
    after = list(StepLines(tmp_path / "memory.jsonl").read())
    assert [r["step"] for r in after] == [1] * 5 + [2] * 5
    assert after[:5] == before[:5]
    assert after[5]["start"] == before[4]["end"]


def test_several_calls_of_the_model_before_backward_are_one_forward(tmp_path):
    class Twice(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            with torch.no_grad():
                model(**inputs)  # a pass without gradients is no forward
            return (model(**inputs).loss + model(**inputs).loss) / 2

    make(tmp_path, [MemoryCallback(chart=False)], Twice, gradient_checkpointing=True).train()
    assert phases(tmp_path) == ONE_STEP * 2


def test_a_model_of_tuples_and_one_without_gradients(tmp_path):
    callback = MemoryCallback(PhaseMeter("cpu"))
    layer = torch.nn.Linear(2, 2)
    names = []
    callback.meter.on_phase_end.append(lambda event: names.append(event.phase))
    layer.register_forward_pre_hook(callback._before_forward)
    layer.register_forward_hook(lambda module, args, output: (output, "text"))
    layer.register_forward_hook(callback._after_forward)
    output, _ = layer(torch.ones(1, 2))
    output.sum().backward()
    callback.on_substep_end(None, None, None)
    layer.requires_grad_(False)
    layer(torch.ones(1, 2))
    assert names == ["forward", "backward", "forward"]


def test_chart_at_the_end(tmp_path):
    pytest.importorskip("matplotlib")
    make(tmp_path, [MemoryCallback()], max_steps=1).train()
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "memory.jsonl").read_text().splitlines()) == 5
    assert json.loads((tmp_path / "memory.jsonl").read_text().splitlines()[0])["step"] == 1

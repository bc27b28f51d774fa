import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_model
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from trl.json_files import JsonLinesFile
from trl.memory.callback import MemoryCallback, Timeline, draw, spans
from trl.memory.meter import PHASES, PhaseEvent, PhaseMeter

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
    records = JsonLinesFile(folder / "memory.jsonl").read()
    return [r["phase"] for r in records if step in (None, r["step"])]


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


ONE_STEP = ["forward", "backward", "forward", "backward", "optimizer"]


def test_phases_of_a_plain_trainer_in_order(tmp_path):
    make(tmp_path, [MemoryCallback(chart=False)]).train()
    assert phases(tmp_path, step=1) == ONE_STEP
    assert phases(tmp_path, step=2) == ONE_STEP
    assert len(phases(tmp_path)) == 10
    records = list(JsonLinesFile(tmp_path / "memory.jsonl").read())
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
    ends = {
        r["phase"]: r.get("tensors_gb") for r in JsonLinesFile(tmp_path / "memory.jsonl").read()
    }
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
    for record in JsonLinesFile(tmp_path / "memory.jsonl").read():
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
    assert not callback.meter._open
    assert not trainer.model._forward_hooks and not trainer.model._forward_pre_hooks


def test_resumed_training_goes_on_with_the_file(tmp_path):
    make(tmp_path, [MemoryCallback(chart=False)], save_strategy="steps", save_steps=1).train()
    before = list(JsonLinesFile(tmp_path / "memory.jsonl").read())
    make(tmp_path, [MemoryCallback(chart=False)]).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-1")
    )
    after = list(JsonLinesFile(tmp_path / "memory.jsonl").read())
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


ROOT = Path(__file__).resolve().parents[2]


def event(phase, start, end, peak=1e9):
    return PhaseEvent(phase, start, end, {"peak": peak, "fragmentation": 0.5})


def test_one_line_for_each_phase_at_once(tmp_path):
    timeline = Timeline(tmp_path / "run" / "memory.jsonl")
    timeline.step = 1
    timeline.add(event("generation", 5.0, 6.5))
    expected = {
        "step": 1,
        "phase": "generation",
        "start": 0.0,
        "end": 1.5,
        "peak_gb": 1.0,
        "fragmentation": 0.5,
    }
    assert [json.loads(line) for line in timeline.path.read_text().splitlines()] == [expected]
    timeline.step = 2
    timeline.add(event("forward", 7.0, 9.0, peak=3e9))
    second = list(JsonLinesFile(timeline.path).read())[1]
    assert (second["step"], second["start"], second["end"], second["peak_gb"]) == (2, 2.0, 4.0, 3.0)
    timeline.add(event("forward", 9.0, 9.5))
    assert len(list(JsonLinesFile(timeline.path).read())) == 3


def test_other_processes_write_nothing(tmp_path):
    timeline = Timeline(tmp_path / "memory.jsonl", writes=False)
    timeline.add(event("generation", 0, 1))
    assert list(tmp_path.iterdir()) == []


def write(path, steps):
    timeline = Timeline(path)
    for place, step in enumerate(steps):
        timeline.step = step
        timeline.add(event("forward", place, place + 0.5))


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path):
    path = tmp_path / "memory.jsonl"
    write(path, [1, 1, 2, 3])
    with path.open("a") as file:
        file.write('{"step": 3, "phase"')  # cut off by a kill
    assert [record["step"] for record in JsonLinesFile(path).read()] == [1, 1, 2, 3]
    timeline = Timeline(path, step=2)
    timeline.step = 3
    timeline.add(event("backward", 100.0, 101.0))
    records = list(JsonLinesFile(path).read())
    assert [record["step"] for record in records] == [1, 1, 2, 3]
    assert (records[3]["phase"], records[3]["start"], records[3]["end"]) == ("backward", 2.5, 3.5)


def test_a_new_run_begins_a_new_file(tmp_path):
    path = tmp_path / "memory.jsonl"
    write(path, [1, 2])
    write(path, [1])
    assert len(list(JsonLinesFile(path).read())) == 1


def test_a_broken_line_ends_what_is_kept(tmp_path):
    path = tmp_path / "memory.jsonl"
    write(path, [1])
    path.write_text(path.read_text() + "no json\n")
    Timeline(path, step=5)
    assert [record["step"] for record in JsonLinesFile(path).read()] == [1]
    assert path.read_text().count("\n") == 1


def test_lines_survive_a_kill(tmp_path):
    path = tmp_path / "memory.jsonl"
    code = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from trl.memory.meter import PhaseEvent\n"
        "from trl.memory.callback import Timeline\n"
        f"timeline = Timeline(Path({str(path)!r}))\n"
        "for i in range(3):\n"
        "    timeline.add(PhaseEvent('rewards', i, i + 1, {'peak': 7e9}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    assert [(r["start"], r["end"], r["peak_gb"]) for r in JsonLinesFile(path).read()] == [
        (0.0, 1.0, 7.0),
        (1.0, 2.0, 7.0),
        (2.0, 3.0, 7.0),
    ]


def test_spans_by_phase_and_many_joined():
    records = [{"phase": "forward", "start": i, "end": i + 0.5, "peak_gb": i} for i in range(2500)]
    records += [{"phase": "rewards", "start": 9, "end": 10, "peak_gb": 1}]
    records += [{"phase": "scoring", "start": 0, "end": 1}]  # nothing measured
    found = spans(iter(records))
    assert found["rewards"] == [(9, 10, 1)]
    assert found["forward"][:2] == [(0, 2.5, 2), (3, 5.5, 5)]
    assert len(found["forward"]) == 834 and found["forward"][-1] == (2499, 2499.5, 2499)
    assert "scoring" not in found


def test_chart_shows_each_phase_at_its_peak(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    jsonl, png = tmp_path / "memory.jsonl", tmp_path / "memory.png"
    timeline = Timeline(jsonl)
    timeline.add(event("generation", 0, 50, peak=8e9))
    timeline.add(event("generation", 50, 100, peak=8e9))
    timeline.add(event("optimizer", 100, 110, peak=2e9))
    timeline.add(event("optimizer", 140, 150, peak=2e9))
    stroke, height = {}, {}
    assert draw(jsonl, png) is True
    pixels = image.imread(png)[..., :3] * 255
    for phase, color in (("generation", (31, 119, 180)), ("optimizer", (140, 86, 75))):
        near = abs(pixels - color).max(axis=2) < 2
        stroke[phase] = near.sum(axis=1).argmax()  # the row with the longest stroke of this color
        assert near[stroke[phase]].sum() > 200, phase
        # Each phase has a panel of its own: what it fills begins at its stroke.
        filled = abs(pixels - (0.2 * np.array(color) + 0.8 * 255)).max(axis=2) < 2
        height[phase] = filled.sum(axis=0).max()
    assert height["generation"] == pytest.approx(4 * height["optimizer"], rel=0.15)
    assert stroke["generation"] + height["generation"] < stroke["optimizer"]


@pytest.mark.parametrize("count", [1, 6])
def test_chart_of_any_number_of_phases(tmp_path, count):
    pytest.importorskip("matplotlib")
    timeline = Timeline(tmp_path / "memory.jsonl")
    for place, phase in enumerate(PHASES[:count]):
        timeline.add(event(phase, place, place + 1))
    assert draw(timeline.path, tmp_path / "memory.png") is True


class Without:
    """A finder of modules that does not find matplotlib."""

    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, *others):
        if name.partition(".")[0] == "matplotlib":
            return None
        return self._finder.find_spec(name, *others)

    def __getattr__(self, name):
        return getattr(self._finder, name)


@pytest.fixture
def no_matplotlib(monkeypatch):
    """As where it is not installed: nothing finds it."""
    finders = [Without(finder) for finder in sys.meta_path]
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", finders)


def test_runs_without_matplotlib_do_not_speak_of_it(tmp_path, no_matplotlib, log):
    make(tmp_path, [MemoryCallback()], max_steps=1).train()
    assert "matplotlib" not in log.text and not (tmp_path / "memory.png").exists()


def test_without_matplotlib_the_log_says_how_to_get_it(tmp_path, no_matplotlib, log):
    write(tmp_path / "memory.jsonl", [1])
    assert draw(tmp_path / "memory.jsonl", tmp_path / "memory.png") is False
    assert "pip install 'trl[quickstart]'" in log.text
    assert not (tmp_path / "memory.png").exists()


def test_nothing_to_draw(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "memory.jsonl").write_text("")
    assert draw(tmp_path / "memory.jsonl", tmp_path / "memory.png") is False
    assert not (tmp_path / "memory.png").exists()

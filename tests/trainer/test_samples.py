import json
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import dpo_runs
import kto_runs
import online_runs
import pytest
import reward_runs
import sft_runs
import torch
from datasets import Dataset
from tiny import tiny_model, tiny_tokenizer
from transformers import GenerationConfig

from trl.cli.completions import main as show
from trl.cli.report import read_run
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.online_dpo_trainer import OnlineDPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.samples import LogCompletionsCallback, Samples, WeaveCallback, scores, summary

PROMPTS = ["2+3=", "Say", "abc", "2+3="]
GREEDY = GenerationConfig(max_new_tokens=6)
COLUMNS = {"completion": ["5"] * 4, "chosen": ["5"] * 4, "rejected": ["6"] * 4}
MAKERS = {
    "SFT": (sft_runs.make_trainer, ["completion"], {}),
    "DPO": (dpo_runs.make_trainer, ["chosen", "rejected"], {}),
    "KTO": (kto_runs.make_trainer, ["completion", "label"], {}),
    **{
        kind.method.name: (online_runs.make_trainer, [], {"kind": kind, "script": None} | options)
        for kind, options in (
            (RLOOTrainer, {}),
            (GRPOTrainer, {}),
            (
                OnlineDPOTrainer,
                {"num_generations": 2, "beta": 0.1, "per_device_train_batch_size": 4},
            ),
        )
    },
}


def make(name, folder, **changes):
    """A trainer whose weights stay, with an evaluation dataset of `PROMPTS`."""
    maker, names, options = MAKERS[name]
    columns = {x: COLUMNS.get(x, [True, False] * 2) for x in names}
    if name == "KTO":  # other answers are needed for its KL estimate
        columns["completion"] = ["5", "6", "7", "8"]
    data = Dataset.from_dict({"prompt": PROMPTS} | columns)
    return maker(folder, **({"eval_dataset": data, "learning_rate": 0.0} | options | changes))


def greedy(prompt, tokens=6, model=None):
    """What the model writes by itself."""
    tokenizer, model = tiny_tokenizer(), model or tiny_model()
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    written = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return written[0, ids.shape[1] :].tolist()


def records(folder):
    return [json.loads(x) for x in (folder / "completions/samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", MAKERS)
def test_every_trainer_completes_its_evaluation_prompts(tmp_path, name):
    trainer = make(name, tmp_path, max_steps=2)
    trainer.add_callback(LogCompletionsCallback(trainer, GREEDY, num_prompts=3, freq=2))
    trainer.train()
    found = records(tmp_path)
    assert [record["step"] for record in found] == [2] * 3
    assert [record["prompt"] for record in found] == PROMPTS[:3]
    assert [record["completion_ids"] for record in found] == list(map(greedy, PROMPTS[:3]))
    decode = tiny_tokenizer().decode
    assert [record["completion"] for record in found] == [
        decode(record["completion_ids"], skip_special_tokens=True) for record in found
    ]


@pytest.mark.parametrize("name", ["SFT", "RLOO"])
def test_training_goes_on_as_without(tmp_path, name):
    weights = []
    for watched in (False, True):
        trainer = make(name, tmp_path / str(watched), max_steps=3, learning_rate=0.1)
        if watched:
            config = GenerationConfig(max_new_tokens=4, do_sample=True)
            trainer.add_callback(LogCompletionsCallback(trainer, config, freq=1))
        trainer.train()
        weights.append(sft_runs.weights(trainer.model))
    assert torch.equal(*weights)


def test_what_is_drawn_is_random_and_the_same_again(tmp_path):
    config = GenerationConfig(max_new_tokens=20, do_sample=True, temperature=2.0)
    trainer = make("DPO", tmp_path)
    drawn = [Samples(trainer, config, None).draw() for _ in range(2)]
    assert drawn[0] == drawn[1] and [record["group"] for record in drawn[0]] == [0, 1, 2, 3]
    assert drawn[0][0]["completion_ids"] != drawn[0][3]["completion_ids"]  # of equal prompts


def test_trainers_that_generate_draw_as_in_training(tmp_path):
    trainer = make("RLOO", tmp_path, max_completion_length=3, temperature=1e-4)
    found = Samples(trainer, None, None).draw()
    assert [record["completion_ids"] for record in found] == [greedy(x, 3) for x in PROMPTS]


def test_completions_end_where_the_context_does(tmp_path):
    trainer = make("SFT", tmp_path, model=tiny_model(max_position_embeddings=70))
    config = GenerationConfig(max_new_tokens=1000)
    found = Samples(trainer, config, None).draw()  # the longest of the prompts has 4 tokens
    assert max(len(record["completion_ids"]) for record in found) <= 66


def test_prompts_that_are_messages(tmp_path):
    prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
    trainer = make("RLOO", tmp_path, eval_dataset=Dataset.from_dict({"prompt": prompts}))
    found = Samples(trainer, GREEDY, 1).draw()
    assert found[0]["prompt"] == prompts[0]
    assert found[0]["completion"][0]["role"] == "assistant"


def test_a_resumed_run_goes_on_with_its_table(tmp_path, monkeypatch):
    """As a tracker gets it: all rows each time."""
    tables = []
    experiment = SimpleNamespace(log_table=lambda *names, **table: tables.append((names, table)))
    comet = ModuleType("comet_ml")
    comet.get_running_experiment = lambda: experiment
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    for resumed in (None, str(tmp_path / "checkpoint-2")):
        trainer = make("SFT", tmp_path, **changes)
        trainer.add_callback(LogCompletionsCallback(trainer, GREEDY, num_prompts=2, freq=2))
        trainer.args.report_to = ["comet_ml"]
        trainer.train(resume_from_checkpoint=resumed)
    assert [record["step"] for record in records(tmp_path)] == [2, 2, 4, 4]
    assert [[row[0] for row in table["tabular_data"]] for _, table in tables] == [
        *([2, 2], [2, 2, 4, 4], [2, 2, 4, 4])
    ]
    assert tables[0][0] == ("completions.csv",)
    assert tables[0][1]["headers"] == ["step", "prompt", "completion"]
    assert tables[0][1]["tabular_data"][0][1:] == ["2+3=", records(tmp_path)[0]["completion"]]


def test_commands_show_them(tmp_path, capsys):
    trainer = make("SFT", tmp_path)
    trainer.add_callback(LogCompletionsCallback(trainer, GREEDY, freq=1))
    trainer.train()
    assert read_run(tmp_path, most=10)["completions"]["samples"]["total"] == 4
    show([str(tmp_path), "--split", "samples"])
    assert "4 of 4 completions" in capsys.readouterr().out


def test_other_ranks_repeat_the_last_prompt(tmp_path):
    """Two ranks in turn, with three prompts."""
    trainer = make("SFT", tmp_path)
    samples, own = Samples(trainer, GREEDY, 3), trainer.ranks
    gathered = []
    for rank in range(2):
        trainer.ranks = _Rank(own, rank, gathered)
        found = samples.draw()
    assert [len(rows) for rows in gathered] == [2, 2]
    assert [record["prompt"] for record in found] == PROMPTS[:3]


class _Rank:
    """One of two ranks, where the last one is told what all of them have."""

    count = 2

    def __init__(self, own, rank, gathered):
        self._own, self.rank, self._gathered = own, rank, gathered

    def __getattr__(self, name):
        return getattr(self._own, name)

    def gather_objects_on_rank_0(self, value):
        self._gathered.append(value)
        return self._gathered if self.rank == 1 else []


def test_mistakes(tmp_path):
    trainer = make("SFT", tmp_path, eval_dataset=None)
    with pytest.raises(ValueError, match="Drawing completions needs an eval_dataset"):
        LogCompletionsCallback(trainer, freq=1)
    with pytest.raises(ValueError, match="needs freq, or the option eval_steps"):
        LogCompletionsCallback(make("SFT", tmp_path))
    texts = Dataset.from_dict({"text": ["abc", "de"]})
    trainer = sft_runs.make_trainer(tmp_path, data=texts, eval_dataset=texts)
    with pytest.raises(ValueError, match="The rows of eval_dataset have no prompts to complete"):
        LogCompletionsCallback(trainer, freq=1)


def test_reward_models_write_nothing(tmp_path):
    data = reward_runs.pairs()
    trainer = reward_runs.make_trainer(tmp_path, eval_dataset=data)
    with pytest.raises(TypeError, match="LlamaForSequenceClassification writes no text"):
        LogCompletionsCallback(trainer, freq=1)


# --- Weave, which is not installed: a stand-in keeps what it is told ---


class Weave(ModuleType):
    """Keeps what it is told."""

    def __init__(self):
        super().__init__("weave")
        self.client, self.told = None, []

    def get_client(self):
        return self.client

    def init(self, project):
        self.client = project

    @contextmanager
    def attributes(self, found):
        self.told.append(found)
        yield

    def EvaluationLogger(self, **names):
        self.told.append(names)
        entry = SimpleNamespace(
            log_score=lambda scorer, score: self.told.append((scorer, score)),
            finish=lambda: self.told.append("finished"),
        )
        return SimpleNamespace(
            log_prediction=lambda inputs, output: self.told.append((inputs, output)) or entry,
            log_summary=lambda found: self.told.append(found),
        )


@pytest.fixture
def weave(monkeypatch):
    monkeypatch.setitem(sys.modules, "weave", Weave())
    return sys.modules["weave"]


def test_without_weave_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "weave", None)
    with pytest.raises(ImportError, match=r"WeaveCallback needs the package `weave`.*trl\[weave\]"):
        WeaveCallback(make("SFT", tmp_path))


def test_an_evaluation_is_sent_once_with_its_scores(tmp_path, weave):
    trainer = make("SFT", tmp_path, eval_strategy="steps", eval_steps=1)
    scorers = {"length": lambda prompt, completion: float(len(completion))}
    options = {"project_name": "mine", "scorers": scorers, "num_prompts": 2, "model_name": "tiny"}
    callback = WeaveCallback(trainer, generation_config=GREEDY, **options)
    assert callback.is_evaluation_mode
    trainer.add_callback(callback)
    trainer.train()
    trainer.evaluate()  # of the same step
    assert weave.client == "mine"
    step, names, *entries, found = weave.told
    assert step == {"training_step": 1}
    assert names == {"model": "tiny", "dataset": "eval_dataset"}
    (first, text), score, end = entries[:3]
    assert first == {"prompt": "2+3="} and score == ("length", float(len(text)))
    assert end == "finished" and len(entries) == 6
    assert found["total_predictions"] == found["successful_predictions"] == 2


def test_without_scorers_predictions_are_sent(tmp_path, weave):
    callback = WeaveCallback(make("SFT", tmp_path), "mine", generation_config=GREEDY, num_prompts=1)
    assert not callback.is_evaluation_mode
    callback.on_evaluate(None, SimpleNamespace(global_step=1), None)
    assert weave.told[-3][0] == {"prompt": "2+3="} and weave.told[-1] == {
        "total_predictions": 1,
        "successful_predictions": 1,
    }


def test_where_it_goes(tmp_path, weave, monkeypatch):
    state = SimpleNamespace(is_world_process_zero=True)
    callback = WeaveCallback(make("SFT", tmp_path))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    with pytest.raises(ValueError, match="needs a project: pass project_name"):
        callback.on_train_begin(None, state, None)
    run = SimpleNamespace(entity="we", project="p")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    callback.on_train_begin(None, state, None)
    assert weave.client == "we/p"
    WeaveCallback(make("SFT", tmp_path), "other").on_train_begin(None, state, None)
    assert weave.client == "we/p"  # as it was there


def test_a_scorer_that_fails_is_left_out(caplog):
    scorers = {"bad": lambda prompt, completion: 1 / 0, "good": lambda prompt, completion: 2.0}
    assert scores(scorers, "p", "c") == {"good": 2.0}


def test_summaries():
    scored = [{"a": 1.0, "b": 3.0}, {"a": 2.0}, {}]
    assert summary(scored, dict.fromkeys("abc")) == {
        "total_predictions": 3,
        "successful_predictions": 0,
        "avg_a": 1.5,
        "avg_b": 3.0,
    }
    assert summary(scored, {"a": max})["successful_predictions"] == 2

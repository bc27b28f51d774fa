"""Completions that callbacks draw while a run goes on, for trackers and the run's records."""

import sys
from collections.abc import Callable, Mapping
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Any

from datasets import Dataset
from transformers import (
    GenerationConfig,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging

from ..data.examples import Example, make_group
from ..generation.base import NAMED_OPTIONS, Sampling, row_seeds
from ..generation.transformers.backend import TransformersBackend
from ..imports import require
from ..json_files import JsonLinesFile
from ..memory.random_numbers import preserve_rng_state
from ..models.loading import context_length, stop_token_ids
from ..models.unwrap import policy_for_inference
from ..online.prompts import PromptEncoder
from ..online.reports import log_table
from ..transcripts import transcript
from ..types import Prompts
from .base.base_trainer import BaseTrainer

MOST_TOKENS = 256  # of a completion, where neither the model nor the user says so
Scorers = Mapping[str, Callable[[str, str], float]]

logger = logging.get_logger(__name__)


class Samples:
    """Completes the first `most` prompts of a trainer's evaluation dataset with its policy.

    Trainers that generate do it with their own engine and options, for the others transformers
    generates; `config` says how tokens are drawn instead. TypeError: the model writes no text.
    ValueError: there is no such dataset, or its rows have no prompt.
    """

    def __init__(self, trainer: BaseTrainer, config: GenerationConfig | None, most: int | None):
        tokenizer: Any = trainer.processing_class
        model: Any = trainer.accelerator.unwrap_model(trainer.model)
        if getattr(model, "get_output_embeddings", lambda: None)() is None:
            raise TypeError(f"{type(model).__name__} writes no text: it cannot complete prompts.")
        self._trainer, self._decode = trainer, PromptEncoder(tokenizer).completions
        self._prompts = _prompts(trainer, tokenizer, most)
        self._engine: Any = getattr(trainer, "backend", None)
        if self._engine is None:
            self._engine = TransformersBackend(
                lambda: policy_for_inference(trainer.model, trainer.accelerator),
                pad_id=self._prompts.token_ids[0][0],  # any token: it is masked
                device=trainer.args.device,
                max_rows=trainer.args.per_device_eval_batch_size,
                ranks=trainer.ranks,
            )
        self._sampling: Any = getattr(trainer, "sampling", None)
        if self._sampling is None:
            stops = stop_token_ids(model, tokenizer)
            self._sampling = Sampling(max_tokens=MOST_TOKENS, stop_ids=stops)
            config = config or model.generation_config
        if config is not None:
            wanted = config.to_dict() | {"max_tokens": config.max_new_tokens}
            wanted["top_k"] = wanted["top_k"] if config.do_sample else 1  # the likeliest token
            named = {name: wanted[name] for name in NAMED_OPTIONS if wanted[name] is not None}
            self._sampling = self._sampling.replace(**named)
        if (context := context_length(model)) is not None:
            room = context - max(map(len, self._prompts.token_ids))
            most_tokens = max(1, min(self._sampling.max_tokens, room))
            self._sampling = self._sampling.replace(max_tokens=most_tokens)

    def draw(self) -> list[dict[str, Any]]:
        """Return a record of each completion on the main process; all processes call this."""
        trainer, ranks, most = self._trainer, self._trainer.ranks, len(self._prompts)
        step, count = trainer.state.global_step, -(-most // ranks.count)
        first = ranks.rank * count
        # Ranks work in step, so the last ones repeat a prompt where there is none left.
        prompts = self._prompts.select([min(first + row, most - 1) for row in range(count)])
        seeds = row_seeds(("samples", trainer.args.seed, step), first, count)
        with preserve_rng_state(), trainer.phases.inference("generation", count):
            self._engine.sync_weights(step)
            found = self._engine.generate(prompts, self._sampling.replace(seeds=seeds), 1)
        prompts, ids = found.completed_prompts(prompts), found.completion_ids
        texts = found.messages or self._decode(prompts, ids)
        names = ("prompt", "completion", "completion_ids", "finish")
        unknown = {"step": step, "rewards": {}, "reward": None, "advantage": None}
        columns = zip(prompts.messages, texts, ids, found.finish_reasons, strict=True)
        rows = [unknown | dict(zip(names, row, strict=True)) for row in columns]
        every = chain(*ranks.gather_objects_on_rank_0(rows))
        return [row | {"group": place} for place, row in enumerate(islice(every, most))]


def _prompts(trainer: BaseTrainer, tokenizer: Any, most: int | None) -> Prompts:
    data = trainer.eval_dataset
    data = next(iter(data.values())) if isinstance(data, Mapping) else data
    if data is None or not isinstance(data, Dataset):
        raise ValueError("Drawing completions needs an eval_dataset with a length: pass one.")
    rows = [data[i] for i in range(min(len(data), most or len(data)))]
    if "prompt" in data.column_names:  # of a trainer that generates; others have prepared tokens
        return trainer.encode(rows)  # type: ignore[operator]
    ids = [found for row in rows if (found := _beginning(row))]
    if not ids:
        raise ValueError(
            "The rows of eval_dataset have no prompts to complete: use 'prompt' and 'completion' "
            "instead of whole texts."
        )
    return Prompts(messages=[tokenizer.decode(row) for row in ids], token_ids=ids)


def _beginning(example: Example) -> list[int]:
    """What comes before the answers of a prepared example, or the target tokens of a document."""
    prefix = list(make_group(example).prefix.ids)
    if "labels" in example and len(prefix) == 1:  # a whole text: nothing predicts its first token
        return []
    return prefix


class LogCompletionsCallback(TrainerCallback):
    """Completes prompts of `eval_dataset` every `freq` steps (by default `eval_steps`).

    A table (step, prompt, completion) goes to W&B and Trackio where `report_to` names them, to
    Comet as `completions.csv`, and as `completions/samples.jsonl` into the output folder, for
    `trl completions --split samples` and `trl report`.

    The `trainer` is any but that of reward models. Tokens are drawn as `generation_config` says, by
    default as in training, or as the model's own configuration says; for the first `num_prompts`,
    by default for all. ValueError: there are none, or neither `freq` nor `eval_steps` is set.
    """

    def __init__(
        self,
        trainer: BaseTrainer,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        freq: int | None = None,
    ):
        if not (freq or trainer.args.eval_steps):
            raise ValueError("LogCompletionsCallback needs freq, or the option eval_steps.")
        self._samples, self._freq = Samples(trainer, generation_config, num_prompts), freq
        self._file = JsonLinesFile(
            Path(trainer.args.output_dir or "", "completions", "samples.jsonl")
        )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep what was drawn until the step that training resumes from."""
        if state.is_world_process_zero:
            self._file.drop_after(state.global_step or -1)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Draw completions, if it is time."""
        if state.global_step % int(self._freq or state.eval_steps):
            return
        records = self._samples.draw()
        if state.is_world_process_zero:
            self._file.add(records)
            names = ["step", "prompt", "completion"]
            drawn = self._file.read()
            rows = [
                [x["step"], transcript(x["prompt"]), transcript(x["completion"])] for x in drawn
            ]
            log_table(args.report_to, names, rows)
            comet = sys.modules.get("comet_ml") if "comet_ml" in args.report_to else None
            if comet is not None and (run := comet.get_running_experiment()) is not None:
                run.log_table("completions.csv", tabular_data=rows, headers=names)


class WeaveCallback(TrainerCallback):
    """Completes prompts of the evaluation dataset at each evaluation, and sends them to Weave.

    They go to `project_name`, or where the client or the W&B run that is there belongs, with what
    `scorers`, functions of a prompt and a completion, say of them. The other arguments are those of
    `LogCompletionsCallback`, and what Weave is to call the prompts and the policy. ValueError:
    there are no prompts, or, when training begins, no project.
    """

    def __init__(
        self,
        trainer: BaseTrainer,
        project_name: str | None = None,
        scorers: Scorers | None = None,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        dataset_name: str = "eval_dataset",
        model_name: str | None = None,
    ):
        self._weave = require("weave", "WeaveCallback")
        self._samples = Samples(trainer, generation_config, num_prompts)
        self._project, self._scorers = project_name, scorers or {}
        config: Any = trainer.accelerator.unwrap_model(trainer.model).config
        self._names = {"model": model_name or config.name_or_path, "dataset": dataset_name}
        self._last = -1

    @property
    def is_evaluation_mode(self) -> bool:
        """Whether completions are scored, not only kept."""
        return bool(self._scorers)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Connect, unless a client is there."""
        if not state.is_world_process_zero or self._weave.get_client() is not None:
            return
        run = getattr(sys.modules.get("wandb"), "run", None)
        if not (project := self._project or (run and f"{run.entity}/{run.project}")):
            raise ValueError("WeaveCallback needs a project: pass project_name.")
        self._weave.init(project)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Draw completions, and send them; of several datasets, with the first alone."""
        if state.global_step == self._last:
            return
        self._last, scored = state.global_step, []
        if not (records := self._samples.draw()):
            return
        with self._weave.attributes({"training_step": state.global_step}):
            log = self._weave.EvaluationLogger(**self._names)
            for record in records:
                prompt, completion = transcript(record["prompt"]), transcript(record["completion"])
                entry = log.log_prediction(inputs={"prompt": prompt}, output=completion)
                scored.append(scores(self._scorers, prompt, completion))
                for name, value in scored[-1].items():
                    entry.log_score(scorer=name, score=value)
                entry.finish()
            log.log_summary(summary(scored, self._scorers))


def scores(scorers: Scorers, prompt: str, completion: str) -> dict[str, float]:
    """What each function says of a completion; one that fails is left out, with a warning."""
    found = {}
    for name, function in scorers.items():
        try:
            found[name] = function(prompt, completion)
        except Exception as error:
            logger.warning(f"The scorer {name!r} failed: {type(error).__name__}: {error}")
    return found


def summary(scored: list[dict[str, float]], scorers: Scorers) -> dict[str, float]:
    """Count predictions, and those that all functions scored; means of what each said."""
    known = {name: [found[name] for found in scored if name in found] for name in scorers}
    return {
        "total_predictions": len(scored),
        "successful_predictions": sum(found.keys() >= scorers.keys() for found in scored),
        **{f"avg_{name}": fmean(values) for name, values in known.items() if values},
    }

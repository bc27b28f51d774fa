"""Completions that callbacks draw while a run goes on, for trackers and the run's records."""

import math
import sys
from collections.abc import Callable, Mapping
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Any

from datasets import Dataset
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
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
    """Completes prompts of a trainer's evaluation dataset with its policy.

    Online trainers use their own engine and sampling options; for other trainers transformers
    generates.

    Args:
        trainer: any trainer but that of reward models.
        config: replaces the trainer's sampling options.
        max_prompts: only the first so many prompts are completed; None: all.

    Raises:
        TypeError: the model has no output head.
        ValueError: the trainer has no evaluation dataset with a length, or no row has a prompt.
    """

    def __init__(
        self, trainer: BaseTrainer, config: GenerationConfig | None, max_prompts: int | None
    ):
        tokenizer: Any = trainer.processing_class
        model: Any = trainer.accelerator.unwrap_model(trainer.model)
        if getattr(model, "get_output_embeddings", lambda: None)() is None:
            raise TypeError(f"{type(model).__name__} writes no text: it cannot complete prompts.")
        self._trainer = trainer
        self._decode = PromptEncoder(tokenizer).completions
        self._prompts = _prompts(trainer, tokenizer, max_prompts)
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
            options = config.to_dict() | {"max_tokens": config.max_new_tokens}
            if not config.do_sample:
                options["top_k"] = 1  # the most likely token
            changes = {name: options[name] for name in NAMED_OPTIONS if options[name] is not None}
            self._sampling = self._sampling.replace(**changes)
        context = context_length(model)
        if context is not None:
            room = context - max(map(len, self._prompts.token_ids))
            max_tokens = max(1, min(self._sampling.max_tokens, room))
            self._sampling = self._sampling.replace(max_tokens=max_tokens)

    def draw(self) -> list[dict[str, Any]]:
        """Return a record of each completion on the main process; all processes call this."""
        trainer = self._trainer
        ranks = trainer.ranks
        step = trainer.state.global_step
        num_prompts = len(self._prompts)
        count = math.ceil(num_prompts / ranks.count)  # prompts of each rank
        first = ranks.rank * count
        # All ranks must generate equally many rows, so the last ones repeat the last prompt.
        prompts = self._prompts.select([min(first + row, num_prompts - 1) for row in range(count)])
        seeds = row_seeds(("samples", trainer.args.seed, step), first, count)
        with preserve_rng_state(), trainer.phases.inference("generation", count):
            self._engine.sync_weights(step)
            completions = self._engine.generate(prompts, self._sampling.replace(seeds=seeds), 1)
        prompts = completions.completed_prompts(prompts)
        ids = completions.completion_ids
        texts = completions.messages or self._decode(prompts, ids)
        names = ("prompt", "completion", "completion_ids", "finish")
        common = {"step": step, "rewards": {}, "reward": None, "advantage": None}
        columns = zip(prompts.messages, texts, ids, completions.finish_reasons, strict=True)
        records = [common | dict(zip(names, row, strict=True)) for row in columns]
        all_records = chain(*ranks.gather_objects_on_rank_0(records))
        return [
            record | {"group": index}
            for index, record in enumerate(islice(all_records, num_prompts))
        ]


def _prompts(
    trainer: BaseTrainer, tokenizer: PreTrainedTokenizerBase, max_prompts: int | None
) -> Prompts:
    """Return the prompts of the first evaluation dataset, at most `max_prompts`."""
    dataset = trainer.eval_dataset
    if isinstance(dataset, Mapping):
        dataset = next(iter(dataset.values()))
    if not isinstance(dataset, Dataset):
        raise ValueError("Drawing completions needs an eval_dataset with a length: pass one.")
    count = min(len(dataset), max_prompts or len(dataset))
    rows = [dataset[index] for index in range(count)]
    if "prompt" in dataset.column_names:  # of a trainer that generates; others have prepared tokens
        return trainer.encode(rows)  # type: ignore[operator]
    prompt_ids = [_prompt_ids(row) for row in rows]
    prompt_ids = [ids for ids in prompt_ids if ids]
    if not prompt_ids:
        raise ValueError(
            "The rows of eval_dataset have no prompts to complete: use 'prompt' and 'completion' "
            "instead of whole texts."
        )
    messages = [tokenizer.decode(ids) for ids in prompt_ids]
    return Prompts(messages=messages, token_ids=prompt_ids)


def _prompt_ids(example: Example) -> list[int]:
    """Return the tokens before the answers of a prepared example, or before its target tokens."""
    prefix = list(make_group(example).prefix.ids)
    if "labels" in example and len(prefix) == 1:  # a whole text: nothing predicts its first token
        return []
    return prefix


class LogCompletionsCallback(TrainerCallback):
    """Completes prompts of `eval_dataset` every `freq` steps (by default `eval_steps`).

    A table (step, prompt, completion) goes to W&B and Trackio where `report_to` names them, to
    Comet as `completions.csv`, and as `completions/samples.jsonl` into the output folder, for
    `trl completions --split samples` and `trl report`.

    Args:
        trainer: any trainer but that of reward models.
        generation_config: how tokens are drawn; None: as in training, or, if the trainer does not
            generate, as in the model's generation config.
        num_prompts: only the first so many prompts are completed; None: all.
        freq: optimizer steps between two rounds of completions; None: `eval_steps`.

    Raises:
        ValueError: there are no prompts, or neither `freq` nor `eval_steps` is set.
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
        self._samples = Samples(trainer, generation_config, num_prompts)
        self._freq = freq
        self._file = JsonLinesFile(
            Path(trainer.args.output_dir or "", "completions", "samples.jsonl")
        )

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Drop completions of steps after the one that training resumes from."""
        if state.is_world_process_zero:
            self._file.drop_after(state.global_step or -1)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
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

    Args:
        trainer, generation_config, num_prompts: as for `LogCompletionsCallback`.
        project_name: the Weave project; None: that of the current Weave client or W&B run.
        scorers: functions of a prompt and a completion, whose values are sent along.
        dataset_name, model_name: names of the prompts and of the policy in Weave.

    Raises:
        ValueError: there are no prompts or, when training begins, no project.
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
        self._project = project_name
        self._scorers = scorers or {}
        config: Any = trainer.accelerator.unwrap_model(trainer.model).config
        self._names = {"model": model_name or config.name_or_path, "dataset": dataset_name}
        self._last = -1

    @property
    def is_evaluation_mode(self) -> bool:
        """Whether completions are scored, not only kept."""
        return bool(self._scorers)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Connect, unless a client is there."""
        if not state.is_world_process_zero or self._weave.get_client() is not None:
            return
        run = getattr(sys.modules.get("wandb"), "run", None)
        if not (project := self._project or (run and f"{run.entity}/{run.project}")):
            raise ValueError("WeaveCallback needs a project: pass project_name.")
        self._weave.init(project)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Draw completions and send them; with several datasets, after the first one alone."""
        if state.global_step == self._last:
            return
        self._last = state.global_step
        records = self._samples.draw()
        if not records:
            return
        scored: list[dict[str, float]] = []
        with self._weave.attributes({"training_step": state.global_step}):
            log = self._weave.EvaluationLogger(**self._names)
            for record in records:
                prompt = transcript(record["prompt"])
                completion = transcript(record["completion"])
                entry = log.log_prediction(inputs={"prompt": prompt}, output=completion)
                scored.append(scores(self._scorers, prompt, completion))
                for name, value in scored[-1].items():
                    entry.log_score(scorer=name, score=value)
                entry.finish()
            log.log_summary(summary(scored, self._scorers))


def scores(scorers: Scorers, prompt: str, completion: str) -> dict[str, float]:
    """Score a completion with each function; one that fails is left out, with a warning."""
    values = {}
    for name, function in scorers.items():
        try:
            values[name] = function(prompt, completion)
        except Exception as error:
            logger.warning(f"The scorer {name!r} failed: {type(error).__name__}: {error}")
    return values


def summary(scored: list[dict[str, float]], scorers: Scorers) -> dict[str, float]:
    """Count predictions, and those that all functions scored; average what each returned."""
    values_by_scorer = {
        name: [values[name] for values in scored if name in values] for name in scorers
    }
    return {
        "total_predictions": len(scored),
        "successful_predictions": sum(values.keys() >= scorers.keys() for values in scored),
        **{f"avg_{name}": fmean(values) for name, values in values_by_scorer.items() if values},
    }

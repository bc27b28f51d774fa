"""`trl lengths`: how long the rows of a dataset are, and what a limit on them would cost."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..data.lengths import LengthProfile
from ..memory.estimate import Estimate
from ..trainer.base.options import option
from ..trainer.length_profile import profile_rows
from ..trainer.model_config import ModelConfig
from ..trainer.offline.offline_config import OfflineConfig
from ..trainer.sft_config import SFTConfig
from .commands import TRAINING
from .exit import one_line_errors
from .length_charts import draw, page
from .memory_plan import build_options, make_plan
from .parser import TrlParser
from .train import load_data, take_split


@dataclass
class LengthsArguments:
    """What is profiled, and how it is shown."""

    method: str = option("sft", "Command whose rows are profiled.", choices=tuple(TRAINING))
    max_lengths: list[int] | None = option(None, "Limits to judge, besides common ones.")
    json: bool = option(False, "Print the profile as JSON.")
    html: str | None = option(None, "File for a page with charts.")
    png: str | None = option(None, "File for a chart; needs matplotlib.")


def main(words: list[str] | None = None) -> None:
    """Print the lengths of the dataset that the options describe."""
    words = list(sys.argv[1:] if words is None else words)
    parser = TrlParser(LengthsArguments, prog="trl lengths", add_help=False)
    with one_line_errors(parser):
        parser = make_parser(parser.read(words)[0].get("method", "sft"))
        if {"-h", "--help"} & set(words):
            parser.print_help()
            return
        values, others, rest = parser.read(words)
        parser.check([*rest, *(f"--{name}" for name in others)])
        own, script, training, model, mixture = build_options(parser, values, 1)
        if model.model_name_or_path is None:
            raise ValueError("--model_name_or_path is required.")
        _show(own, profiled(own, script, training, model, mixture), training)


def make_parser(method: str = "sft") -> TrlParser:
    """The options of `trl lengths --method METHOD`: its own, and those of the training command."""
    types = TRAINING[method].make_parser().dataclass_types
    return TrlParser((LengthsArguments, *types), prog="trl lengths")


def profiled(
    own: LengthsArguments, script: Any, training: Any, model: ModelConfig, mixture: Any
) -> LengthProfile:
    """Profile the training split as the trainer would prepare it, with the memory of each limit."""
    dataset = take_split(
        load_data(script, mixture), script.dataset_train_split, "--dataset_train_split"
    )
    given = [*(own.max_lengths or []), *filter(None, [getattr(training, "max_length", None)])]
    name = model.model_name_or_path or ""
    profile = profile_rows(dataset, name, training, given, model.model_revision)
    plan = make_plan(script, training, model)
    limits = []
    for row in profile.limits:
        peak = Estimate(plan.model, plan.run.of_length(row["max_length"])).peak
        limits.append(row | {"memory MB": round(peak / 1e6), "fits": peak <= plan.budget})
    option = "tokens of a prompt" if plan.run.generates else "max_length"
    largest = next(limit.largest for limit in plan.limits() if limit.option == option)
    return replace(profile, limits=limits, largest_that_fits=largest)


def _show(own: LengthsArguments, profile: LengthProfile, training: Any) -> None:
    size = profile.enough(profile.largest_that_fits)
    packs = isinstance(training, SFTConfig) and profile.parts["row"]["p50"] <= size / 2
    line = (
        "--max_length" if isinstance(training, OfflineConfig) else "--max_prompt_length"
    ) + f" {size}"
    line += " --packing" * packs
    if own.json:
        print(json.dumps(profile.as_dict() | {"options": line}, indent=1))
    else:
        print("\n".join([*profile.lines(), "", f"Options to paste: {line}"]))
    if own.html:
        Path(own.html).write_text(page(profile, line), encoding="utf-8")
    if own.png:
        draw(profile, own.png)

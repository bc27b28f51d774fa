"""`trl lengths`: how long the rows of a dataset are, and what a limit on them would cost."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..data.encode import TextEncoder
from ..data.lengths import LengthProfile, profile_preferences, profile_prompts, profile_supervised
from ..data.preference_rows import prepare_preferences
from ..data.prepare import prepare_supervised
from ..data.supervised import SupervisedOptions
from ..imports import require
from ..memory.estimate import Estimate
from ..memory.plan import table
from ..models.loading import load_tokenizer
from ..online.prompts import PromptEncoder
from ..options import option
from ..trainer.model_config import ModelConfig, tokenizer_source
from ..trainer.offline.offline_config import OfflineConfig, set_template
from ..trainer.sft_config import SFTConfig
from .exit import one_line_errors
from .memory_plan import build_options, make_plan, parser_for
from .methods import METHODS
from .train import load_data, take_split

LOST = 0.001  # share of the tokens that a proposed limit may lose


@dataclass
class LengthsArguments:
    """What is profiled, and how it is shown."""

    method: str = option("sft", "Command whose rows are profiled.", choices=tuple(METHODS))
    max_lengths: list[int] | None = option(None, "Limits to judge, besides common ones.")
    json: bool = option(False, "Print the profile as JSON.")
    html: str | None = option(None, "File for a page with charts.")
    png: str | None = option(None, "File for a chart; needs matplotlib.")


def main(words: list[str] | None = None) -> None:
    """Print the lengths of the dataset that the options describe."""
    words = list(sys.argv[1:] if words is None else words)
    parser = parser_for(words, LengthsArguments, "lengths")
    with one_line_errors(parser):
        values, others, rest = parser.read(words)
        parser.check([*rest, *(f"--{name}" for name in others)])
        own, script, training, model, mixture = build_options(parser, values, 1)
        profile = profiled(own, script, training, model, mixture)
        size = proposed(profile)
        packs = isinstance(training, SFTConfig) and profile.parts["row"]["p50"] <= size / 2
        name = "max_length" if isinstance(training, OfflineConfig) else "max_prompt_length"
        line = f"--{name} {size}" + " --packing" * packs
        if own.json:
            print(json.dumps(vars(profile) | {"options": line}, indent=1))
        else:
            print(f"{described(profile)}\n\nOptions to paste: {line}")
        if own.html:
            Path(own.html).write_text(page(profile, line), encoding="utf-8")
        if own.png:
            draw(profile, own.png)


def profiled(
    own: LengthsArguments, script: Any, training: Any, model: ModelConfig, mixture: Any
) -> LengthProfile:
    """Profile the training split as the trainer would prepare it, with the memory of each limit."""
    splits = load_data(script, mixture)
    data = take_split(splits, script.dataset_train_split, "--dataset_train_split")
    given = [*(own.max_lengths or []), *filter(None, [getattr(training, "max_length", None)])]
    profile = profile_rows(data, model, training, given)
    plan = make_plan(script, training, model)
    limits = []
    for row in profile.limits:
        peak = Estimate(plan.model, plan.run.of_length(row["max_length"])).peak
        limits.append(row | {"memory MB": round(peak / 1e6), "fits": peak <= plan.budget})
    option = "tokens of a prompt" if plan.run.generates else "max_length"
    largest = next(limit.largest for limit in plan.limits() if limit.option == option)
    return replace(profile, limits=limits, largest_that_fits=largest)


def proposed(profile: LengthProfile) -> int:
    """The shortest judged limit that loses little of the tokens, if the device has room for it."""
    total = profile.parts.get("trained", profile.parts[next(reversed(profile.parts))])["tokens"]
    for row in profile.limits:
        if row["trained lost" if "trained lost" in row else "tokens lost"] <= LOST * total:
            break
    return min(row["max_length"], profile.largest_that_fits or row["max_length"])


def profile_rows(data: Any, model: ModelConfig, args: Any, limits: Sequence[int]) -> LengthProfile:
    """Profile a dataset as the trainer of `args` would prepare it; `limits` are judged as well."""
    tokenizer = load_tokenizer(*tokenizer_source(model), args.trust_remote_code)
    if not isinstance(args, OfflineConfig):
        encode = PromptEncoder(tokenizer, args.chat_template_kwargs)
        return profile_prompts(encode(list(data)).token_ids, args.num_generations, limits)
    set_template(None, tokenizer, args)
    encoder, processes = TextEncoder(tokenizer), args.dataset_num_proc
    if not isinstance(args, SFTConfig):
        rows = prepare_preferences(data, encoder, num_proc=processes)
        return profile_preferences(rows, limits)
    rows = prepare_supervised(data, encoder, SupervisedOptions.of(args), processes)
    return profile_supervised(rows, limits, args.max_length if args.packing else None)


def described(profile: LengthProfile) -> str:
    """All facts of a profile, as one screen of text."""
    longest = ", ".join(f"row {row} ({size})" for row, size in profile.longest)
    parts = [{"part": name} | row for name, row in profile.parts.items()]
    tables = [
        [list(rows[0]), *([*map(str, row.values())] for row in rows)]
        for rows in (parts, profile.limits, profile.padding)
    ]
    facts = profile.packing | profile.repeated
    if profile.largest_that_fits is not None:
        facts["largest limit that fits the device"] = profile.largest_that_fits
    said = [f"{name}: {value:.6g}" for name, value in facts.items()] + profile.warnings
    head = f"{profile.rows:,} rows, {profile.tokens:,} tokens. Longest: {longest}."
    return "\n\n".join([head, *map(table, tables), "\n".join(said)])


def page(profile: LengthProfile, options: str) -> str:
    """A page with the chart and the tables of a profile, and the options that are proposed."""
    text = escape(described(profile))
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Lengths</title>"
        "<style>body{font:15px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "pre{overflow-x:auto}</style><h1>Lengths of the rows</h1>"
        f"<p>Options: <code>{escape(options)}</code></p>{_svg(profile)}<pre>{text}</pre></html>\n"
    )


def _svg(profile: LengthProfile) -> str:
    """Rows by length as bars, and the share of rows up to each length as a line."""
    edges, rows = profile.histogram["edges"], profile.histogram["rows"]
    most, total = max(rows), max(sum(rows), 1)
    # Places are tokens to the right and shares downwards; lines are as thick as without scaling.
    style = "<style>path{fill:none;vector-effect:non-scaling-stroke}</style>"
    found = [f'<svg viewBox="0 0 {edges[-1]} 1" preserveAspectRatio="none" role="img" ']
    found.append(f'width="100%" height="240">{style}')
    for start, stop, count in zip(edges[:-1], edges[1:], rows, strict=True):
        found.append(
            f'<rect x="{start}" y="{1 - count / most:.4f}" width="{stop - start}" '
            f'height="{count / most:.4f}" fill="#8fb4d9"><title>{start} to {stop - 1} tokens: '
            f"{count} rows</title></rect>"
        )
    shares = zip(edges, accumulate(rows, initial=0), strict=True)
    line = " ".join(f"{edge},{1 - n / total:.4f}" for edge, n in shares)
    found.append(f'<path d="M{line}" stroke="#b5482a" />')
    part = profile.parts[next(reversed(profile.parts))]
    marks = {name: part[name] for name in ("p50", "p95", "p99")}
    found += [f'<path d="M{x} 0V1" stroke="#555" stroke-dasharray="3" />' for x in marks.values()]
    said = ", ".join(f"{name}: {x}" for name, x in marks.items())
    return "".join(found) + f"</svg><p>0 to {edges[-1]} tokens; dashed: {said}.</p>"


def draw(profile: LengthProfile, png: str) -> None:
    """Write the same chart as a picture, for which matplotlib is needed."""
    library = require("matplotlib.figure", "A chart of lengths as PNG")
    edges, rows = profile.histogram["edges"], profile.histogram["rows"]
    figure = library.Figure((8, 3), layout="constrained")
    axes = figure.subplots()
    axes.stairs(rows, edges, fill=True, alpha=0.5)
    axes.set(xlabel="tokens of a row", ylabel="rows", xlim=(0, edges[-1]))
    shares = axes.twinx()
    shares.plot(edges, [n / max(sum(rows), 1) for n in accumulate(rows, initial=0)], color="C3")
    shares.set(ylabel="share of rows up to this length", ylim=(0, 1.02))
    figure.savefig(png, dpi=120)

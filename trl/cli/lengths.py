"""`trl lengths`: show how long the rows of a dataset are, and what a limit would cost."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate
from pathlib import Path

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
from ..trainer.base.base_config import BaseConfig
from ..trainer.model_config import ModelConfig, tokenizer_source
from ..trainer.offline.offline_config import OfflineConfig, set_template
from ..trainer.sft_config import SFTConfig
from .exit import one_line_errors
from .files import AnyDataset
from .memory_plan import RunOptions, build_options, make_plan, parser_for
from .methods import METHODS
from .train import load_data, take_split

TOLERATED_LOSS = 0.001  # share of the tokens that a proposed limit may leave out


@dataclass
class LengthsArguments:
    """What is profiled, and how it is shown."""

    method: str = option("sft", "Command whose rows are profiled.", choices=tuple(METHODS))
    max_lengths: list[int] | None = option(None, "Limits to judge, besides common ones.")
    json: bool = option(False, "Print the profile as JSON.")
    html: str | None = option(None, "File for a page with charts.")
    png: str | None = option(None, "File for a chart; needs matplotlib.")


def main(argv: list[str] | None = None) -> None:
    """Print the lengths of the dataset that the options describe."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = parser_for(argv, LengthsArguments, "lengths")
    with one_line_errors(parser):
        parsed = parser.read(argv)
        unknown_config = [f"--{name}" for name in parsed.unknown_config]
        parser.check_unknown([*parsed.unknown_argv, *unknown_config])
        options = build_options(parser, parsed.values, processes=1)
        profile = profile_run(options)
        proposed_options = propose_options(profile, options.training)
        own = options.own
        if own.json:
            print(json.dumps(vars(profile) | {"options": proposed_options}, indent=1))
        else:
            print(f"{as_text(profile)}\n\nOptions to paste: {proposed_options}")
        if own.html:
            Path(own.html).write_text(as_html(profile, proposed_options), encoding="utf-8")
        if own.png:
            write_png(profile, own.png)


def profile_run(options: RunOptions) -> LengthProfile:
    """Profile the training split as the trainer would prepare it, with the memory of each limit."""
    script = options.script
    training = options.training
    splits = load_data(script, options.mixture)
    data = take_split(splits, script.dataset_train_split, "--dataset_train_split")
    limits = list(options.own.max_lengths or [])
    max_length = getattr(training, "max_length", None)
    if max_length:
        limits.append(max_length)
    profile = profile_rows(data, options.model, training, limits)
    plan = make_plan(script, training, options.model)
    judged_limits = []
    for limit in profile.limits:
        run = plan.run.of_length(limit["max_length"])
        peak = Estimate(plan.model, run).peak
        judged_limits.append(limit | {"memory MB": round(peak / 1e6), "fits": peak <= plan.budget})
    limited_option = "tokens of a prompt" if plan.run.generates else "max_length"
    largest = next(limit.largest for limit in plan.limits() if limit.option == limited_option)
    return replace(profile, limits=judged_limits, largest_that_fits=largest)


def propose_options(profile: LengthProfile, training: BaseConfig) -> str:
    """Return the options that a run on these rows should have."""
    limit = propose_limit(profile)
    name = "max_length" if isinstance(training, OfflineConfig) else "max_prompt_length"
    options = f"--{name} {limit}"
    # Packing pays off if most rows are short. Only the profile of SFT has the part "row".
    if isinstance(training, SFTConfig) and profile.parts["row"]["p50"] <= limit / 2:
        options += " --packing"
    return options


def propose_limit(profile: LengthProfile) -> int:
    """Return the shortest judged limit that leaves out few tokens, if it fits into memory.

    Otherwise, return the largest limit that fits.
    """
    last_part = profile.parts[next(reversed(profile.parts))]
    total = profile.parts.get("trained", last_part)["tokens"]
    for limit in profile.limits:
        lost = limit["trained lost"] if "trained lost" in limit else limit["tokens lost"]
        if lost <= TOLERATED_LOSS * total:
            break
    length: int = limit["max_length"]
    return min(length, profile.largest_that_fits or length)


def profile_rows(
    data: AnyDataset, model: ModelConfig, args: BaseConfig, limits: Sequence[int]
) -> LengthProfile:
    """Profile a dataset as the trainer with the configuration `args` would prepare it.

    Args:
        limits: limits to judge, besides common ones.
    """
    tokenizer = load_tokenizer(*tokenizer_source(model), args.trust_remote_code)
    if not isinstance(args, OfflineConfig):
        encode = PromptEncoder(tokenizer, args.chat_template_kwargs)
        return profile_prompts(encode(list(data)).token_ids, args.num_generations, limits)
    set_template(None, tokenizer, args)
    encoder = TextEncoder(tokenizer)
    processes = args.dataset_num_proc
    if not isinstance(args, SFTConfig):
        rows = prepare_preferences(data, encoder, num_proc=processes)
        return profile_preferences(rows, limits)
    rows = prepare_supervised(data, encoder, SupervisedOptions.of(args), processes)
    return profile_supervised(rows, limits, args.max_length if args.packing else None)


def as_text(profile: LengthProfile) -> str:
    """Render a profile as text that fits on a screen."""
    longest = ", ".join(f"row {row} ({length})" for row, length in profile.longest)
    summary = f"{profile.rows:,} rows, {profile.tokens:,} tokens. Longest: {longest}."
    part_rows = [{"part": name} | row for name, row in profile.parts.items()]
    tables = []
    for rows in (part_rows, profile.limits, profile.padding):
        header = list(rows[0])
        tables.append(table([header, *([*map(str, row.values())] for row in rows)]))
    facts = profile.packing | profile.repeated
    if profile.largest_that_fits is not None:
        facts["largest limit that fits the device"] = profile.largest_that_fits
    fact_lines = [f"{name}: {value:.6g}" for name, value in facts.items()]
    return "\n\n".join([summary, *tables, "\n".join(fact_lines + profile.warnings)])


def as_html(profile: LengthProfile, options: str) -> str:
    """Render a page with the chart, the proposed options and the tables of a profile."""
    text = escape(as_text(profile))
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Lengths</title>"
        "<style>body{font:15px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "pre{overflow-x:auto}</style><h1>Lengths of the rows</h1>"
        f"<p>Options: <code>{escape(options)}</code></p>{_svg(profile)}<pre>{text}</pre></html>\n"
    )


def _svg(profile: LengthProfile) -> str:
    """Draw the number of rows by length as bars, and the share of shorter rows as a line."""
    edges = profile.histogram["edges"]
    row_counts = profile.histogram["rows"]
    largest_count = max(row_counts)
    total = max(sum(row_counts), 1)
    # The x axis is in tokens and the y axis in shares, from top to bottom. Strokes do not scale.
    parts = [
        f'<svg viewBox="0 0 {edges[-1]} 1" preserveAspectRatio="none" role="img" ',
        'width="100%" height="240">',
        "<style>path{fill:none;vector-effect:non-scaling-stroke}</style>",
    ]
    for start, stop, count in zip(edges[:-1], edges[1:], row_counts, strict=True):
        height = count / largest_count
        parts.append(
            f'<rect x="{start}" y="{1 - height:.4f}" width="{stop - start}" '
            f'height="{height:.4f}" fill="#8fb4d9"><title>{start} to {stop - 1} tokens: '
            f"{count} rows</title></rect>"
        )
    cumulative_counts = accumulate(row_counts, initial=0)
    points = [
        f"{edge},{1 - count / total:.4f}"
        for edge, count in zip(edges, cumulative_counts, strict=True)
    ]
    parts.append(f'<path d="M{" ".join(points)}" stroke="#b5482a" />')
    last_part = profile.parts[next(reversed(profile.parts))]
    percentiles = {name: last_part[name] for name in ("p50", "p95", "p99")}
    for length in percentiles.values():
        parts.append(f'<path d="M{length} 0V1" stroke="#555" stroke-dasharray="3" />')
    dashed = ", ".join(f"{name}: {length}" for name, length in percentiles.items())
    parts.append(f"</svg><p>0 to {edges[-1]} tokens; dashed: {dashed}.</p>")
    return "".join(parts)


def write_png(profile: LengthProfile, path: str) -> None:
    """Write the same chart as a PNG file; needs matplotlib."""
    matplotlib_figure = require("matplotlib.figure", "A chart of lengths as PNG")
    edges = profile.histogram["edges"]
    row_counts = profile.histogram["rows"]
    figure = matplotlib_figure.Figure((8, 3), layout="constrained")
    axes = figure.subplots()
    axes.stairs(row_counts, edges, fill=True, alpha=0.5)
    axes.set(xlabel="tokens of a row", ylabel="rows", xlim=(0, edges[-1]))
    total = max(sum(row_counts), 1)
    cumulative_shares = [count / total for count in accumulate(row_counts, initial=0)]
    share_axes = axes.twinx()
    share_axes.plot(edges, cumulative_shares, color="C3")
    share_axes.set(ylabel="share of rows up to this length", ylim=(0, 1.02))
    figure.savefig(path, dpi=120)

"""Which checkpoint a run resumes from, and why not from another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.utils import logging

from ...distributed import Ranks, fsdp_version
from ...models.unwrap import is_peft_model
from .checkpoint import checkpoints_in, facts_of, find_fault, settle
from .run_settings import PROCESSES, differences

logger = logging.get_logger(__name__)


def choose_checkpoint(wanted: Any, args: Any, settings: dict[str, Any], ranks: Ranks) -> str | None:
    """Find the checkpoint to resume from; every rank must call this.

    Args:
        wanted (`bool` or `str`, *optional*): True for the newest intact one in `args.output_dir`,
            or the path of one.
        args (`TrainingArguments`): options.
        settings: those of this run, by name.
        ranks (`Ranks`): all processes, which decide together.

    Returns:
        `str`: the folder; None if nothing is wanted.

    Raises:
        ValueError: on every rank, if there is none, or some rank does not find it.
    """
    found: tuple[str | None, str | None] = (None, None)
    if ranks.rank == 0:
        found = _chosen_on_first(wanted, args, settings)
    chosen, problem = ranks.gather_objects(found)[0]
    if args.local_process_index == 0:
        settle(args.output_dir)  # of a disk of its own; on that of rank 0 all is done
    if problem is not None:
        raise ValueError(problem)
    if chosen is not None:
        _check_found(chosen, ranks)
    return chosen


def _chosen_on_first(
    wanted: Any, args: Any, settings: dict[str, Any]
) -> tuple[str | None, str | None]:
    settle(args.output_dir)
    if not wanted:
        return None, None
    try:
        found = _newest_intact(args.output_dir) if wanted is True else _named(Path(wanted))
        _compare(found, args, settings)
    except ValueError as error:
        return None, str(error)
    return str(found), None


def _check_found(chosen: str, ranks: Ranks) -> None:
    """A process that finds nothing would begin anew while the others go on."""
    finds = ranks.gather_objects((Path(chosen) / "trainer_state.json").is_file())
    lacking = [str(rank) for rank, found in enumerate(finds) if not found]
    if lacking:
        raise ValueError(
            f"{chosen} cannot be resumed from: rank {', '.join(lacking)} does not find it. Put "
            "output_dir on a disk that all nodes share, or train with save_on_each_node=True."
        )


def warn_of_earlier_run(folder: str) -> None:
    """Say that a run that begins at its start will write over an earlier one."""
    earlier = checkpoints_in(folder)
    if earlier:
        logger.warning(
            f"{folder} has {earlier[0].name} of an earlier run, which this run begins over. To go "
            "on with it, set resume_from_checkpoint=True; to keep the runs apart, choose another "
            "output_dir."
        )


def check_engine(model: Any, accelerator: Any) -> None:
    """Refuse an adapter where peft cannot load one.

    Raises:
        ValueError: under FSDP1, where peft would read one wrapped module without the others.
    """
    if fsdp_version(accelerator) == 1 and is_peft_model(model):
        raise ValueError(
            "resume_from_checkpoint: an adapter cannot be restored under FSDP1. Train it under "
            "FSDP2 (--accelerate_config fsdp2), or begin a new run with the checkpoint as "
            "model_name_or_path."
        )


def _newest_intact(folder: str) -> Path:
    problems: list[str] = []
    for checkpoint in checkpoints_in(folder):
        problem = _why_not(checkpoint)
        if problem is None:
            for words in problems:
                logger.warning(f"{words} Resuming from {checkpoint.name} instead.")
            return checkpoint
        problems.append(f"{checkpoint.name} cannot be resumed from: {problem}.")
    found = " ".join(problems) or "There is no checkpoint there."
    raise ValueError(
        f"resume_from_checkpoint=True: nothing to resume in output_dir={folder!r}. {found} Without "
        "the option, training begins at the start."
    )


def _named(checkpoint: Path) -> Path:
    option = f"resume_from_checkpoint={str(checkpoint)!r}"
    if not checkpoint.is_dir():
        raise ValueError(f"{option}: there is no such folder.")
    problem = _why_not(checkpoint)
    if problem is None:
        return checkpoint
    inside = checkpoints_in(checkpoint)
    others = inside or [path for path in checkpoints_in(checkpoint.parent) if path != checkpoint]
    nearby = next((str(path) for path in others if _why_not(path) is None), None)
    advice = f" {nearby} is intact." if nearby else ""
    raise ValueError(f"{option} cannot be resumed from: {problem}.{advice}")


def _why_not(checkpoint: Path) -> str | None:
    fault = find_fault(checkpoint)
    if fault is None and (facts_of(checkpoint) or {}).get("weights_only"):
        return "it was saved with save_only_model=True, so it has no optimizer"
    return fault


def _compare(checkpoint: Path, args: Any, settings: dict[str, Any]) -> None:
    facts = facts_of(checkpoint)
    if facts is None:
        logger.warning(
            f"{checkpoint} was written by another program: its files have no checksums, and "
            "whether its settings are those of this run is not known."
        )
        return
    changes = differences(facts["settings"], settings)
    if not changes:
        return
    listed = "".join(f"\n  - {change}" for change in changes)
    written = facts["settings"].get(PROCESSES, settings[PROCESSES])
    if written != settings[PROCESSES] and args.deepspeed_plugin is not None:
        raise ValueError(
            f"{checkpoint} was written by a run with other settings:{listed}\nDeepSpeed divides "
            f"optimizer states by the number of processes and cannot divide them anew: resume with "
            f"--num_processes {written}, or begin a new run with the checkpoint as "
            "model_name_or_path."
        )
    if not args.resume_with_changes:
        raise ValueError(
            f"{checkpoint} was written by a run with other settings:{listed}\nRestore them, or "
            "accept the changes with resume_with_changes=True."
        )
    logger.warning(f"{checkpoint} is resumed with other settings:{listed}")

"""Checkpoints: written below `unfinished/`, sealed with checksums of their files, then renamed."""

import copy
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils import logging

from ...distributed import Ranks
from ...number_format import format_bytes
from ...redaction import is_secret, without_secrets

logger = logging.get_logger(__name__)

MANIFEST = "trl_manifest.json"
UNFINISHED = "unfinished"
_FREE = (MANIFEST, "README.md")  # files that a user may edit, and the manifest itself
# Of larger files than 16 MiB, samples are hashed.
_SAMPLES = 256
_SAMPLE_BYTES = 2**16


@dataclass
class DataPosition:
    """How far a run has come in its training data, and in an evaluation."""

    epoch: int = 0
    micro_steps: int = 0  # since the start of the epoch
    eval_batches: int = 0  # since the start of the evaluation


# Of what `RankState` writes; changed with every part that older code would read otherwise.
STATE_FORMAT = 2


class RankState:
    """The state of this process that the next step depends on and transformers does not save."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._parts: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    def register(self, name: str, save: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        """Add a part: `save` returns plain values and tensors, and `restore` takes them back."""
        self._parts[name] = save, restore

    def write(self, folder: str | Path, layout: list[int], position: DataPosition) -> None:
        """Write the file of this process, valid only for this `layout`: the sizes of batches."""
        state = {name: save() for name, (save, _) in self._parts.items()}
        facts = {"format": STATE_FORMAT, "plan": layout}
        torch.save(facts | vars(position) | state, self._path(folder))

    def read(self, folder: str | Path, layout: list[int]) -> dict[str, Any] | None:
        """Read what `write` wrote; None on every rank if one of them has no file for `layout`.

        A file of another `STATE_FORMAT` is a ValueError.
        """
        path = self._path(folder)
        with self._ranks.fail_together("reading the state of the run"):
            state = load(path) if path.exists() else None
            if state is not None and state.get("format", 1) != STATE_FORMAT:
                raise ValueError(
                    f"{path} was written by another version of trl, whose runs this one cannot go "
                    "on with. Resume with that version, or begin a new run with "
                    f"model_name_or_path={str(folder)!r}."
                )
        fits = state is not None and state["plan"] == layout
        # Ranks that continue a rollout batch and ranks that begin one would wait for each other.
        lacking = [rank for rank, has in enumerate(self._ranks.gather_objects(fits)) if not has]
        if not lacking:
            return state
        if self._ranks.rank == 0:
            logger.warning(
                f"{folder} has no state of rank {', '.join(map(str, lacking))} for these batch "
                "sizes: a round in progress is generated again on all ranks."
            )
        return None

    def restore(self, state: dict[str, Any]) -> None:
        """Restore each part that the checkpoint has; other parts stay as they are."""
        for name, (_, restore) in self._parts.items():
            if name in state:
                restore(state[name])

    def _path(self, folder: str | Path) -> Path:
        return Path(folder) / f"trl_state_{self._ranks.rank}.pt"


def load(path: Path, in_place: bool = False) -> Any:
    """Read tensors and plain values; a file with anything else in it is refused.

    Tensors that are left `in_place` are read when they are used, which the file must outlive.
    """
    return torch.load(path, map_location="cpu", weights_only=True, mmap=in_place)


def checkpoints_in(folder: str | Path) -> list[Path]:
    """Return the checkpoints in an output folder, highest step first."""
    folders = [
        path
        for path in Path(folder).glob("*")
        if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir()
    ]
    return sorted(folders, key=lambda path: int(path.name.split("-")[1]), reverse=True)


@contextmanager
def explained(staged: Path, final: Path) -> Iterator[None]:
    """If saving fails, remove what was written, and say in the error how full the disk is."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(staged, ignore_errors=True)
        folder = next(path for path in final.absolute().parents if path.is_dir())
        free = format_bytes(shutil.disk_usage(folder).free)
        older = ", ".join(path.name for path in checkpoints_in(final.parent))
        raise OSError(
            f"{final.name} could not be saved in {final.parent} ({error}); {free} are free "
            f"there. Earlier checkpoints are untouched: {older or 'there are none'}."
        ) from error


def save_arguments(args: TrainingArguments, folder: str | Path) -> None:
    """Replace the `training_args.bin` of transformers by one without secrets."""
    if not args.should_save:
        return
    public = copy.copy(args)
    vars(public).update(
        {
            name: None if is_secret(name, value) else without_secrets(value)
            for name, value in vars(args).items()
        }
    )
    torch.save(public, Path(folder, TRAINING_ARGS_NAME))


def publish_together(
    staged: Path, final: Path, facts: dict[str, Any], best: str | None, args: Any, ranks: Ranks
) -> None:
    """Seal and publish what all ranks have written, once on each disk, and remove old checkpoints.

    Every rank calls this. `facts` are kept with the checksums, as JSON; the `best` one stays.
    """
    mark = staged / ".disk-of-rank-0"  # shows who writes to the same disk
    if ranks.rank == 0:
        mark.touch()
    ranks.wait()  # also for all files
    shares = mark.exists()  # nodes may have disks of their own
    ranks.wait()  # for all to have looked
    if ranks.rank == 0:
        mark.unlink()
    if ranks.rank == 0 or (args.local_process_index == 0 and not shares):
        seal(staged, facts, args.checkpoint_checksums == "all")
        publish(staged, final)
        rotate(final.parent, args.save_total_limit, [final, *([Path(best)] if best else [])])
    ranks.wait()


def seal(folder: Path, facts: dict[str, Any], whole: bool = True) -> None:
    """Write the manifest of a complete folder, with checksums of `whole` files or of samples."""
    files = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.name not in _FREE and path.is_file()
    }
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(_flush, files.values()))
        descriptions = pool.map(lambda path: _describe(path, whole), files.values())
        content = {"facts": facts, "files": dict(zip(files, descriptions, strict=True))}
    text = json.dumps({"content": content, "sha256": _text_sum(content)}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    _flush(folder / MANIFEST)
    _flush(folder)


def facts_of(folder: Path) -> dict[str, Any] | None:
    """Return the `facts` given to `seal`; None if another program wrote the folder."""
    return _content(folder).get("facts")


def find_fault(folder: Path) -> str | None:
    """Check all files of a checkpoint; return what is wrong with it, or None."""
    if not (folder / "trainer_state.json").is_file():
        return "trainer_state.json is missing"
    try:
        content = _content(folder)
    except ValueError as error:
        return str(error)
    if not content:
        ours = sorted(path.name for path in folder.glob("trl_state_*.pt"))
        return f"{MANIFEST} is missing, though {ours[0]} is there" if ours else None
    files = content["files"]
    with ThreadPoolExecutor(4) as pool:
        faults = pool.map(_fault_of, map(folder.joinpath, files), files.values())
        return next(filter(None, faults), None)


def publish(staged: Path, final: Path) -> None:
    """Move a sealed checkpoint to its final name, replacing a folder of that name."""
    if final.exists():
        _withdraw(final)
    staged.rename(final)
    _flush(final.parent)
    with suppress(OSError):  # something else is in it
        staged.parent.rmdir()


def clean_up(folder: str | Path) -> None:
    """Finish or remove checkpoints that a run was saving when it was killed."""
    unfinished = Path(folder) / UNFINISHED
    for staged in checkpoints_in(unfinished):
        if (staged / MANIFEST).exists() and find_fault(staged) is None:
            publish(staged, Path(folder) / staged.name)
    shutil.rmtree(unfinished, ignore_errors=True)


def rotate(folder: str | Path, limit: int | None, keep: list[Path]) -> None:
    """Remove the oldest checkpoints until `limit` are left, but none of `keep`; 0: no limit."""
    if not limit or limit < 0:
        return
    protected = {path.resolve() for path in keep}
    removable = [path for path in checkpoints_in(folder)[::-1] if path.resolve() not in protected]
    removable.sort(key=lambda path: path.stat().st_mtime)  # resumed runs write lower steps later
    excess = len(removable) + len(protected) - max(limit, len(protected))
    for path in removable[: max(0, excess)]:
        _withdraw(path)
        with suppress(OSError):
            path.with_name(UNFINISHED).rmdir()


def _content(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.exists():
        return {}
    with suppress(ValueError, KeyError, TypeError):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["sha256"] == _text_sum(manifest["content"]):
            return manifest["content"]
    raise ValueError(f"{MANIFEST} is damaged")


def _fault_of(path: Path, expected: dict[str, Any]) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    if (size := path.stat().st_size) != expected["bytes"]:
        return f"{path.name} has {size} bytes, not {expected['bytes']}"
    is_intact = _describe(path, whole="sha256" in expected) == expected
    return None if is_intact else f"{path.name} is not what was written: its checksum differs"


def _text_sum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _describe(path: Path, whole: bool) -> dict[str, Any]:
    """Return size and checksum of a file: `sha256` of all bytes, or `sampled_sha256`."""
    size = path.stat().st_size
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        if whole or size <= _SAMPLES * _SAMPLE_BYTES:
            return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        for sample in range(_SAMPLES):  # the first begins the file, the last ends it
            file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            checksum.update(file.read(_SAMPLE_BYTES))
    return {"bytes": size, "sampled_sha256": checksum.hexdigest()}


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _withdraw(checkpoint: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that its name never holds half of it."""
    doomed = checkpoint.with_name(UNFINISHED) / f"replaced-{checkpoint.name}"
    doomed.parent.mkdir(exist_ok=True)
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)

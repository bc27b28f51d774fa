"""Names of models and datasets: paths here, or ids on the hub. Loads no model and no dataset."""

import os
import re
from difflib import get_close_matches
from pathlib import Path

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
HUB_SECONDS = 10.0
CONFIGS = ("config.json", "adapter_config.json")
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def offline_variable() -> str | None:
    """The environment variable that switches the hub off, such as "HF_HUB_OFFLINE=1"."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        return None
    names = [name for name in OFFLINE_VARIABLES if os.environ.get(name)]
    return f"{names[0]}={os.environ[names[0]]}" if names else "HF_HUB_OFFLINE=1"


def check_upload(folder: str) -> None:
    """Raise an OfflineModeIsEnabled error before an upload of a folder, if the hub is off."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    variable = offline_variable()
    if variable is not None:
        raise OfflineModeIsEnabled(
            f"push_to_hub: nothing was uploaded, as {variable} switches the hub off. Unset it "
            f"and call push_to_hub again, or run `hf upload REPOSITORY {folder}`."
        )


def missing_from_hub(name: str, repo_type: str = "model") -> str | None:
    """Say why the hub cannot give what has this name; None if it may.

    It is asked once, where loading would ask again and again for a minute.
    """
    if HUB_ID.fullmatch(name) is None:
        return "there is no such folder"
    if (variable := offline_variable()) is not None:
        return f"there is no such folder, and {variable} switches the hub off"
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        HfApi().repo_info(name, repo_type=repo_type, timeout=HUB_SECONDS)
    except RepositoryNotFoundError:
        return f"there is no such folder, and the hub has no such {repo_type}, or a private one"
    except HfHubHTTPError:
        return None  # of a gated repository or a busy hub, which loading says better
    except Exception as error:  # of the HTTP library
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        return f"there is no such folder, and the hub cannot be reached ({reason})"
    return None


def nearest_path(name: str | Path, folders_only: bool = False) -> Path | None:
    """Find the path most like one that does not exist; its suffix may be missing."""
    path = Path(name).expanduser()
    while not path.parent.is_dir():
        path = path.parent
    beside = [file for file in path.parent.iterdir() if file.is_dir() or not folders_only]
    by_name = {file.stem: file for file in beside} | {file.name: file for file in beside}
    close = get_close_matches(path.name, by_name, n=1)
    return path.with_name(by_name[close[0]].name) if close else None


def check_model_name(name: str, revision: str | None = None) -> None:
    """Raise an OSError that says what is wrong with the path or hub id of a model."""
    path = Path(name).expanduser()
    if path.is_dir():
        _check_model_folder(path)
        return
    if path.is_file():
        folder = f": {str(path.parent)!r}" if _holds_model(path.parent) else ""
        raise OSError(f"The model {name!r} is a file; give the folder that it is in{folder}.")
    # With the hub switched off, loading looks into the cache, and fails at once.
    may_be_cached = HUB_ID.fullmatch(name) and offline_variable() is not None
    if not may_be_cached and not is_cached(name, revision):
        raise_if_missing(name)


def raise_if_missing(name: str, subject: str = "") -> None:
    """Raise a FileNotFoundError if a model is neither a folder nor on the hub.

    The error begins with `subject`; the cache of downloaded models is not searched.
    """
    if not Path(name).is_dir() and (reason := missing_from_hub(name)) is not None:
        nearest = nearest_path(name, folders_only=True)
        hint = "" if nearest is None else f" Did you mean {nearest}?"
        raise FileNotFoundError(f"{subject or f'The model {name!r}'}: {reason}.{hint}")


def _check_model_folder(path: Path) -> None:
    if _holds_model(path):
        return
    inside = [folder for folder in path.glob("*/") if _holds_model(folder)]
    newest = max(inside, key=lambda folder: folder.stat().st_mtime, default=None)
    hint = f" Did you mean {newest}?" if newest else ""
    raise FileNotFoundError(f"The model folder {str(path)!r} has no config.json.{hint}")


def _holds_model(folder: Path) -> bool:
    return any((folder / name).exists() for name in CONFIGS)


def is_cached(name: str, revision: str | None = None) -> bool:
    """Whether the configuration of a model on the hub was downloaded before."""
    from huggingface_hub import try_to_load_from_cache

    if HUB_ID.fullmatch(name) is None:
        return False
    files = [try_to_load_from_cache(name, file, revision=revision) for file in CONFIGS]
    return any(isinstance(file, str) for file in files)

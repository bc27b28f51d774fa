"""Check names of models and datasets: local paths, or ids on the hub. Nothing is loaded."""

import os
import re
from difflib import get_close_matches
from pathlib import Path

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
HUB_SECONDS = 10.0  # time limit of a request
CONFIG_FILES = ("config.json", "adapter_config.json")
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def offline_variable() -> str | None:
    """Return the setting that switches the hub off, such as "HF_HUB_OFFLINE=1", or None."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        return None
    names = [name for name in OFFLINE_VARIABLES if os.environ.get(name)]
    return f"{names[0]}={os.environ[names[0]]}" if names else "HF_HUB_OFFLINE=1"


def check_upload(folder: str) -> None:
    """Raise an OfflineModeIsEnabled error if a folder is to be uploaded while the hub is off."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    variable = offline_variable()
    if variable is not None:
        raise OfflineModeIsEnabled(
            f"push_to_hub: nothing was uploaded, as {variable} switches the hub off. Unset it "
            f"and call push_to_hub again, or run `hf upload REPOSITORY {folder}`."
        )


def why_not_on_hub(name: str, repo_type: str = "model") -> str | None:
    """Return why a name cannot be loaded from the hub; None if it may be possible.

    This sends one request. Loading would retry for a minute.
    """
    if HUB_ID.fullmatch(name) is None:
        return "there is no such folder"
    variable = offline_variable()
    if variable is not None:
        return f"there is no such folder, and {variable} switches the hub off"
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        HfApi().repo_info(name, repo_type=repo_type, timeout=HUB_SECONDS)
    except RepositoryNotFoundError:
        return f"there is no such folder, and the hub has no such {repo_type}, or a private one"
    except HfHubHTTPError:
        return None  # a gated repository or a busy hub: loading raises a better error
    except Exception as error:  # any error of the HTTP library
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        return f"there is no such folder, and the hub cannot be reached ({reason})"
    return None


def nearest_path(name: str | Path, folders_only: bool = False) -> Path | None:
    """Return the existing path whose name is closest to one that does not exist, if any is close.

    The suffix may be missing in `name`.
    """
    path = Path(name).expanduser()
    while not path.parent.is_dir():
        path = path.parent
    siblings = [file for file in path.parent.iterdir() if file.is_dir() or not folders_only]
    by_name = {file.stem: file for file in siblings} | {file.name: file for file in siblings}
    closest = get_close_matches(path.name, by_name, n=1)
    return path.with_name(by_name[closest[0]].name) if closest else None


def check_model_name(name: str, revision: str | None = None) -> None:
    """Raise an OSError if a model cannot be loaded from this path or hub id."""
    path = Path(name).expanduser()
    if path.is_dir():
        _check_model_folder(path)
        return
    if path.is_file():
        folder = f": {str(path.parent)!r}" if _holds_model(path.parent) else ""
        raise OSError(f"The model {name!r} is a file; give the folder that it is in{folder}.")
    # With the hub switched off, loading only looks into the cache, so it fails quickly itself.
    loads_from_cache_only = HUB_ID.fullmatch(name) and offline_variable() is not None
    if not loads_from_cache_only and not is_cached(name, revision):
        raise_if_missing(name)


def raise_if_missing(name: str, subject: str = "") -> None:
    """Raise a FileNotFoundError if a model is neither a folder nor on the hub.

    The cache of downloaded models is not searched.

    Args:
        subject: the beginning of the error; "The model NAME" by default.
    """
    if Path(name).is_dir():
        return
    reason = why_not_on_hub(name)
    if reason is not None:
        nearest = nearest_path(name, folders_only=True)
        hint = "" if nearest is None else f" Did you mean {nearest}?"
        raise FileNotFoundError(f"{subject or f'The model {name!r}'}: {reason}.{hint}")


def _check_model_folder(path: Path) -> None:
    if _holds_model(path):
        return
    subfolders = [folder for folder in path.glob("*/") if _holds_model(folder)]
    newest = max(subfolders, key=lambda folder: folder.stat().st_mtime, default=None)
    hint = f" Did you mean {newest}?" if newest else ""
    raise FileNotFoundError(f"The model folder {str(path)!r} has no config.json.{hint}")


def _holds_model(folder: Path) -> bool:
    return any((folder / name).exists() for name in CONFIG_FILES)


def is_cached(name: str, revision: str | None = None) -> bool:
    """Return whether the configuration of a model on the hub is in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    if HUB_ID.fullmatch(name) is None:
        return False
    files = [try_to_load_from_cache(name, file, revision=revision) for file in CONFIG_FILES]
    return any(isinstance(file, str) for file in files)

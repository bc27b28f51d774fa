"""`trl env`: versions and devices, for bug reports."""

import platform
import subprocess
from pathlib import Path

from ..imports import version_of
from ..redaction import redact
from .parser import OneLineParser

OPTIONAL = ("bitsandbytes", "DeepSpeed", "Liger-Kernel", "PEFT", "vLLM")


def main(words: list[str] | None = None) -> None:
    """Print the report."""
    OneLineParser(prog="trl env", description="Print versions for a bug report.").parse_args(words)
    print("\nCopy-paste the following into a bug report:\n")
    for name, value in report().items():
        print(f"- {name}: {value}")


def report() -> dict[str, str]:
    """What is installed, in the order it is printed."""
    import torch

    cuda, mps = torch.cuda, torch.backends.mps
    names = [cuda.get_device_name(i) for i in range(cuda.device_count())]
    return {
        "Platform": platform.platform(),
        "Python version": platform.python_version(),
        "TRL version": version("trl") + _commit(),
        "PyTorch version": version("torch"),
        "accelerator(s)": ", ".join(names) or ("MPS" if mps.is_available() else "cpu"),
        "Transformers version": version("transformers"),
        "Accelerate version": version("accelerate"),
        "Accelerate config": _accelerate_config(),
        "Datasets version": version("datasets"),
        "HF Hub version": version("huggingface_hub"),
        **{f"{x} version": version(x.lower().replace("-", "_")) for x in OPTIONAL},
    }


def version(package: str) -> str:
    """The installed version, possibly of a build for CPUs, or "not installed"."""
    return version_of(package, "") or version_of(f"{package}-cpu", "not installed")


def _commit() -> str:
    """The commit, when the package runs from a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    words = ["git", "rev-parse", "--short=7", "HEAD"]
    found = subprocess.run(words, cwd=root, capture_output=True, text=True)
    return f"+{found.stdout.strip()}" if found.returncode == 0 else ""


def _accelerate_config() -> str:
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    if not Path(default_config_file).is_file():
        return "not found"
    config = redact(load_config_from_file(default_config_file).to_dict())
    return "".join(f"\n  - {name}: {value}" for name, value in config.items())

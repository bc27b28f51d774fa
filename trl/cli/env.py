"""`trl env`: print versions and devices for a bug report."""

import platform
import subprocess
from pathlib import Path

from ..imports import version_of
from ..redaction import redact
from .parser import OneLineParser

OPTIONAL = ("bitsandbytes", "DeepSpeed", "Liger-Kernel", "PEFT", "vLLM")


def main(argv: list[str] | None = None) -> None:
    """Print the report."""
    OneLineParser(prog="trl env", description="Print versions for a bug report.").parse_args(argv)
    print("\nCopy-paste the following into a bug report:\n")
    for name, value in report().items():
        print(f"- {name}: {value}")


def report() -> dict[str, str]:
    """Return versions and devices, in the order they are printed."""
    import torch

    cuda_devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    other_device = "MPS" if torch.backends.mps.is_available() else "cpu"
    return {
        "Platform": platform.platform(),
        "Python version": platform.python_version(),
        "TRL version": version("trl") + _commit(),
        "PyTorch version": version("torch"),
        "accelerator(s)": ", ".join(cuda_devices) or other_device,
        "Transformers version": version("transformers"),
        "Accelerate version": version("accelerate"),
        "Accelerate config": _accelerate_config(),
        "Datasets version": version("datasets"),
        "HF Hub version": version("huggingface_hub"),
        **{f"{name} version": version(name.lower().replace("-", "_")) for name in OPTIONAL},
    }


def version(package: str) -> str:
    """Return the installed version of a package or of its CPU build, or "not installed"."""
    return version_of(package, "") or version_of(f"{package}-cpu", "not installed")


def _commit() -> str:
    """Return "+COMMIT" if the package runs from a git checkout, else ""."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return f"+{result.stdout.strip()}" if result.returncode == 0 else ""


def _accelerate_config() -> str:
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    if not Path(default_config_file).is_file():
        return "not found"
    config = redact(load_config_from_file(default_config_file).to_dict())
    return "".join(f"\n  - {name}: {value}" for name, value in config.items())

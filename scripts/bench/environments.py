"""Makes one virtual environment for each peer below .bench/, from the package index."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / ".bench"
TORCH = "torch==2.13.0"
# Versions that were current when the release was, as far as they run with this torch.
PEERS = {
    "trl-0.20.0": ("trl==0.20.0", "transformers==4.55.4", "accelerate==1.10.1", "datasets==4.0.0"),
    "trl-0.22.2": ("trl==0.22.2", "transformers==4.56.2", "accelerate==1.10.1", "datasets==4.0.0"),
    "trl-1.16.0": ("trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0"),
}


def site(trainer: str) -> str | None:
    """Return the folder of an installed peer, if set: BENCH_SITE_TRL_1_16_0=folder."""
    name = trainer.upper().replace("-", "_").replace(".", "_")
    return os.environ.get(f"BENCH_SITE_{name}")


def interpreter(trainer: str) -> str:
    """Return the Python that runs a trainer: a peer's own, or the current one for this project."""
    if trainer not in PEERS or site(trainer):
        return sys.executable
    return str(BENCH / trainer / "bin" / "python")


def is_ready(peer: str) -> bool:
    """Return whether a peer's environment is installed with the versions listed here."""
    stamp = BENCH / peer / ".installed"
    return stamp.exists() and stamp.read_text(encoding="utf-8") == wanted(peer)


def wanted(peer: str) -> str:
    """Return the content of the stamp file of a complete environment."""
    return "\n".join((TORCH, *PEERS[peer]))


def make(peer: str) -> None:
    """Install a peer unless it is already installed."""
    if is_ready(peer) or site(peer):
        return
    print(f"{peer}: installing", flush=True)
    BENCH.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(BENCH / peer)], check=True)
    install = [interpreter(peer), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*install, TORCH], check=True)  # first and alone: nothing else chooses its build
    subprocess.run([*install, TORCH, *PEERS[peer], "rich"], check=True)
    (BENCH / peer / ".installed").write_text(wanted(peer), encoding="utf-8")


def main() -> None:
    """Make the environments named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", help=f"some of {', '.join(PEERS)}; none: all")
    for peer in parser.parse_args().peers or PEERS:
        if peer not in PEERS:
            parser.error(f"no peer {peer!r}; the peers are {', '.join(PEERS)}")
        make(peer)


if __name__ == "__main__":
    main()

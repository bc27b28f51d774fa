import math

import pytest
import torch

from trl.ops.kl import k1, k3, sequence_kl

NAN = torch.nan


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("policy", "reference", "first", "third"),
    [
        (0.5, 0.5, 0.0, 0.0),
        (0.5, 0.25, math.log(2), 0.5 - 1 + math.log(2)),
        (0.1, 0.3, -math.log(3), 3 - math.log(3) - 1),
    ],
)
def test_table_of_values(policy, reference, first, third):
    logps, ref_logps = tensor([[math.log(policy)]]), tensor([[math.log(reference)]])
    assert k1(logps, ref_logps).item() == pytest.approx(first, abs=1e-15)
    assert k3(logps, ref_logps).item() == pytest.approx(third, abs=1e-15)


def test_k1_and_k3_average_to_the_divergence():
    p, q = tensor([0.5, 0.3, 0.2]), tensor([0.2, 0.2, 0.6])
    divergence = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert (p * k1(p.log(), q.log())).sum().item() == pytest.approx(divergence, abs=1e-15)
    assert (p * k3(p.log(), q.log())).sum().item() == pytest.approx(divergence, abs=1e-15)


def test_k3_keeps_the_digits_of_small_differences():
    difference = 3 * 2.0**-12
    exact = math.expm1(difference) - difference
    found = k3(torch.tensor([0.0]), torch.tensor([difference]))
    assert found.item() == pytest.approx(exact, rel=1e-3)
    assert (torch.tensor(difference).exp() - 1 - difference).item() != pytest.approx(
        exact, rel=1e-2
    )


def test_k3_does_not_overflow():
    logps = torch.tensor([-500.0], requires_grad=True)
    value = k3(logps, torch.tensor([-1.0]))
    value.sum().backward()
    assert value.isfinite().all() and logps.grad.isfinite().all()


@pytest.mark.parametrize("estimator", [k1, k3])
def test_masked_junk_reaches_neither_value_nor_gradient(estimator):
    logps = tensor([[-1.0, NAN, 1e30]]).requires_grad_()
    ref_logps = tensor([[-2.0, -1.0, NAN]])
    mask = torch.tensor([[True, False, False]])
    values = estimator(logps, ref_logps, mask)
    expected = estimator(tensor([-1.0]), tensor([-2.0])).item()
    assert values.tolist() == [[expected, 0.0, 0.0]]
    values.sum().backward()
    alone = tensor([-1.0]).requires_grad_()
    estimator(alone, tensor([-2.0])).sum().backward()
    assert logps.grad.tolist() == [[alone.grad.item(), 0.0, 0.0]]


def test_sequence_kl_sums_marked_tokens():
    logps = tensor([[-1.0, -2.0, NAN], [-3.0, NAN, NAN], [NAN, NAN, NAN]])
    ref_logps = tensor([[-2.0, -1.5, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    assert sequence_kl(logps, ref_logps, mask).tolist() == [0.5, -2.0, 0.0]

import pytest
import torch
from tiny import tiny_model

from trl.memory.tensor_bytes import TensorBytes


def test_counts_storages_until_they_are_freed():
    with TensorBytes() as tracker:
        first = torch.zeros(1000)
        view = first[10:].view(2, 495)
        assert tracker.live == 4000
        double = first.double()
        assert tracker.live == 12_000
        del first
        assert tracker.live == 12_000  # the view holds the storage
        del view
        assert tracker.live == 8000
    del double  # freed outside, but counted while inside
    assert (tracker.live, tracker.peak) == (0, 12_000)


def test_what_only_autograd_holds_counts():
    weight = torch.ones(1000, requires_grad=True)
    with TensorBytes() as tracker:
        total = (weight * 2).exp().exp().sum()
        # The two results of exp are kept for backward; the product is not.
        assert tracker.live == 2 * 4000 + 4
        total.backward()
        del total
        assert tracker.live == 4000  # the gradient
    assert weight.grad is not None


def test_peak_begins_anew_at_each_boundary():
    with TensorBytes([torch.zeros(5), torch.zeros(6)]) as tracker:
        assert tracker.live == 0  # nobody kept the two
        kept = torch.zeros(100)
        torch.zeros(1000)
        assert tracker.boundary() == {"tensors": 400.0, "tensors_peak": 4400.0}
        assert tracker.boundary() == {"tensors": 400.0, "tensors_peak": 400.0}
    assert kept.numel() == 100


def test_shapes_without_bytes_do_not_count_and_resizing_does():
    with TensorBytes() as tracker:
        shape = torch.empty(1000, device="meta")
        assert tracker.live == 0
        tensor = torch.zeros(10)
        tensor.resize_(30)
        assert tracker.live == 120
    assert shape.numel() == 1000


def test_results_and_random_numbers_stay_the_same():
    def losses(tracker):
        model = tiny_model()
        tracker.__enter__()
        ids = torch.randint(0, 50, (2, 12))
        loss = model(ids, labels=ids).loss
        loss.backward()
        tracker.__exit__(None, None, None)
        return loss.detach(), torch.rand(1), model.lm_head.weight.grad

    plain = losses(_Nothing())
    tracker = TensorBytes()
    for expected, found in zip(plain, losses(tracker), strict=True):
        assert torch.equal(expected, found)
    assert tracker.peak > 10_000


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *ignored):
        return None


def test_bytes_of_a_model_step_equal_a_sum_by_hand():
    layer = torch.nn.Linear(64, 32, bias=False)
    tracker = TensorBytes(layer.parameters())
    assert tracker.live == 64 * 32 * 4
    with tracker:
        rows = torch.ones(16, 64)
        layer(rows).sum().backward()
    # weight, its gradient, rows, and the output of the layer with its own gradient (expanded ones)
    by_hand = 2 * 64 * 32 * 4 + 16 * 64 * 4
    assert tracker.live == by_hand
    assert by_hand < tracker.peak <= by_hand + 3 * 16 * 32 * 4
    assert pytest.approx(rows.sum().item()) == 1024

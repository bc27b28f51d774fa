"""Activations that wait on the host, on a pretended device, or are partly recomputed."""

from pathlib import Path

import pytest
import torch
from tiny import tiny_model
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from workspace import run_forked

from trl.models.activations import ActivationOffloading, keep_attention

SCRIPT = Path(__file__).parents[1] / "offload_runs.py"


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices made in Python",
)
def test_a_device_holds_less_and_the_weights_are_the_same(tmp_path):
    done = run_forked([SCRIPT, str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    found = torch.load(tmp_path / "found.pt")
    for recomputes in (False, True):
        plain, moved = found[recomputes, False], found[recomputes, True]
        assert torch.equal(plain["weights"], moved["weights"])
        assert moved["held"] < plain["held"]
    assert found[False, True]["held"] < 0.25 * found[False, False]["held"]


def test_activations_of_a_cpu_stay(monkeypatch):
    model = tiny_model()
    ids = torch.arange(2, 22)[None]
    model(ids, labels=ids).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with ActivationOffloading(model)():
        model(ids, labels=ids).loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


def test_the_modules_of_a_model_are_walked_through_once():
    walks = []

    class Counted(torch.nn.Linear):
        def parameters(self, recurse=True):
            walks.append(1)
            return super().parameters(recurse)

    offloading = ActivationOffloading(Counted(2, 2))
    for _ in range(3):
        with offloading():
            pass
    assert walks == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_gradients_are_the_same_and_less_is_held():
    model = tiny_model().cuda()
    ids = torch.arange(2, 258, device="cuda").view(4, 64) % 60
    found = []
    for context in (torch.enable_grad(), ActivationOffloading(model)()):
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        with context:
            loss = model(ids, labels=ids).loss
            held = torch.cuda.memory_allocated() - before
            loss.backward()
        found.append((held, [p.grad.clone() for p in model.parameters()]))
    assert found[1][0] < found[0][0]
    for ours, reference in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(ours, reference)


class Attention(TorchDispatchMode):
    """Counts forward calls of attention kernels."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "scaled_dot_product" in str(func) and "backward" not in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("selective", [False, True])
def test_attention_is_not_computed_again_and_gradients_are_the_same(selective):
    ids = torch.arange(2, 42).view(2, 20)
    model = tiny_model().train()
    model(ids, labels=ids).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if selective:
        keep_attention(model)
        keep_attention(model)  # of every update: no second one around the first
    with Attention() as counted:
        model(ids, labels=ids).loss.backward()
    layers = model.config.num_hidden_layers
    assert counted.count == layers * (1 if selective else 2)
    found = [p.grad for p in model.parameters()]
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-9)

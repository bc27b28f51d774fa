"""A small example tells right attention kernels from wrong ones, in the precision they run in."""

import pytest
import torch
from faulty_kernels import FAULTS, break_kernels
from tiny import tiny_model
from transformers import AttentionInterface

from trl.models.kernel_check import Heads, check_kernels, noted_heads
from trl.models.packed_attention import install

CPU = torch.device("cpu")
WIDTHS = [(4, 2, 8), (6, 1, 64), (2, 2, 12)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def heads(dtype, queries=4, keys=2, size=8) -> Heads:
    return Heads(queries, keys, size, size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_of_this_machine_is_right(dtype):
    """Whatever the precision of autocast is around the check."""
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        check_kernels(CPU, {heads(dtype, *widths) for widths in WIDTHS})


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_kernel_is_found(monkeypatch, fault, dtype):
    break_kernels(monkeypatch, fault, dtype)
    with pytest.raises(RuntimeError, match=r"off by .* for 4 heads on 2, of size 8 in \w+\d+,"):
        check_kernels(CPU, {heads(dtype)})


def test_each_kind_of_layer_is_checked(monkeypatch):
    break_kernels(monkeypatch, "key", torch.bfloat16)
    check_kernels(CPU, {heads(torch.float32)})
    with pytest.raises(RuntimeError, match="in bfloat16"):
        check_kernels(CPU, {heads(torch.float32), heads(torch.bfloat16)})


def test_what_cannot_be_checked_is_an_error(monkeypatch):
    with pytest.raises(RuntimeError, match="did not ask for attention"):
        check_kernels(CPU, set())
    with pytest.raises(RuntimeError):
        check_kernels(CPU, {Heads(4, 2, 16, 8, torch.float32)})  # the kernels have one size
    break_kernels(monkeypatch, "error", torch.float32)
    with pytest.raises(RuntimeError, match="no kernel image"):
        check_kernels(CPU, {heads(torch.float32)})


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_what_layers_work_on_is_noted(autocast):
    install("sdpa")
    before = AttentionInterface._global_mapping["sdpa"]
    model = tiny_model("qwen3", num_key_value_heads=1, head_dim=16)
    ids = torch.tensor([[20, 21, 22]])
    with noted_heads("sdpa") as found, torch.autocast("cpu", autocast, autocast is not None):
        noted = model(ids, use_cache=False).logits
    assert found == {Heads(4, 1, 16, 16, autocast or torch.float32)}
    assert AttentionInterface._global_mapping["sdpa"] is before
    with torch.autocast("cpu", autocast, autocast is not None):
        assert torch.equal(model(ids, use_cache=False).logits, noted), "noting changes nothing"


def test_an_error_ends_the_noting():
    before = AttentionInterface._global_mapping["sdpa"]
    with pytest.raises(ValueError, match="of a test"), noted_heads("sdpa"):
        raise ValueError("of a test")
    assert AttentionInterface._global_mapping["sdpa"] is before

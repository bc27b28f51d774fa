import pytest
import torch

from trl.memory.fragmentation import FLOOR, release_cached_blocks, should_empty_cache

GIB = 2**30


@pytest.mark.parametrize(
    ("policy", "allocated", "reserved", "expected"),
    [
        ("never", 0, 80 * GIB, False),
        ("always", 10, 11, True),
        ("always", 10, 10, False),  # nothing to give
        ("always", 0, 0, False),
        ("auto", 6 * GIB, 10 * GIB, True),
        ("auto", 9 * GIB, 10 * GIB, False),  # a tenth is below the threshold
        ("auto", 3 * GIB, 4 * GIB, False),  # a quarter is not above it
        ("auto", 3 * GIB - 1, 4 * GIB, True),
        ("auto", 0, FLOOR, True),
        ("auto", 0, FLOOR - 1, False),  # too little to be worth it
        ("auto", 0, 0, False),
    ],
)
def test_decision(policy, allocated, reserved, expected):
    assert should_empty_cache(policy, allocated, reserved) is expected


def test_threshold_and_floor_can_be_set():
    assert not should_empty_cache("auto", 60, 100, threshold=0.5, floor=1)
    assert should_empty_cache("auto", 40, 100, threshold=0.5, floor=60)
    assert not should_empty_cache("auto", 40, 100, threshold=0.5, floor=61)


def test_wrong_values_are_refused():
    with pytest.raises(ValueError, match=r"empty_cache='alway'.*Did you mean always\?"):
        should_empty_cache("alway", 0, 0)
    with pytest.raises(ValueError, match="one of never, auto, always"):
        should_empty_cache("?", 0, 0)
    with pytest.raises(ValueError, match="threshold=25 is no share. Nearest legal: 1"):
        should_empty_cache("auto", 0, 0, threshold=25)
    with pytest.raises(ValueError, match="empty_cache='x'"):
        release_cached_blocks("x", "cpu")


def test_nothing_is_done_on_the_cpu():
    assert [release_cached_blocks(policy, "cpu") for policy in ("never", "auto", "always")] == [
        False
    ] * 3


@pytest.mark.parametrize(("policy", "expected"), [("never", 0), ("auto", 1), ("always", 1)])
def test_cuda_blocks_are_returned_when_decided(monkeypatch, policy, expected):
    emptied = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    assert release_cached_blocks(policy, torch.device("cuda", 0)) is bool(expected)
    assert len(emptied) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_its_memory_back():
    kept = torch.ones(10, device="cuda")
    torch.ones(GIB // 4, device="cuda")
    held = torch.cuda.memory_reserved()
    assert held >= GIB
    assert not release_cached_blocks("never", "cuda")
    assert torch.cuda.memory_reserved() == held
    assert release_cached_blocks("auto", "cuda")
    assert torch.cuda.memory_reserved() <= held - GIB
    assert kept.sum() == 10

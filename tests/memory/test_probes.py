import gc

import pytest
import torch

from trl.memory.probes import (
    CudaProbe,
    HeapProbe,
    ProcessProbe,
    fragmentation,
    storage_of,
    visible_tensor_bytes,
)

MB = 10**6


def test_fragmentation_is_the_share_that_no_tensor_uses():
    assert fragmentation(75, 100) == 0.25
    assert fragmentation(100, 100) == 0.0
    assert fragmentation(0, 0) == 0.0


def test_process_peak_sees_what_was_freed_and_forgets_it_after_a_boundary():
    probe = ProcessProbe()
    if not probe.is_exact:
        pytest.skip("/proc/self/clear_refs cannot be written")
    quiet = probe.boundary()["peak"]
    torch.ones(50 * MB)  # 200 MB, freed at once
    assert probe.boundary()["peak"] > quiet + 190 * MB
    assert probe.boundary()["peak"] < quiet + 100 * MB


def test_without_a_high_water_mark_the_ends_are_compared(monkeypatch, tmp_path):
    status = tmp_path / "status"
    monkeypatch.setattr("trl.memory.probes._CLEAR_REFS", tmp_path / "no" / "clear_refs")
    monkeypatch.setattr("trl.memory.probes._STATUS", status)
    status.write_text("Name:\tx\nVmHWM:\t  9000 kB\nVmRSS:\t    70 kB\n")
    probe = ProcessProbe()
    assert not probe.is_exact
    status.write_text("VmHWM:\t  9000 kB\nVmRSS:\t    50 kB\n")
    assert probe.boundary() == {"peak": 70 * 1024}
    status.write_text("VmHWM:\t  9000 kB\nVmRSS:\t    60 kB\n")
    assert probe.boundary() == {"peak": 60 * 1024}


def test_no_figure_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr("trl.memory.probes._STATUS", tmp_path / "absent")
    assert ProcessProbe().boundary() == {}


def test_heap_follows_tensors_that_only_autograd_holds():
    weight = torch.ones(1, requires_grad=True)
    probe = HeapProbe()
    figures = probe.boundary()
    if not figures:
        pytest.skip("tensors do not come from glibc here")
    before = figures["tensors"]
    held = (torch.ones(5 * MB) * weight).exp()  # exp keeps its result, the product its factor
    assert probe.boundary()["tensors"] - before == pytest.approx(40 * MB, rel=0.02)
    del held
    assert probe.boundary()["tensors"] - before == pytest.approx(0, abs=MB)


def test_heap_begins_with_the_tensors_that_exist():
    gc.collect()
    existing = torch.zeros(50 * MB)
    figures = HeapProbe().boundary()
    if not figures:
        pytest.skip("tensors do not come from glibc here")
    assert figures["tensors"] == pytest.approx(visible_tensor_bytes(), rel=0.05)
    assert existing.nbytes == 200 * MB


def test_heap_is_never_below_nothing():
    freed_later = [bytes(1000) for _ in range(20_000)]
    probe = HeapProbe()
    del freed_later
    assert probe.boundary().get("tensors", 0) >= 0


def test_visible_bytes_count_a_storage_once():
    before = visible_tensor_bytes()
    tensor = torch.zeros(1000, 10)
    views = [tensor[:10], tensor.t(), torch.nn.Parameter(tensor)]
    shape_only = torch.empty(10**9, device="meta")
    assert visible_tensor_bytes() - before == 40_000
    assert len(views) == 3 and shape_only.numel() == 10**9


def test_tensors_without_bytes_have_no_storage():
    assert storage_of(torch.empty(8, device="meta")) is None
    assert storage_of(torch.eye(3).to_sparse()) is None
    assert storage_of(torch.nn.LazyLinear(3).weight) is None
    assert storage_of(torch.zeros(4)[1:]).nbytes() == 16


def test_cuda_figures_come_from_the_allocator_whose_peaks_are_reset(monkeypatch):
    stats = {
        "allocated_bytes": {"all": {"current": 30, "peak": 90, "allocated": 500, "freed": 470}},
        "reserved_bytes": {"all": {"current": 120, "peak": 200, "allocated": 200, "freed": 80}},
    }
    resets = []
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    device = torch.device("cuda", 1)
    assert CudaProbe(device).boundary() == {"peak": 90, "reserved": 200, "fragmentation": 0.75}
    assert resets == [device]


def test_cuda_probe_has_no_figures_before_cuda_is_used():
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use already")
    assert CudaProbe(torch.device("cuda", 0)).boundary() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_peaks_of_real_tensors():
    device = torch.device("cuda", 0)
    held = torch.zeros(25 * MB, device=device)
    probe = CudaProbe(device)
    probe.boundary()
    torch.zeros(50 * MB, device=device)
    first, second = probe.boundary(), probe.boundary()
    assert first["peak"] - second["peak"] == pytest.approx(200 * MB, rel=0.01)
    assert first["reserved"] >= first["peak"]
    allocated, reserved = torch.cuda.memory_allocated(0), torch.cuda.memory_reserved(0)
    assert second["fragmentation"] == pytest.approx(1 - allocated / reserved)
    assert held.numel() == 25 * MB

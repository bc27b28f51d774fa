import gc
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tensor_bytes import TensorBytes
from tiny import tiny_model

from trl.memory.meter import (
    FLOOR,
    PHASES,
    DeviceMemory,
    HeapProbe,
    PhaseEvent,
    PhaseMeter,
    ProcessProbe,
    cuda_figures,
    device_bytes,
    merge_peaks,
    release_cached_blocks,
    storage_of,
    visible_tensor_bytes,
)

MB = 10**6


class Allocator:
    """Sizes in bytes that a test sets; a probe reads their peaks."""

    def __init__(self):
        self.held = self.peak = self.reserved = 0

    def use(self, size):
        self.held = size
        self.peak = max(self.peak, size)
        self.reserved = max(self.reserved, size)

    def boundary(self):
        figures = {"tensors": self.held, "tensors_peak": self.peak}
        self.peak = self.held
        return figures


@pytest.fixture
def allocator():
    return Allocator()


@pytest.fixture
def meter(allocator):
    return PhaseMeter("cpu", tensors=allocator.boundary)


def gb(meter, name="tensors_peak_gb"):
    """The figure of each phase, in bytes."""
    metrics = meter.take()
    return {
        key.split("/")[1]: round(value * 1e9)
        for key, value in metrics.items()
        if key.split("/")[2] == name
    }


def test_each_phase_has_its_own_peak_and_end(meter, allocator):
    allocator.use(10)
    with meter.phase("generation"):
        allocator.use(70)
        allocator.use(20)
    allocator.use(500)  # between phases: of none
    allocator.use(20)
    with meter.phase("scoring"):
        allocator.use(50)
        allocator.use(30)
    metrics = meter.take()
    assert metrics["memory/generation/tensors_peak_gb"] == pytest.approx(70e-9)
    assert metrics["memory/generation/tensors_gb"] == pytest.approx(20e-9)
    assert metrics["memory/scoring/tensors_peak_gb"] == pytest.approx(50e-9)
    assert metrics["memory/scoring/tensors_gb"] == pytest.approx(30e-9)
    assert meter.take() == {}


def test_inner_phase_wins_and_outer_goes_on(meter, allocator):
    with meter.phase("backward"):
        allocator.use(40)
        allocator.use(10)
        with meter.phase("forward"):
            allocator.use(90)
            allocator.use(15)
            assert meter._open[-1].phase == "forward"
        allocator.use(60)
        assert meter._open[-1].phase == "backward"
        allocator.use(5)
    assert gb(meter) == {"forward": 90, "backward": 60}


def test_outer_peak_from_before_the_inner_phase_is_kept(meter, allocator):
    with meter.phase("backward"):
        allocator.use(40)
        allocator.use(10)
        with meter.phase("forward"):
            allocator.use(12)
    assert gb(meter) == {"forward": 12, "backward": 40}


def test_largest_of_several_runs_counts(meter, allocator):
    for size in (30, 80, 20):
        with meter.phase("forward"):
            allocator.use(size)
            allocator.use(0)
    assert gb(meter) == {"forward": 80}


def test_a_phase_ends_what_is_open_inside(meter, allocator):
    events = []
    meter.on_phase_end.append(events.append)
    backward, optimizer = meter.phase("backward"), meter.phase("optimizer")
    backward.__enter__()
    optimizer.__enter__()
    allocator.use(33)
    backward.__exit__(None, None, None)
    assert [event.phase for event in events] == ["optimizer", "backward"]
    assert events[0].figures["tensors_peak"] == 33
    assert not meter._open


def test_an_exception_ends_the_phases_of_its_block(meter):
    def broken():
        with meter.phase("scoring"), meter.phase("forward"):
            raise KeyError("x")

    with meter.phase("rewards"):
        with pytest.raises(KeyError):
            broken()
        assert meter._open[-1].phase == "rewards"


def test_events_have_times_in_order(meter):
    events = []
    meter.on_phase_end.append(events.append)
    with meter.phase("generation"):
        pass
    with meter.phase("backward"), meter.phase("forward"):
        pass
    generation, forward, backward = events
    assert 0 <= generation.start <= generation.end <= backward.start
    assert backward.start <= forward.start <= forward.end <= backward.end
    assert "peak" in generation.figures


def test_wrong_phases_are_refused(meter):
    with pytest.raises(ValueError, match=r"phase='scorin'.*Did you mean scoring\?"):
        meter.phase("scorin").__enter__()
    with pytest.raises(ValueError, match=", ".join(PHASES)):
        meter.phase("zzz").__enter__()


def test_a_disabled_meter_does_nothing(allocator):
    meter = PhaseMeter("cpu", enabled=False, tensors=allocator.boundary)
    events = []
    meter.on_phase_end.append(events.append)
    with meter.phase("forward"):
        allocator.use(5)
    assert (events, meter.take(), meter._open, meter.peak) == ([], {}, [], 0.0)


def test_event_reads_in_gb_but_fragmentation_as_a_share():
    event = PhaseEvent("scoring", 1.0, 2.0, {"peak": 2.5e9, "fragmentation": 0.3})
    assert event.readable() == {"peak_gb": 2.5, "fragmentation": 0.3}
    metrics = {"memory/scoring/peak_gb": 1.0, "memory/scoring/fragmentation": 0.9}
    merge_peaks(metrics, event)
    assert metrics == {"memory/scoring/peak_gb": 2.5, "memory/scoring/fragmentation": 0.9}


def test_cuda_phases_and_the_peak_of_all(monkeypatch):
    device = {"current": 0, "peak": 0}

    def use(size):
        device["current"] = size
        device["peak"] = max(device["peak"], size)

    def stats(_):
        reserved = {"current": 400, "peak": 500}
        return {"allocated_bytes": {"all": dict(device)}, "reserved_bytes": {"all": reserved}}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda _: device.update(peak=device["current"])
    )
    use(7000)  # before the meter
    use(0)
    meter = PhaseMeter("cuda:0")
    use(300)
    use(100)
    with meter.phase("generation"):
        use(200)
        use(100)
    metrics = meter.take()
    assert metrics == pytest.approx(
        {
            "memory/generation/peak_gb": 200e-9,
            "memory/generation/reserved_gb": 500e-9,
            "memory/generation/fragmentation": 0.75,
        }
    )
    assert meter.peak == 300


def test_process_figures_of_real_tensors():
    meter = PhaseMeter("cpu")
    with meter.phase("forward"):
        held = torch.ones(5 * MB)
    with meter.phase("backward"):
        torch.ones(60 * MB)
    with meter.phase("optimizer"):
        pass
    metrics = meter.take()
    names = {key.rsplit("/", 1)[1] for key in metrics}
    if names != {"peak_gb", "tensors_gb"}:
        pytest.skip("the system does not tell")
    tensors = [metrics[f"memory/{x}/tensors_gb"] for x in ("forward", "backward", "optimizer")]
    assert tensors[1:] == pytest.approx([tensors[0]] * 2, abs=0.001)
    difference = metrics["memory/backward/peak_gb"] - metrics["memory/optimizer/peak_gb"]
    assert difference > 0.2
    assert meter.peak == pytest.approx(metrics["memory/backward/peak_gb"] * 1e9)
    assert held.numel() == 5 * MB


def test_exact_tensors_agree_with_the_estimate():
    estimate, tracker = PhaseMeter("cpu"), TensorBytes()
    exact = PhaseMeter("cpu", tensors=tracker.boundary)
    with tracker:
        with estimate.phase("rewards"), exact.phase("rewards"):
            pass
        with estimate.phase("forward"), exact.phase("forward"):
            held = [torch.ones(MB) for _ in range(10)]
    counted, guessed = exact.take(), estimate.take()
    assert counted["memory/forward/tensors_gb"] == pytest.approx(0.04)
    assert counted["memory/rewards/tensors_gb"] == 0
    if "memory/forward/tensors_gb" in guessed:
        grown = guessed["memory/forward/tensors_gb"] - guessed["memory/rewards/tensors_gb"]
        assert grown == pytest.approx(0.04, rel=0.02)
    assert len(held) == 10


def test_random_numbers_do_not_change():
    torch.manual_seed(3)
    random.seed(3)
    expected = [*torch.rand(3).tolist(), random.random()]
    torch.manual_seed(3)
    random.seed(3)
    with PhaseMeter("cpu").phase("forward"):
        pass
    assert [*torch.rand(3).tolist(), random.random()] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nested_phases_on_a_gpu():
    meter = PhaseMeter("cuda")
    base = torch.cuda.memory_allocated()
    with meter.phase("backward"):
        torch.zeros(10 * MB, device="cuda")
        with meter.phase("forward"):
            torch.zeros(30 * MB, device="cuda")
    metrics = meter.take()
    for phase, size in (("backward", 0.04), ("forward", 0.12)):
        found = metrics[f"memory/{phase}/peak_gb"] - base / 1e9
        assert found == pytest.approx(size, rel=0.02)
        assert metrics[f"memory/{phase}/reserved_gb"] >= metrics[f"memory/{phase}/peak_gb"]
        assert 0 <= metrics[f"memory/{phase}/fragmentation"] <= 1


# --- Devices and processes ---


MB, GIB = 10**6, 2**30


def test_process_peak_sees_what_was_freed_and_forgets_it_after_a_boundary():
    probe = ProcessProbe()
    if not probe.is_exact:
        pytest.skip("/proc/self/clear_refs cannot be written")
    quiet = probe()["peak"]
    torch.ones(50 * MB)  # 200 MB, freed at once
    assert probe()["peak"] > quiet + 190 * MB
    assert probe()["peak"] < quiet + 100 * MB


def test_without_a_high_water_mark_the_ends_are_compared(monkeypatch, tmp_path):
    status = tmp_path / "status"
    monkeypatch.setattr("trl.memory.meter._CLEAR_REFS", tmp_path / "no" / "clear_refs")
    monkeypatch.setattr("trl.memory.meter._STATUS", status)
    status.write_text("Name:\tx\nVmHWM:\t  9000 kB\nVmRSS:\t    70 kB\n")
    probe = ProcessProbe()
    assert not probe.is_exact
    status.write_text("VmHWM:\t  9000 kB\nVmRSS:\t    50 kB\n")
    assert probe() == {"peak": 70 * 1024}
    status.write_text("VmHWM:\t  9000 kB\nVmRSS:\t    60 kB\n")
    assert probe() == {"peak": 60 * 1024}


def test_no_figure_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr("trl.memory.meter._STATUS", tmp_path / "absent")
    assert ProcessProbe()() == {}


def test_heap_follows_tensors_that_only_autograd_holds():
    weight = torch.ones(1, requires_grad=True)
    probe = HeapProbe()
    figures = probe()
    if not figures:
        pytest.skip("tensors do not come from glibc here")
    before = figures["tensors"]
    held = (torch.ones(5 * MB) * weight).exp()  # exp keeps its result, the product its factor
    assert probe()["tensors"] - before == pytest.approx(40 * MB, rel=0.02)
    del held
    assert probe()["tensors"] - before == pytest.approx(0, abs=MB)


def test_heap_begins_with_the_tensors_that_exist():
    gc.collect()
    existing = torch.zeros(50 * MB)
    figures = HeapProbe()()
    if not figures:
        pytest.skip("tensors do not come from glibc here")
    assert figures["tensors"] == pytest.approx(visible_tensor_bytes(), rel=0.05)
    assert existing.nbytes == 200 * MB


def test_heap_is_never_below_nothing():
    freed_later = [bytes(1000) for _ in range(20_000)]
    probe = HeapProbe()
    del freed_later
    assert probe().get("tensors", 0) >= 0


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
    assert cuda_figures(device) == {"peak": 90, "reserved": 200, "fragmentation": 0.75}
    assert resets == [device]


def test_cuda_probe_has_no_figures_before_cuda_is_used():
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use already")
    assert cuda_figures(torch.device("cuda", 0)) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_peaks_of_real_tensors():
    device = torch.device("cuda", 0)
    held = torch.zeros(25 * MB, device=device)
    probe = partial(cuda_figures, device)
    probe()
    torch.zeros(50 * MB, device=device)
    first, second = probe(), probe()
    assert first["peak"] - second["peak"] == pytest.approx(200 * MB, rel=0.01)
    assert first["reserved"] >= first["peak"]
    allocated, reserved = torch.cuda.memory_allocated(0), torch.cuda.memory_reserved(0)
    assert second["fragmentation"] == pytest.approx(1 - allocated / reserved)
    assert held.numel() == 25 * MB


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
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_cuda_blocks_are_returned_when_decided(
    monkeypatch, policy, allocated, reserved, expected, device
):
    emptied = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    release_cached_blocks(policy, device)
    assert emptied == [1] * (expected and device != "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_its_memory_back():
    kept = torch.ones(10, device="cuda")
    torch.ones(GIB // 4, device="cuda")
    held = torch.cuda.memory_reserved()
    assert held >= GIB
    release_cached_blocks("never", "cuda")
    assert torch.cuda.memory_reserved() == held
    release_cached_blocks("auto", "cuda")
    assert torch.cuda.memory_reserved() <= held - GIB
    assert kept.sum() == 10


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


def test_the_memory_of_a_device(monkeypatch):
    sizes = {torch.device("cuda", 1): SimpleNamespace(total_memory=80 * 2**30)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", sizes.__getitem__)
    assert device_bytes(torch.device("cuda", 1)) == 80 * 2**30
    with open("/proc/meminfo", encoding="utf-8") as file:
        total = int(file.readline().split()[1])
    assert device_bytes(torch.device("cpu")) == 1024 * total


def test_free_and_held_memory(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 * GIB)
    found = DeviceMemory.of(device)
    assert found == DeviceMemory(free=32 * GIB, used=4 * GIB)
    before = DeviceMemory.of(torch.device("cpu")).used
    block = torch.zeros(MB)
    found = DeviceMemory.of(torch.device("cpu"))
    assert found.used - before == block.nbytes
    assert 0 < found.free < device_bytes(torch.device("cpu"))

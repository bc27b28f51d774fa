import random

import pytest
import torch
from tensor_bytes import TensorBytes

from trl.memory.meter import PHASES, PhaseEvent, PhaseMeter, merge_peaks

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
            assert meter.current == "forward"
        allocator.use(60)
        assert meter.current == "backward"
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


def test_start_and_stop_span_functions_and_stop_ends_what_is_inside(meter, allocator):
    events = []
    meter.on_phase_end.append(events.append)
    meter.start("backward")
    meter.start("optimizer")
    allocator.use(33)
    assert meter.is_open("backward") and not meter.is_open("forward")
    meter.stop("backward")
    assert [event.phase for event in events] == ["optimizer", "backward"]
    assert events[0].figures["tensors_peak"] == 33
    assert meter.current is None


def test_an_exception_ends_the_phases_of_its_block(meter):
    def broken():
        with meter.phase("scoring"):
            meter.start("forward")
            raise KeyError("x")

    with meter.phase("rewards"):
        with pytest.raises(KeyError):
            broken()
        assert meter.current == "rewards"


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
        meter.start("scorin")
    with pytest.raises(ValueError, match=", ".join(PHASES)):
        meter.start("zzz")
    meter.start("forward")
    with pytest.raises(ValueError, match="phase='backward' cannot be stopped; open: forward"):
        meter.stop("backward")


def test_a_disabled_meter_does_nothing(allocator):
    meter = PhaseMeter("cpu", enabled=False, tensors=allocator.boundary)
    events = []
    meter.on_phase_end.append(events.append)
    with meter.phase("forward"):
        allocator.use(5)
    meter.start("backward")
    meter.stop("optimizer")
    assert (events, meter.take(), meter.current, meter.peak) == ([], {}, None, 0.0)


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

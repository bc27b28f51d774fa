import gc
import weakref

import pytest
import torch

from trl.memory.adaptive_batch import AdaptiveBatch, RowTooLargeError, drop_frames
from trl.ops.oom import is_out_of_memory


def limited(work, most, calls=None):
    """Let `work` fail above `most` rows, after it has done what it does."""

    def run(rows):
        if calls is not None:
            calls.append((rows.start, rows.stop))
        result = work(rows)
        if len(rows) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return result

    return run


@pytest.mark.parametrize(("total", "size"), [(0, 4), (1, 4), (4, 4), (9, 4), (7, None), (3, 1)])
def test_ranges_cover_all_rows_in_order(total, size):
    ranges = AdaptiveBatch("scoring", size).run(total, lambda rows: rows)
    assert [row for rows in ranges for row in rows] == list(range(total))
    assert all(len(rows) <= (size or total) for rows in ranges)
    assert len(ranges) == -(-total // (size or total or 1))


def test_failed_rows_are_halved_and_done_again_and_the_others_are_not():
    calls = []
    batch = AdaptiveBatch("scoring", 8)
    # The first eight rows fit, as if they were shorter.
    first = limited(list, 8, calls)
    later = limited(list, 2, calls)
    results = batch.run(20, lambda rows: (first if rows.start == 0 else later)(rows))
    assert [row for rows in results for row in rows] == list(range(20))
    assert calls[:4] == [(0, 8), (8, 16), (8, 12), (8, 10)]
    assert calls[4:] == [(10, 12), (12, 14), (14, 16), (16, 18), (18, 20)]
    assert (batch.size, batch.failures) == (2, 2)


def test_the_smaller_size_is_for_good():
    calls = []
    batch = AdaptiveBatch("generation")
    batch.run(6, limited(list, 3, calls))
    assert calls == [(0, 6), (0, 3), (3, 6)]
    batch.run(6, limited(list, 3, calls))
    assert calls[3:] == [(0, 3), (3, 6)]


def test_a_short_last_range_shrinks_below_itself():
    calls = []
    batch = AdaptiveBatch("scoring", 8)
    batch.run(11, lambda rows: limited(list, 8 if rows.start == 0 else 1, calls)(rows))
    assert calls == [(0, 8), (8, 11), (8, 9), (9, 10), (10, 11)]


def test_results_and_random_numbers_equal_those_of_a_start_at_the_small_size():
    data = torch.arange(60.0).view(12, 5)

    def work(rows):
        return data[rows.start : rows.stop] + torch.rand(len(rows), 5)

    torch.manual_seed(4)
    small = torch.cat(AdaptiveBatch("scoring", 3).run(12, work))
    following = torch.rand(2)
    torch.manual_seed(4)
    recovered = torch.cat(AdaptiveBatch("scoring", 12).run(12, limited(work, 3)))
    assert torch.equal(recovered, small)
    assert torch.equal(torch.rand(2), following)


def test_a_call_may_have_a_bound_of_its_own():
    batch, calls = AdaptiveBatch("scoring", 4), []
    batch.run(6, limited(list, 9, calls), most=3)
    batch.run(6, limited(list, 9, calls), most=5)
    assert calls == [(0, 3), (3, 6), (0, 4), (4, 6)]
    assert batch.size == 4


def test_nothing_to_train_on():
    assert AdaptiveBatch("training").run(0, pytest.fail) == []


def test_tensors_of_the_failed_attempt_are_gone_before_the_next():
    alive, seen = [], []

    class Tensors:
        """Stands for memory, and can be watched."""

    def deep(rows):
        held = Tensors()
        held.myself = held  # only the collector frees it
        alive.append(weakref.ref(held))
        if len(rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return list(rows)

    def work(rows):
        seen.append(sum(ref() is not None for ref in alive))
        activations = Tensors()
        alive.append(weakref.ref(activations))
        return deep(rows)

    gc.disable()
    try:
        batch = AdaptiveBatch("scoring", 8)
        batch.run(8, work)
    finally:
        gc.enable()
    assert len(seen) == 6
    assert seen[:3] == [0, 0, 0]


def test_one_row_that_does_not_fit_is_an_error_that_says_what_to_do():
    with pytest.raises(RowTooLargeError) as caught:
        AdaptiveBatch("training", 4).run(8, limited(list, 0))
    words = str(caught.value)
    assert "training" in words and "only row 0, so" in words
    assert "per_device_train_batch_size=1" in words and "gradient_checkpointing=True" in words
    assert "Tried to allocate 2.00 GiB" in words
    assert is_out_of_memory(caught.value)
    with pytest.raises(RowTooLargeError, match=r"in rewards with only row 2,"):
        AdaptiveBatch("rewards", 1).run(
            3, lambda rows: limited(list, 0 if rows.start == 2 else 1)(rows)
        )


def test_the_log_names_phase_sizes_and_option(log):
    AdaptiveBatch("generation", 6).run(6, limited(list, 3))
    assert len(log.records) == 1
    words = log.records[0].getMessage()
    assert "generation with 6 rows" in words and "3 at once" in words
    assert "generation_max_rows=3" in words


def test_other_errors_and_a_disabled_batch_let_errors_through():
    calls = []

    def broken(rows):
        calls.append(rows)
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        AdaptiveBatch("scoring", 4).run(8, broken)
    batch = AdaptiveBatch("scoring", 4, disabled=True)
    with pytest.raises(torch.OutOfMemoryError, match="2.00 GiB"):
        batch.run(8, limited(list, 2, calls))
    assert len(calls) == 2
    assert (batch.size, batch.failures) == (4, 0)


def test_frames_lose_their_variables_and_the_traceback_stays():
    class Held:
        pass

    refs = []

    def inner():
        held = Held()
        refs.append(weakref.ref(held))
        raise KeyError("first")

    def outer():
        held = Held()
        refs.append(weakref.ref(held))
        try:
            inner()
        except KeyError as error:
            raise MemoryError("second") from error

    try:
        outer()
    except MemoryError as error:
        assert [ref() is not None for ref in refs] == [True, True]
        drop_frames(error)
        assert [ref() is not None for ref in refs] == [False, False]
        names = []
        link = error.__traceback__
        while link is not None:
            names.append(link.tb_frame.f_code.co_name)
            link = link.tb_next
        assert names[-1] == "outer"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_failure_on_a_gpu():
    free, _ = torch.cuda.mem_get_info()
    share = int(free * 0.4)

    def work(rows):
        block = torch.empty(share * len(rows), dtype=torch.uint8, device="cuda")
        block[:1] = 1
        return torch.rand(2, device="cuda").cpu()

    torch.manual_seed(0)
    small = AdaptiveBatch("scoring", 2).run(4, work)
    torch.manual_seed(0)
    batch = AdaptiveBatch("scoring", 4)
    assert all(map(torch.equal, batch.run(4, work), small))
    assert (batch.size, batch.failures) == (2, 1)

"""What every backend must do, whatever engine completes the rows."""

import pytest
import torch

from trl.generation.base import Sampling
from trl.types import Prompts

EOS = 1
SIZE = 24  # tokens that are asked for


class BackendContract:
    """Subclass it and give the fixture `backend`; `logps` for one that reports them."""

    scripted = False  # completions depend on prompt and place, not on seeds
    rounding = 0.0  # by which log-probabilities of the same rows may differ

    @pytest.fixture
    def backend(self):
        """A backend that completes random token ids; some completions must hold id 1."""
        raise NotImplementedError

    def logps(self, prompt, completion):
        """Log-probabilities of a completion under the weights that generate."""
        raise NotImplementedError

    @staticmethod
    def prompts(*groups):
        """Rows of groups (ids, count)."""
        ids = [list(ids) for ids, count in groups for _ in range(count)]
        return Prompts(messages=[str(row) for row in ids], token_ids=ids)

    @staticmethod
    def sampling(count, **changes):
        seeds = tuple(range(100, 100 + count))
        return Sampling(**({"max_tokens": SIZE, "stop_ids": (), "seeds": seeds} | changes))

    def groups(self):
        return self.prompts(((20, 21, 22), 4), ((30,), 4), ((40, 41), 4))

    def same(self, one, other):
        """Whether generations are the same."""
        pairs = zip(one.sampling_logps or (), other.sampling_logps or (), strict=True)
        near = all(pytest.approx(a, abs=self.rounding, rel=0) == b for a, b in pairs)
        return near and (one.completion_ids, one.finish_reasons) == (
            other.completion_ids,
            other.finish_reasons,
        )

    def test_each_row_is_completed_up_to_the_limit(self, backend):
        for size in (1, 7):
            backend.sync_weights(0)
            found = backend.generate(self.groups(), self.sampling(12, max_tokens=size), 4)
            assert [len(ids) for ids in found.completion_ids] == [size] * 12
            assert found.finish_reasons == ["length"] * 12

    def test_completions_end_with_the_first_stop_token(self, backend):
        backend.sync_weights(0)
        free = backend.generate(self.groups(), self.sampling(12), 4).completion_ids
        stops = (free[0][5], free[4][2], free[8][9])
        found = backend.generate(self.groups(), self.sampling(12, stop_ids=stops), 4)
        for row, ids in enumerate(found.completion_ids):
            assert ids == free[row][: len(ids)]
            assert set(ids[:-1]).isdisjoint(stops)
            assert (ids[-1] in stops) == (found.finish_reasons[row] == "stop")
            assert found.finish_reasons[row] == "stop" or len(ids) == SIZE
        assert [found.finish_reasons[row] for row in (0, 4, 8)] == ["stop"] * 3

    def test_rows_of_a_prompt_differ_and_stay_in_order(self, backend):
        backend.sync_weights(0)
        rows = self.groups()
        found = backend.generate(rows, self.sampling(12), 4).completion_ids
        assert len({tuple(ids) for ids in found}) == 12
        turned = self.prompts(((40, 41), 4), ((20, 21, 22), 4), ((30,), 4))
        seeds = tuple(range(100, 112))
        sampling = self.sampling(12, seeds=seeds[8:] + seeds[:8])
        again = backend.generate(turned, sampling, 4).completion_ids
        assert again == found[8:] + found[:8]

    def test_seeds_decide_and_the_global_stream_does_not(self, backend):
        backend.sync_weights(0)
        torch.manual_seed(0)
        state = torch.get_rng_state()
        first = backend.generate(self.groups(), self.sampling(12), 4)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(99)
        assert self.same(backend.generate(self.groups(), self.sampling(12), 4), first)
        other = self.sampling(12, seeds=tuple(range(500, 512)))
        differs = backend.generate(self.groups(), other, 4).completion_ids != first.completion_ids
        assert differs != self.scripted

    def test_a_part_of_a_group_can_be_asked_for(self, backend):
        backend.sync_weights(0)
        whole = backend.generate(self.prompts(((20, 21), 4)), self.sampling(4), 4)
        half = backend.generate(self.prompts(((20, 21), 2)), self.sampling(2), 4)
        assert half.completion_ids == whole.completion_ids[:2]

    def test_reported_log_probabilities_are_those_of_the_weights(self, backend):
        backend.sync_weights(0)
        rows = self.groups()
        for temperature in (1.0, 0.6):
            sampling = self.sampling(12, temperature=temperature)
            found = backend.generate(rows, sampling, 4)
            if found.sampling_logps is None:
                pytest.skip("reports none")
            for row, ids in enumerate(found.completion_ids):
                expected = self.logps(rows.token_ids[row], ids, temperature)
                gap = (torch.tensor(found.sampling_logps[row]) - expected).abs().max()
                assert gap <= 1e-4, f"row {row} at temperature {temperature}: {gap}"

    def test_the_next_step_can_be_synced(self, backend):
        backend.sync_weights(0)
        first = backend.generate(self.groups(), self.sampling(12), 4)
        backend.sync_weights(1)
        assert self.same(backend.generate(self.groups(), self.sampling(12), 4), first)


def model_logps(model, prompt, completion, temperature):
    """Log-probabilities (C,) from one plain forward."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0] / temperature
    places = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
    return logits.log_softmax(-1)[places, torch.tensor(completion)]

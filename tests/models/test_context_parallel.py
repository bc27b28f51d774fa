import pytest
import torch
from distributed.engines import call
from tiny import in_double, tiny_model

from trl.models.context_parallel import ContextParallel, SlicedPacking, _spans
from trl.models.packed_attention import Rules, visible
from trl.models.packed_places import Packing, Window
from trl.models.scorer import Scorer
from trl.types import TokenRows

# Two groups that share a prompt, and documents; the longest is longer than a run of tokens.
ROWS = [
    *[([8, 9, 10], [20, 21, 1]), ([8, 9, 10], [20, 24, 25, 26, 27]), ([8, 9, 10], [])],
    *[([], list(range(30, 47))), ([], [5]), ([11] * 6, [22]), ([11] * 6, [23, 12, 13])],
]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_see_together_what_the_row_sees(ranks):
    packing = Packing.of([(4, [3, 2]), (0, [9, 1]), (6, [])], "cpu")
    total = 25
    length = -(-total // (2 * ranks))
    seen = torch.zeros(2 * ranks * length, total, dtype=torch.int)
    for rank in range(ranks):
        starts = [rank * length, (2 * ranks - 1 - rank) * length]
        tokens = [start + i for start in starts for i in range(length)]
        for span in _spans(packing, starts, length):
            queries = tokens[span.queries]
            keys = torch.arange(total)[span.keys]
            allowed = torch.ones(len(queries), len(keys), dtype=torch.int)
            if span.causal:
                assert queries == keys.tolist()
                allowed = allowed.tril()
            for query, row in zip(queries, allowed, strict=True):
                seen[query, keys] += row
    assert torch.equal(seen[:total].bool(), visible(packing, total))
    assert seen.max() == 1 and not seen[total:].any()


def test_windows_that_rows_outgrow_are_refused():
    places, states = SlicedPacking((), None, longest=9), torch.ones(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="one of 8 tokens"):
        places.attend(states, (states, states), Rules(0, 1.0, Window(8)), None)


def scores_of_rank() -> dict[str, torch.Tensor]:
    """Scores of all rows, the gradient of this rank, and how many tokens it computed."""
    model = in_double(tiny_model())
    scorer = Scorer(pad_id=0, temperature=1.0, device=torch.device("cpu"))
    computed: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, given: computed.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    batch = TokenRows.of(ROWS)
    scorer.logps(model, batch)  # the check of the layout is on whole rows
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        scorer.context = ContextParallel(torch.distributed.group.WORLD)
    computed.clear()
    kept: dict[int, int] = {}  # storages that wait for the backward pass

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = scorer(model, batch, with_entropy=True)
    hook.remove()
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    (scores.logps * torch.arange(1.0, 1 + len(ROWS))[:, None]).sum().backward()
    grad = torch.cat([p.grad.flatten() for p in model.parameters()])
    return {"logps": scores.logps.detach(), "entropies": scores.entropies, "grad": grad} | {
        "hits": scores.hits,
        "computed": computed,
        "kept": sum(kept.values()),
    }


def on_ranks() -> dict[str, torch.Tensor]:
    torch.distributed.init_process_group("gloo")
    found = scores_of_rank()
    torch.distributed.all_reduce(found["grad"])
    return found


@pytest.mark.distributed
def test_three_ranks_score_what_one_does():
    alone = scores_of_rank()
    for found in call(on_ranks, processes=3):
        for name in ("logps", "entropies"):
            assert (found[name] - alone[name]).abs().max() <= 1e-12
        assert torch.equal(found["hits"], alone["hits"])
        # Every rank's loss is the whole one, so the gradients of three ranks are three times it.
        assert (found["grad"] / 3 - alone["grad"]).norm() <= 1e-12 * alone["grad"].norm()
        (tokens,), (total,) = found["computed"], alone["computed"]
        assert tokens == 2 * -(-total // 6)
        # Keys and values of all tokens, and a third of everything else.
        assert found["kept"] <= 0.5 * alone["kept"]

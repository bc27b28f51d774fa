import pytest
import torch
from distributed.engines import call
from rollouts import visible
from tiny import in_double, tiny_model
from transformers import Lfm2Config, Lfm2ForCausalLM, MistralConfig, MistralForCausalLM

from trl.models.context_parallel import (
    ContextParallel,
    SlicedPacking,
    _attention_calls,
    check_divisible,
)
from trl.models.packed_attention import AttentionOptions
from trl.models.packed_row import Packing, Window
from trl.models.scorer import Scorer
from trl.types import Rows

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
        for part in _attention_calls(packing, starts, length):
            queries = tokens[part.queries]
            keys = torch.arange(total)[part.keys]
            allowed = torch.ones(len(queries), len(keys), dtype=torch.int)
            if part.causal:
                assert queries == keys.tolist()
                allowed = allowed.tril()
            for query, row in zip(queries, allowed, strict=True):
                seen[query, keys] += row
    assert torch.equal(seen[:total].bool(), visible(packing, total))
    assert seen.max() == 1 and not seen[total:].any()


def test_windows_that_rows_outgrow_are_refused():
    places, states = SlicedPacking((), None, longest=9), torch.ones(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="does not support attention windows"):
        places.attend(states, (states, states), AttentionOptions(0, 1.0, Window(8)))


def test_models_whose_rows_cannot_be_divided_are_refused():
    sizes = {"vocab_size": 95, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    mistral = MistralForCausalLM(MistralConfig(**sizes, sliding_window=16))
    with pytest.raises(ValueError, match=r"cp_size=4 .* window of 16 tokens, and max_length=17"):
        check_divisible(mistral, 4, 17)
    with pytest.raises(ValueError, match="max_length=None allows longer rows"):
        check_divisible(mistral, 4, None)
    check_divisible(mistral, 4, 16)
    mistral.config.layer_types = ["full_attention"] * 2
    check_divisible(mistral, 4, None)
    with pytest.raises(ValueError, match="cp_size=2 .* recurrent layers"):
        check_divisible(Lfm2ForCausalLM(Lfm2Config(**sizes, full_attn_idxs=[1])), 2, 16)


def scores_of_rank() -> dict[str, torch.Tensor]:
    """Scores of all rows, the gradient of this rank, and how many tokens it computed."""
    model = in_double(tiny_model())
    scorer = Scorer(pad_id=0, temperature=1.0, device=torch.device("cpu"))
    computed: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, given: computed.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    batch = Rows.of(ROWS)
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

"""Half precision of FSDP2 in its own way: it casts what modules return."""

import torch
from rollouts import token_mask
from tiny import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from trl.models.scorer import Scorer
from trl.types import Rows

ROWS = [[20, 21, 22, 1], [23, 24, 1]]


def rollout() -> Rows:
    return Rows.of([([8, 9, 10], row) for row in ROWS])


def sharded(dtype):
    """As accelerate does it: layers, embedding, norm and head together, and the rest."""
    model = tiny_model().train()
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    for unit in (*model.model.layers, model.model.embed_tokens, [model.model.norm, model.lm_head]):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def scores(model, autocast):
    score = Scorer(pad_id=0, temperature=1.0, device=torch.device("cpu"))
    score.agree(model, rollout(), lambda value: value)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = score(model, rollout(), with_entropy=True)
    (found.logps.sum() + 0.3 * found.entropies.sum()).backward()
    assert score.check.enabled
    return found


def gradient(model):
    grads = [getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in model.parameters()]
    return torch.cat([grad.flatten().float() for grad in grads])


def test_log_probabilities_keep_their_digits(process_group):
    plain, model = tiny_model().train(), sharded(torch.bfloat16)
    expected, found = scores(plain, autocast=True), scores(model, autocast=True)
    assert found.logps.dtype == found.entropies.dtype == torch.float32
    assert not torch.equal(found.logps, found.logps.bfloat16().float())
    exists = token_mask(rollout())
    # A layer rounds here and there at other places; one log-probability in bfloat16 is off by more.
    assert (found.logps - expected.logps)[exists].abs().mean() < 2e-3
    assert (expected.logps.bfloat16().float() - expected.logps)[exists].abs().mean() > 4e-3
    difference = (gradient(model) - gradient(plain)).norm() / gradient(plain).norm()
    assert difference < 0.03


def test_a_model_sharded_over_one_rank_gives_the_same_gradient(process_group):
    plain, model = tiny_model().train(), sharded(None)
    expected, found = scores(plain, autocast=False), scores(model, autocast=False)
    assert (found.logps - expected.logps).abs().max() < 1e-5
    difference = (gradient(model) - gradient(plain)).norm() / gradient(plain).norm()
    assert difference < 5e-6

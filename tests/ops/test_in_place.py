import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, embedding

from trl.ops.in_place import adds_in_place, look_up, several_passes
from trl.ops.linear_logprobs import Tiling, linear_log_probs

VOCABULARY, HIDDEN = 150, 8
IDS = torch.tensor([[3, 149, 3, 0], [7, 3, 0, 148]])
TARGETS = torch.tensor([5, 149, 5, 0, 77, 3, 1, 64])


def weights(tied=False, dtype=torch.float32):
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(VOCABULARY, HIDDEN, dtype=dtype))
    return table, table if tied else nn.Parameter(torch.randn(VOCABULARY, HIDDEN, dtype=dtype))


def loss_of(table, head, padding=None, chunk=200):
    """Cross-entropy of a model that is nothing but an embedding and a head, by this package."""
    hidden = look_up(IDS, table, padding).flatten(0, 1).tanh()
    tiling = Tiling(chunk=chunk, in_place=True)
    return -linear_log_probs(hidden, head, TARGETS, tiling=tiling)[0].sum()


def expected(table, head, padding=None, times=1):
    """Gradients as torch makes them, in float64."""
    pair = [nn.Parameter(x.detach().double()) for x in (table, head)]
    if head is table:
        pair[1] = pair[0]
    hidden = embedding(IDS, pair[0], padding).flatten(0, 1).tanh()
    (times * cross_entropy(hidden @ pair[1].t(), TARGETS, reduction="sum")).backward()
    return [x.grad for x in pair]


def differs(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


def whole_matrices(work):
    """How many tensors of the size of the vocabulary's matrix `work` makes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            for x in found if isinstance(found, tuple) else (found,):
                if isinstance(x, torch.Tensor) and x.numel() == VOCABULARY * HIDDEN:
                    seen.add(x.untyped_storage().data_ptr())
            return found

    with Watch():
        work()
    return len(seen)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("padding", [None, 3, 0])
def test_gradients_in_place_are_those_of_torch(tied, padding):
    table, head = weights(tied)
    loss_of(table, head, padding).backward()
    for parameter, wanted in zip((table, head), expected(table, head, padding), strict=True):
        assert differs(parameter.grad, wanted) <= 1e-6


def test_a_second_backward_pass_adds_to_the_first_and_makes_no_matrix():
    table, head = weights(tied=True)
    loss_of(table, head).backward()
    held = table.grad
    again = loss_of(table, head)
    # None but `.grad` itself, of which tiles are views.
    assert whole_matrices(again.backward) == 1
    assert table.grad is held
    assert differs(held, expected(table, head, times=2)[0]) <= 1e-6


def test_the_matrix_is_made_in_the_last_of_several_passes():
    table, head = weights()
    node, seen = table.expand_as(table).grad_fn.next_functions[0][0], []
    node.register_hook(lambda *_: seen.append(None if table.grad is None else table.grad.clone()))
    with several_passes() as waiting:
        for number in range(3):
            waiting.is_last = number == 2
            loss_of(table, head).backward()
    wanted = expected(table, head, times=3)[0]
    assert seen[:2] == [None, None] and differs(seen[2], wanted) <= 1e-6
    with several_passes() as waiting:  # to one that is there, or with many rows, they are added
        loss_of(table, head).backward()
        assert differs(table.grad, 4 * wanted / 3) <= 1e-6
        other, _ = weights()
        look_up(torch.zeros(VOCABULARY, dtype=torch.long), other).sum().backward()
        assert other.grad is not None


def test_rows_that_wait_are_added_in_the_end_and_dropped_after_an_error():
    table, head = weights()
    loss = loss_of(table, head)

    def fail():
        with several_passes():
            loss_of(table, head).backward()
            loss.backward(torch.ones(2))  # which has another shape

    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        fail()
    assert table.grad is None
    with several_passes():  # and never says which pass is the last one
        loss_of(table, head).backward()
    assert differs(table.grad, expected(table, head)[0]) <= 1e-6


def test_a_graph_that_is_kept_counts_each_time():
    table, head = weights()
    loss = loss_of(table, head)
    loss.backward(retain_graph=True)
    loss.backward()
    assert differs(table.grad, expected(table, head, times=2)[0]) <= 1e-6


def test_gradients_of_half_precision_are_summed_before_they_are_rounded():
    ids = torch.full((1, 2000), 4)
    table = weights(dtype=torch.bfloat16)[0]
    (look_up(ids, table) * 0.01).sum().backward()
    assert differs(table.grad[4], torch.full((HIDDEN,), 20.0).double()) <= 2**-8


@pytest.mark.parametrize("which", ["table", "head", "tied"])
@pytest.mark.parametrize("kind", ["tensor", "post-accumulate"])
def test_hooks_on_a_weight_see_its_whole_gradient(which, kind):
    table, head = weights(tied=which == "tied")
    hooked = head if which == "head" else table
    seen = []
    if kind == "tensor":
        hooked.register_hook(lambda grad: seen.append(grad.clone()))
    else:
        hooked.register_post_accumulate_grad_hook(lambda x: seen.append(x.grad.clone()))
    assert not adds_in_place(hooked)
    loss_of(table, head).backward()
    wanted = expected(table, head)[which == "head"]
    assert len(seen) == 1
    assert differs(seen[0], wanted) <= 1e-6
    assert differs(hooked.grad, wanted) <= 1e-6


def test_a_hook_that_comes_between_forward_and_backward_is_served():
    table, head = weights()
    loss = loss_of(table, head)
    table.register_hook(lambda grad: 2 * grad)
    head.register_hook(lambda grad: 3 * grad)
    loss.backward()
    for x, factor, wanted in zip((table, head), (2, 3), expected(table, head), strict=True):
        assert differs(x.grad, factor * wanted) <= 1e-6


def test_hooks_on_the_node_of_a_weight_find_its_gradient_complete():
    """DDP and its like hang theirs there."""
    table, head = weights(tied=True)
    node = table.expand_as(table).grad_fn.next_functions[0][0]
    seen = []
    node.register_hook(lambda *_: seen.append(table.grad.clone()))
    loss_of(table, head).backward()
    assert len(seen) == 1
    assert differs(seen[0], expected(table, head)[0]) <= 1e-6


def test_a_loss_scaler_finds_scaled_gradients():
    table, head = weights(tied=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD([table], lr=0.0)
    scaler.scale(loss_of(table, head)).backward()
    wanted = expected(table, head)[0]
    assert differs(table.grad, 1024 * wanted) <= 1e-6
    scaler.unscale_(optimizer)
    assert differs(table.grad, wanted) <= 1e-6


def test_weights_that_are_no_leaf_are_left_to_autograd():
    table, head = weights()
    loss_of(2 * table, 2 * head).backward()
    wanted = expected(2 * table, 2 * head)
    for parameter, grad in zip((table, head), wanted, strict=True):
        assert differs(parameter.grad, 2 * grad) <= 1e-6


def test_ids_may_be_short_integers():
    table, _ = weights()
    look_up(IDS.int(), table).pow(2).sum().backward()
    wide = table.detach().double().requires_grad_()
    embedding(IDS, wide).pow(2).sum().backward()
    assert differs(table.grad, wide.grad) <= 1e-6


def test_frozen_weights_get_no_gradient():
    table, head = weights()
    table.requires_grad_(False)
    loss_of(table, head).backward()
    assert table.grad is None
    assert differs(head.grad, expected(table, head)[1]) <= 1e-6
    frozen = copy.deepcopy(head).requires_grad_(False)
    table.requires_grad_(True)
    loss_of(table, frozen).backward()
    assert frozen.grad is None


def test_what_is_saved_may_come_back_as_another_tensor():
    table, head = weights(tied=True)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        loss_of(table, head).backward()
    assert differs(table.grad, expected(table, head)[0]) <= 1e-6

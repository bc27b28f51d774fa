import pytest
import torch
from torch import nn

from trl.generation.vllm.weight_verifier import CHUNK_WORDS, WeightVerifier, fingerprint


class Fused(nn.Module):
    """Holds two weights as one parameter, half of a third, and one in another precision."""

    def __init__(self):
        super().__init__()
        self.pair = nn.Parameter(torch.zeros(6, 4))
        self.part = nn.Parameter(torch.zeros(5, 2))
        self.narrow = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))

    def load(self, name, weight):
        if name == "first":
            self.pair.data[:3].copy_(weight)
        elif name == "second":
            self.pair.data.narrow(0, 3, 3).copy_(weight)
        elif name == "third":  # the right half of four columns, and a row that pads
            self.part.data[:4].copy_(weight.narrow(1, 2, 2))
            self.part.data[4:].fill_(0)
        elif name == "fourth":
            self.narrow.data.copy_(weight)


def weights(seed=0):
    stream = torch.Generator().manual_seed(seed)
    shapes = {"first": (3, 4), "second": (3, 4), "third": (4, 4), "fourth": (7,)}
    return {name: torch.randn(shape, generator=stream) for name, shape in shapes.items()}


def sync(verifier, sent, load):
    for name, weight in sent.items():
        verifier.load(name, weight, load)
    return verifier.finish_sync()


def test_what_arrives_is_proven_at_each_sync():
    model = Fused()
    verifier = WeightVerifier(model)
    for seed in range(3):
        assert sync(verifier, weights(seed), model.load) is None
    assert verifier.unverified == []


def test_a_loader_that_converts_is_named():
    model = Fused()

    def load(name, weight):
        model.load(name, -weight if name == "first" else weight)

    verifier = WeightVerifier(model)
    assert sync(verifier, weights(), load) is None
    assert verifier.unverified == ["first"]


@pytest.mark.parametrize("name", ["first", "second", "third", "fourth"])
def test_a_change_after_loading_is_seen(name):
    model = Fused()
    verifier = WeightVerifier(model)
    assert sync(verifier, weights(), model.load) is None
    for key, weight in weights(1).items():
        verifier.load(key, weight, model.load)
    place = {"first": (model.pair, 0), "second": (model.pair, 15), "third": (model.part, 3)}
    parameter, entry = place.get(name, (model.narrow, 6))
    flat = parameter.data.view(-1)
    flat[entry] = flat[entry] * 1.01
    assert f"{name} differs from what was sent" in verifier.finish_sync()


def test_entries_that_were_never_loaded_are_counted():
    model = Fused()
    sent = weights()
    del sent["second"]
    words = "12 of 24 entries of the engine's pair were not loaded"
    assert sync(WeightVerifier(model), sent, model.load) == words


def test_a_weight_missing_at_a_later_sync_is_named():
    model = Fused()
    verifier, sent = WeightVerifier(model), weights()
    assert sync(verifier, sent, model.load) is None
    del sent["third"]
    assert sync(verifier, sent, model.load) == "third was not sent, unlike at earlier syncs"
    assert sync(verifier, weights(), model.load) is None, "a failure is forgotten"


def test_many_weights_are_listed_shortly():
    model = Fused()
    verifier = WeightVerifier(model)
    assert sync(verifier, weights(), model.load) is None
    problem = sync(verifier, weights(1), lambda name, weight: None)
    assert problem == "first, second, third and 1 more differ from what was sent"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [4, 5])
def test_fingerprints_tell_order_sign_and_last_bit_apart(dtype, size):
    values = torch.arange(1, size**2 + 1, dtype=torch.float64).to(dtype).view(size, size)
    others = [values.T, values.flip(0), values.roll(1), values + torch.eye(size, dtype=dtype)]
    one = fingerprint(values)
    assert fingerprint(values.clone()) == one
    assert fingerprint(torch.cat([values[:1], values])[1:]) == one, "wherever it lies in memory"
    assert all(fingerprint(other) != one for other in others)


def test_one_flipped_bit_anywhere_changes_a_fingerprint():
    values = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    one = fingerprint(values)
    for byte in range(values.nbytes):
        flipped = values.clone()
        flipped.view(-1).view(torch.uint8)[byte] ^= 1
        assert fingerprint(flipped) != one


def test_fingerprints_of_long_tensors_count_places_through():
    values = torch.randn(2 * CHUNK_WORDS + 3, generator=torch.Generator().manual_seed(0))
    swapped = values.clone()
    swapped[[0, 2 * CHUNK_WORDS]] = values[[2 * CHUNK_WORDS, 0]]
    assert fingerprint(values) != fingerprint(swapped)


def test_fingerprints_do_not_depend_on_the_number_of_threads():
    values, threads, found = torch.randn(2**21) * 1e-3, torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(fingerprint(values).item())
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]

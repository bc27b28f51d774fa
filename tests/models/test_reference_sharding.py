"""Models that are only scored with, on one process; see tests/distributed for several."""

import pytest
import torch
from accelerate import Accelerator
from tiny import tiny_model

from trl.models.reference_sharding import copy_weights, load_weights, spread, whole_weights


@pytest.mark.parametrize("tied", [False, True])
def test_weights_go_out_and_in_again(tied):
    model = tiny_model(tie_word_embeddings=tied)
    state = dict(whole_weights(model))
    assert state.keys() == model.state_dict().keys()
    doubled = {name: 2 * weight for name, weight in state.items()}
    load_weights(model, doubled)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, 2 * state[name]), "what came out does not change with the model"


def test_other_weights_are_refused():
    model = tiny_model()
    state = dict(whole_weights(model))
    with pytest.raises(RuntimeError, match="more.weight"):
        load_weights(model, state | {"more.weight": torch.ones(1)})
    state.pop("lm_head.weight")
    with pytest.raises(RuntimeError, match="lm_head.weight"):
        load_weights(model, state)


def test_a_copy_is_its_own():
    model = tiny_model(tie_word_embeddings=True)
    copied = copy_weights(model)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert torch.equal(copied.lm_head.weight, model.lm_head.weight)
    assert copied.lm_head.weight.data_ptr() != model.lm_head.weight.data_ptr()


def test_one_process_keeps_the_model_as_it_is():
    model = tiny_model()
    assert spread(model, Accelerator(cpu=True)) is model

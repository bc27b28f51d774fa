"""Models whose tokens see what follows them are refused before training."""

import pytest
from tiny import tiny_model
from transformers import BertConfig, BertLMHeadModel

from trl.models.causality import NotCausalError, refuse_encoder

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 100}


@pytest.mark.parametrize("scale", [0.02, 0.2])
def test_encoders_are_refused_whatever_the_size_of_their_weights(scale):
    """The logits of a model with small random weights hardly depend on other tokens."""
    model = BertLMHeadModel(BertConfig(intermediate_size=16, initializer_range=scale, **SIZES))
    with pytest.raises(NotCausalError, match="BertLMHeadModel is not causal: what follows a "):
        refuse_encoder(model)


def test_decoders_are_accepted():
    refuse_encoder(tiny_model())
    refuse_encoder(BertLMHeadModel(BertConfig(intermediate_size=16, is_decoder=True, **SIZES)))

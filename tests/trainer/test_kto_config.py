import pytest

from trl.trainer.kto_config import KTOConfig


def make(**changes):
    return KTOConfig("out", **({"use_cpu": True, "bf16": False} | changes))


def test_defaults():
    args = make()
    assert (args.learning_rate, args.beta, args.max_length) == (1e-6, 0.1, 1024)
    assert (args.desirable_weight, args.undesirable_weight) == (1.0, 1.0)
    assert args.disable_dropout and args.estimates_kl
    assert make(per_device_train_batch_size=1).order_seed == 42  # shuffled, one row at a time
    assert not make(loss_type="apo_zero_unpaired").estimates_kl


def test_older_options_are_told_of():
    with pytest.warns(FutureWarning, match="KTOConfig: padding_value has no effect"):
        make(padding_value=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_type": "bco"}, "loss_type='bco' must be one of kto, apo_zero_unpaired"),
        ({"desirable_weight": -1.0}, "desirable_weight=-1.0 must be at least 0"),
    ],
)
def test_what_cannot_be(changes, words):
    with pytest.raises(ValueError, match=words):
        make(**changes)

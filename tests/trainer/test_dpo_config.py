import enum

import pytest

from trl.ops.preference_losses import DIVERGENCES
from trl.trainer.dpo_config import LOSSES, DPOConfig


def make(**changes):
    return DPOConfig("out", **({"use_cpu": True, "bf16": False} | changes))


def test_defaults():
    args = make()
    assert (args.learning_rate, args.beta, args.max_length) == (1e-6, 0.1, 1024)
    assert args.disable_dropout and args.gradient_checkpointing and args.needs_reference
    assert args.loss_type == ["sigmoid"] and args.losses == {"sigmoid": 1.0}
    assert (args.f_divergence_type, args.f_alpha_divergence_coef) == ("reverse_kl", 0.5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss_type": "ipo"}, {"ipo": 1.0}),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.2]}, None),
        ({"rpo_alpha": 0.5}, {"sigmoid": 1.0, "sft": 0.5}),
        ({"loss_type": ["hinge", "sft"], "rpo_alpha": 0.5}, {"hinge": 1.0, "sft": 1.5}),
    ],
)
def test_losses_and_their_weights(changes, expected):
    assert make(**changes).losses == (expected or {"sigmoid": 0.8, "sft": 0.2})


def test_limits():
    limits = make(max_prompt_length=3, max_completion_length=5, truncation_mode="keep_end").limits
    assert (limits.max_length, limits.max_prompt_length) == (1024, 3)
    assert (limits.max_completion_length, limits.truncation_mode) == (5, "keep_end")


class Divergence(enum.Enum):
    JS = "js_divergence"


def test_names_of_earlier_releases():
    with pytest.warns(FutureWarning, match="'aot_pair' is now 'aot_unpaired'"):
        assert make(loss_type="aot_pair").loss_type == ["aot_unpaired"]
    assert make(f_divergence_type=Divergence.JS).f_divergence_type == "js_divergence"
    with pytest.warns(FutureWarning, match="label_pad_token_id has no effect .rows are not padded"):
        make(label_pad_token_id=-100)
    for name in ("padding_free", "use_logits_to_keep", "use_liger_loss"):
        assert getattr(make(**{name: True}), name)
    message = "no option of DPOConfig any more: write them into the column"
    with pytest.raises(TypeError, match=message):
        make(tools=[1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_type": "sigmoyd"}, "loss_type='sigmoyd' must be one of .* Did you mean sigmoid?"),
        ({"loss_type": ["sft", "kto_pair"]}, "loss_type='kto_pair' must be one of sigmoid, hinge"),
        ({"f_divergence_type": "kl"}, "f_divergence_type='kl' must be one of reverse_kl, forward"),
        ({"loss_weights": [1.0, 2.0]}, r"loss_type=\['sigmoid'\] and loss_weights=\[1.0, 2.0\] mu"),
        ({"loss_type": []}, "must be equally long"),
        (
            {"loss_type": ["sigmoid", "bco_pair"], "f_divergence_type": "forward_kl"},
            "f_divergence_type='forward_kl' cannot be used with loss_type=bco_pair, which does not",
        ),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "no effect on loss_type=hinge; it is for"),
        ({"loss_type": "exo_pair"}, "loss_type=exo_pair needs label_smoothing above 0"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "robust needs label_smoothing below 0.5"),
        ({"loss_type": "ipo", "beta": 0}, "beta=0 trains nothing"),
        (
            {"loss_type": "aot", "use_weighting": True},
            "cannot be used with loss_type=aot: they do not",
        ),
        ({"sync_ref_model": True, "reference_free": True}, "has no reference to move"),
        ({"ld_alpha": 1.5}, "ld_alpha=1.5 must be"),
        ({"label_smoothing": 1}, "label_smoothing=1 must be"),
        ({"truncation_mode": "middle"}, "truncation_mode='middle' must be one of keep_start, kee"),
    ],
)
def test_what_cannot_be(changes, words):
    with pytest.raises(ValueError, match=words):
        make(**changes)


def test_every_loss_and_divergence_can_be_chosen():
    fields = DPOConfig.__dataclass_fields__
    assert all(name in fields["loss_type"].metadata["help"] for name in LOSSES)
    assert fields["f_divergence_type"].metadata["choices"] == list(DIVERGENCES)
    for name in LOSSES:
        smoothing = 0.1 if name in ("exo_pair", "robust") else 0.0
        assert make(loss_type=name, label_smoothing=smoothing).losses == {name: 1.0}

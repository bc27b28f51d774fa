import pytest

from trl.trainer.sft_config import SFTConfig


def make(**changes):
    return SFTConfig("out", **({"use_cpu": True, "bf16": False} | changes))


def test_defaults():
    args = make()
    assert (args.learning_rate, args.max_length, args.logging_steps) == (2e-5, 1024, 10)
    assert args.gradient_checkpointing and args.completion_only_loss is None
    assert args.row_limit == "keep_start" and args.pad_to_multiple_of is None
    assert args.order_seed == 42
    assert not hasattr(args, "beta")  # there is no reference policy


def test_values_that_were_renamed():
    with pytest.warns(FutureWarning, match="'bfd-requeue' is now 'bfd_split'"):
        assert make(packing=True, packing_strategy="bfd-requeue").row_limit == "split"
    with pytest.warns(FutureWarning, match="loss_type='chunked_nll' is now 'nll'"):
        assert make(loss_type="chunked_nll").loss_type == "nll"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "keep_start"),
        ({"truncation_mode": "keep_end"}, "keep_end"),
        ({"long_rows": "drop", "packing": True}, "drop"),
        ({"packing": True, "packing_strategy": "wrapped"}, "wrapped"),
        (
            {
                "packing": True,
                "packing_strategy": "wrapped",
                "wrapped_attends_across": True,
            },
            "wrapped_across",
        ),
    ],
)
def test_what_is_done_with_long_rows(changes, expected):
    assert make(**changes).row_limit == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"selective": True}},
            "'selective' needs gradient_checkpointing=True",
        ),
        (
            {"gradient_checkpointing_kwargs": '{"selective": true, "use_reentrant": true}'},
            "and use_reentrant must not be True",
        ),
        ({"loss_type": "nl"}, "loss_type='nl' must be one of nll, dft. Did you mean nll?"),
        ({"packing_strategy": "ffd"}, "packing_strategy='ffd' must be one of bfd, bfd_split, wr"),
        ({"long_rows": "crop"}, "long_rows='crop' must be one of cut, drop, split, error"),
        ({"truncation_mode": "left"}, "truncation_mode='left' must be one of keep_start, keep_end"),
        ({"packing": True, "max_length": None}, "packing=True needs max_length"),
        ({"max_length": 1}, "max_length=1 must be at least 2"),
        (
            {"packing": True, "packing_strategy": "wrapped", "long_rows": "drop"},
            "packing_strategy='wrapped' says what is done with long rows: leave out long_rows=",
        ),
        ({"wrapped_attends_across": True}, "needs packing=True and packing_strategy='wrapped'"),
        (
            {"packing": True, "long_rows": "split"},
            "set packing_strategy='bfd_split' instead of long_rows='split'",
        ),
        ({"packing": True, "lazy_tokenization": True}, "packing needs the lengths of all rows"),
        (
            {"max_tokens_per_micro_batch": 9, "lazy_tokenization": True},
            "max_tokens_per_micro_batch needs the lengths of all rows",
        ),
    ],
)
def test_what_cannot_be(changes, words):
    with pytest.raises(ValueError, match=words):
        make(**changes)

"""Options of memory, as configurations of all trainers have them."""

import dataclasses

import pytest

from trl.memory.options import MemoryOptions
from trl.trainer.ppo_config import PPOConfig
from trl.trainer.sft_config import SFTConfig


@pytest.mark.parametrize("kind", [PPOConfig, SFTConfig])
def test_every_trainer_has_them_with_their_ranges(tmp_path, kind):
    given = {"logits_chunk_size": 0, "max_tokens_per_piece": 7, "empty_cache": "never"}
    args = kind(str(tmp_path), use_cpu=True, report_to="none", **given)
    assert {name: getattr(args, name) for name in given} == given
    assert {field.name for field in dataclasses.fields(MemoryOptions)} <= set(vars(args))
    for name, bad in {
        "logits_chunk_size": -1,
        "max_tokens_per_piece": 0.5,
        "empty_cache": "x",
    }.items():
        with pytest.raises(ValueError, match=f"^{name}={bad!r} must be "):
            kind(str(tmp_path), use_cpu=True, report_to="none", **{name: bad})

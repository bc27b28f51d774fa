import pytest
from online_runs import config

from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.rloo_config import RLOOConfig


@pytest.mark.parametrize("kind", [RLOOConfig, GRPOConfig])
def test_defaults(tmp_path, kind):
    args = config(tmp_path, kind)
    assert (args.max_tool_calling_iterations, args.tool_timeout) == (None, 60.0)
    assert config(tmp_path, kind, tool_timeout=None).tool_timeout is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tool_calling_iterations": -1}, "max_tool_calling_iterations=-1 must be at least 0"),
        ({"tool_timeout": 0}, "tool_timeout=0 must be above 0 .None: no limit."),
    ],
)
def test_values_out_of_range(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        config(tmp_path, **change)

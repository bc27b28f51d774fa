"""Options of engines, as configurations of trainers that generate have them."""

import pytest
from online_runs import config

from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.rloo_config import RLOOConfig

KINDS = pytest.mark.parametrize("kind", [RLOOConfig, GRPOConfig])


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("max_completion_length", (0, None, -1), (1,)),
        ("temperature", (0.0, -1.0), (0.01, 2.0)),
        ("top_p", (0.0, 1.01), (0.01, 1.0)),
        ("top_k", (-1,), (0, 5)),
        ("min_p", (-0.1, 1.1), (None, 0.0, 1.0)),
        ("repetition_penalty", (0.0,), (0.5,)),
        ("vllm_mode", ("remote",), ("colocate", "server")),
    ],
)
def test_ranges(tmp_path, name, bad, good):
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name}={value!r} must be "):
            config(tmp_path, **{name: value})
    for value in good:
        assert getattr(config(tmp_path, **{name: value}), name) == value


@KINDS
def test_defaults_of_tools(tmp_path, kind):
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
def test_values_of_tools_out_of_range(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        config(tmp_path, **change)

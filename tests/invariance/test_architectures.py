"""Model classes that stand for the others: what they share, and that it is right."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import architectures
from architectures import EXACT, Found, apart, examine, main, page, small

# What a class shares: prompts in scoring, prompts in decoding, documents in SFT.
SHARES = {
    "llama": (True, True, True),
    "qwen3": (True, True, True),
    "qwen3_moe": (True, True, True),
    "gpt2": (True, True, True),
    "gpt_neox": (True, True, True),
    "gemma2": (True, True, True),  # soft caps
    "gemma3_text": (True, True, True),  # windows
    "gpt_oss": (True, True, True),  # sinks
    "deepseek_v3": (True, True, True),  # values of another size
    "opt": (False, False, False),  # no hidden states
    "lfm2": (True, True, True),  # convolutions
    "bamba": (True, True, True),  # Mamba 2 beside attention
    "mamba2": (False, False, False),  # no attention at all
}


@pytest.mark.parametrize("kind", SHARES)
def test_a_class(kind):
    found = examine(kind)
    assert found.problem == ""
    assert (found.scoring, found.decoding, found.packs) == SHARES[kind], found.reasons
    assert found.errors.keys() == {"RLOO", "SFT"} and max(found.errors.values()) <= EXACT
    assert found.same_tokens
    assert bool(found.reasons) is not all(SHARES[kind])


def test_a_class_that_no_trainer_takes_is_refused():
    found = examine("xlnet")
    assert found.refused.startswith("is not causal") and found.is_right


def test_a_class_that_is_wrong_is_told(monkeypatch, tmp_path, capsys):
    layout = architectures.online_runs.make_trainer

    def wrong(folder, shared_prefix=True, **options):
        trainer = layout(folder, shared_prefix=shared_prefix, **options)
        if shared_prefix:
            with torch.no_grad():
                next(trainer.model.parameters()).mul_(1.01)
        return trainer

    monkeypatch.setattr(architectures.online_runs, "make_trainer", wrong)
    assert main(["llama", "--write", str(tmp_path / "page.md")]) == 1
    assert "LlamaForCausalLM: +++" in (shown := capsys.readouterr().out) and "WRONG" in shown
    assert "1 classes, of which 1 share prompts" in (tmp_path / "page.md").read_text()


def test_a_class_that_crashes_or_cannot_be_built_is_told(monkeypatch):
    assert apart("bart").problem.startswith("cannot be built: ")
    monkeypatch.setattr(architectures, "examine", lambda kind: nn.Module().nothing)
    assert apart("llama").problem.startswith("failed: the process ended with ")


def test_sizes_come_from_names():
    names = {"hidden_size": 32, "num_hidden_layers": 4, "head_dim": 8, "n_embd": 32, "beta": None}
    names |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "v_head_dim": 8, "ffn_dim": 64}
    assert {name: small(name) for name in names} == names


def test_the_page():
    right = Found("a", "A", scoring=True, errors={"RLOO": 1e-7})
    failed = Found("b", "B", problem="failed: ValueError: no")
    refused = Found("d", "D", refused="is not causal")
    missing = Found("c", "C", problem="cannot be built: it is an encoder")
    text = page([right, failed, refused, missing])
    assert "3 classes, of which 1 share" in text
    assert "1 are refused; 1 are wrong or fail" in text
    assert "| D | no | no | no | - | - | refused: it is not causal |" in text
    assert "| A | yes | no | no | 1.0e-07 | - |  |" in text
    assert "| C | it is an encoder |" in text

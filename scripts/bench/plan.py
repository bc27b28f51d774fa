"""Compares the memory that `trl memory-plan` predicts with what training takes, on a CPU.

Each configuration trains a small random model for two updates in a process of its own, in which
every byte of torch's allocator is counted. Without options all of them are measured, and the table
is written to docs/benchmarks/plan.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks" / "plan.md"
BOUND = 0.1
PHASES = ("generation", "scoring", "forward + backward", "optimizer")
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "head_dim": 32}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192}
WIDE = SMALL | {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 16}
LARGE_VOCABULARY = SMALL | {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 151_936}


@dataclass(frozen=True)
class Case:
    """A configuration; lengths are in tokens."""

    name: str
    model: dict[str, Any]
    prompt: int
    completion: int
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "qwen3"
    method: str = "grpo"
    adapter: bool = False

    @property
    def shape(self) -> str:
        """Format lengths, completions per prompt and rows per micro-batch for the table."""
        rows = self.options.get("per_device_train_batch_size", 8)
        return f"{self.prompt} / {self.completion} / {self.options['num_generations']} / {rows}"


EIGHT = {"num_generations": 8}
PLAIN = {"shared_prefix": False, "gradient_checkpointing": False, "logits_chunk_size": 0}
KL = {"beta": 0.05}
SPLIT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
FLOAT32 = {"bf16": False}
BFLOAT16 = {"bf16": True}
CASES = (
    Case("defaults, float32", SMALL, 256, 64, EIGHT | FLOAT32),
    Case("defaults, bf16", SMALL, 256, 64, EIGHT | BFLOAT16),
    Case("long prompts, bf16", SMALL, 2048, 64, EIGHT | BFLOAT16),
    Case("long completions", SMALL, 64, 384, EIGHT | FLOAT32),
    Case("RLOO with KL penalty, bf16", WIDE, 512, 128, EIGHT | BFLOAT16 | KL, method="rloo"),
    Case("no checkpointing", SMALL, 256, 64, EIGHT | FLOAT32 | {"gradient_checkpointing": False}),
    Case("no sharing", SMALL, 256, 64, EIGHT | FLOAT32 | {"shared_prefix": False}),
    Case("all savings off", SMALL, 256, 64, EIGHT | FLOAT32 | PLAIN | KL, method="rloo"),
    Case("vocabulary of 151,936, bf16", LARGE_VOCABULARY, 512, 64, EIGHT | BFLOAT16 | KL),
    Case("the same, all logits at once", LARGE_VOCABULARY, 64, 32, EIGHT | FLOAT32 | PLAIN),
    Case("four micro-batches, Llama", WIDE, 256, 64, EIGHT | FLOAT32 | SPLIT, kind="llama"),
    Case("LoRA, bf16", WIDE, 512, 128, EIGHT | BFLOAT16 | KL, adapter=True),
    Case("SGD", WIDE, 512, 128, EIGHT | FLOAT32 | {"optim": "sgd"}),
)


def main() -> None:
    """Measure one case, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", type=int, help="measure only this one and print JSON")
    chosen = parser.parse_args().case
    if chosen is None:
        results = [run(number) for number in range(len(CASES))]
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page(results), encoding="utf-8")
        print(PAGE.read_text(encoding="utf-8"))
        sys.exit(any(abs(ratio(result) - 1) > BOUND for result in results))
    import meter

    meter.preload()
    line, sys.stdout = sys.stdout, sys.stderr  # trainers print as well
    print(json.dumps(measure(CASES[chosen])), file=line)


def run(number: int) -> dict[str, Any]:
    """Measure a case in its own process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--case", str(number)]
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    if process.returncode:
        raise SystemExit(f"{CASES[number].name}: {process.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    print(f"{CASES[number].name}: {ratio(result):.3f}", flush=True)
    return result


def measure(case: Case) -> dict[str, Any]:
    """Train, and return predicted and measured peaks in bytes."""
    from meter import CpuBytes, Meter

    memory = CpuBytes()
    meter = Meter(memory)
    meter.install()
    meter.start()
    trainer, predicted = build(case, meter)
    trainer.train()
    held_bytes = memory.phase_peaks()
    measured = {name: held_bytes.get(name, 0) for name in ("generation", "scoring", "optimizer")}
    measured["forward + backward"] = max(held_bytes["forward"], held_bytes["backward"])
    return {"predicted": predicted, "measured": measured}


def build(case: Case, meter: Any) -> tuple[Any, dict[str, float]]:
    """Make the trainer of a case, and plan its memory from the configuration alone."""
    import synthetic
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM

    import trl
    from trl.cli.arguments import OnlineScriptArguments
    from trl.cli.memory_plan import settings
    from trl.generation.transformers.backend import TransformersBackend
    from trl.memory.estimate import Estimate
    from trl.memory.model_size import model_size
    from trl.trainer.model_config import ModelConfig, get_peft_config

    meter.watch_generation(TransformersBackend)
    torch.manual_seed(0)
    vocabulary = case.model["vocab_size"]
    config = AutoConfig.for_model(case.kind, **case.model, max_position_embeddings=4096)
    config.tie_word_embeddings = case.kind == "qwen3"
    chosen = ModelConfig(use_peft=case.adapter)
    args = getattr(trl, f"{case.method.upper()}Config")(
        tempfile.mkdtemp(),
        max_completion_length=case.completion,
        **{"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": "none"},
        **{"use_cpu": True, "disable_tqdm": True, "reward_dry_run": False},
        **{"gradient_checkpointing_kwargs": {"use_reentrant": False}},
        **({"optim": "adamw_torch_fused"} | case.options),
    )
    script = OnlineScriptArguments(longest_prompt=case.prompt)
    size = model_size(config, get_peft_config(chosen))
    plan = Estimate(size, settings(script, args, chosen, config))
    trainer = getattr(trl, f"{case.method.upper()}Trainer")(
        model=AutoModelForCausalLM.from_config(config, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [float(i) for i in range(len(completions))],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": synthetic.prompts(8, case.prompt, vocabulary)}),
        processing_class=synthetic.make_tokenizer(vocabulary),
        peft_config=get_peft_config(chosen),
    )
    return trainer, {name: phase_memory.total for name, phase_memory in plan.phases.items()}


def ratio(result: dict[str, Any]) -> float:
    """Return the ratio of predicted to measured peak."""
    return max(result["predicted"].values()) / max(result["measured"].values())


def page(results: list[dict[str, Any]]) -> str:
    """Make the page of the documentation."""
    rows = list(zip(CASES, results, strict=True))
    lines = [*PREFACE.splitlines(), ""]
    lines += ["| Configuration | P / C / G / rows | Predicted, MB | Measured, MB | Ratio |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for case, result in rows:
        sizes = [f"{max(result[key].values()) / 1e6:.1f}" for key in ("predicted", "measured")]
        lines.append(f"| {case.name} | {case.shape} | {' | '.join(sizes)} | {ratio(result):.3f} |")
    lines += ["", *BY_PHASE.splitlines(), "", f"| Configuration | {' | '.join(PHASES)} |"]
    lines += ["| --- |" + " --- |" * len(PHASES)]
    for case, result in rows:
        cells = [phase_ratio(result, name) for name in PHASES]
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def phase_ratio(result: dict[str, Any], name: str) -> str:
    """Format the ratio of predicted to measured bytes of a phase; a dash if it does not occur."""
    predicted = result["predicted"].get(name)
    return "-" if predicted is None else f"{predicted / result['measured'][name]:.2f}"


PREFACE = """# Memory planned and measured

Made by `make bench-plan`. Each configuration trains a random model on a CPU for two updates. The
plan is computed from its configuration alone. The measured value is the largest number of bytes
that torch's allocator held since the start of the process, including temporaries inside operations.
MB = 1e6 bytes. P and C are the tokens of each prompt and completion, and G is the number of
completions per prompt; rows are those of a micro-batch. The optimizer is fused AdamW unless
another one is named."""
BY_PHASE = "Predicted over measured bytes of each phase:"

if __name__ == "__main__":
    main()

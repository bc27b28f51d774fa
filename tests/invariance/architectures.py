"""Try every causal language model class of transformers: which share prompts, and are they right?

`python tests/invariance/architectures.py [--write FILE] [KIND ...]` ends with 1 if one is wrong.

Each class is built from a tiny configuration, made from the fields of its own. Then one step of
RLOO, one of SFT with packing and one round of completions are compared with rows that are computed
one by one, without padding, where nothing is shared and all logits are there at once.
"""

import argparse
import inspect
import json
import logging
import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import online_runs
import sft_runs
import torch
import transformers
from datasets import Dataset
from tiny import tiny_tokenizer
from torch import nn
from transformers import TrainerCallback
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trl.generation.base import Sampling
from trl.generation.transformers.backend import TransformersBackend
from trl.models.lm_head import NotCausalError
from trl.types import Prompts

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "architectures.md"
EXACT = 5e-6  # relative difference of gradients
LARGEST = 6_000_000  # parameters
SECONDS = 240  # for one class
WINDOW = 16  # tokens, less than rows have
TEXTS = ["the first of them is quite long", "ab", "another one, in the middle", "x = y + z"]
# Sizes by the name of the field; the first pattern that fits counts.
SIZES = {
    r"(.*_)?vocab_size(_per_layer_input)?": 128,
    r"pad_token_id": 0,
    r"eos_token_id": 1,
    r"\w+_token_(id|index)": 2,
    r"sliding_window(_size)?|attention_chunk_size|(local_)?window_size": WINDOW,
    r"(max|n)_(position|seq).*|seq_length|n_ctx": 512,
    r"layer_group_size|\w*(attention|attn)\w*_(interval|period)": 2,
    r"\w*(attention|attn)\w*_offset": 1,
    r"first_k_dense_replace|moe_layer_start_index": 1,
    r"num_nextn_predict_layers|num_kv_shared_layers|num_mtp_\w+|mtp_num_layers": 0,
    r"(num_|n_)?(hidden_|decoder_|encoder_)?(layers?|blocks)": 4,
    r"(num_|n_)?(global_|swa_)?(key_value_heads|kv_heads|head_kv|query_groups)": 2,
    r"topk_group|n_group": 1,
    r"(mamba_)?n_groups|mamba_num_groups|ssm_ngroups": 2,
    r"(num_|n_)?(experts_per_tok(en)?|experts_top_?k|\w*top_k)|moe_(top)?k": 2,
    r"\w*(n_routed|num_local|num|n)_experts": 4,
    r"\w*shared_experts?": 1,
    r"\w*lora_(rank|dim)|\w*low_rank_dim|\w*_rank(_dim)?": 8,
    r"rotary_dim|rope_dim": 4,
    r"\w*head_dim(_\w+)?|d_head|d_kv|kv_channels": 8,
    r"mamba_(n|num)_heads": 8,
    r"\w*heads?": 4,
    r"\w*(d_state|state_size|state_dim|chunk_size)": 8,
    r"mamba_d_ssm": 64,
    r"\w*(intermediate|ffn|ffw|feed_forward|d_ff|ff_size|n_inner|inner_dim|mlp)\w*": 64,
    r"\w*(hidden_size|n_embd|d_model|embed\w*_(size|dim)|hidden_dim|model_dim|width)(_\w+)?": 32,
}


class CannotBuildError(Exception):
    """A class of which there is no tiny model."""


@dataclass
class Found:
    """What is known of a class; errors are relative differences of gradients."""

    kind: str
    name: str
    problem: str = ""  # why there is no model, or what was raised
    refused: str = ""  # why no trainer takes it
    scoring: bool = False  # shares prompts when rows are scored
    decoding: bool = False  # shares prompts when completions are generated
    packs: bool = False
    errors: dict[str, float] = field(default_factory=dict)  # of RLOO and SFT
    same_tokens: bool = True  # as when rows are generated alone, or as a forward says
    reasons: list[str] = field(default_factory=list)  # why not everything is shared
    is_random: bool = False  # rows computed alone differ from one seed to another

    @property
    def is_right(self) -> bool:
        """Whether everything ran, and was exact."""
        exact = self.is_random or all(x <= EXACT for x in self.errors.values())
        return exact and not self.problem and self.same_tokens


# --- Tiny models ---


def tiny_config(kind: type) -> Any:
    """A configuration with small sizes for all fields of its class whose names say a size."""
    fields = inspect.signature(kind.__init__).parameters
    changes: dict[str, Any] = {}
    for name, parameter in fields.items():
        default = parameter.default
        if isinstance(default, float) and "drop" in name:
            changes[name] = 0.0
        elif name in ("initializer_range", "init_std"):
            changes[name] = 0.1
        elif type(default) is int or (default is None and name.endswith("token_id")):
            changes[name] = small(name, default)
    changes |= _consistent(fields.keys())
    for name, inner in (getattr(kind, "sub_configs", None) or {}).items():
        if name in fields and inner.__name__ != "AutoConfig":
            changes[name] = tiny_config(inner)
    config = kind(**changes)
    if "layer_types" in fields and set(config.layer_types or ()) == {"linear_attention"}:
        changes["layer_types"] = [*config.layer_types[1:], "full_attention"]
        config = kind(**changes)
    layers = getattr(config, "num_hidden_layers", None)
    for name in fields:  # one entry for each layer
        value = getattr(config, name, None)
        if isinstance(value, list) and isinstance(layers, int) and len(value) > layers:
            setattr(config, name, value[:layers])
    return config


def _consistent(fields: Any) -> dict[str, Any]:
    """Fields that must fit others, or without which there would be no attention."""
    changes: dict[str, Any] = {
        name: [1, 3] for name in ("attn_layer_indices", "full_attn_idxs") if name in fields
    }
    if {"num_heads", "expand"} <= set(fields):  # of Mamba, where they make up the width
        changes["num_heads"] = 8
    if "qk_dim_factor" in fields:  # of xLSTM, whose states have widths in multiples of 64
        changes["hidden_size"] = 128
    if "kv_lora_rank" in fields:  # latent attention, which has as many heads of each kind
        changes["num_key_value_heads"] = 4
    return changes


def small(name: str, default: Any = None) -> Any:
    """The size of a field that is larger; None for fields that are none."""
    size = next((x for pattern, x in SIZES.items() if re.fullmatch(pattern, name)), default)
    is_larger = default is None or name.endswith("token_id") or 0 <= size < default
    return size if is_larger else default


def tiny_model(kind: str) -> nn.Module:
    """A random model of a kind, in float32.

    Raises:
        CannotBuildError: if its class cannot be made, or is too large all the same.
    """
    try:
        config = tiny_config(CONFIG_MAPPING[kind])
        model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
        if config.is_encoder_decoder:
            raise ValueError("it is an encoder-decoder")
        if hasattr(config, "is_decoder"):
            config.is_decoder = True
        with torch.device("meta"):
            count = sum(p.numel() for p in model_class(config).parameters())
        if count > LARGEST:
            raise ValueError(f"it has {count / 1e6:.0f} M parameters when its sizes are made small")
        torch.manual_seed(0)
        model = model_class(config).float()
        # Some keep what they computed, which cannot be copied.
        trial = deepcopy(model)
        trial(torch.arange(8)[None], use_cache=False).logits.sum().backward()
    except Exception as error:
        raise CannotBuildError(one_line(error)) from error
    for parameter in model.parameters():  # so that attention is not the same everywhere
        if parameter.dim() > 1 and 0 < float(parameter.detach().std()) < 0.05:
            parameter.data *= 5
    return model


def one_line(error: BaseException) -> str:
    """What was raised, in few words."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


# --- Comparisons ---


@contextmanager
def noted_reasons(found: list[str]) -> Iterator[None]:
    """Add the reasons of warnings that something is not shared."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            match = re.search(r"because (.*?)\. Results are", record.getMessage())
            if match and match[1] not in found:
                found.append(match[1])

    handler, logger = Notes(), logging.getLogger("trl")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class Gradient(TrainerCallback):
    """Keeps the gradient of the first update."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        parts = [
            torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
            for p in model.parameters()
            if p.requires_grad
        ]
        self.value = torch.cat([part.flatten().double() for part in parts])


# The load-balancing loss of a mixture of experts is one of a micro-batch, not of a row.
FAST = {"logits_chunk_size": 512, "router_aux_loss_coef": 0.0}
ALONE = {"shared_prefix": False, "logits_chunk_size": 0, "per_device_train_batch_size": 1}
ALONE |= {"router_aux_loss_coef": 0.0}


def rloo_gradient(model: nn.Module, folder: str, **changes: Any) -> torch.Tensor:
    """The gradient of a step of RLOO on completions that are given."""
    note = Gradient()
    options = {"model": deepcopy(model), "data": online_runs.dataset(TEXTS[::2])} | changes
    trainer = online_runs.make_trainer(folder, callbacks=[note], **options)
    trainer.train()
    return note.value


def sft_gradient(model: nn.Module, folder: str, **changes: Any) -> torch.Tensor:
    """The gradient of a step of SFT on a few texts."""
    note = Gradient()
    data = Dataset.from_dict({"text": TEXTS})
    trainer = sft_runs.make_trainer(folder, data, deepcopy(model), callbacks=[note], **changes)
    trainer.train()
    return note.value


def completions(model: nn.Module, shared: bool) -> tuple[list[list[int]], float]:
    """What a model writes after two prompts, three times each; one row at a time if not shared.

    Returns:
        The tokens, and how far the log-probabilities that are told of them are from those of a
        forward without a cache; infinity if none are told.
    """
    backend = TransformersBackend(
        lambda: nullcontext(model.eval()),
        pad_id=0,
        device=torch.device("cpu"),
        shared_prefix=shared,
        max_rows=None if shared else 1,
    )
    tokenizer = tiny_tokenizer()
    ids = [tokenizer(text)["input_ids"] for text in TEXTS[::2] for _ in range(3)]
    prompts = Prompts(messages=["text"] * len(ids), token_ids=ids)
    sampling = Sampling(max_tokens=6, stop_ids=(1,), seeds=tuple(range(len(ids))))
    found = backend.generate(prompts, sampling, 3)
    rows = [list(row) for row in found.completion_ids]
    if found.sampling_logps is None:
        return rows, float("inf")
    gaps = []
    for prompt, row, told in zip(ids, rows, found.sampling_logps, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + row]), use_cache=False).logits[0]
        at = torch.arange(len(prompt) - 1, len(prompt) + len(row) - 1)
        logps = logits.log_softmax(-1)[at, torch.tensor(row)]
        gaps.append(float((logps - torch.tensor(told)).abs().max()))
    return rows, max(gaps)


def examine(kind: str) -> Found:
    """Build a class and compare all ways to compute its steps."""
    found = Found(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    try:
        model = tiny_model(kind)
    except CannotBuildError as error:
        found.problem = f"cannot be built: {error}"
        return found
    try:
        with tempfile.TemporaryDirectory() as folder, noted_reasons(reasons := []):
            ours = rloo_gradient(model, folder, **FAST)
            found.scoring = not reasons
            theirs = rloo_gradient(model, folder, gradient_accumulation_steps=8, **ALONE)
            found.errors["RLOO"] = online_runs.relative(ours, theirs)
            if found.errors["RLOO"] > EXACT:
                again = rloo_gradient(model, folder, gradient_accumulation_steps=8, seed=1, **ALONE)
                found.is_random = online_runs.relative(again, theirs) > EXACT
            found.reasons, reasons[:] = [*reasons], []
            ours = sft_gradient(model, folder, packing=True, max_length=128, **FAST)
            found.packs = not reasons
            theirs = sft_gradient(model, folder, gradient_accumulation_steps=len(TEXTS), **ALONE)
            found.errors["SFT"] = online_runs.relative(ours, theirs)
            reasons.clear()
            together, gap = completions(model, shared=True)
            found.decoding = not reasons
            # `generate` of some classes is not what their forward says.
            found.same_tokens = gap <= 1e-5 or together == completions(model, shared=False)[0]
            found.reasons += [reason for reason in reasons if reason not in found.reasons]
    except NotCausalError as error:
        found.refused = one_line(error).removeprefix(f"NotCausalError: {found.name} ")
    except Exception as error:
        if os.environ.get("TRL_DEBUG") == "1":
            raise
        found.problem = f"failed: {one_line(error)}"
    return found


def apart(kind: str) -> Found:
    """Examine a class in a copy of this process, which may crash or hang."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(SECONDS)
            os.close(reads)
            with os.fdopen(writes, "w") as out, open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), 1)
                os.dup2(nothing.fileno(), 2)
                out.write(json.dumps(asdict(examine(kind))))
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as told:
        text = told.read()
    _, status = os.waitpid(child, 0)
    if text:
        return Found(**json.loads(text))
    how = os.waitstatus_to_exitcode(status)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    return Found(kind, name, problem=f"failed: the process ended with {how}")


# --- The page ---


def page(results: list[Found]) -> str:
    """The results as a page of the documentation."""
    built = [x for x in results if not x.problem.startswith("cannot be built")]
    rest = [x for x in results if x not in built]
    lines = ["# Model classes", "", *PREFACE.strip().splitlines(), ""]
    lines += [
        f"transformers {transformers.__version__}: {len(built)} classes, of which "
        f"{sum(x.scoring for x in built)} share prompts in scoring, "
        f"{sum(x.decoding for x in built)} in decoding, and {sum(x.packs for x in built)} pack; "
        f"{sum(bool(x.refused) for x in built)} are refused; "
        f"{sum(not x.is_right for x in built)} are wrong or fail. Tried: {len(results)} of "
        f"{len(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))}.",
        "",
        "| class | scoring | decoding | packs | RLOO | SFT | why not |",
        "| --- | --- | --- | --- | ---: | ---: | --- |",
    ]
    for x in sorted(built, key=lambda x: (not x.is_right, bool(x.refused), not x.scoring, x.name)):
        errors = [f"{x.errors[name]:.1e}" if name in x.errors else "-" for name in ("RLOO", "SFT")]
        why = [*x.reasons, *[x.problem] * bool(x.problem)]
        why += [f"refused: it {x.refused}"] * bool(x.refused)
        why += ["**other tokens are drawn**"] * (not x.same_tokens)
        why += ["it trains with noise: rows alone differ from seed to seed"] * x.is_random
        flags = ["yes" if flag else "no" for flag in (x.scoring, x.decoding, x.packs)]
        cells = [x.name, *flags, *errors, "; ".join(why).replace("|", "/")]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Not built", "", "| class | why |", "| --- | --- |"]
    for x in sorted(rest, key=lambda x: x.name):
        why = x.problem.removeprefix("cannot be built: ").replace("|", "/")
        lines.append(f"| {x.name} | {why} |")
    return "\n".join(lines) + "\n"


PREFACE = f"""
Made by `make architectures`. Every causal language model class of transformers that can be built
from a tiny configuration, with {LARGEST // 10**6} M parameters at most, takes one step of RLOO and
one of SFT with packing, and completes two prompts. The columns RLOO and SFT show the relative
difference of the gradient, in float32, from that of rows computed one by one without padding,
sharing or tiles: at most {EXACT:.0e} if a class is right. Attention windows have {WINDOW} tokens,
fewer than rows have; if rows are shorter than its window, a class with a window shares like others.
"""


def main(words: list[str] | None = None) -> int:
    """Examine the kinds that are named, or all; return 1 if one is wrong or fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="model types such as qwen3")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page here")
    given = parser.parse_args(words)
    every: dict[str, str] = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name not in every or kind.endswith("_text"):  # what else a kind has is no language
            every[name] = kind
    results = []
    for kind in given.kinds or every.values():
        results.append(found := apart(kind))
        shown = " ".join(f"{x:.1e}" for x in found.errors.values())
        flags = "".join("-+"[x] for x in (found.scoring, found.decoding, found.packs))
        state = "right" if found.is_right else found.problem or "WRONG"
        state = "refused" if found.refused else state
        print(f"{found.name}: {flags} {shown} {state} {'; '.join(found.reasons)}", flush=True)
    if given.write is not None:
        given.write.write_text(page(results), encoding="utf-8")
    return int(any(not x.is_right and not x.problem.startswith("cannot") for x in results))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import_module("trl.trainer.rloo_trainer")
    sys.exit(main())

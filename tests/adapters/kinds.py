"""Every kind of adapter, on tiny models, and the gradient of one step by definition."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainerCallback,
)

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "trainer")]

from online_runs import completion_logps, dataset, make_trainer, rows_of, token_sum  # noqa: E402
from tiny import tiny_model  # noqa: E402

from trl.trainer.rloo_trainer import RLOOTrainer  # noqa: E402

GROUP = 4
PROMPTS = ["ab", "cdefghijk"]
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "initializer_range": 0.1}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def dense(**changes: Any) -> nn.Module:
    """A model with large weights, so that attention matters."""
    return tiny_model(**(WIDE | changes))


def mixture() -> nn.Module:
    """Four experts in one parameter, as models of transformers 5 hold them."""
    torch.manual_seed(0)
    settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**(tiny_model().config.to_dict() | settings), router_aux_loss_coef=0.0)
    return Qwen3MoeForCausalLM(config)


@dataclass(frozen=True)
class Kind:
    """An adapter on a base model, and how far its gradient may be from the definition."""

    base: Callable[[], nn.Module] = dense
    lora: dict[str, Any] = field(default_factory=dict)
    bits: dict[str, Any] | None = None  # of bitsandbytes; the base is then loaded from a folder
    dtype: torch.dtype = torch.float32
    bound: float = 5e-6
    loader: Any = AutoModelForCausalLM

    @property
    def config(self) -> peft.LoraConfig:
        """The adapter, with a random second factor so that it has an effect at once."""
        settings = {"target_modules": LAYERS, "r": 4, "lora_alpha": 8, "init_lora_weights": False}
        return peft.LoraConfig(**(settings | {"task_type": "CAUSAL_LM"} | self.lora))

    def quantization(self) -> BitsAndBytesConfig | None:
        return None if self.bits is None else BitsAndBytesConfig(**self.bits)

    def load(self, folder: Path) -> nn.Module:
        """The base model, as the trainer loads it; a quantized one comes from a folder."""
        if self.bits is None:
            return self.base().to(self.dtype)
        if not (folder / "config.json").exists():
            self.base().save_pretrained(folder)
        options = {"quantization_config": self.quantization(), "dtype": self.dtype}
        return self.loader.from_pretrained(folder, **options)


FOUR = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32, "bnb_4bit_quant_type": "nf4"}
KINDS = {
    "lora": Kind(),
    "dora": Kind(lora={"use_dora": True}),
    "rslora": Kind(lora={"use_rslora": True}),
    "all-linear": Kind(lora={"target_modules": "all-linear"}),
    "target_parameters": Kind(
        mixture, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
    ),
    "modules_to_save": Kind(lora={"modules_to_save": ["lm_head", "embed_tokens"]}),
    "head": Kind(lora={"target_modules": ["q_proj", "lm_head"]}),
    "dora on the head": Kind(lora={"target_modules": ["lm_head"], "use_dora": True}),
    "tied head": Kind(
        lambda: dense(tie_word_embeddings=True), {"target_modules": ["q_proj", "lm_head"]}
    ),
    "embedding": Kind(lora={"target_modules": ["q_proj", "embed_tokens"]}),
    "bf16": Kind(dtype=torch.bfloat16, bound=2e-2),
    "4-bit": Kind(bits=FOUR),
    "4-bit, nested": Kind(bits=FOUR | {"bnb_4bit_use_double_quant": True}),
    "4-bit, fp4": Kind(bits=FOUR | {"bnb_4bit_quant_type": "fp4"}),
    "4-bit dora": Kind(bits=FOUR, lora={"use_dora": True}),
    "4-bit head": Kind(
        bits=FOUR | {"llm_int8_skip_modules": ["none"]},
        lora={"target_modules": ["q_proj", "lm_head"]},
    ),
    "4-bit in bf16": Kind(
        bits=FOUR | {"bnb_4bit_compute_dtype": torch.bfloat16}, dtype=torch.bfloat16, bound=2e-2
    ),
    "8-bit": Kind(bits={"load_in_8bit": True}, bound=2e-2),
}


class Watch(TrainerCallback):
    """Keeps the gradients that the optimizer is about to use."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.gradients.append(trained(others["model"], lambda p: p.grad.clone()))


def trained(
    model: nn.Module, of: Callable[[nn.Parameter], Tensor] = lambda p: p.detach().clone()
) -> dict[str, Tensor]:
    """What is trained, by name."""
    return {name: of(p) for name, p in model.named_parameters() if p.requires_grad}


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that are not trained, and the constants of quantized weights."""
    found = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    found |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        state = getattr(weight, "quant_state", None)
        parts = {} if state is None else state.as_dict()
        found |= {f"{name} {k}": v.clone() for k, v in parts.items() if isinstance(v, Tensor)}
        if weight is not None and weight.dtype == torch.int8 and hasattr(module, "state"):
            scale = module.state.SCB if weight.SCB is None else weight.SCB
            found[f"{name} scale"] = scale.clone()
    return found


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether all tensors are equal to the last bit."""
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) for name, value in first.items()
    )


def trainer_of(kind: Kind, folder: Path, trainer_class: type = RLOOTrainer, **changes: Any) -> Any:
    """A trainer over scripted completions: of a new adapter, or of a model with one.

    A quantized base is named.
    """
    model = kind.load(folder / "base")
    quantization = kind.quantization()
    settings: dict[str, Any] = {"data": dataset(PROMPTS), "peft_config": kind.config}
    if quantization is not None:
        model = str(folder / "base")
        settings["quantization_config"] = quantization
        settings["model_init_kwargs"] = {"dtype": str(kind.dtype).removeprefix("torch.")}
    if "model" in changes:
        settings = {"data": settings["data"], "model": model}
    options = {"model": model} | settings | changes
    return make_trainer(folder / "out", trainer_class, **options)


def exact_base(kind: Kind, folder: Path) -> nn.Module:
    """The base model, as a trainer computes with it."""
    base = kind.load(folder / "base")
    for module in base.modules():
        # Its inference format on some processors rounds the constants, and has no backward pass.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return base


def independent(kind: Kind, folder: Path, adapter: dict[str, Tensor]) -> nn.Module:
    """The same policy, put together by peft alone."""
    base = exact_base(kind, folder)
    if kind.bits is not None:
        base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    model = peft.get_peft_model(base, kind.config)
    states = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in adapter.items():
            states[name].copy_(value)
    return model.train()


def rloo_gradient(model: nn.Module, prompts: list[str] = PROMPTS) -> dict[str, Tensor]:
    """REINFORCE leave-one-out, one completion at a time, from full logits."""
    rows = rows_of(prompts, GROUP)
    rewards = token_sum([completion for _, completion in rows])
    model.zero_grad()
    for i, (prompt, completion) in enumerate(rows):
        start = i // GROUP * GROUP
        others = [rewards[j] for j in range(start, start + GROUP) if j != i]
        advantage = rewards[i] - sum(others) / len(others)
        logps = completion_logps(model, prompt, completion)
        (-advantage * logps.sum() / len(rows)).backward()
    return trained(model, lambda p: p.grad.clone())


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Relative distance of all gradients together."""
    assert ours.keys() == theirs.keys()
    flat = [torch.cat([g[name].flatten().double() for name in theirs]) for g in (ours, theirs)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())

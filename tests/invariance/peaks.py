"""Print the peak of an RLOO step by the number of completions, for kinds of attention.

`python tests/invariance/peaks.py [KIND ...]`: prompts of 3,100 tokens, completions of 53, and a
vocabulary of 151,936 entries; bytes of all tensors of the step, model and optimizer included.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import torch
import transformers
from datasets import Dataset
from synthetic import make_tokenizer
from tensor_bytes import TensorBytes

from trl import RLOOConfig, RLOOTrainer

VOCABULARY, PROMPT, COMPLETION, COUNTS = 151_936, 3100, 53, (2, 8, 64)
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 4, "pad_token_id": 0}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 4096, "initializer_range": 0.1}
SIZES |= {"eos_token_id": VOCABULARY - 1, "bos_token_id": 1, "intermediate_size": 256}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "num_key_value_heads": 4, "n_group": 1}
LATENT |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1}
LATENT |= {"moe_intermediate_size": 64, "first_k_dense_replace": 1}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
KINDS = {
    "Llama": GROUPED,
    "Gemma3Text": GROUPED | {"sliding_window": 512},
    "GptOss": GROUPED | {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": LATENT,
}


def peak(kind: str, count: int) -> int:
    """Bytes at the peak of a step with this many completions of one prompt."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | KINDS[kind])
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    prompt = " ".join(f"w{2 + i % 1000}" for i in range(PROMPT))
    with tempfile.TemporaryDirectory() as folder, TensorBytes(model.parameters()) as meter:
        args = RLOOConfig(
            output_dir=folder,
            num_generations=count,
            per_device_train_batch_size=count,
            max_completion_length=COMPLETION,
            max_steps=1,
            gradient_checkpointing=True,
            router_aux_loss_coef=0.0,
            beta=0.0,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
        )
        trainer = RLOOTrainer(
            model=model,
            args=args,
            reward_funcs=lambda completions, **_: [float(len(x) % 7) for x in completions],
            train_dataset=Dataset.from_dict({"prompt": [prompt] * 2}),
            processing_class=make_tokenizer(VOCABULARY),
        )
        trainer.train()
        return meter.peak


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or KINDS:
        found = [peak(name, count) / 1e6 for count in COUNTS]
        shown = " | ".join(f"{x:.1f}" for x in found)
        print(f"| {name} | {shown} | {found[-1] / found[0]:.3f} |", flush=True)

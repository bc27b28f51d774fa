"""A byte-level BPE tokenizer, trained on the spot, and chat templates for it."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = (
    "the quick brown fox jumps over a lazy dog while seven wizards juggle boxes of zinc and "
    "quartz near the harbour; then they hello the hall, tell stories and fall asleep below."
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}"
    "<|im_end|>{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% endif %}"
)
# Thinking stays in the turns behind the last question alone, and stands there even if empty.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>"
    "{{ m['role'] }}\n{% if m['role'] == 'assistant' and loop.index0 > ns.last %}<think>\n"
    "{{ m.get('reasoning_content', '') }}\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def _core() -> str:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=letters)
    core.train_from_iterator([WORDS] * 3, trainer)
    return core.to_str()


def bpe_tokenizer(template: str = CHATML, **changes: str) -> PreTrainedTokenizerFast:
    """A tokenizer that merges letters to words, so that boundaries of texts may be crossed."""
    names = {"pad_token": "<pad>", "eos_token": "<eos>"} | changes
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_core()), **names)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer

"""A tiny chat model's tokenizer whose template knows tools, and tools for it."""

from tiny import tiny_tokenizer

TEMPLATE = (
    "{% if tools %}<system>{% for t in tools %}{{ t.function.name }} {% endfor %}<end>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}(tool {{ m.name }}: {{ m.content }})"
    "{% else %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>"
    "{% endfor %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
EOS, END = 1, 6
STOPS = (EOS, END)


def tool_tokenizer():
    """The tokenizer of `tiny`, with `TEMPLATE`. Turns end with `<end>`."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def ids(text: str) -> list[int]:
    return tiny_tokenizer()(text)["input_ids"]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: first number
        b: second number
    """
    return a + b


async def spell(word: str) -> str:
    """
    Spell a word.

    Args:
        word: the word
    """
    return "-".join(word)


def fail(why: str) -> str:
    """
    Fail.

    Args:
        why: reason
    """
    raise RuntimeError(why)

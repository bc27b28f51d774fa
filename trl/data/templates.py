"""Chat templates: their markers, copies of them, and turns that are read with them."""

import copy
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
TRAINING = Path(__file__).parents[1] / "templates" / "training_chat_template.jinja"
USER = {"role": "user", "content": "ask"}
NO_TEMPLATE = (
    "The tokenizer has no chat template, which conversations need. Give one by "
    "chat_template_path='FILE.jinja' (SFT, DPO, KTO, reward models), or as the file "
    "chat_template.jinja in the folder of the model."
)


def has_generation_markers(template: str | Mapping[str, str]) -> bool:
    """Whether a chat template marks what the assistant writes with `{% generation %}`.

    Of several by name, "default" counts; without any, that is a TypeError.
    """
    return MARKER.search(_default(template)) is not None


def _default(template: str | Mapping[str, str]) -> str:
    if template is None:
        raise TypeError("The tokenizer has no chat template.")
    return template if isinstance(template, str) else template["default"]


def get_training_chat_template(
    processing_class: Any = None, *, tokenizer: Any = None
) -> str | None:
    """Make a chat template that renders as the tokenizer's does, with generation markers.

    `assistant_only_loss` does not need it: turns are found with any template. The tokenizer, or
    processor, is left as it is; `tokenizer` is an older name of it. None: its template has markers
    already. TypeError: it has no template. ValueError: later messages change how a turn is
    rendered.
    """
    if processing_class is not None and tokenizer is not None:
        raise TypeError("Give processing_class alone; tokenizer is an older name of it.")
    processing_class = tokenizer if processing_class is None else processing_class
    template = _default(processing_class.chat_template)
    if has_generation_markers(template):
        return None
    marked = TRAINING.read_text(encoding="utf-8").replace("TEMPLATE", template)
    talk = [USER, {"role": "assistant", "content": "one"}] * 2 + [USER]
    try:  # the template says itself when a turn does not stay as it was
        render_probe(processing_class, talk, chat_template=marked, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(
            "No training template can be made of this chat template: later messages change how a "
            "turn of the assistant is rendered. assistant_only_loss=True works without one."
        ) from error
    return marked


def clone_chat_template(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source_tokenizer_path: str,
    resize_to_multiple_of: int | None = 64,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[int]]:
    """Give a tokenizer the chat template, the added tokens and the EOS token of another one.

    The tokenizer is changed in place; the model's embeddings are resized, and its configurations
    get the new EOS token. The vocabulary is rounded up to a multiple, if there is one, with tokens
    called `<extra_id_0>` and so on. Returns model, tokenizer, and the ids of the tokens that are
    new. ValueError: the other tokenizer has no chat template.
    """
    missing = take_template(tokenizer, source_tokenizer_path)
    model.config.eos_token_id = tokenizer.eos_token_id
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    # A model may have more embeddings than its tokenizer has tokens; none of them is lost.
    size = max(model.get_input_embeddings().num_embeddings, len(tokenizer))
    step = resize_to_multiple_of or 1
    size = -(-size // step) * step
    model.resize_token_embeddings(size)
    vocabulary = tokenizer.get_vocab()
    names = (f"<extra_id_{i}>" for i in range(size + len(tokenizer)))
    fillers = [name for name in names if name not in vocabulary][: size - len(tokenizer)]
    tokenizer.add_tokens(fillers)
    return model, tokenizer, tokenizer.convert_tokens_to_ids(missing + fillers)


def take_template(tokenizer: PreTrainedTokenizerBase, path: str) -> list[str]:
    """Give a tokenizer the chat template and EOS token of another one, and return added tokens."""
    source = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = source.get_chat_template()
    vocabulary = tokenizer.get_vocab()
    added = source.added_tokens_decoder.values()
    missing = [token for token in added if token.content not in vocabulary]
    tokenizer.add_tokens(missing)
    tokenizer.eos_token = source.eos_token
    return [token.content for token in missing]


@contextmanager
def naming_template(
    tokenizer: PreTrainedTokenizerBase, template: str | None = None
) -> Iterator[None]:
    """Let errors of a chat template, by default the tokenizer's, name its file and line.

    No template at all is a ValueError, too.
    """
    if template is None and tokenizer.chat_template is None:
        raise ValueError(NO_TEMPLATE)
    try:
        yield
    except Exception as error:  # templates refuse a conversation by any error
        if (line := line_of_template(error)) is None:
            raise
        where = f"line {line} of the chat template"
        file = Path(tokenizer.name_or_path, "chat_template.jinja")
        used = tokenizer.chat_template if template is None else template
        if file.is_file() and file.read_text(encoding="utf-8") == used:
            where += f" {file}"
        error_class = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise ValueError(f"{where}: {error_class}{error}") from error


def line_of_template(error: BaseException) -> int | None:
    """The line of a chat template that an error comes from, if it comes from one."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    return lines[-1] if lines else None


def read_template(path: str) -> str:
    """Read a chat template from a file; a ValueError names what is wrong with its syntax."""
    template = Path(path).read_text(encoding="utf-8")
    try:
        render_jinja_template([[USER]], chat_template=template)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"chat_template_path={path!r}: line {error.lineno} is broken: {error.message}"
        ) from error
    except Exception:  # it may refuse this conversation
        pass
    return template


def render_probe(processing_class: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    """Render a conversation, by default as text; templates may change what they are given."""
    options = {"tokenize": False} | options
    return processing_class.apply_chat_template(copy.deepcopy(messages), **options)


def reads_parts(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether a chat template writes the text of a content that is a list of parts."""
    probes = ("first part", "second part")
    content = [{"type": "text", "text": probe} for probe in probes]
    chat = [{"role": "user", "content": content}]
    try:
        text = render_probe(tokenizer, chat, chat_template=template)
    except Exception:  # a template refuses what it does not know by any error of its own
        return False
    # Templates for text alone write the list itself, as Python or JSON.
    return all(probe in text for probe in probes) and not re.search(r"""["']type["']""", text)


def reads_responses(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer knows how its model writes reasoning, content and tool calls."""
    return getattr(tokenizer, "response_template", None) is not None


def read_response(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    ids: Sequence[int],
    schemas: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Read one turn, without the token that ended it, with the tokenizer's `response_template`.

    The message has a `content`, empty if there is none. Text that the parser of transformers does
    not understand raises whatever it raises.
    """
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    before = tokenizer.decode(list(prompt))
    message = dict(tokenizer.parse_response(text, prefix=before, tools=list(schemas) or None))
    return {"role": "assistant"} | message | {"content": message.get("content") or ""}

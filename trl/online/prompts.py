"""Encodes the prompts of dataset rows, and decodes completions for reward functions."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
from datasets import Dataset, Features, IterableDataset, Value
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.bounds import ModelBounds
from ..data.formats import malformed_prompt, refuse_media_columns
from ..distributed import Ranks
from ..number_format import pluralize
from ..types import Prompts

CHECKED_AT_ONCE = 1_000  # rows
COLUMNS = ("prompt", "chat_template_kwargs")  # that encoding reads
VERSION = "prompt sizes 1"  # changed with what `PromptEncoder.sizes` makes of a prompt
SIZES = Features(tokens=Value("int32"), largest_id=Value("int32"))
COUNTED = {"drop": "prompts/dropped", "cut-left": "prompts/cut"}
Row = dict[str, Any]

logger = logging.get_logger(__name__)


def as_message(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int]
) -> dict[str, Any]:
    """Parse the ids of an assistant turn; if they cannot be parsed, all text is the content."""
    from ..data.templates import read_response, reads_responses  # only conversations need it

    if reads_responses(tokenizer):
        ended = bool(ids) and ids[-1] in tokenizer.all_special_ids
        try:
            return read_response(tokenizer, prompt, ids[:-1] if ended else ids)
        except Exception:  # a policy in training may write anything
            pass
    return {"role": "assistant", "content": tokenizer.decode(list(ids), skip_special_tokens=True)}


@dataclass(frozen=True)
class PromptLimit:
    """The maximum length of prompts, and what is done with longer ones."""

    tokens: int | None = None  # None: no limit
    reason: str = ""  # where that number comes from, for messages
    action: str = "error"  # or "drop", or "cut-left", which keeps the end of the prompt
    completion: int = 0  # tokens of a completion; without room for them there is a warning

    @classmethod
    def of(cls, longest: int | None, action: str, context: int | None, completion: int) -> Self:
        """Make the limit of `max_prompt_length` (`longest`), `long_prompts` (`action`) and context.

        Without a `longest`, prompts are dropped or cut so that a whole `completion` fits behind
        them into the `context` tokens that the model sees.
        """
        if longest is not None and (context is None or longest < context):
            return cls(longest, f"max_prompt_length={longest}", action)
        if context is None:
            return cls(action=action)
        room = 1 if action == "error" or longest is not None else completion
        reason = f"the model sees {context} tokens of prompt and completion together"
        return cls(context - room, reason, action)

    def is_broken_by(self, length: int) -> bool:
        """Return whether a prompt with `length` tokens is too long."""
        return self.tokens is not None and length > self.tokens

    def problem(self, length: int) -> str | None:
        """Return an error text for a prompt of `length` tokens that cannot be used, else None."""
        if not length:
            return "has no tokens. Remove such rows from the dataset."
        if self.action != "error" or not self.is_broken_by(length):
            return None
        return (
            f"has {length} tokens; at most {self.tokens} are possible ({self.reason}). Shorten "
            "such prompts, or set long_prompts to 'drop' or 'cut-left'."
        )

    def cut(self, ids: list[int]) -> list[int]:
        """Keep the end of a prompt that is too long."""
        return ids[-self.tokens :] if self.tokens and self.action == "cut-left" else ids


class PromptEncoder:
    """Tokenizes prompts for the policy, each distinct one once.

    The `limit` is for long prompts, `bounds` are those of the policy. With several `ranks`, rank 0
    checks the prompts of a dataset for all of them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: dict[str, Any] | None = None,
        limit: PromptLimit | None = None,
        bounds: ModelBounds | None = None,
        ranks: Ranks | None = None,
    ):
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs or {}  # of every chat-template call
        self._limit = limit or PromptLimit()
        self._bounds = bounds or ModelBounds()
        self._ranks = ranks or Ranks()
        self._long: Counter[str] = Counter()  # number of long prompts of each dataset
        self._checked: list[Dataset | IterableDataset] = []
        # Of the longest prompt of each dataset: its number of tokens, and its row.
        self.longest: dict[str, tuple[int, int]] = {}

    def __call__(self, rows: Sequence[Row]) -> Prompts:
        """Encode the `prompt` of each row; rows with equal prompts share one list of ids.

        A row without a prompt is a KeyError that names it, an unusable prompt a ValueError.
        """
        for number, row in enumerate(rows):
            if "prompt" not in row:
                raise KeyError(f"Row {number} has no 'prompt' column; it has {sorted(row)}.")
        keys = [repr((row["prompt"], row.get("chat_template_kwargs"))) for row in rows]
        first_rows: dict[str, int] = {}  # number of the first row with each key
        for number, key in enumerate(keys):
            first_rows.setdefault(key, number)
        encoded = self._encode(
            {number: rows[number] for number in first_rows.values()}, "the batch"
        )
        ids = {key: self._limit.cut(encoded[number]) for key, number in first_rows.items()}
        return Prompts(
            messages=[row["prompt"] for row in rows],
            token_ids=[ids[key] for key in keys],
            rows=list(rows),
        )

    def check(self, name: str, dataset: Dataset | IterableDataset) -> Dataset | IterableDataset:
        """Return a dataset without the prompts that are dropped; messages call it by the `name`.

        A prompt that cannot be used is an error: at once, or when a stream reads it.
        """
        if any(dataset is earlier for earlier in self._checked):
            return dataset
        checked = dataset
        if isinstance(dataset, IterableDataset):
            checked = dataset.filter(
                lambda row, number: bool(self._not_dropped({number: row}, name)), with_indices=True
            )
        else:
            numbers = self._check_dataset(name, dataset)
            self._warn_of_long_prompts(name, len(dataset))
            if len(numbers) < len(dataset):
                checked = dataset.select(numbers)
        self._checked.append(checked)
        return checked

    def _warn_of_long_prompts(self, name: str, num_rows: int) -> None:
        if self._long[name]:
            outcome = "left out" if self._limit.action == "drop" else "cut on the left"
            maximum = pluralize(self._limit.tokens or 0, "token")
            logger.warning(
                f"{name}: {self._long[name]} of {num_rows} prompts have more than {maximum} "
                f"({self._limit.reason}) and are {outcome}."
            )

    def counts(self, name: str = "train_dataset") -> dict[str, float]:
        """Return how many prompts were dropped or cut so far, as a metric.

        The result is empty if long prompts are errors.
        """
        metric = COUNTED.get(self._limit.action)
        return {metric: float(self._long[name])} if metric else {}

    def completions(self, prompts: Prompts, completion_ids: Sequence[Sequence[int]]) -> list[Any]:
        """Decode completions into the format of their prompts: strings, or lists of messages.

        A tokenizer with a `response_template` separates reasoning and tool calls from the content.
        """
        rows = zip(prompts.messages, prompts.token_ids, completion_ids, strict=True)
        return [
            self._tokenizer.decode(list(ids), skip_special_tokens=True)
            if isinstance(message, str)
            else [as_message(self._tokenizer, prompt, ids)]
            for message, prompt, ids in rows
        ]

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds to the token before it; special tokens too."""
        if not ids:
            return []
        # Decoded alone, a token may lack the space in front of it.
        pairs = self._tokenizer.batch_decode([ids[max(0, i - 1) : i + 1] for i in range(len(ids))])
        before = ["", *self._tokenizer.batch_decode([[token] for token in ids])]
        return [pair[len(text) :] for pair, text in zip(pairs, before[:-1], strict=True)]

    def _not_dropped(self, rows: dict[int, Row], name: str) -> list[int]:
        """Check numbered rows, count long prompts, and return the numbers of those not dropped."""
        encoded = self._encode(rows, name)
        long = {number for number, ids in encoded.items() if self._limit.is_broken_by(len(ids))}
        self._long[name] += len(long)
        remaining = [
            number for number in rows if self._limit.action != "drop" or number not in long
        ]
        lengths = [(len(self._limit.cut(encoded[number])), number) for number in remaining]
        self.longest[name] = max([self.longest.get(name, (0, 0)), *lengths])
        return remaining

    def _check_dataset(self, name: str, dataset: Dataset) -> list[int]:
        """Check all prompts of a dataset, and return the numbers of those not dropped."""
        sizes = partial(self.sizes, name, dataset)
        lengths, largest = self._ranks.compute_on_rank_0(sizes, f"checking the prompts of {name}")
        long = np.zeros(len(lengths), dtype=bool)
        if self._limit.tokens is not None:
            long = lengths > self._limit.tokens
        is_error = (lengths == 0) | (largest >= (self._bounds.vocabulary or np.inf))
        if self._limit.action == "error":
            is_error |= long
        for number in np.flatnonzero(is_error)[:1].tolist():
            problem = self._problem(int(lengths[number]), int(largest[number]))
            raise _unusable(name, number, dataset[number], str(problem))
        self._long[name] += int(long.sum())
        is_remaining = ~long if self._limit.action == "drop" else np.ones(len(long), dtype=bool)
        lengths = np.where(long, self._limit.tokens or 0, lengths) * is_remaining
        if len(lengths):
            longest = len(lengths) - 1 - int(lengths[::-1].argmax())
            self.longest[name] = int(lengths[longest]), longest
        self._warn_of_context(name, lengths)
        return np.flatnonzero(is_remaining).tolist()

    def _warn_of_context(self, name: str, lengths: np.ndarray) -> None:
        """Warn if prompts of these lengths (rows,) leave too little context for a completion."""
        context = self._bounds.context
        completion = self._limit.completion
        if context is None or not completion:
            return
        beyond = np.flatnonzero(lengths + completion > context)
        if len(beyond):
            longest = int(lengths.max())
            logger.warning(
                f"{name}: {len(beyond)} of {len(lengths)} prompts, with "
                f"max_completion_length={completion}, are longer than the {context:,} tokens that "
                f"the model sees (max_position_embeddings): first row {beyond[0]}, and the longest "
                f"has {longest:,}. Lower max_completion_length to {context - longest}, or set "
                f"max_prompt_length={context - completion} with long_prompts='drop' or 'cut-left'."
            )

    def sizes(self, name: str, dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
        """Return the lengths (rows,) and largest token ids (rows,) of prompts.

        Errors call the dataset by the `name`. Results are cached on disk, as those of
        `Dataset.map` are.
        """
        from ..data.encode import TextEncoder  # slow to import
        from ..data.prepare import fingerprint

        is_transformed = dataset.format["type"] == "custom"  # a transform may read any column
        if not is_transformed:
            dataset = dataset.select_columns(sorted(set(COLUMNS) & set(dataset.column_names)))
        key = [TextEncoder(self._tokenizer).digest, self._template_kwargs]
        table = dataset.map(
            self._sizes_of_batch,
            with_indices=True,
            batched=True,
            batch_size=CHECKED_AT_ONCE,
            remove_columns=dataset.column_names,
            features=SIZES,
            new_fingerprint=fingerprint(dataset, VERSION, key),
            fn_kwargs={"name": name},
            desc="Tokenizing prompts",
        ).with_format("numpy")
        return table["tokens"][:], table["largest_id"][:]

    def _sizes_of_batch(
        self, batch: Mapping[str, list[Any]], numbers: list[int], name: str
    ) -> dict[str, list[int]]:
        values = zip(*(batch[column] for column in batch), strict=True)
        rows = [dict(zip(batch, row, strict=True)) for row in values]
        numbered = dict(zip(numbers, rows, strict=True))
        _refuse_malformed(numbered, name)
        prompts = self._tokenize(numbered, name).values()
        return {
            "tokens": [len(ids) for ids in prompts],
            "largest_id": [max(ids, default=-1) for ids in prompts],
        }

    def _problem(self, length: int, largest_id: int) -> str | None:
        """Return an error text for a prompt that cannot be used, else None."""
        outside = self._bounds.problem_of_id(largest_id)
        return self._limit.problem(length) or (outside and f"{outside}.")

    def _encode(self, rows: dict[int, Row], name: str) -> dict[int, list[int]]:
        """Return the token ids of numbered rows; errors name the number of the row."""
        _refuse_malformed(rows, name)
        encoded = self._tokenize(rows, name)
        for number, row in rows.items():
            ids = encoded[number]
            if (problem := self._problem(len(ids), max(ids, default=-1))) is not None:
                raise _unusable(name, number, row, problem)
        return encoded

    def _tokenize(self, rows: dict[int, Row], name: str) -> dict[int, list[int]]:
        """Tokenize all rows at once; if that fails, one by one, to name the row that fails."""
        try:
            return dict(zip(rows, self._token_ids([*rows.values()]), strict=True))
        except Exception as error:  # chat templates raise anything
            if len(rows) == 1:
                number, row = next(iter(rows.items()))
                error_type = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                problem = f"cannot be tokenized: {error_type}{error}"
                raise _unusable(name, number, row, problem) from error
        return {number: self._tokenize({number: rows[number]}, name)[number] for number in rows}

    def _token_ids(self, rows: list[Row]) -> list[list[int]]:
        """Tokenize texts as they are, and conversations with the chat template."""
        from ..data.encode import TextEncoder  # slow to import

        texts = [row["prompt"] for row in rows if isinstance(row["prompt"], str)]
        chats = [row for row in rows if not isinstance(row["prompt"], str)]
        options = [self._template_kwargs | (row.get("chat_template_kwargs") or {}) for row in chats]
        encoder = TextEncoder(self._tokenizer)
        rendered = encoder.render_prompts([row["prompt"] for row in chats], options)
        text_ids = iter(self._tokenizer(texts)["input_ids"] if texts else [])
        chat_ids = iter(encoder.ids(rendered))
        return [next(text_ids if isinstance(row["prompt"], str) else chat_ids) for row in rows]


def check_forms(name: str, dataset: Dataset) -> None:
    """Raise a ValueError for a missing or malformed prompt; this needs no tokenizer."""
    for rows in _numbered(dataset):
        _refuse_malformed(rows, name)


def _numbered(dataset: Dataset) -> Iterator[dict[int, Row]]:
    """Yield the rows of a dataset by number, `CHECKED_AT_ONCE` at a time."""
    if dataset.format["type"] != "custom":  # a transform may read any column
        dataset = dataset.select_columns(sorted(set(COLUMNS) & set(dataset.column_names)))
    for start in range(0, len(dataset), CHECKED_AT_ONCE):
        columns = dataset[start : start + CHECKED_AT_ONCE]
        values = enumerate(zip(*columns.values(), strict=True), start)
        yield {number: dict(zip(columns, row, strict=True)) for number, row in values}


def _refuse_malformed(rows: dict[int, Row], name: str) -> None:
    for number, row in rows.items():
        refuse_media_columns(f"Row {number} of {name}", row)
        if (problem := malformed_prompt(row["prompt"])) is not None:
            raise _unusable(name, number, row, problem)


def _unusable(name: str, number: int, row: Row, problem: str) -> ValueError:
    return ValueError(f"The prompt of row {number} of {name} ({row['prompt']!r:.80}) {problem}")

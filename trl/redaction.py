"""Configurations without their secrets: for files of a run, trackers, logs and reports."""

import json
import re
from typing import Any

# A name with one of these words is that of a secret, whatever its value is.
ALWAYS = frozenset(
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
# A name that ends with one of these is that of a secret, unless the word before it is harmless.
HARMLESS: dict[str, frozenset[str]] = {
    "token": frozenset(
        {
            *("added", "audio", "begin", "bos", "cls", "each", "end", "eoi", "eos", "eot", "image"),
            *("mask", "new", "next", "pad", "per", "sep", "special", "start", "stop", "think"),
            *("unk", "video"),
        }
    ),
    "key": frozenset(
        {
            *("cache", "column", "dataset", "foreign", "group", "image", "input", "label"),
            *("metric", "output", "primary", "prompt", "row", "sort", "target", "text"),
        }
    ),
    "auth": frozenset(),
    "cookie": frozenset(),
    "jwt": frozenset(),
    "pat": frozenset(),
}
# Plurals are mostly counts, or special tokens of a vocabulary; of these words they are secrets.
OWNERS = frozenset({"access", "api", "auth", "bearer", "hf", "hub", "private", "refresh"})
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
FLAG = re.compile(r"(?<![\w-])--?(?P<name>[A-Za-z][\w.-]*)(?P<between>=|\s+)(?P<value>[^\s-]\S*)")
ASSIGNMENT = re.compile(r"(?P<name>-{0,2}[A-Za-z][\w.-]*)(?P<between>=)(?P<value>.+)", re.DOTALL)
PARAMETER = re.compile(r"(?<=[?&])(?P<name>[\w.-]+)(?P<between>=)(?P<value>[^&\s#]+)")
USER = re.compile(r"(?<=://)[^/\s@]+@")
SPECIAL_TOKEN = re.compile(r"<.*>|\[.*\]", re.DOTALL)


def redact(value: Any) -> Any:
    """Copy a configuration with a placeholder, such as `<HUB_TOKEN>`, for each secret.

    Secrets are told by their names: of options, keys of nested dictionaries, flags of a command
    line (a list of arguments, or one text), parameters of a URL. User and password of a URL are
    secrets, too. Counts such as `max_tokens` and tokens of a vocabulary such as `pad_token` are
    not.
    """
    return _copy(value, drop=False)


def without_secrets(value: Any) -> Any:
    """Copy a configuration without its secrets, so that it compares equal whatever they are.

    A dictionary of nothing else becomes None.
    """
    return _copy(value, drop=True)


def is_secret(name: str, value: Any = "") -> bool:
    """Whether a name such as `hub_token`, `apiKey` or `--password` is that of a secret."""
    words = [word.lower() for word in WORD.findall(name)]
    if not words or value is None or isinstance(value, bool):
        return False
    if ALWAYS.intersection(words):
        return True
    is_text = isinstance(value, str)
    if is_text and SPECIAL_TOKEN.fullmatch(value) and value != _placeholder(name):
        return False
    return not isinstance(value, (int, float)) and _ends_like_a_secret(words)


def _ends_like_a_secret(words: list[str]) -> bool:
    *before, last = words
    if last in ("tokens", "keys"):
        return bool(OWNERS.intersection(before))
    return last in HARMLESS and not HARMLESS[last].intersection(before[-1:])


def _copy(value: Any, drop: bool) -> Any:
    if isinstance(value, str):
        return _text(value, drop)
    if isinstance(value, dict):
        return _dictionary(value, drop)
    if type(value) in (list, tuple):
        return type(value)(_arguments(value, drop))
    return value


def _dictionary(options: dict[Any, Any], drop: bool) -> dict[Any, Any] | None:
    result = {}
    for name, value in options.items():
        if not is_secret(str(name), value):
            result[name] = _copy(value, drop)
        elif not drop:
            result[name] = _placeholder(str(name))
    return None if options and not result else result


def _arguments(values: list[Any] | tuple[Any, ...], drop: bool) -> list[Any]:
    """Copy a list, which may be a command line: `--hub_token` and its value are two entries."""
    result: list[Any] = []
    flag = ""
    for value in values:
        if flag and isinstance(value, str) and not value.startswith("--"):
            result.append(_placeholder(flag))
        else:
            result.append(_copy(value, drop))
        is_flag = isinstance(value, str) and value.startswith("-") and "=" not in value
        flag = value if is_flag and is_secret(value) else ""
    return result


def _text(text: str, drop: bool) -> str:
    if text.lstrip().startswith("{"):
        try:
            options = json.loads(text)
        except ValueError:
            options = None
        if isinstance(options, dict) and (public := _copy(options, drop)) != options:
            return json.dumps(public)
    text = USER.sub("<CREDENTIALS>@", text)
    text = PARAMETER.sub(_hidden, text)
    match = ASSIGNMENT.fullmatch(text)
    return _hidden(match) if match else FLAG.sub(_hidden, text)


def _hidden(match: re.Match[str]) -> str:
    if not is_secret(match["name"], match["value"]):
        return match[0]
    start = match[0][: match.start("value") - match.start()]
    return start + _placeholder(match["name"])


def _placeholder(name: str) -> str:
    return f"<{name.lstrip('-').upper()}>"

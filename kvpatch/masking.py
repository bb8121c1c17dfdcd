"""Values that are nobody else's to read, by the names that they have in options and settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MASK = "***"
_SECRET = re.compile(
    r"secret|passw|passphrase|credential|api_?key|access_?key|private_?key|authorization",
    re.IGNORECASE,
)
# A number of that name is one of tokens: a threshold, or an id.
_TOKEN = re.compile(r"(^|[._])token($|[._])", re.IGNORECASE)
_TOKEN_IN_TEXT = re.compile(r"(?<![a-z])token(?!s)\w*[\"']?\s*:", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
# Options of vLLM's that argparse also takes by their beginnings.
_OPTIONS = ("api_key", "hf_token", "ssl_keyfile_password")
_SHORTEST = 4  # of such a beginning
_WHOLE = ("ssl_keyfile",)  # an option of its own


def masked(value: Any, name: str = "") -> Any:
    """Return a value of JSON in which what has a secret's name is ``MASK``.

    At any depth, also in the JSON at the end of a text.

    Args:
        value: of JSON.
        name: that it has.
    """
    if _SECRET.search(name):
        return MASK
    if isinstance(value, Mapping):
        inherited = name if _TOKEN.search(name) else ""
        return {key: masked(of, inherited or str(key)) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [masked(one, name) for one in value]
    if isinstance(value, str):
        return MASK if _is_secret(name, value) else _text(value)
    return value


def command(words: Sequence[str]) -> list[str]:
    """Return a command without the values of keys, tokens and passwords.

    These are values of options, of variables (``NAME=VALUE``), and within JSON.
    """
    return list(_words(words))


def _words(words: Sequence[str]) -> Iterator[str]:
    before = ""  # the last option, whose values follow; --api-key takes several
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            before = "" if equals else name
        elif _is_secret(before, word):
            yield MASK
            continue
        if not equals or word.lstrip().startswith(("{", "[")):
            yield _text(word)
        elif _is_secret(name, value):
            yield f"{name}={MASK}"
        else:
            yield f"{name}={_text(value)}"


def _is_secret(name: str, value: str) -> bool:
    plain = name.lstrip("-").replace("-", "_").lower()
    if plain in _WHOLE:
        return False
    if _TOKEN.search(plain):
        return not _NUMBER.fullmatch(value)
    begins = len(plain) >= _SHORTEST and any(one.startswith(plain) for one in _OPTIONS)
    return bool(_SECRET.search(plain)) or (name.startswith("--") and begins)


def _text(text: str) -> str:
    """Return a text in which the JSON at its end has no secrets."""
    if "{" not in text or not (_SECRET.search(text) or _TOKEN_IN_TEXT.search(text)):
        return text
    begin = min(at for at in map(text.find, "{[") if at >= 0)
    try:
        found = json.loads(text[begin:])
        hidden = masked(found)
    except (ValueError, RecursionError):
        return MASK  # perhaps JSON that vLLM reads otherwise
    return text if hidden == found else text[:begin] + json.dumps(hidden, sort_keys=True)

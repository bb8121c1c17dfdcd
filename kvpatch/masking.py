"""Values that are nobody else's to read, by the names that they have in options and settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MASK = "***"
_SECRET = re.compile(
    r"secret|passw|passphrase|credential|api_?key|access_?key|private_?key|(^|_)token($|_)"
    r"|authorization",
    re.IGNORECASE,
)
# Options of vLLM's that argparse also takes by their beginnings.
_OPTIONS = ("api_key", "hf_token", "ssl_keyfile_password")
_SHORTEST = 4  # of such a beginning
_WHOLE = ("ssl_keyfile",)  # an option of its own


def masked(value: Any) -> Any:
    """Return a value of JSON in which what has a secret's name is ``MASK``.

    At any depth, also in the JSON at the end of a text.
    """
    if isinstance(value, Mapping):
        return {key: MASK if _SECRET.search(str(key)) else masked(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [masked(one) for one in value]
    return _text(value) if isinstance(value, str) else value


def command(words: Sequence[str]) -> list[str]:
    """Return a command without the values of keys, tokens and passwords.

    These are values of options, of variables (``NAME=VALUE``), and within JSON.
    """
    return list(_words(words))


def _words(words: Sequence[str]) -> Iterator[str]:
    secret = False
    for word in words:
        name, equals, value = word.partition("=")
        option = name.startswith("--")
        if secret and not option:
            yield MASK  # --api-key takes several
            continue
        secret = option and _is_secret(name) and not equals
        if not equals or word.lstrip().startswith(("{", "[")):
            yield _text(word)
        elif _is_secret(name):
            yield f"{name}={MASK}"
        else:
            yield f"{name}={_text(value)}"


def _is_secret(name: str) -> bool:
    plain = name.lstrip("-").replace("-", "_").lower()
    if plain in _WHOLE:
        return False
    begins = len(plain) >= _SHORTEST and any(one.startswith(plain) for one in _OPTIONS)
    return bool(_SECRET.search(plain)) or (name.startswith("--") and begins)


def _text(text: str) -> str:
    """Return a text in which the JSON at its end has no secrets."""
    if not _SECRET.search(text) or "{" not in text:
        return text  # as it was typed
    begin = min(at for at in map(text.find, "{[") if at >= 0)
    try:
        return text[:begin] + json.dumps(masked(json.loads(text[begin:])), sort_keys=True)
    except (ValueError, RecursionError):
        return MASK  # perhaps JSON that vLLM reads otherwise

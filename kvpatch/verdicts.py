"""The verdicts of ``kvpatch verify``: files, and for what each of them holds.

A verdict holds for one combination, see ``upstream.combination``, and for nothing else: another
version, model shape, setting or device asks again. It lifts refusals that are based on
missing validation, and only those that were lifted in its own run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch import masking, private, versions
from kvpatch.environ import VERDICTS, VERIFIED, VERIFY
from kvpatch.logs import log
from kvpatch.process import started_by_multiprocessing
from kvpatch.refusal import VERIFIABLE

FORMAT = 2
LONGEST = 1 << 20  # bytes of a file
RIGHT, WRONG = "right", "wrong"
PACKAGE = Path(__file__).parent
# What of kvpatch is not in an engine's way.
_BESIDE = ("cli", "doctor", "matrix", "verify", "startup", "buildtime", "__pycache__")
_ANOTHER = {
    "versions": "{} is {here} and was {there}",
    "model": "the {} of the model is another",
    "code": "the code of {} is another",
    "flags": "{} is {here!r} and was {there!r}",
}


class Verified(NamedTuple):
    """A verdict that holds for the configuration of a process."""

    date: str  # empty in the run itself
    codes: frozenset[str]  # of the refusals that it lifts


class Verdict(NamedTuple):
    """One verdict file."""

    path: Path
    word: str  # ``right`` or ``wrong``
    date: str  # as ``2026-11-22``
    lifted: frozenset[str]  # the codes of the refusals that were lifted
    combination: dict[str, Any]
    command: tuple[str, ...]


def own_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the user's folder of verdicts, which need not exist; OSError without a home."""
    data = environment.get("XDG_DATA_HOME", "")
    try:
        home = Path(data) if data.startswith("/") else Path("~/.local/share").expanduser()
    except RuntimeError:
        raise OSError("this user has no home folder for verdicts; name another one") from None
    return home / "kvpatch" / "verdicts"


def folders(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders of verdicts: the one that the operator names, and the user's own."""
    named = VERDICTS.read(environment)
    found = [Path(named)] if named else []
    with suppress(OSError):
        found.append(own_folder(environment))
    return found


def every(environment: Mapping[str, str] = os.environ) -> list[Verdict]:
    """Return every verdict that can be read; a file that cannot is logged, and lifts nothing."""
    found = []
    for path in files(environment):
        try:
            found.append(read(path))
        except (OSError, ValueError) as error:
            _say_once(f"the verdict {path} is not used: {error}")
    return found


@cache
def _say_once(sentence: str) -> None:
    """Log a sentence, however often a process reads the verdicts."""
    log.warning("kvpatch: %s", sentence)


def files(environment: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Iterate over the verdict files; a folder that cannot be read is logged."""
    for folder in folders(environment):
        try:
            found = sorted(folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            log.warning("kvpatch: the verdicts of %s are not used: %s", folder, error)
            continue
        yield from (path for path in found if path.suffix == ".json")


def read(path: Path) -> Verdict:
    """Read a verdict, or raise OSError; ValueError if it is none, or another kvpatch's."""
    try:
        content = json.loads(private.read(path, LONGEST))
        if content["format"] == 1:
            raise ValueError(
                "an earlier kvpatch made it, and it lacks settings that decide which code runs"
            )
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, and this kvpatch has {FORMAT}")
        verdict = Verdict(
            path,
            content["verdict"],
            content["date"],
            frozenset(content["lifted"]) & VERIFIABLE,  # whoever wrote the file
            content["combination"],
            tuple(content["command"]),
        )
        texts = (verdict.word, verdict.combination["device"], *verdict.command)
        parts = [verdict.combination[name] for name in ("versions", "code", "model", "flags")]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError("it is not JSON") from error
    except KeyError as error:
        raise ValueError(f"it is no verdict, and lacks {error}") from error
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no verdict ({error})") from error
    if (
        not re.fullmatch(r"\d{4}-\d\d-\d\d", str(verdict.date))
        or not all(isinstance(one, str) for one in texts)
        or not all(isinstance(one, dict) for one in parts)
    ):
        raise ValueError("it is no verdict")
    return verdict


def write(folder: Path, content: Mapping[str, Any]) -> Path:
    """Write a verdict over an earlier one of its combination; return its path."""
    import hashlib  # takes milliseconds, of every start

    combination = content["combination"]
    text = json.dumps(combination, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    name = f"vllm-{combination['versions']['vllm']}-{combination['model']['architecture']}-{digest}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    partial = path.with_suffix(".part")
    partial.unlink(missing_ok=True)
    private.create(partial, (json.dumps({"format": FORMAT, **content}, indent=1) + "\n").encode())
    partial.replace(path)
    return path


def early(environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return the codes that are lifted before the configuration is known.

    In a run of ``kvpatch verify`` all that it can judge. Otherwise those that verdicts on the
    installed versions lift; one of them must then hold for the configuration.
    """
    if VERIFY.read(environment):
        return VERIFIABLE
    if not any(files(environment)):
        return frozenset()
    here = {package: versions.installed(package) for package in ("vllm", "kvcached")}
    if not all(here.values()):
        return frozenset()
    installed = {package: found[0].text for package, found in here.items()}
    return frozenset(
        code
        for one in every(environment)
        if one.word == RIGHT and installed.items() <= one.combination["versions"].items()
        for code in one.lifted
    )


def inherited(environment: Mapping[str, str] = os.environ) -> Verified | None:
    """Return the verdict of the vLLM that started this process; in a run of verify, everything."""
    if VERIFY.read(environment):
        return Verified("", VERIFIABLE)
    given = VERIFIED.read(environment)
    if not given or not started_by_multiprocessing():
        return None
    date, _, codes = given.partition(":")
    return Verified(date, frozenset(codes.split(",")) - {""})


def pass_on(verified: Verified | None) -> None:
    """Let the processes that vLLM starts inherit a verdict; None for none."""
    os.environ.pop(VERIFIED.name, None)
    if verified is not None:
        os.environ[VERIFIED.name] = f"{verified.date}:{','.join(sorted(verified.codes))}"


def covering(
    combination: Mapping[str, Any], codes: Iterable[str], known: Iterable[Verdict]
) -> Verdict | None:
    """Return the newest verdict on a combination if it is right and lifts what must be lifted."""
    if not combination["device"]:
        return None
    masked = masking.masked(combination)
    same = [one for one in known if one.combination == masked]
    newest = max(same, key=lambda one: one.date, default=None)
    # On one day, the wrong one.
    if newest is None or any(one.word != RIGHT and one.date == newest.date for one in same):
        return None
    return newest if newest.lifted.issuperset(codes) else None


def apart(
    combination: Mapping[str, Any], codes: Iterable[str], known: Iterable[Verdict]
) -> tuple[Verdict, list[str]] | None:
    """Return the nearest right verdict that lifts ``codes``, and in what it differs; or None."""
    masked = masking.masked(combination)
    found = [
        (one, _differences(masked, one.combination))
        for one in known
        if one.word == RIGHT
        and one.lifted.issuperset(codes)
        and one.combination["model"].get("architecture") == masked["model"]["architecture"]
    ]
    return min(found, key=lambda each: len(each[1]), default=None)


def _differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    found = []
    for part, another in _ANOTHER.items():
        for name in sorted({*now[part], *then[part]}):
            here, there = now[part].get(name), then[part].get(name)
            if here != there:
                found.append(another.format(name, here=here, there=there))
    if now["device"] != then["device"]:
        found.append(f"the device is {now['device']!r} and was {then['device']!r}")
    return found


def digest(package: str) -> str:
    """Return a digest of a package's or module's code, empty without one; nothing is imported."""
    import hashlib

    found = hashlib.sha256()
    for path in (every := sorted(set(_code(package)))):
        found.update(path.read_bytes())
    return found.hexdigest()[:16] if every else ""


def _code(package: str) -> Iterator[Path]:
    if package == PACKAGE.name:
        for path in PACKAGE.rglob("*.py"):
            if not set(path.relative_to(PACKAGE).parts) & set(_BESIDE):
                yield path
        return
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a stand-in without a spec
        return
    if spec is None:
        return
    if spec.origin and Path(spec.origin).is_file():
        yield Path(spec.origin)  # of a package, one of those below
    # vLLM's extensions are a gigabyte, and known by its version.
    suffixes = (".py",) if package == "vllm" else (".py", ".so")
    for folder in spec.submodule_search_locations or ():
        yield from (path for path in Path(folder).rglob("*") if path.suffix in suffixes)

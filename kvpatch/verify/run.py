"""One run: the command with kvpatch, then without, and what comes of both."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpatch import environ
from kvpatch.environ import DEBUG, HOST_POOL, STATUS_DIR, SWITCH, VERIFY
from kvpatch.pool import ledger
from kvpatch.verify import compare, judge, plain
from kvpatch.verify.api import Answer, Api
from kvpatch.verify.child import Child, Ended, Unfinished, free_port
from kvpatch.verify.drive import Arms, Drive, Say, Seen
from kvpatch.verify.load import Load
from kvpatch.verify.readings import Readings

OPENING = 1200  # tokens of a first turn, where the model takes as many
WARM_UP = 400  # letters
BLOCKS = 4  # at least, in a first turn
WAIT_SECONDS = 0.5


@dataclass(frozen=True)
class Options:
    """What to run."""

    command: tuple[str, ...]
    environment: dict[str, str]  # that the operator has
    folder: Path  # for logs and what the processes leave
    plain: bool = True
    start_seconds: float = 1800.0  # that it may take to answer


@dataclass
class Result:
    """What came of a run."""

    judgement: judge.Judgement
    combination: dict[str, Any] = field(default_factory=dict)  # empty if not started
    lifted: list[str] = field(default_factory=list)  # the codes of refusals
    seen: Seen = field(default_factory=Seen)


def api_key(command: Sequence[str], environment: dict[str, str]) -> str:
    """Return the key of the server's API; empty for none."""
    for word, after in zip(command, [*command[1:], ""], strict=True):
        if word.startswith("--api-key"):
            return word.partition("=")[2] or after
    return environment.get("VLLM_API_KEY", "")


def run(options: Options, say: Say) -> Result:
    """Run the command, and judge it."""
    readings = Readings(options.folder)
    result = Result(judge.Judgement())
    try:
        load = _ours(options, readings, result, say)
        if options.plain and not result.judgement.wrong:
            _plain(options, load, result, say)
    except Ended as error:
        result.judgement.wrong.append(str(error))
    except Unfinished as error:
        result.judgement.missing.append(str(error))
    result.combination = readings.combination().get("combination", {})
    result.lifted = readings.lifted()
    return result


def _ours(options: Options, readings: Readings, result: Result, say: Say) -> Load:
    ours = {
        SWITCH.name: "1",
        DEBUG.name: "1",
        VERIFY.name: str(options.folder),
        STATUS_DIR.name: str(options.folder),
    }
    log = options.folder / "kvpatch.log"
    with (
        _status_in(options.folder),
        _pool_of_its_own(options.environment) as (pool, given),
        _started(options, options.command, options.environment | ours | given, log, say) as started,
    ):
        child, api = started
        engine = readings.engine()
        ran = readings.combination()
        block = int(ran["combination"]["flags"]["cache_config.block_size"] or 16)
        load = _sized(api, block)
        sleeps = bool(ran["combination"]["flags"].get("model_config.enable_sleep_mode"))
        arms = Arms(sleeps and bool(engine["connector"]), pool)
        drive = Drive(api, child, readings, load, block, say, arms)
        result.seen = drive.seen
        try:
            drive.run()
        except Ended as error:
            # What the audit found is why the server no longer answers.
            raise Ended(child.violation or f"{error}; {child.reason()}") from error
        offloads = bool(engine["connector"])
        result.judgement = judge.together(
            [
                judge.judge_seen(drive.seen, offloads),
                judge.judge_bytes(readings.audits(), ran["workers"], ran["connectors"]),
                judge.judge_memory(drive.seen),
            ]
        )
    return load


@contextmanager
def _pool_of_its_own(
    environment: Mapping[str, str],
) -> Iterator[tuple[Path | None, dict[str, str]]]:
    """Return a host pool as large as the operator's own, which stays as it is, and its variable."""
    wanted = HOST_POOL.read(environment)
    if not wanted:
        yield None, {}
        return
    name = f"verify{os.getpid()}"
    folder = ledger.home(name)
    try:
        yield folder, {HOST_POOL.name: f"{environ.pool(wanted)[0]}@{name}"}
    finally:
        if folder.exists() and ledger.show(folder, remove=True) is None:
            for left in folder.iterdir():
                left.unlink()
            folder.rmdir()


@contextmanager
def _status_in(folder: Path) -> Iterator[None]:
    """Let this process read the status pages that the command's processes write."""
    earlier = os.environ.get(STATUS_DIR.name)
    os.environ[STATUS_DIR.name] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(STATUS_DIR.name)
        if earlier is not None:
            os.environ[STATUS_DIR.name] = earlier


def _plain(options: Options, load: Load, result: Result, say: Say) -> None:
    command = plain.command_of(options.command)
    environment = plain.environment_of(options.environment)
    log = options.folder / "plain.log"
    with _started(options, command, environment, log, say) as (child, api):
        try:
            cached, computed = plain.answers(api, load, result.seen.conversations, say)
        except Ended as error:
            raise Unfinished(f"plain vLLM: {error}; {child.reason()}") from error
    ours = compare.differences(cached, result.seen.answers)
    itself = compare.differences(cached, computed)
    result.judgement = judge.together([result.judgement, judge.judge_answers(ours, itself)])


@contextmanager
def _started(
    options: Options, command: Sequence[str], environment: dict[str, str], log: Path, say: Say
) -> Iterator[tuple[Child, Api]]:
    port = free_port()
    words = [*command, "--host", "127.0.0.1", "--port", str(port)]
    api, begun = Api(port, api_key(command, environment)), time.monotonic()
    # With the routes that empty caches.
    with Child(words, environment | {"VLLM_SERVER_DEV_MODE": "1"}, log) as child:
        try:
            say(f"starting; {child.log_path} has its log")
            while not api.healthy():
                child.check()
                if time.monotonic() - begun > options.start_seconds:
                    raise Ended(f"the command did not answer within {options.start_seconds:.0f} s")
                time.sleep(WAIT_SECONDS)
            api.look()
        except Ended as error:
            raise Unfinished(f"not started: {error}") from error
        say(f"{api.model} answers after {time.monotonic() - begun:.0f} s")
        yield child, api


def _sized(api: Api, block: int) -> Load:
    try:
        warm: Answer = api.complete("warm-up", Load(1.0, 0, 0).of("warm-up", WARM_UP), 2)
    except Ended as error:
        raise Unfinished(f"no prompt was answered: {error}") from error
    letters = WARM_UP / max(1, warm.prompt_tokens)
    opening = min(max(OPENING, BLOCKS * block), int(api.longest * 0.6))
    return Load(letters, opening, max(32, min(opening // 8, 4 * block)))

"""How the values of environment variables are read."""

import importlib.util
import re
from pathlib import Path

import pytest

from kvpatch import environ, gate

STARTUP = Path(__file__).parents[2] / "kvpatch/startup"


@pytest.mark.parametrize(
    ("on", "text"),
    [
        *((True, text) for text in ("1", "true", "on", "yes", "TRUE", "Yes")),
        *((False, text) for text in ("", "0", "false", "off", "no", "FALSE", "Off")),
    ],
)
def test_a_switch_is_on_or_off(on, text):
    assert environ.boolean(text) is on
    for variable in (environ.SWITCH, environ.DEBUG):
        assert variable.is_on({variable.name: f" {text} "}) is on
        assert variable.is_off({variable.name: f" {text} "}) is not on


NO_SWITCH = environ.boolean, "neither on nor off"
NO_DURATION = environ.seconds, "not a number of seconds"
NO_SIZE = environ.size, "is not a size; use for example 2GiB or 512MiB"
TOO_LONG = environ.seconds, "more than 30 years; use for example 10 or 0.5"
TOO_MUCH = environ.size, "no machine has as much"  # the ledger of a pool has no room for it


@pytest.mark.parametrize(
    ("read", "why", "text"),
    [
        *((*NO_SWITCH, text) for text in ("banana", "2", "on off", "10s")),
        *((*NO_DURATION, text) for text in ("", "10s", "soon", "0", "-1", "inf", "nan")),
        *((*NO_DURATION, text) for text in ("1e3", "1_0", "٣")),
        *((*TOO_LONG, text) for text in ("1073741825", "9" * 400)),
        (environ.duration, "more than 30 years; use for example 30s or 5min", "99999999999999h"),
        *((environ.memory, "less than 1 MiB; use for example", text) for text in ("64", "1023KiB")),
        (environ.memory, "is not a size", "0"),
        *((*NO_SIZE, text) for text in ("", "0", "2GBs", "2  GiB", "-1GiB", "infMiB", "1PiB")),
        (*NO_SIZE, "0.1"),
        *((*TOO_MUCH, text) for text in ("99999999999GiB", "9" * 400)),
    ],
)
def test_what_cannot_be_read(read, why, text):
    with pytest.raises(ValueError, match=why):
        read(text)


@pytest.mark.parametrize(("text", "seconds"), [("10", 10.0), ("0.5", 0.5), ("3600", 3600.0)])
def test_durations(text, seconds):
    assert environ.seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("1.5MiB", 3 << 19),
        ("4096", 4096),
        ("0.5GiB", 1 << 29),
        ("2Gi", 2 << 30),  # as Kubernetes writes them
        ("512Mi", 512 << 20),
        ("8G", 8 << 30),
        ("8GB", 8 << 30),
        ("8gib", 8 << 30),
        ("8 GiB", 8 << 30),
        ("1TiB", 1 << 40),
        ("1k", 1 << 10),
        ("7B", 7),
    ],
)
def test_sizes(text, size):
    assert environ.size(text) == size


PART = "it is neither a size nor a part of one; use for example 8GiB or 25%"
SHARE = "it is not a share between 0 and 1; use for example 0.95"
WHOLE = "it is not a whole number; use for example 8"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("KVPATCH_DEBUG", "banana", "it means neither on nor off; use 1 or 0"),
        (
            "KVPATCH_TIER_PATIENCE",
            "10s",
            "it is not a number of seconds; use for example 10 or 0.5",
        ),
        ("KVPATCH_TIER_SIZE", "110%", PART),
        ("KVPATCH_TIER_SIZE", "25%x", PART),
        ("KVPATCH_TIER_SIZE", "all", "it is not a size; use for example 2GiB or 512MiB"),
        ("KVCACHED_GPU_UTILIZATION", "90%", SHARE),
        ("KVCACHED_MAX_CACHED_TOKENS", "16k", WHOLE),
        ("KVCACHED_MIN_RESERVED_PAGES", "", WHOLE),
        ("KVCACHED_MAX_RESERVED_PAGES", "1.5", WHOLE),
        ("KVCACHED_PAGE_SIZE_MB", "2M", WHOLE),
        ("KVCACHED_PAGE_SIZE_MB", "0", "it is not a multiple of 2; use for example 2 or 64"),
        ("KVCACHED_IPC_TIMEOUT", "1min", "it is not a number; use for example 60"),
    ],
)
def test_a_value_that_cannot_be_read_is_refused(name, text, why):
    refusal = gate.check_environment({"KVPATCH": "1", name: text})
    assert str(refusal) == (
        f"kvpatch refuses to start vLLM: {name}={text} cannot be read, because {why}, "
        f"or unset {name}, or set KVPATCH=0. [KVP113]"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("KVPATCH_DEBUG", text) for text in ("", "  ", "yes", "off")),
        ("KVCACHED_GPU_UTILIZATION", "1"),
        ("KVCACHED_MAX_CACHED_TOKENS", "-1"),  # all of them
        ("KVCACHED_MIN_RESERVED_PAGES", " 0 "),
        ("KVCACHED_PAGE_SIZE_MB", "64"),
        ("KVCACHED_IPC_TIMEOUT", "0.5"),
    ],
)
def test_a_value_that_can_be_read_is_not_refused(name, text):
    assert gate.check_environment({"KVPATCH": "yes", name: text}) is None


def test_every_number_that_kvcached_reads_when_it_is_imported_can_be_refused():
    pytest.importorskip("kvcached")  # scripts/pythons is without
    source = Path(importlib.util.find_spec("kvcached").origin).parent
    text = "".join((source / name).read_text() for name in ("utils.py", "tp_ipc_util.py"))
    read = re.findall(r'^\w+(?:: \w+)? = (?:int|float)\(os.getenv\(\s*"(\w+)"', text, re.MULTILINE)
    parsed = {one.name for one in environ.KVCACHED if one.parse is not None}
    assert set(read) | {environ.KVCACHED_PAGE_SIZE_MB.name} == parsed


def test_the_startup_files_have_the_same_values():
    """They import nothing of kvpatch where it is off."""
    spec = importlib.util.spec_from_file_location("stub", STARTUP / "kvpatch_startup.py")
    assert spec is not None and spec.loader is not None
    stub = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stub)
    assert stub.OFF_VALUES == environ.OFF_VALUES
    (line,) = (STARTUP / "kvpatch-init.pth").read_text().splitlines()
    found = re.search(r'in (\("", "0"[^)]*\))', line)
    assert eval(found[1]) == environ.OFF_VALUES


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("KVPATCH_HOSTPOOL", "KVPATCH_HOST_POOL"),
        ("KVPATCH_FIRST_LIMITS", "KVPATCH_FIRST_LIMIT"),
        ("KVPATCH_idle", "KVPATCH_IDLE"),
        ("KVPATCH_VERIFIES", ""),  # what kvpatch sets itself is not meant
        ("KVPATCH_SOMETHING_ELSE", ""),
        *((one.name, None) for one in environ.OURS),
        ("KVPATCH_SERVICE_HOST", None),  # by Kubernetes, of a service called kvpatch
        ("KVPATCH_CHAT_SERVICE_PORT_HTTP", None),
        ("KVPATCH_PORT", None),
        ("KVPATCH_CHAT_PORT_8000_TCP_ADDR", None),
        ("MY_KVPATCH_IDLE", None),
    ],
)
def test_a_variable_that_nothing_reads_is_unknown(name, meant):
    found = list(environ.unknown({"KVPATCH_LOG": "debug", "HOME": "/", name: "1"}))
    assert found == ([] if meant is None else [(name, meant)])

"""What the environment says: the switch, kvcached's switches, the host device."""

import sys
from pathlib import Path

import pytest

from harness.engines.refused import REFUSES, Refused

ROOT = Path(__file__).parents[2]
PACKAGES = Path(pytest.__file__).parents[1]


def test_banana(start_server):
    refused = start_server(KVPATCH="banana")
    assert refused.sentence == (
        f"{REFUSES}KVPATCH=banana is not a known value, because it would be unclear whether "
        "kvpatch is on; set KVPATCH to 1, true, on or yes to switch it on, or to 0, false, off or "
        "no (or leave it unset) to switch it off."
    )
    assert refused.code == "KVP101"
    assert "Traceback" not in refused.log


def test_a_variable_that_cannot_be_read(start_server):
    """Debug mode was off without a word."""
    refused = start_server(KVPATCH_DEBUG="banana")
    assert refused.sentence == (
        f"{REFUSES}KVPATCH_DEBUG=banana cannot be read, because it means neither on nor off; use 1 "
        "or 0, or unset KVPATCH_DEBUG, or set KVPATCH=0."
    )
    assert refused.code == "KVP113"


def test_banana_before_a_submodule_of_vllm(start_python):
    refused = start_python("from vllm.entrypoints.llm import LLM", KVPATCH="banana")
    assert refused.sentence.startswith(f"{REFUSES}KVPATCH=banana is not a known value")
    assert "Traceback" not in refused.log


@pytest.mark.parametrize("name", ["ENABLE_KVCACHED", "KVCACHED_AUTOPATCH"])
def test_kvcached_switched_off(start_server, name):
    refused = start_server(**{name: "false"})
    assert refused.sentence == (
        f"{REFUSES}KVPATCH is on but {name}=false, because kvpatch requires kvcached's memory and "
        f"this switches kvcached off; unset {name} (kvpatch sets it) or set KVPATCH=0."
    )


@pytest.mark.parametrize("size", ["", "lots"])
def test_host_device_without_a_size(start_python, size):
    refused = start_python("import vllm", KVPATCH_HOST_DEVICE=size)
    assert refused.sentence == (
        f"{REFUSES}this machine has no GPU and the host device has no size, because "
        f'KVPATCH_HOST_DEVICE="{size}" is not a size; use for example 2GiB or 512MiB; set '
        "KVPATCH_HOST_DEVICE=2GiB, or set KVPATCH=0."
    )
    assert "Traceback" not in refused.log


def test_a_refusal_holds_for_every_later_import(start_python):
    code = """
for statement in ("import vllm", "import vllm", "from vllm.config import VllmConfig"):
    try:
        exec(statement)
    except ImportError as error:
        print("refused:", error)
    else:
        print("let through:", statement)
raise SystemExit(3)
"""
    refused = start_python(code, KVPATCH_HOST_DEVICE="lots")
    assert refused.log.count(f"refused: {REFUSES}this machine has no GPU") == 3
    assert "let through" not in refused.log


def test_a_startup_file_that_did_not_run(run, machine, model):
    """Without site nothing is patched, and vLLM's plug-ins are what is left to notice."""
    code = f"from vllm import LLM; LLM({str(model)!r})"
    path = f"{ROOT}:{PACKAGES}"
    refused = Refused(run(sys.executable, "-S", "-c", code, **machine | {"PYTHONPATH": path}))
    assert refused.code == "KVP109"
    assert refused.sentence.startswith(
        f"RuntimeError: {REFUSES}KVPATCH is set but its startup file did not run in"
    )

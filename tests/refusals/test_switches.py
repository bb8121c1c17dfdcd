"""What the environment says: the switch, kvcached's switches, the host device."""

import sys
from pathlib import Path

import pytest

from harness.engines.refused import REFUSES, Refused
from kvpatch import gate

ROOT = Path(__file__).parents[2]
PACKAGES = Path(pytest.__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("KVPATCH", "banana", "KVP101"),
        ("KVPATCH_DEBUG", "banana", "KVP113"),  # debug mode was off without a word
        ("ENABLE_KVCACHED", "false", "KVP102"),
        ("KVCACHED_AUTOPATCH", "false", "KVP102"),
    ],
)
def test_a_value_that_cannot_be(start_server, name, value, code):
    """In the sentence of the gate, which tests/unit/test_gate.py and test_environ.py have."""
    refused = start_server(**{name: value})
    gates = gate.check_environment({"KVPATCH": "1", name: value})
    assert refused.code == gates.code == code
    assert refused.sentence == f"{REFUSES}{gates.what}, because {gates.why}; {gates.remedy}."
    assert f"{name}={value}" in refused.sentence
    assert "Traceback" not in refused.log


def test_banana_before_a_submodule_of_vllm(start_python):
    refused = start_python("from vllm.entrypoints.llm import LLM", KVPATCH="banana")
    assert refused.sentence.startswith(f"{REFUSES}KVPATCH=banana is not a known value")
    assert "Traceback" not in refused.log


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

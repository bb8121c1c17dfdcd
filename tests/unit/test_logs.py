"""KVPATCH_LOG=debug says what is done; without it nothing is printed."""

import pytest

CODE = "import kvpatch, fake_patches, vllm"


@pytest.mark.parametrize("value", [None, "", "info"], ids=repr)
def test_nothing_is_said_unless_asked(python, value):
    assert python(CODE, **({} if value is None else {"KVPATCH_LOG": value})).err == ""


@pytest.mark.parametrize("value", ["debug", " DEBUG "])
def test_every_gate_and_patch_is_said(python, value):
    lines = python(CODE, KVPATCH_LOG=value).err.splitlines()
    assert [line.partition("] ")[2] for line in lines] == [
        "kvpatch: the gates before vllm are passed",
        "kvpatch: applied fake.serve to vllm.serving:Server.serve",
        "kvpatch: feature fake applied ",
    ]
    assert all(line.startswith("DEBUG ") for line in lines)


def test_only_debug_lines_take_this_way(python):
    """vLLM's handler prints the others, which would be there twice."""
    code = CODE + "\nfrom kvpatch.logs import log\nlog.info('once')"
    assert "once" not in python(code, KVPATCH_LOG="debug").err

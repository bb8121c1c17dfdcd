"""The order of patching does not depend on who registered a hook first."""

import itertools

import pytest

# What may stand before and after kvpatch's own line, each with what it does at startup.
KVCACHED_STARTUP = """
from wrapt import when_imported
when_imported("vllm")(lambda _: __import__("kvcached.integration.vllm.autopatch"))
"""
KVCACHED_IMPORTED = "import kvcached.integration.vllm.autopatch\n"
OTHERS = """
from wrapt import when_imported
when_imported("vllm")(lambda _: sys.events.append("other"))
"""
KVPATCH = "import kvpatch, fake_patches\n"
STEPS = {"startup": KVCACHED_STARTUP, "imported": KVCACHED_IMPORTED, "other": OTHERS}
ORDERS = [
    order
    for count in range(3)
    for steps in itertools.combinations(STEPS, count)
    for order in itertools.permutations((*steps, "kvpatch"))
]


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_kvcached_then_others_then_kvpatch(python, order):
    code = "import sys\nsys.events = []\n"
    code += "".join((STEPS | {"kvpatch": KVPATCH})[step] for step in order)
    code += "import vllm; print(*sys.events)"
    done = python(code)
    assert done.err == ""
    events = done.out.split()
    assert events[0] == "vllm"
    assert events[-1] == "kvpatch"
    assert sorted(events[1:-1]) == (["kvcached", "other"] if "other" in order else ["kvcached"])


def test_a_failing_kvcached_is_refused_in_one_sentence(python, fakes):
    broken = "raise ImportError('libcudart.so.12: cannot open\\nshared object file')"
    (fakes / "kvcached/integration/vllm/autopatch.py").write_text(broken)
    done = python("import sys\n" + KVCACHED_STARTUP + KVPATCH + "import vllm")
    assert done.code == 1
    assert done.err == (
        "kvpatch refuses to start vLLM: kvcached cannot be imported, because it failed with "
        "ImportError: libcudart.so.12: cannot open shared object file; reinstall kvcached for "
        "this torch, or set KVPATCH=0. [KVP110]\n"
    )

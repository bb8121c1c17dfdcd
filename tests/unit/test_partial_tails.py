"""The boundary of a prompt inside a Mamba block is named while the state is at it, not later."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from kvpatch.patches.kvcached_adapters.partial_tails import unless_it_has_passed


@pytest.mark.parametrize(
    ("status", "computed", "named"),
    [
        (RequestStatus.RUNNING, 47, True),
        (RequestStatus.RUNNING, 48, False),  # vLLM's count is of what was computed before
        (RequestStatus.RUNNING, 60, False),
        (RequestStatus.WAITING_FOR_REMOTE_KVS, 48, True),  # a load has ended: the state is there
        (RequestStatus.PREEMPTED, 60, True),
    ],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_a_boundary_that_was_passed_is_not_named(status, computed, named, by_name):
    request = SimpleNamespace(status=status, num_computed_tokens=computed)
    called = []

    def original(*args, **kwargs):
        called.append((args, kwargs))
        return "named"

    args, kwargs = ((request,), {"num_tokens": 48}) if by_name else ((request, 48, None), {})
    found = unless_it_has_passed(original, object(), args, kwargs)
    assert (found, called) == (("named", [(args, kwargs)]) if named else (None, []))

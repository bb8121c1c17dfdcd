"""What is asked of kvcached's bookkeeping when an allocation fails, and when it does not."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvpatch.patches.elastic_memory import allocation

MODULE = "kvcached.integration.vllm.allocation_attempt"
REQUEST = SimpleNamespace(request_id="one")


@pytest.fixture
def manager(monkeypatch):
    """A ``KVCacheManager`` with the calls that its attempts have seen."""
    made = SimpleNamespace(coordinator=object(), seen=[])

    class AllocationAttempt:
        def __init__(self, coordinator):
            assert coordinator is made.coordinator
            made.seen.append("new")

        def begin(self, request_id):
            made.seen.append(f"begin {request_id}")

        def rollback(self):
            made.seen.append("rollback")

        def end(self):
            made.seen.append("end")

    module = ModuleType(MODULE)
    module.AllocationAttempt = AllocationAttempt
    for depth in range(1, MODULE.count(".") + 1):
        name = ".".join(MODULE.split(".")[:depth])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    return made


def allocate(manager, result, *args, **kwargs):
    def wrapped(*args, **kwargs):
        manager.seen.append("allocate")
        if isinstance(result, Exception):
            raise result
        return result

    return allocation.around_allocate_slots(wrapped, manager, args, kwargs)


def test_what_was_given_stays(manager):
    blocks = object()
    assert allocate(manager, blocks, REQUEST, 32) is blocks
    assert allocate(manager, blocks, request=REQUEST) is blocks
    once = ["begin one", "allocate", "end"]
    assert manager.seen == ["new", *once, *once]


def test_what_no_room_was_found_for_is_taken_back(manager):
    assert allocate(manager, None, REQUEST, 32) is None
    assert manager.seen == ["new", "begin one", "allocate", "rollback", "end"]


def test_so_is_what_an_error_left(manager):
    with pytest.raises(ValueError, match="no pages"):
        allocate(manager, ValueError("no pages"), REQUEST, 32)
    assert manager.seen == ["new", "begin one", "allocate", "rollback", "end"]

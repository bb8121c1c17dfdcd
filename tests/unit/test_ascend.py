"""What starts on an NPU, and what the rows of the feature do without one."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvpatch.patches.ascend import device, order, presence
from kvpatch.refusal import Refusal


@pytest.mark.parametrize(
    ("ascend", "vllm", "built", "code"),
    [
        ("0.23.0", "0.23.0", True, "KVP603"),
        ("0.23.0", "0.23.0+empty", True, "KVP603"),
        ("0.23.0", "0.23.0", False, "KVP602"),
        ("0.23.0", "0.24.0", True, "KVP601"),
        ("0.23.0.post1", "0.23.0", True, "KVP601"),
        ("0.18.0", "0.18.0", True, "KVP601"),
        ("0.23.0", None, True, "KVP601"),
        (None, None, True, "KVP601"),
    ],
)
def test_what_is_refused_on_an_npu(
    ascend: str | None, vllm: str | None, built: bool, code: str
) -> None:
    refusal = presence.refused(ascend, vllm, built)
    assert refusal is not None
    assert refusal.code == code


def platform(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    module = ModuleType("vllm.platforms")
    module.current_platform = SimpleNamespace(device_type=kind)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.platforms", module)


def test_another_device_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    platform(monkeypatch, "cuda")
    monkeypatch.setattr(presence, "refused", lambda *_: pytest.fail("asked"))
    assert presence.wanted() is False


def test_an_npu_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    platform(monkeypatch, "npu")
    monkeypatch.setattr(presence, "_version", lambda name: "0.23.0")
    monkeypatch.setattr(presence, "_built", lambda: True)
    with pytest.raises(Refusal) as error:
        presence.wanted()
    assert str(error.value) == (
        "kvpatch refuses to start vLLM: the device is an NPU, because memory and copies are "
        "validated on an emulated one, and an engine is not; set KVPATCH=0. [KVP603]"
    )


# The rows


@pytest.mark.parametrize(
    ("given", "known"), [("npu:3", "cuda:3"), ("npu", "cuda"), ("cuda:1", "theirs cuda:1")]
)
def test_kvcached_knows_an_npu_by_the_name_of_cuda(given: str, known: str) -> None:
    assert device.npu_as_cuda(lambda name: f"theirs {name}", None, (given,), {}) == known
    assert device.npu_as_cuda(lambda device: f"theirs {device}", None, (), {"device": given}) == (
        known
    )


def test_kvcached_reads_the_npus_memory_as_cudas() -> None:
    npu = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 2,
        mem_get_info=lambda index: (1, {2: 64, None: 32}[index]),
    )
    torch = device.torch_with_npu(SimpleNamespace(npu=npu, int8="kept"))
    assert torch.cuda.is_available()
    assert torch.cuda.current_device() == 2
    assert torch.cuda.get_device_properties("cuda:2").total_memory == 64
    assert torch.cuda.get_device_properties("cuda").total_memory == 32
    assert torch.int8 == "kept"


def npu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the devices that ``torch.npu`` is told to wait for; () for the current one."""
    waited: list[Any] = []
    torch = ModuleType("torch")
    torch.npu = SimpleNamespace(  # type: ignore[attr-defined]
        synchronize=lambda *device: waited.append(device)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    return waited


def test_the_listener_selects_no_cuda_device() -> None:
    assert device.no_cuda_device(lambda name: pytest.fail(name), None, ("npu:1",), {}) is None


def test_the_whole_npu_is_waited_for_before_an_unmap(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = npu(monkeypatch)
    device.synchronize_npu(lambda: pytest.fail("kvcached's own"), None, (), {})
    assert waited == [()]


def test_the_barrier_waits_for_the_workers_npu_and_is_pickled_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited = npu(monkeypatch)
    barrier = device.replace_release_barrier(lambda worker: pytest.fail("kvcached's own"))
    assert pickle.loads(pickle.dumps(barrier)) is barrier
    assert barrier(SimpleNamespace(device="npu:1")) is True
    assert waited == [("npu:1",)]


class Backend:
    """What ``NPUDmaCopyBackend.launch_copy`` was called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded: list[Any] = []
        recorded = self.recorded

        class Event:
            def record(self, stream: str) -> None:
                recorded.append((self, stream))

        torch = ModuleType("torch")
        torch.npu = SimpleNamespace(  # type: ignore[attr-defined]
            Event=Event, current_stream=lambda: "computation"
        )
        monkeypatch.setitem(sys.modules, "torch", torch)

    def launch_copy(
        self,
        src_blocks: Any,
        dst_blocks: Any,
        is_store: bool,
        event_idx: int,
        events_list: Any,
        wait_event: Any = None,
    ) -> None:
        self.waited = wait_event


@pytest.mark.parametrize("by_name", [False, True])
def test_a_store_waits_for_the_computation(monkeypatch: pytest.MonkeyPatch, by_name: bool) -> None:
    backend = Backend(monkeypatch)
    given = {"src_blocks": [1], "dst_blocks": [2], "is_store": True, "event_idx": 0}
    given["events_list"] = []
    args, kwargs = ((), given) if by_name else (tuple(given.values()), {})
    order.around_launch(backend.launch_copy, backend, args, kwargs)
    ((event, stream),) = backend.recorded
    assert backend.waited is event
    assert stream == "computation"


@pytest.mark.parametrize("args", [([1], [2], True, 0, [], None), ([1], [2], True, 0, [])])
def test_an_event_that_is_none_is_none(monkeypatch: pytest.MonkeyPatch, args: Any) -> None:
    backend = Backend(monkeypatch)
    order.around_launch(backend.launch_copy, backend, args, {})
    assert len(backend.recorded) == 1
    assert backend.waited is not None


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (([1], [2], False, 0, []), {}),
        (([1], [2], True, 0, [], "vLLM's"), {}),
        (([1], [2], True, 0, []), {"wait_event": "vLLM's"}),
    ],
    ids=["a load", "vLLM's own event", "vLLM's own event by name"],
)
def test_what_needs_no_event_gets_none(
    monkeypatch: pytest.MonkeyPatch, args: Any, kwargs: Any
) -> None:
    backend = Backend(monkeypatch)
    order.around_launch(backend.launch_copy, backend, args, kwargs)
    assert backend.recorded == []
    assert backend.waited == ("vLLM's" if args[2] else None)

"""What vLLM's own copying workers call of CUDA, on the host device; no engine."""

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.simple_kv_offload import cuda_mem_ops
from vllm.v1.simple_kv_offload import worker as simple

from harness.engines import kill_points
from kvpatch.environ import HOST_DEVICE, HOST_DEVICE_DIR
from kvpatch.hostdevice import copies, ledger, offloading
from kvpatch.hostdevice.copies import CopyEvent, CopyStream, DeviceTensor, HostRegistration
from kvpatch.patches.elastic_memory.regions import Regions
from kvpatch.patches.offloading.registration import canonical

ROWS, SIZE = 8, 4096


@pytest.fixture(autouse=True)
def device(tmp_path, monkeypatch):
    monkeypatch.setenv(HOST_DEVICE.name, "64MiB")
    monkeypatch.setenv(HOST_DEVICE_DIR.name, str(tmp_path))
    offloading.prepare()


def rows() -> torch.Tensor:
    """A region whose row n has n in every byte."""
    numbers = torch.arange(ROWS, dtype=torch.int8)
    return numbers.repeat_interleave(SIZE).view(ROWS, SIZE).clone()


def addresses(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


def copy(source: torch.Tensor, target: torch.Tensor, on: Any) -> CopyEvent:
    """Queue a copy as vLLM does."""
    event = CopyEvent(enable_timing=True)
    with copies.stream(on):
        copies.swap_blocks_batch(addresses(source), addresses(target), torch.tensor([SIZE]))
        event.record(on)
    return event


def test_vllms_worker_copies_there_and_back_and_names_the_bytes_it_moved():
    region = rows()
    worker = CPUOffloadingWorker(canonical(Regions([region], [[0]])), 1, ROWS)
    blocks = GPULoadStoreSpec([1, 5], group_sizes=[2], block_indices=[0])
    with ledger.hold_copies():
        assert worker.submit_store(1, blocks, CPULoadStoreSpec([3, 0]))
        assert worker.get_finished() == []
    worker.wait({1})
    (stored,) = worker.get_finished()
    assert (stored.job_id, stored.success, stored.transfer_size) == (1, True, 2 * SIZE)
    assert stored.transfer_time is not None and stored.transfer_time >= 0
    other = GPULoadStoreSpec([7], group_sizes=[1], block_indices=[0])
    worker.submit_load(2, CPULoadStoreSpec([0]), other)
    worker.wait({2})
    assert region[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 5]
    worker.shutdown()


def test_the_shared_region_is_registered_and_deregistered_and_leaves_no_file(monkeypatch):
    monkeypatch.setattr(HostRegistration, "ranges", {})
    shared = SharedOffloadRegion("kvpatch-test-copies", ROWS, 0, SIZE, SIZE, lambda: None)
    worker = CPUOffloadingWorker(canonical(Regions([rows()], [[0]])), 1, ROWS, shared)
    assert list(HostRegistration.ranges.values()) == [ROWS * SIZE]
    assert not Path(shared.mmap_path).exists()
    worker.shutdown()
    assert HostRegistration.ranges == {}


@pytest.mark.parametrize(("name", "passed"), [("store", [1]), ("load", [2])])
def test_a_process_is_stopped_in_a_copy_of_one_way(name, passed, tmp_path, monkeypatch):
    """Where `harness.kills` kills; by the name of another thread it never stopped."""
    monkeypatch.setattr(HostRegistration, "ranges", {})
    monkeypatch.setattr(copies, "ctypes", copies.ctypes)  # to be put back
    region, now, seen = rows(), [0], []
    monkeypatch.setattr(kill_points.Point, "stop", lambda point: seen.append(now[0]))
    kill_points.install(name, 1, tmp_path / "reached")
    (tmp_path / "armed").touch()
    shared = SharedOffloadRegion("kvpatch-test-kills", ROWS, 0, SIZE, SIZE, lambda: None)
    worker = CPUOffloadingWorker(canonical(Regions([region], [[0]])), 1, ROWS, shared)
    for now[0] in (1, 2):
        block = GPULoadStoreSpec([now[0]], group_sizes=[1], block_indices=[0])
        if now[0] == 1:
            worker.submit_store(1, block, CPULoadStoreSpec([3]))
        else:
            worker.submit_load(2, CPULoadStoreSpec([3]), block)
        worker.wait({now[0]})
    worker.shutdown()
    assert seen == passed
    assert region[:, 0].tolist()[:3] == [0, 1, 1]


def test_a_range_is_registered_once_and_deregistered_once(monkeypatch):
    monkeypatch.setattr(HostRegistration, "ranges", {})
    runtime = HostRegistration()
    assert runtime.cudaHostRegister(0, 10) == runtime.cudaHostRegister(4096, 0) == 1
    assert runtime.cudaHostRegister(4096, 8192, 0).value == 0
    assert runtime.cudaHostRegister(8192, 4096) == copies.ALREADY_REGISTERED
    assert runtime.cudaHostUnregister(8192) == copies.NOT_REGISTERED
    assert runtime.cudaHostUnregister(4096) == 0


def test_a_stream_waits_for_another_and_for_an_event():
    first, second = CopyStream(), CopyStream()
    source, between, target = torch.ones(SIZE, dtype=torch.int8), rows()[0], rows()[0]
    with ledger.hold_copies():
        copied = copy(source, between, first)
        second.wait_event(copied)
        last = copy(between, target, second)
        assert not last.query()
    last.synchronize()
    assert bool((target == 1).all())
    third = CopyStream()
    third.wait_stream(second)
    copy(target, rows()[1], third).synchronize()
    assert copied.elapsed_time(last) >= 0


def test_an_error_stays_with_its_stream(monkeypatch):
    on = CopyStream()
    before = copy(rows()[0], rows()[1], on)
    before.synchronize()

    def fail(*arguments: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(copies.ctypes, "memmove", fail)
    failed = copy(rows()[0], rows()[1], on)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        failed.synchronize()
    monkeypatch.undo()
    later = CopyEvent()
    later.record(on)
    for wait in (later.synchronize, later.query, on.synchronize):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            wait()
    assert before.query()


def test_an_event_that_nobody_recorded_is_complete_and_has_no_time():
    event = CopyEvent()
    assert event.query()
    event.synchronize()
    with pytest.raises(RuntimeError, match="has no time"):
        event.elapsed_time(CopyEvent())


def test_whole_blocks_of_dense_tensors_are_swapped_in_the_current_stream():
    source, target, on = rows(), torch.zeros((ROWS, SIZE), dtype=torch.int8), CopyStream()
    mapping = torch.tensor([[3, 0], [6, 2]])
    with copies.stream(on):
        copies.swap_blocks(source, target, SIZE, mapping)
    on.synchronize()
    assert target[:, 0].tolist() == [3, 0, 6, 0, 0, 0, 0, 0]
    copies.swap_blocks(source, target, SIZE, torch.tensor([[1, 1]]))  # the computation's
    assert target[1, 0] == 1


def test_views_of_a_tensor_of_the_device_are_of_the_device():
    on_device = rows().as_subclass(DeviceTensor)
    for view in (on_device, on_device.view(torch.int8).view(-1, SIZE), on_device[2]):
        assert view.is_cuda
    assert on_device.data_ptr() == on_device.view(-1).data_ptr()
    assert not rows().is_cuda


def test_the_thread_of_a_stream_ends_with_it():
    before = set(threading.enumerate())
    on = CopyStream()
    copy(rows()[0], rows()[1], on).synchronize()
    (thread,) = set(threading.enumerate()) - before
    del on
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("gone", [False, True])
def test_a_process_may_end_with_copies_in_flight(gone):
    """The interpreter ended their thread inside of libtorch, and so the process with SIGABRT."""
    code = """
import torch
from kvpatch.hostdevice.streams import Stream
there, here = torch.zeros(1 << 22), torch.ones(1 << 22)
stream = Stream("copies")
begun = stream.submit(lambda: there.copy_(here))
for _ in range(2000):
    stream.submit(lambda: there.copy_(here))
begun.synchronize()
"""
    ended = subprocess.run(
        [sys.executable, "-c", code + ("del stream\n" if gone else "")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_vllms_simple_backend_copies_there_and_back_behind_what_it_waits_for():
    device, tier = {"layer": rows()}, {"layer": torch.zeros((ROWS, SIZE), dtype=torch.int8)}
    load, store = (simple.torch.cuda.Stream(priority=0) for _ in range(2))
    backend = simple.DmaCopyBackend()
    backend.init(device, tier, torch.device("cpu"), load, store)
    events: list[tuple[int, Any]] = []
    ready = simple.torch.Event()
    with ledger.hold_copies():
        ready.record(load)  # reached when the copies are let go
        backend.launch_copy([1, 5], [3, 0], True, 7, events, ready)
        backend.shutdown()  # its thread has launched it
        ((index, stored),) = events
        assert (index, stored.query()) == (7, False)
    stored.synchronize()
    assert torch.equal(tier["layer"][[3, 0]], device["layer"][[1, 5]])
    assert not tier["layer"][[1, 2, 4, 5, 6, 7]].any()
    again = simple.DmaCopyBackend()
    again.init(device, tier, torch.device("cpu"), load, store)
    again.launch_copy([3], [6], False, 8, events)
    again.shutdown()
    events[-1][1].synchronize()
    assert torch.equal(device["layer"][6], rows()[1])


def test_a_batch_on_a_stream_that_is_gone_or_of_an_unknown_order_is_an_error():
    on = CopyStream()
    params = cuda_mem_ops.build_params({"layer": rows()}, {"layer": rows()}, on)
    cuda_mem_ops.copy_blocks([0], [1], params)
    on.synchronize()
    params.attrs.srcAccessOrder = 9
    with pytest.raises(RuntimeError, match="batch memcpy failed: err=1"):
        cuda_mem_ops.copy_blocks([0], [1], params)
    lost = params._replace(stream_handle=1 << 40)
    with pytest.raises(RuntimeError, match="batch memcpy failed: err=1"):
        cuda_mem_ops.copy_blocks([0], [1], lost)


def test_the_simple_connectors_tier_is_registered_as_strictly():
    tier = torch.zeros((ROWS, SIZE), dtype=torch.int8)
    cuda_mem_ops.pin_tensor(tier)
    with pytest.raises(RuntimeError, match="cudaHostRegister failed: 712"):
        cuda_mem_ops.pin_tensor(tier)
    HostRegistration().cudaHostUnregister(tier.data_ptr())

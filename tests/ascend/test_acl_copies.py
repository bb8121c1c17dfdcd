"""What ACL's documents say of copies and streams, the emulator does, or refuses."""

import ctypes
import threading

import acl_runtime as runtime
import pytest
from acl_runtime import (
    NOT_SUPPORTED,
    PAGE,
    PARAMETER,
    STREAM_FAILED,
    TO_DEVICE,
    TO_HOST,
    refused,
)

from kvpatch.hostdevice import ledger


@pytest.fixture
def page(device):
    """A page that is mapped, with its own number of bytes in it."""
    address = device.reserve()
    device.map(address, device.physical())
    device.write(address, b"0123456789")
    return address


def pageable(size):
    buffer = ctypes.create_string_buffer(size)
    return buffer, ctypes.addressof(buffer)


def test_a_batch_stores_and_loads(device, page):
    host, stream = device.pinned(PAGE), device.stream()
    before = device.library.kvpatch_acl_batches()
    device.batch([(host, page + 2, 3), (host + 8, page + 7, 2)], stream)
    device.synchronize(stream)
    assert device.read(host, 3) + device.read(host + 8, 2) == b"23478"
    device.batch([(page + 100, host, 3)], stream, (TO_DEVICE,))
    device.synchronize(stream)
    assert device.read(page + 100, 3) == b"234"
    assert device.library.kvpatch_acl_batches() == before + 2


def test_a_batch_has_one_direction(device, page):
    host, stream = device.pinned(PAGE), device.stream()
    with refused(PARAMETER, "a batch has one direction") as error:
        device.batch([(host, page, 1), (page, host, 1)], stream, (TO_HOST, TO_DEVICE))
    assert error.value.args[-1] == 1


def test_a_batch_goes_between_host_and_device(device, page):
    with refused(PARAMETER, "between the host and the device only"):
        device.batch([(page + 10, page, 1)], device.stream(), (0,))


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_batch_names_the_copy_of_unmapped_memory(device, page, side):
    host, stream = device.pinned(PAGE), device.stream()
    before = device.read(host, 4)
    last = page + PAGE - 4  # the four bytes behind it are another page, which is not mapped
    copies = [(host, page, 4), (host, last, 8)]
    if side == "destination":
        copies = [(of, to, size) for to, of, size in copies]
    with refused(PARAMETER, f"the {side} is not mapped on the device") as error:
        device.batch(copies, stream, (TO_HOST if side == "source" else TO_DEVICE,))
    assert error.value.args[-1] == 1
    device.synchronize(stream)
    assert device.read(host, 4) == before  # nothing of a refused batch was done


def test_a_batch_without_a_direction_is_refused(device, page):
    with refused(PARAMETER, "without a direction"):
        device.batch([(device.pinned(1), page, 1)], device.stream(), ())


def test_device_memory_is_no_host_memory(device, page):
    with refused(PARAMETER, "the destination is not on the host"):
        device.copy(page + 100, page, 1, TO_HOST)
    with refused(PARAMETER, "the source is not on the host"):
        device.copy(page, page + 100, 1, TO_DEVICE)


@pytest.mark.parametrize("batch", [False, True])
def test_a_copy_to_pinned_memory_is_asynchronous(device, page, batch):
    host, stream, event = device.pinned(PAGE), device.stream(), device.event()
    with device.held(stream):
        if batch:
            device.batch([(host, page, 10)], stream)
        else:
            device.copy_later(host, page, 10, TO_HOST, stream)
        device.record(event, stream)
        assert not device.reached(event)
        device.write(page, b"later")  # the source is read when the copy runs
    device.synchronize(stream)
    assert device.reached(event)
    assert device.read(host, 10) == b"later56789"


@pytest.mark.parametrize("batch", [False, True])
def test_a_copy_to_other_memory_is_synchronous(device, page, batch):
    """And so waits for what the stream has before it: in a thread, while the stream is held."""
    (kept, host), stream = pageable(16), device.stream()
    returned = threading.Event()

    def copy():
        device.do("aclrtSetDevice", 0)
        if batch:
            device.batch([(host, page, 10)], stream)
        else:
            device.copy_later(host, page, 10, TO_HOST, stream)
        assert device.read(host, 10) == b"0123456789"
        returned.set()

    with device.held(stream):
        thread = threading.Thread(target=copy)
        thread.start()
        assert not returned.is_set()
    thread.join()
    assert returned.is_set()
    assert kept


def test_a_test_holds_batches_in_any_process(device, page):
    host, stream, event = device.pinned(PAGE), device.stream(), device.event()
    with ledger.hold_copies():
        device.batch([(host, page, 10)], stream)
        device.record(event, stream)
        assert not device.reached(event)
    device.synchronize(stream)
    assert device.read(host, 10) == b"0123456789"


def test_a_page_unmapped_under_a_copy_fails_its_stream_and_events(device, page):
    host, stream, event = device.pinned(PAGE), device.stream(), device.event()
    with device.held(stream):
        device.batch([(host, page, 10)], stream)
        device.record(event, stream)
        device.unmap(page)
    with refused(STREAM_FAILED, "the source is not mapped on the device"):
        device.synchronize(stream)
    with refused(STREAM_FAILED, "the source is not mapped on the device"):
        device.reached(event)


def test_another_page_under_a_copy_is_copied_without_an_error(device, page):
    """What kvcached does: a scratch page takes the place of the one that is unmapped."""
    host, stream = device.pinned(PAGE), device.stream()
    with device.held(stream):
        device.batch([(host, page, 10)], stream)
        device.unmap(page)
        device.map(page, device.physical())
    device.synchronize(stream)
    assert device.read(host, 10) == bytes(10)


@pytest.mark.parametrize("waits", [True, False])
def test_a_store_reads_what_is_computed_if_its_stream_waits_for_the_event(device, page, waits):
    compute, copies, event = device.stream(), device.stream(), device.event()
    host, new = device.pinned(PAGE), device.pinned(PAGE)
    device.write(new, b"computed")
    with device.held(compute):
        device.copy_later(page, new, 8, TO_DEVICE, compute)
        device.record(event, compute)
        if waits:
            device.do("aclrtStreamWaitEvent", runtime.address_t(copies), runtime.address_t(event))
        device.batch([(host, page, 8)], copies)
        if not waits:
            device.synchronize(copies)
            assert device.read(host, 8) == b"01234567"
    device.synchronize(copies)
    assert device.read(host, 8) == (b"computed" if waits else b"01234567")


def test_the_device_is_waited_for_as_a_whole(device, page):
    host, streams = device.pinned(PAGE), [device.stream(), device.stream()]
    for number, stream in enumerate(streams):
        device.batch([(host + number, page + number, 1)], stream)
    device.do("aclrtSynchronizeDevice")
    assert device.read(host, 2) == b"01"


@pytest.mark.parametrize(
    "call",
    [
        "aclopCompileAndExecute",
        "aclopCompileAndExecuteV2",
        "rtKernelLaunch",
        "aclrtLaunchKernelWithHostArgs",
        "aclrtBinaryGetFunction",
        "aclmdlInitDump",
        "aclrtMemSetAccess",
    ],
)
def test_what_the_emulator_cannot_do_is_an_error_with_its_name(device, call):
    with refused(NOT_SUPPORTED, f"{call}: the "):
        device.do(call)


def test_an_operator_is_not_even_described(device):
    describe = device.library.aclCreateTensorDesc
    describe.restype = runtime.address_t
    assert describe() is None


def test_no_kernel_of_ascend_has_a_name(device):
    """torch_npu looks up aclnn calls when it needs them."""
    assert not hasattr(device.library, "aclnnAdd")
    assert not hasattr(device.library, "aclnnAddGetWorkspaceSize")
    assert not hasattr(device.library, "kvpatch_host_device_abi")


@pytest.mark.parametrize("call", ["aclrtSynchronizeStream", "aclrtDestroyStream"])
def test_what_is_no_stream_is_refused(device, call):
    with refused(PARAMETER, f"{call}: this is no stream"):
        device.do(call, runtime.address_t(4096))


def test_what_is_no_event_is_refused(device):
    with refused(PARAMETER, "this is no event"):
        device.do("aclrtSynchronizeEvent", runtime.address_t(4096))

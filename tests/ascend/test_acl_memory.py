"""What ACL's documents forbid of memory, the emulator refuses."""

import subprocess
import sys
import threading
from pathlib import Path

import acl_runtime as runtime
import pytest
from acl_runtime import (
    BUSY,
    NO_CONTEXT,
    OUT_OF_MEMORY,
    PAGE,
    PARAMETER,
    Properties,
    Refused,
    refused,
)

TIB, GIB = 1 << 40, 1 << 30


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"alignment": PAGE}, "the alignment can only be 0"),
        ({"wish": 2 * TIB}, "no address of the device can be wished there"),
        ({"wish": 24 * TIB - PAGE}, "no address of the device can be wished there"),
        ({"size": 128 * GIB + PAGE}, "more than 128 GiB in one reservation"),
        ({"size": 0}, "a size of 0"),
        ({"flags": 1}, "huge pages only"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)
def test_a_reservation_is_refused(device, arguments, why):
    with refused(PARAMETER, why):
        device.reserve(**arguments)


def test_what_is_allowed_of_a_reservation(device):
    for arguments in ({"size": 128 * GIB}, {"wish": 16 * TIB}, {}):
        address = device.reserve(**arguments)
        assert address % PAGE == 0
        device.release(address)


def test_reserved_addresses_are_no_memory(device):
    free = device.free()
    address = device.reserve()
    assert device.free() == free
    host = device.pinned(PAGE)
    with refused(PARAMETER, "the source is not mapped on the device"):
        device.copy(host, address, 1, runtime.TO_HOST)


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE + 1])
def test_physical_memory_is_whole_pages(device, size):
    with refused(PARAMETER, "not in whole pages of 2 MiB"):
        device.physical(size)


@pytest.mark.parametrize("wanted", [Properties(attribute=5), Properties(device=1)])
def test_physical_memory_is_huge_pages_of_the_device(device, wanted):
    with refused(PARAMETER, "huge pages of device 0"):
        device.physical(properties=wanted)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"offset": PAGE}, "offset and flags can only be 0"),
        ({"flags": 1}, "offset and flags can only be 0"),
        ({"size": PAGE}, "a handle is mapped as a whole"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)
def test_a_handle_is_mapped_as_a_whole(device, arguments, why):
    address, handle = device.reserve(), device.physical(2 * PAGE)
    with refused(PARAMETER, why):
        device.map(address, handle, **{"size": 2 * PAGE, **arguments})


def test_a_mapping_lies_in_one_reservation_and_on_nothing_else(device):
    address, handle = device.reserve(2 * PAGE), device.physical()
    with refused(PARAMETER, "not at a page of 2 MiB"):
        device.map(address + 4096, handle)
    with refused(PARAMETER, "not within one reservation"):
        device.map(address + 2 * PAGE, handle)
    device.map(address, handle)
    with refused(PARAMETER, "something is mapped there"):
        device.map(address, handle)


def test_a_freed_handle_is_none(device):
    address, handle = device.reserve(), device.physical()
    device.free_physical(handle)
    with refused(PARAMETER, "this is no handle, or was freed"):
        device.map(address, handle)
    with refused(PARAMETER, "this is no handle, or was freed"):
        device.free_physical(handle)


def test_only_the_head_of_a_mapping_unmaps_it(device):
    address, handle = device.reserve(), device.physical(2 * PAGE)
    device.map(address, handle, size=2 * PAGE)
    with refused(PARAMETER, "no mapping begins at"):
        device.unmap(address + PAGE)
    device.unmap(address)
    with refused(PARAMETER, "no mapping begins at"):
        device.unmap(address)


def test_addresses_with_a_mapping_are_not_released(device):
    address = device.reserve()
    device.map(address + 3 * PAGE, device.physical())
    with refused(BUSY, "memory is still mapped"):
        device.release(address)
    with refused(PARAMETER, "no reservation begins here"):
        device.release(address + PAGE)
    device.unmap(address + 3 * PAGE)
    device.release(address)


def test_free_memory_follows_the_handle_and_its_last_mapping(device):
    address, free = device.reserve(), device.free()
    handle = device.physical()
    assert device.free() == free - 2
    device.map(address, handle)
    device.map(address + PAGE, handle)  # kvcached's scratch page lies in every hole
    assert device.free() == free - 2
    device.write(address, b"seen twice")
    assert device.read(address + PAGE, 10) == b"seen twice"
    device.free_physical(handle)
    device.unmap(address)
    assert device.free() == free - 2
    device.unmap(address + PAGE)
    assert device.free() == free


def test_the_next_owner_of_a_page_reads_zeros(device):
    address = device.reserve()
    for _ in range(2):
        handle = device.physical()
        device.map(address, handle)
        assert device.read(address, 8) == bytes(8)
        device.write(address, b"a secret")
        device.unmap(address)
        device.free_physical(handle)


def test_memory_ends(device):
    for _ in range(device.free() // 2):
        device.physical()
    with refused(OUT_OF_MEMORY, "the device has no more memory"):
        device.physical()
    with refused(OUT_OF_MEMORY, "the device has no more memory"):
        device.malloc(1)


def test_an_allocation_is_charged_and_freed_once(device):
    free = device.free()
    address = device.malloc(3 << 20)
    assert device.free() == free - 4
    with refused(PARAMETER, "was not allocated"):
        device.do("aclrtFree", runtime.address_t(address + PAGE))
    device.do("aclrtFree", runtime.address_t(address))
    assert device.free() == free


ANOTHER = """
import sys
from pathlib import Path
from acl_runtime import ACL
acl = ACL(Path(sys.argv[1]))
acl.physical()
print(acl.free(), flush=True)
sys.stdin.read()
"""


def test_all_processes_share_one_device(device):
    free = device.free()
    command = [sys.executable, "-c", ANOTHER, device.library._name]
    with subprocess.Popen(
        command,
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert int(other.stdout.readline()) == free - 2
        assert device.free() == free - 2
        other.stdin.close()
        other.wait()  # it ended without freeing
    assert device.free() == free


def test_a_thread_without_a_device_has_no_context(device):
    outcomes = []

    def without():
        calls = (device.physical, device.reserve, device.free, device.stream, device.event)
        for call in (*calls, lambda: device.malloc(1)):
            with pytest.raises(Refused) as error:
                call()
            outcomes.append(error.value.status)

    thread = threading.Thread(target=without)
    thread.start()
    thread.join()
    assert outcomes == [NO_CONTEXT] * 6


def test_the_runtime_starts_once(device):
    with refused(100002, "the runtime has been started"):
        device.do("aclInit", None)


def test_there_is_one_device(device):
    with refused(107001, "there is one device, 0"):
        device.do("aclrtSetDevice", 1)

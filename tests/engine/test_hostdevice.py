"""The host device by itself: kvcached's real extension, no engine."""

import subprocess
import sys
import textwrap
import threading

import pytest

from harness.engines.runs import Device, Run
from kvpatch.environ import HOST_DEVICE, HOST_DEVICE_DIR
from kvpatch.hostdevice import ledger
from kvpatch.hostdevice.streams import Event, Stream

MIB = 1 << 20


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A device of 64 MiB, seen by this process too."""
    device = Device(tmp_path, size="64MiB")
    monkeypatch.setenv(HOST_DEVICE.name, device.size)
    monkeypatch.setenv(HOST_DEVICE_DIR.name, str(tmp_path))
    return device


PRELUDE = """
    import ctypes, os, sys, torch
    import kvcached._C as extension
    from kvcached import vmm_ops as ops
    from kvpatch.hostdevice import ledger
    MIB = 1 << 20

    def pools(contiguous, count=2, per_pool=16):
        ops.init_kvcached("cuda:0", 2 * MIB, contiguous)
        return ops.create_kv_tensors(
            per_pool * MIB, 1, "cuda:0", count, num_kv_buffers=1, group_id=0, unified_pool=True
        )
"""


def python(own: Device, code: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(code)],
        env=own.environ(Run(kvpatch=False)),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("contiguous", [True, False])
def test_unmap_gives_the_pages_back_and_hides_the_old_bytes(own, contiguous):
    python(
        own,
        f"""
        contiguous = {contiguous}
        """
        """
        tensors = pools(contiguous)
        idle = ledger.usage()[os.getpid()]
        page = 2 * MIB * (2 if contiguous else 1)
        ops.map_to_kv_tensors([0, page])
        assert ledger.usage()[os.getpid()] == idle + 8 * MIB
        for tensor in tensors:
            tensor[: 2 * MIB] = 7
        ops.unmap_from_kv_tensors([0])
        assert ledger.usage()[os.getpid()] == idle + 4 * MIB
        assert all(tensor[5].item() != 7 for tensor in tensors)
        # A page mapped again is not the old one either.
        ops.map_to_kv_tensors([0])
        assert all(tensor[5].item() != 7 for tensor in tensors)
        """,
    )


def test_every_unmapped_address_shows_one_shared_page(own):
    """As on a GPU, where kvcached maps its scratch page: a stray write is seen elsewhere."""
    python(
        own,
        """
        tensor, _ = pools(False)
        tensor[4 * MIB] = 9
        assert tensor[6 * MIB].item() == 9
        """,
    )


def test_a_neighbours_pages_are_not_free(own):
    python(
        own,
        """
        import subprocess
        pools(False)
        ops.map_to_kv_tensors([0, 2 * MIB])
        neighbour = (
            "import os; from kvpatch.hostdevice import ledger; free, total = ledger.memory();"
            "print(total - free, os.getppid() in ledger.usage())"
        )
        said = subprocess.check_output([sys.executable, "-c", neighbour], text=True).split()
        assert said == [str(ledger.usage()[os.getpid()]), "True"], said
        """,
    )
    # The process is gone, and what it had is free.
    assert ledger.usage() == {}
    assert ledger.memory() == (64 * MIB, 64 * MIB)


def test_a_full_device_refuses_a_page_and_stays_usable(own):
    python(
        own,
        """
        pools(False, count=2, per_pool=64)
        try:
            ops.map_to_kv_tensors([page * 2 * MIB for page in range(17)])
        except RuntimeError as error:
            assert "out of memory" in str(error), error
        else:
            raise AssertionError("17 pages of two pools fit on 64 MiB")
        ops.map_to_kv_tensors([page * 2 * MIB for page in range(8)])
        """,
    )


def test_a_forked_child_leaves_its_parents_memory_alone(own):
    python(
        own,
        """
        tensor, _ = pools(False)
        ops.map_to_kv_tensors([0])
        tensor[0] = 7
        before = ledger.usage()[os.getpid()]
        if os.fork() == 0:
            ops.unmap_from_kv_tensors([0])
            os._exit(0)
        os.wait()
        assert tensor[0].item() == 7
        assert ledger.usage() == {os.getpid(): before}
        """,
    )


def test_copies_are_launched_before_they_run_and_run_in_order(own):
    stream = Stream("test")
    ran: list[int] = []
    with ledger.hold_copies():
        events = [stream.submit(lambda n=n: ran.append(n)) for n in range(3)]
        assert ran == []
        assert not any(event.query() for event in events)
    stream.synchronize()
    assert ran == [0, 1, 2]
    stream.close()


def test_a_copy_waits_for_the_events_it_comes_after(own):
    stream = Stream("test")
    computed, ran = Event(), threading.Event()
    done = stream.submit(ran.set, after=[computed])
    assert not ran.is_set()
    computed.record()
    done.synchronize()
    assert ran.is_set()
    stream.close()


def test_a_failed_copy_is_reported_and_the_next_one_runs(own):
    stream = Stream("test")

    def fail() -> None:
        raise IndexError("no such block")

    failed, after = stream.submit(fail), stream.submit(lambda: None)
    after.synchronize()
    assert isinstance(failed.error, IndexError)
    assert after.error is None
    stream.close()


def test_a_hold_reaches_other_processes_and_ends_with_its_owner(own):
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from kvpatch.hostdevice import ledger\n"
            "with ledger.hold_copies():\n  print('held', flush=True); input()",
        ],
        env=own.environ(Run(kvpatch=False)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    stream = Stream("test")
    done = stream.submit(lambda: None)
    assert not done.query()
    holder.kill()
    holder.wait()
    done.synchronize()
    stream.close()

"""What the probe asks a device. Each question runs in a process of its own: ``python -m ... NAME``.

Its answer is the last line that the process prints, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from kvpatch.ascend.probe.acl import ACL, PAGE, TO_DEVICE, TO_HOST, Refused

ADDRESSES = 32768  # of pages in the 64 GiB that kvcached reserves on a device of that size
PIECE = 4096
FREED_WITHIN = 5.0  # seconds
TIMED = 64  # pages
ROUNDS, SIDE, PRODUCTS = 8, 1024, 20  # of the computation before a copy
_POOL = 32 << 20  # bytes of a layer
MARK = "kvpatch_ascend_runtime"  # a function of kvcached's builds on ACL


class Answer(NamedTuple):
    """What a device answered."""

    right: bool | None  # whether kvpatch runs on a device that answers so; None if not asked
    words: str


def addresses(acl: ACL, count: int = ADDRESSES) -> Answer:
    """Map one page at as many addresses as kvcached's scratch page has."""
    start, handle = acl.reserve(count * PAGE), acl.physical()
    begun = time.perf_counter()
    for at in range(count):
        acl.map(start + at * PAGE, handle)
    mapped = time.perf_counter()
    text = os.urandom(PIECE)
    acl.write(start, text)
    same = acl.read(start + (count - 1) * PAGE, PIECE) == text
    asked = time.perf_counter()
    for at in range(count):
        acl.unmap(start + at * PAGE)
    done = time.perf_counter()
    acl.free_physical(handle)
    acl.release(start)
    each = [round(seconds / count * 1e6) for seconds in (mapped - begun, done - asked)]
    words = f"{count} addresses, {each[0]} us to map each and {each[1]} us to unmap"
    return Answer(same, words if same else f"{words}; they have different bytes")


def batches(acl: ACL) -> Answer:
    """Copy pieces of mapped pages and across two of them, in batches, there and back."""
    start, stream = acl.reserve(2 * PAGE), acl.stream()
    handles = [acl.physical(), acl.physical()]
    for number, handle in enumerate(handles):
        acl.map(start + number * PAGE, handle)
    places = [start, start + PAGE - PIECE // 2, start + 2 * PAGE - PIECE]
    texts = [os.urandom(PIECE) for _ in places]
    host = acl.pinned(len(places) * PIECE)
    there = [(host + number * PIECE, place, PIECE) for number, place in enumerate(places)]
    for place, text in zip(places, texts, strict=True):
        acl.write(place, text)
    acl.batch(there, TO_HOST, stream)
    acl.synchronize(stream)
    stored = [acl.get(to, PIECE) == text for (to, _, _), text in zip(there, texts, strict=True)]
    for place in places:
        acl.write(place, bytes(PIECE))
    for (to, _, _), text in zip(there, texts, strict=True):
        acl.put(to, text)
    acl.batch([(of, to, size) for to, of, size in there], TO_DEVICE, stream)
    acl.synchronize(stream)
    loaded = [acl.read(place, PIECE) == text for place, text in zip(places, texts, strict=True)]
    for number, handle in enumerate(handles):
        acl.unmap(start + number * PAGE)
        acl.free_physical(handle)
    acl.release(start)
    wrong = [*stored, *loaded].count(False)
    return Answer(not wrong, f"{wrong} of {len(stored) + len(loaded)} pieces wrong")


def freed(acl: ACL, pages: int = 64) -> Answer:
    """See whether memory that is freed is free for others."""
    before, handle = acl.free(), acl.physical(pages * PAGE)
    taken = before - acl.free()
    acl.free_physical(handle)
    begun = time.monotonic()
    while (missing := before - acl.free()) > 0 and time.monotonic() - begun < FREED_WITHIN:
        time.sleep(0.01)
    seconds = time.monotonic() - begun
    words = f"of {pages * PAGE >> 20} MiB {taken >> 20} MiB were taken, "
    if missing > 0:
        return Answer(False, f"{words}and {missing >> 20} MiB not given back in {seconds:.0f} s")
    return Answer(taken > 0, f"{words}and given back after {seconds * 1e3:.0f} ms")


def times(acl: ACL) -> Answer:
    """Measure how long a page takes from its allocation to its end."""
    start = acl.reserve(TIMED * PAGE)
    begun = time.perf_counter()
    handles = []
    for at in range(TIMED):
        handles.append(acl.physical())
        acl.map(start + at * PAGE, handles[-1])
    mapped = time.perf_counter()
    for at, handle in enumerate(handles):
        acl.unmap(start + at * PAGE)
        acl.free_physical(handle)
    done = time.perf_counter()
    acl.release(start)
    each = [round(seconds / TIMED * 1e6) for seconds in (mapped - begun, done - mapped)]
    return Answer(
        True, f"a page takes {each[0]} us to make and map, {each[1]} us to unmap and free"
    )


def unmapped(acl: ACL, pages: int = 32) -> Answer:
    """See what copies do whose page is unmapped under them, which kvpatch never lets happen."""
    start, stream = acl.reserve(pages * PAGE), acl.stream()
    handle, last = acl.physical((pages - 1) * PAGE), acl.physical()
    acl.map(start, handle, (pages - 1) * PAGE)
    acl.map(start + (pages - 1) * PAGE, last)
    host = acl.pinned(pages * PAGE)
    text = os.urandom(PIECE)
    acl.write(start + pages * PAGE - PIECE, text)
    for at in range(pages):
        acl.copy_later(host + at * PAGE, start + at * PAGE, PAGE, TO_HOST, stream)
    said = []
    last_page = start + (pages - 1) * PAGE
    acts: dict[str, Callable[[], None]] = {
        "unmap": lambda: acl.unmap(last_page),
        "synchronize": lambda: acl.synchronize(stream),
    }
    for name, act in acts.items():
        begun = time.perf_counter()
        try:
            act()
            said.append(f"{name} returned after {(time.perf_counter() - begun) * 1e3:.1f} ms")
        except Refused as error:
            said.append(f"{name}: {error}")
    same = acl.get(host + pages * PAGE - PIECE, PIECE) == text
    said.append("the bytes were right" if same else "the bytes were lost")
    return Answer(True, ", ".join(said))


def order(device: int) -> Answer:
    """Copy what is still being computed, on another stream that waits for an event."""
    if find_spec("torch_npu") is None:
        return Answer(None, "torch_npu is not installed")
    import torch
    import torch_npu  # noqa: F401 - torch.npu

    torch.npu.set_device(device)
    copies, wrong = torch.npu.Stream(), 0
    ones = torch.ones(SIDE, SIDE, device=f"npu:{device}")
    for number in range(ROUNDS):
        made = ones
        for _ in range(PRODUCTS):
            made = (made @ ones) / SIDE  # ones again
        made = made + number
        host = torch.empty(SIDE, SIDE, pin_memory=True)
        computed = torch.npu.Event()
        computed.record(torch.npu.current_stream())
        with torch.npu.stream(copies):
            copies.wait_event(computed)
            host.copy_(made, non_blocking=True)
        copies.synchronize()
        wrong += not torch.allclose(host, torch.full_like(host, 1.0 + number), atol=1e-2)
    return Answer(not wrong, f"{wrong} of {ROUNDS} copies wrong")


def pools(device: int) -> Answer:
    """Make kvcached's pools, write to a page through a tensor, and unmap it."""
    import torch

    if find_spec("torch_npu") is not None:
        import torch_npu  # noqa: F401 - torch.npu

        torch.npu.set_device(device)
    import kvcached._C  # torch.ops.kvcached

    if not hasattr(ctypes.CDLL(kvcached._C.__file__), MARK):
        return Answer(
            False, "kvcached was not built for NPUs; run python -m kvpatch.ascend install"
        )
    calls, name = torch.ops.kvcached, f"cuda:{device}"
    calls.init_kvcached(name, 0, False)
    first, *_ = calls.create_kv_tensors(_POOL, 2, name, 2, 2, 0, False)
    calls.map_to_kv_tensors([PAGE], 0)
    at = PAGE // first.element_size()
    first[at : at + 8] = 7
    kept = first[at : at + 8].tolist() == [7] * 8
    calls.unmap_from_kv_tensors([PAGE], 0)
    first[at : at + 8] = 9  # on the scratch page
    shared = first[:8].tolist() == [9] * 8
    calls.map_to_kv_tensors([PAGE], 0)
    first[at : at + 8] = 5
    again = first[at : at + 8].tolist() == [5] * 8 and first[:8].tolist() == [9] * 8
    calls.unmap_from_kv_tensors([PAGE], 0)
    del first
    calls.shutdown_kvcached()
    seen = {"a mapped page keeps": kept, "holes share": shared, "mapped again it keeps": again}
    wrong = [what for what, right in seen.items() if not right]
    return Answer(not wrong, f"not so: {', '.join(wrong)}" if wrong else "written and read")


class Question(NamedTuple):
    """One question, asked of the ACL runtime or, with a device's number, of torch."""

    words: str
    of_acl: Callable[[ACL], Answer] | None = None
    of_torch: Callable[[int], Answer] | None = None


# The last one may leave the device's driver busy.
QUESTIONS = {
    "addresses": Question("one page at thousands of addresses", addresses),
    "batches": Question("batched copies of mapped pages, and across two", batches),
    "freed": Question("freed memory is free for others", freed),
    "times": Question("the time of a page", times),
    "pools": Question("kvcached's pools, computation on a page and a hole", None, pools),
    "order": Question("copies behind the computation", None, order),
    "unmapped": Question("a page unmapped under a copy", unmapped),
}


def ask(name: str, library: Path, device: int) -> Answer:
    """Ask one question in this process."""
    question = QUESTIONS[name]
    try:
        if question.of_acl is not None:
            return question.of_acl(ACL(library, device))
        assert question.of_torch is not None
        return question.of_torch(device)
    except Exception as error:
        return Answer(False, f"{type(error).__name__}: {error}")


def main() -> None:
    """Ask the question that the command line names."""
    name, library, device = sys.argv[1:]
    answer = ask(name, Path(library), int(device))
    print()
    print(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # what a device does at the end of a process was not asked


if __name__ == "__main__":
    main()

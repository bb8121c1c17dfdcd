"""Copies that fail in an engine on the host device, as those of a GPU may."""

from collections.abc import Iterator
from typing import Any

REFUSED = "batch memcpy failed: err=1 failIdx=0"  # by the driver, when it is launched
BROKEN = "CUDA error: unspecified launch failure"  # on the device, and for good


def install(connector: str, of: str, times: int = 1) -> None:
    """Let the first copies of a direction fail; before the engine is made.

    Args:
        connector: ``Offloading``, whose copies fail on the device, or ``Simple``, whose copies are
            refused when they are launched.
        of: ``stores`` or ``loads``.
        times: how many copies fail; on the device nothing works after the first one.
    """
    if connector == "Simple":
        _refuse(of == "stores", times)
    else:
        _break(of == "stores")


def _refuse(stores: bool, times: int) -> None:
    from vllm.v1.simple_kv_offload import copy_backend

    chosen: list[list[int]] = []
    launch, copy = copy_backend.DmaCopyBackend.launch_copy, copy_backend.copy_blocks

    def launch_copy(
        self: Any, src_blocks: Any, dst_blocks: Any, is_store: bool, *rest: Any, **more: Any
    ) -> None:
        if is_store is stores and len(chosen) < times:
            chosen.append(src_blocks)
        launch(self, src_blocks, dst_blocks, is_store, *rest, **more)

    def copy_blocks(src_blocks: Any, dst_blocks: Any, params: Any) -> None:
        if any(src_blocks is one for one in chosen):
            print(f"driver: a copy of {len(src_blocks)} blocks fails", flush=True)
            raise RuntimeError(REFUSED)
        copy(src_blocks, dst_blocks, params)

    copy_backend.DmaCopyBackend.launch_copy = launch_copy
    copy_backend.copy_blocks = copy_blocks


def _break(stores: bool) -> None:
    from kvpatch.hostdevice import copies

    def broken() -> Iterator[tuple[int, int, int]]:
        print("driver: a copy fails on the device", flush=True)
        raise RuntimeError(BROKEN)
        yield  # a generator, which the stream's thread runs

    def swap_blocks_batch(
        src_ptrs: Any, dst_ptrs: Any, sizes: Any, is_src_access_order_any: bool = False
    ) -> None:
        # The driver may read the sources of loads early.
        if is_src_access_order_any is stores:
            copies.swap_blocks_batch(src_ptrs, dst_ptrs, sizes)
        else:
            copies.current_stream().enqueue(broken())

    copies._Operations.swap_blocks_batch = staticmethod(swap_blocks_batch)

"""NIXL and addresses of which kvcached unmaps pages: why KVP391 refuses it.

UCX copies host memory by its address, and so it finds what is there now: after an unmap that is the
page which all unmapped addresses share, and the transfer is done. A registration for RDMA, or of a
GPU's memory, holds the page that was there.
"""

import os
import subprocess
import sys
import textwrap

import pytest

from harness.engines import bucket as buckets
from harness.engines.runs import Device, Run

CODE = """
    import ctypes, os, sys
    from kvcached import vmm_ops as ops
    from nixl._api import nixl_agent, nixl_agent_config

    PAGE, COUNT = 2 << 20, 8
    ops.init_kvcached("cuda:0", PAGE, False)
    (kv,) = ops.create_kv_tensors(
        COUNT * PAGE, 1, "cuda:0", 1, num_kv_buffers=1, group_id=0, unified_pool=True
    )
    ops.map_to_kv_tensors([0])
    base, into = kv.data_ptr(), ctypes.create_string_buffer(b"." * 4096)
    how = nixl_agent_config(backends=["UCX"])
    owner, peer = nixl_agent("owner", how), nixl_agent("peer", how)
    owner.register_memory(owner.get_reg_descs([(base, COUNT * PAGE, 0, "")], "DRAM"))
    place = ctypes.addressof(into)
    peer.register_memory(peer.get_reg_descs([(place, 4096, 0, "")], "DRAM"))
    peer.add_remote_agent(owner.get_agent_metadata())

    def read(page):
        local = peer.get_xfer_descs([(place, 4096, 0)], "DRAM")
        remote = peer.get_xfer_descs([(base + page * PAGE, 4096, 0)], "DRAM")
        moves = peer.initialize_xfer("READ", local, remote, "owner")
        now = peer.transfer(moves)
        while now == "PROC":
            now = peer.check_xfer_state(moves)
        return now, into.raw[:1]

    ctypes.memset(base, ord("A"), 4096)
    assert read(0) == ("DONE", b"A")
    ops.map_to_kv_tensors([PAGE])  # after the registration
    ctypes.memset(base + PAGE, ord("B"), 4096)
    assert read(1) == ("DONE", b"B")
    ops.unmap_from_kv_tensors([PAGE])
    assert read(1) == ("DONE", bytes(1))
    ops.map_to_kv_tensors([2 * PAGE])
    ctypes.memset(base + 3 * PAGE, ord("C"), 4096)  # to another unmapped page
    assert read(1) == ("DONE", b"C")
    print("read", flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("transport", ["tcp", "tcp,cma"])
def test_a_peer_that_reads_an_unmapped_page_gets_other_bytes_and_no_error(tmp_path, transport):
    environment = Device(tmp_path, size="64MiB").environ(Run(kvpatch=False))
    path = os.pathsep.join((str(buckets.installed("nixl")), environment["PYTHONPATH"]))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE)],
        env=environment | {"PYTHONPATH": path, "UCX_TLS": transport},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["read"]), done.stderr[-2000:]

"""An emulated CUDA device: the CUDA builds of vLLM, torch and kvcached on a processor alone.

``build.build(DEST, SITE_PACKAGES)`` builds for the environment whose packages those are:

    DEST/libcuda.so.1, DEST/libnvidia-ml.so.1     for LD_LIBRARY_PATH
    DEST/libcudart.so.13                          in the place of every other in the environment:
                                                  SITE_PACKAGES/nvidia/cu13/lib, copies by others
    DEST/libemu_operators.so                      torch's and vLLM's operators
    DEST/emu_device.py, DEST/emu_device.pth       for SITE_PACKAGES: they load the operators into
                                                  torch when it is imported, and correct Triton's
                                                  interpreter; without EMU_DEVICE they do nothing

A process uses it by its environment:

    EMU_DEVICE=4GiB        the memory of the device; all processes of a user share it
    EMU_DEVICE_DIR=PATH    its ledger, /dev/shm if not set
    EMU_LIBRARIES=DEST     where the operators are
    LD_LIBRARY_PATH=DEST
    TRITON_INTERPRET=1     Triton's kernels run in its interpreter
    VLLM_USE_FLASHINFER_SAMPLER=0
    EMU_DELAY=KIND         how late work is: none, random, copies last, compute last
    EMU_SEED=N             of random delays
    EMU_COMPLAINTS=FILE    each complaint is a line there at once: PID and what is wrong

and may ask libcuda.so.1 for the functions of ``work.h``: ``emu_count(4)`` complaints,
``emu_complaint(n)``, ``emu_delay(kind, seed)``. Order is that of the program: what only the
emulator waits for, and what torch's pinned allocator asks, orders nothing (``order.cpp``).
"""

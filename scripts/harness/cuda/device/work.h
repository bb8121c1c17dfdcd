// SPDX-License-Identifier: Apache-2.0
//
// What libcuda.so.1 of the emulated device has besides CUDA's functions: for operators, for the
// host's own accesses, and for who asks what it saw. CUDA's programs know none of it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define EMU extern "C" __attribute__((visibility("default")))
#else
#define EMU
#endif

struct emu_access {
  uintptr_t at;
  size_t size;
  bool write;
};

// Put a call on a stream, with the memory that it touches. With `lockless`, it may wait for a
// thread that maps memory.
EMU void emu_enqueue(void *stream, const char *what, const emu_access *, size_t count, void (*call)(void *),
                     void *argument, bool lockless);
// From inside of such a call: memory that only it knows, as the blocks of a block table.
EMU void emu_touch(const emu_access *, size_t count);
// From inside of such a call: it failed, as a kernel does.
EMU void emu_fail(const char *why);
// Wait for a stream, for the emulator's own sake: it orders nothing.
EMU void emu_wait(void *stream);
// The host reads or writes memory that copies use, or punches a hole into it.
EMU void emu_host_access(const char *what, const emu_access *, size_t count);
// How late work is: 0 none, 1 random, 2 copies last, 3 compute last. It holds from now on.
EMU void emu_delay(int kind, unsigned seed);
enum { EMU_MAPS, EMU_UNMAPS, EMU_BATCHES, EMU_COPIES, EMU_COMPLAINTS, EMU_WORK, EMU_KERNELS, EMU_COUNTS };
EMU uint64_t emu_count(int of);
EMU const char *emu_complaint(size_t index); // "" behind the last

// SPDX-License-Identifier: Apache-2.0
// Pages: the host device's, under names of their own, since kvpatch refuses to see the host device's.
#include <cstdlib>
#include <cstring>

static const char *of_this_device(const char *name) {
  return getenv(!strcmp(name, "KVPATCH_HOST_DEVICE") ? "EMU_DEVICE" : "EMU_DEVICE_DIR");
}
#define getenv of_this_device
#include "../../../../kvpatch/hostdevice/include/cuda.h" // not CUDA's
#undef getenv

namespace emu::physical {

static kvpatch_host::Device &device() { return kvpatch_host::Device::get(); }

int create(unsigned long long *handle, size_t size, int of) { return device().create(handle, size, of); }
int release(unsigned long long handle) { return device().release(handle); }

int reserve(uintptr_t *at, size_t size, size_t alignment, uintptr_t hint) {
  CUdeviceptr got = 0;
  int status = device().reserve(&got, size, alignment, hint);
  *at = got;
  return status;
}

int map(uintptr_t at, size_t size, unsigned long long handle) { return device().map(at, size, 0, handle); }
int unmap(uintptr_t at, size_t size) { return device().unmap(at, size); }
void memory(int of, size_t *free, size_t *total) { device().memory(of, free, total); }

} // namespace emu::physical

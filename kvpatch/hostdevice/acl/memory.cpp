// SPDX-License-Identifier: Apache-2.0
// Devices and memory: allocations, reservations, physical memory, mappings.
#include "emulator.hpp"

#include <acl/acl.h>

namespace acl {

thread_local int selected = -1;
// No std::string, whose destructor would run before the last call of a thread.
static thread_local char last_error[256];

aclError fail(aclError status, const std::string &why) {
  snprintf(last_error, sizeof last_error, "%s", why.c_str());
  return status;
}

std::shared_mutex &mapping_lock() {
  static auto *lock = new std::shared_mutex;
  return *lock;
}

namespace {

constexpr size_t LARGEST_RESERVATION = 128ull << 30;
// Where the documents let a caller wish for addresses.
constexpr uintptr_t FIRST_WISH = 16ull << 40, LAST_WISH = 24ull << 40;

struct Physical {
  CUmemGenericAllocationHandle handle;
  size_t size;
  int device;
  int maps = 0;
  bool freed = false;
};
struct Reservation {
  size_t size;
  int device = -1; // of the first handle mapped in it
};
struct Mapping {
  size_t size;
  Physical *of;
};

// Guarded by mapping_lock(). They outlive every static destructor: torch_npu frees after ours.
auto &reservations = *new std::map<uintptr_t, Reservation>;
auto &mappings = *new std::map<uintptr_t, Mapping>;
auto &allocations = *new std::map<uintptr_t, size_t>;
auto &host = *new std::map<uintptr_t, size_t>; // pinned
auto &alive = *new std::set<Physical *>;
bool started = false;

kvpatch_host::Device &memory() { return kvpatch_host::Device::get(); }

uintptr_t number(const void *address) { return reinterpret_cast<uintptr_t>(address); }

template <typename Ranges> typename Ranges::iterator holding(Ranges &ranges, uintptr_t at) {
  auto next = ranges.upper_bound(at);
  return next == ranges.begin() ? ranges.end() : std::prev(next);
}

size_t size_of(size_t size) { return size; }
size_t size_of(const Mapping &mapping) { return mapping.size; }
size_t size_of(const Reservation &reservation) { return reservation.size; }

// How many bytes from `at` on lie in one of the ranges.
template <typename Ranges> size_t inside(Ranges &ranges, uintptr_t at) {
  auto found = holding(ranges, at);
  if (found == ranges.end() || at >= found->first + size_of(found->second))
    return 0;
  return found->first + size_of(found->second) - at;
}

template <typename Ranges> bool touched(Ranges &ranges, uintptr_t at, size_t size) {
  auto next = ranges.lower_bound(at);
  return (next != ranges.end() && next->first < at + size) || inside(ranges, at);
}

// Whether device memory is mapped or allocated anywhere in these bytes.
bool touches(uintptr_t at, size_t size) {
  return touched(mappings, at, size) || touched(allocations, at, size);
}

std::string text(uintptr_t at) {
  char hex[32];
  snprintf(hex, sizeof hex, "0x%zx", at);
  return hex;
}

bool huge(const aclrtPhysicalMemProp *wanted) {
  return wanted && wanted->handleType == ACL_MEM_HANDLE_TYPE_NONE &&
         wanted->allocationType == ACL_MEM_ALLOCATION_TYPE_PINNED &&
         wanted->memAttr == ACL_HBM_MEM_HUGE &&
         wanted->location.type == ACL_MEM_LOCATION_TYPE_DEVICE && wanted->location.id == 0;
}

void drop_if_unused(Physical *one) {
  if (!one->freed || one->maps)
    return;
  memory().release(one->handle);
  alive.erase(one);
  delete one;
}

} // namespace

bool on_device(const void *address, size_t size) {
  for (uintptr_t at = number(address); size;) {
    size_t here = std::max(inside(mappings, at), inside(allocations, at));
    if (!here)
      return false;
    if (here >= size)
      return true;
    at += here;
    size -= here;
  }
  return true;
}

bool on_host(const void *address, size_t size) {
  return !touched(reservations, number(address), size) && !touches(number(address), size);
}

bool pinned(const void *address, size_t size) { return inside(host, number(address)) >= size; }

} // namespace acl

using namespace acl;

ACL aclError aclInit(const char *) {
  std::unique_lock<std::shared_mutex> lock(mapping_lock());
  if (started)
    return fail(REPEATED_INIT, "aclInit: the runtime has been started");
  started = true;
  return SUCCESS;
}
ACL aclError aclFinalize() {
  std::unique_lock<std::shared_mutex> lock(mapping_lock());
  started = false;
  return SUCCESS;
}
ACL const char *aclGetRecentErrMsg() { return last_error; }
ACL const char *aclrtGetSocName() { return "Ascend910B1"; }
ACL aclError aclrtGetDeviceCount(uint32_t *count) {
  *count = 1;
  return SUCCESS;
}
ACL aclError aclrtSetDevice(int32_t device) {
  if (device != 0)
    return fail(NO_DEVICE, "aclrtSetDevice: there is one device, 0");
  selected = device;
  return SUCCESS;
}
ACL aclError aclrtResetDevice(int32_t) {
  selected = -1;
  return SUCCESS;
}
ACL aclError aclrtGetDevice(int32_t *device) {
  WANT_CONTEXT("aclrtGetDevice");
  *device = selected;
  return SUCCESS;
}
static int context; // there is one
ACL aclError aclrtGetCurrentContext(void **current) {
  WANT_CONTEXT("aclrtGetCurrentContext");
  *current = &context;
  return SUCCESS;
}
ACL aclError aclrtSetCurrentContext(void *wanted) {
  if (wanted != &context)
    return fail(PARAMETER, "aclrtSetCurrentContext: this is no context");
  selected = 0;
  return SUCCESS;
}
ACL aclError aclrtCreateContext(void **made, int32_t device) {
  *made = &context;
  return aclrtSetDevice(device);
}
ACL aclError aclrtGetRunMode(int *mode) {
  *mode = 1; // the caller runs on the host
  return SUCCESS;
}
ACL aclError aclrtGetMemInfo(aclrtMemAttr kind, size_t *free_bytes, size_t *total_bytes) {
  WANT_CONTEXT("aclrtGetMemInfo");
  if (kind != ACL_HBM_MEM && kind != ACL_HBM_MEM_HUGE)
    return fail(PARAMETER, "aclrtGetMemInfo: the device has HBM in huge pages only");
  if (memory().memory(selected, free_bytes, total_bytes) != CUDA_SUCCESS)
    return fail(NOT_SUPPORTED, "aclrtGetMemInfo: the ledger of the host device cannot be opened");
  return SUCCESS;
}

// -- allocations

ACL aclError aclrtMalloc(void **made, size_t size, int) {
  WANT_CONTEXT("aclrtMalloc");
  if (size == 0)
    return fail(PARAMETER, "aclrtMalloc: a size of 0");
  size_t whole = (size + PAGE - 1) / PAGE * PAGE;
  std::unique_lock<std::shared_mutex> lock(mapping_lock());
  CUmemGenericAllocationHandle handle;
  CUdeviceptr address;
  if (memory().create(&handle, whole, selected) != CUDA_SUCCESS)
    return fail(OUT_OF_MEMORY, "aclrtMalloc: the device has no more memory");
  if (memory().reserve(&address, whole, PAGE, 0) != CUDA_SUCCESS ||
      memory().map(address, whole, 0, handle) != CUDA_SUCCESS) {
    memory().release(handle);
    return fail(OUT_OF_MEMORY, "aclrtMalloc: no more addresses");
  }
  memory().release(handle); // it lives as long as its mapping
  allocations[address] = whole;
  *made = reinterpret_cast<void *>(address);
  return SUCCESS;
}
ACL aclError aclrtMallocAlign32(void **made, size_t size, int policy) {
  return aclrtMalloc(made, size, policy);
}
ACL aclError aclrtFree(void *address) {
  WANT_CONTEXT("aclrtFree");
  {
    std::shared_lock<std::shared_mutex> lock(mapping_lock());
    if (!allocations.count(number(address)))
      return fail(PARAMETER, "aclrtFree: " + text(number(address)) + " was not allocated");
  }
  synchronize_all();
  std::unique_lock<std::shared_mutex> lock(mapping_lock());
  auto found = allocations.find(number(address));
  memory().unmap(found->first, found->second);
  munmap(address, found->second);
  allocations.erase(found);
  return SUCCESS;
}
ACL aclError aclrtMallocHost(void **made, size_t size) {
  WANT_CONTEXT("aclrtMallocHost");
  if (size == 0)
    return fail(PARAMETER, "aclrtMallocHost: a size of 0");
  size_t whole = (size + 4095) / 4096 * 4096;
  *made = aligned_alloc(4096, whole);
  if (!*made)
    return fail(OUT_OF_MEMORY, "aclrtMallocHost: the host has no more memory");
  std::unique_lock<std::shared_mutex> lock(mapping_lock());
  host[number(*made)] = whole;
  return SUCCESS;
}
ACL aclError aclrtMallocHostWithCfg(void **made, uint64_t size, void *) {
  return aclrtMallocHost(made, size);
}
ACL aclError aclrtFreeHost(void *address) {
  {
    std::unique_lock<std::shared_mutex> lock(mapping_lock());
    if (!host.erase(number(address)))
      return fail(PARAMETER, "aclrtFreeHost: " + text(number(address)) + " was not allocated");
  }
  synchronize_all();
  free(address);
  return SUCCESS;
}

// -- virtual memory

ACL aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *wanted,
                                              aclrtMemGranularityOptions, size_t *granularity) {
  WANT_CONTEXT("aclrtMemGetAllocationGranularity");
  if (!huge(wanted))
    return fail(PARAMETER, "aclrtMemGetAllocationGranularity: huge pages of device 0 only");
  *granularity = PAGE;
  return SUCCESS;
}
ACL aclError aclrtReserveMemAddress(void **address, size_t size, size_t alignment, void *expected,
                                    uint64_t flags) {
  WANT_CONTEXT("aclrtReserveMemAddress");
  if (size == 0)
    return fail(PARAMETER, "aclrtReserveMemAddress: a size of 0");
  if (alignment != 0)
    return fail(PARAMETER, "aclrtReserveMemAddress: the alignment can only be 0");
  if (flags != 0)
    return fail(PARAMETER, "aclrtReserveMemAddress: the device has huge pages only");
  if (expected && (number(expected) < FIRST_WISH || number(expected) + size > LAST_WISH))
    return fail(PARAMETER, "aclrtReserveMemAddress: no address of the device can be wished there");
  if (size > LARGEST_RESERVATION)
    return fail(PARAMETER, "aclrtReserveMemAddress: more than 128 GiB in one reservation");
  size_t whole = (size + PAGE - 1) / PAGE * PAGE;
  std::unique_lock<std::shared_mutex> lock(mapping_lock());
  CUdeviceptr made;
  if (memory().reserve(&made, whole, PAGE, reinterpret_cast<CUdeviceptr>(expected)) != CUDA_SUCCESS)
    return fail(OUT_OF_MEMORY, "aclrtReserveMemAddress: no more addresses");
  reservations[made] = Reservation{whole};
  *address = reinterpret_cast<void *>(made);
  return SUCCESS;
}
ACL aclError aclrtReleaseMemAddress(void *address) {
  WANT_CONTEXT("aclrtReleaseMemAddress");
  std::unique_lock<std::shared_mutex> lock(mapping_lock());
  auto found = reservations.find(number(address));
  if (found == reservations.end())
    return fail(PARAMETER, "aclrtReleaseMemAddress: no reservation begins here");
  if (touches(found->first, found->second.size))
    return fail(BUSY, "aclrtReleaseMemAddress: memory is still mapped in it");
  munmap(address, found->second.size);
  reservations.erase(found);
  return SUCCESS;
}
ACL aclError aclrtMallocPhysical(aclrtDrvMemHandle *made, size_t size,
                                 const aclrtPhysicalMemProp *wanted, uint64_t flags) {
  WANT_CONTEXT("aclrtMallocPhysical");
  if (!huge(wanted) || flags != 0)
    return fail(PARAMETER, "aclrtMallocPhysical: huge pages of device 0, without a flag, only");
  if (size == 0 || size % PAGE)
    return fail(PARAMETER, "aclrtMallocPhysical: not in whole pages of 2 MiB");
  std::unique_lock<std::shared_mutex> lock(mapping_lock());
  CUmemGenericAllocationHandle handle;
  if (memory().create(&handle, size, 0) != CUDA_SUCCESS)
    return fail(OUT_OF_MEMORY, "aclrtMallocPhysical: the device has no more memory");
  auto *one = new Physical{handle, size, 0};
  alive.insert(one);
  *made = one;
  return SUCCESS;
}
ACL aclError aclrtFreePhysical(aclrtDrvMemHandle raw) {
  WANT_CONTEXT("aclrtFreePhysical");
  std::unique_lock<std::shared_mutex> lock(mapping_lock());
  auto *one = static_cast<Physical *>(raw);
  if (!alive.count(one) || one->freed)
    return fail(PARAMETER, "aclrtFreePhysical: this is no handle, or was freed");
  one->freed = true;
  drop_if_unused(one);
  return SUCCESS;
}
ACL aclError aclrtMapMem(void *address, size_t size, size_t offset, aclrtDrvMemHandle raw,
                         uint64_t flags) {
  WANT_CONTEXT("aclrtMapMem");
  std::unique_lock<std::shared_mutex> lock(mapping_lock());
  auto *one = static_cast<Physical *>(raw);
  uintptr_t at = number(address);
  if (!alive.count(one) || one->freed)
    return fail(PARAMETER, "aclrtMapMem: this is no handle, or was freed");
  if (offset != 0 || flags != 0)
    return fail(PARAMETER, "aclrtMapMem: offset and flags can only be 0");
  if (size != one->size)
    return fail(PARAMETER, "aclrtMapMem: a handle is mapped as a whole");
  if (at % PAGE)
    return fail(PARAMETER, "aclrtMapMem: not at a page of 2 MiB");
  if (inside(reservations, at) < size)
    return fail(PARAMETER, "aclrtMapMem: not within one reservation");
  if (touches(at, size))
    return fail(PARAMETER, "aclrtMapMem: something is mapped there");
  if (memory().map(at, size, 0, one->handle) != CUDA_SUCCESS)
    return fail(OUT_OF_MEMORY, "aclrtMapMem: the host refused the mapping");
  mappings[at] = Mapping{size, one};
  ++one->maps;
  return SUCCESS;
}
ACL aclError aclrtUnmapMem(void *address) {
  WANT_CONTEXT("aclrtUnmapMem");
  std::unique_lock<std::shared_mutex> lock(mapping_lock());
  auto found = mappings.find(number(address));
  if (found == mappings.end())
    return fail(PARAMETER, "aclrtUnmapMem: no mapping begins at " + text(number(address)));
  memory().unmap(found->first, found->second.size);
  auto *one = found->second.of;
  mappings.erase(found);
  --one->maps;
  drop_if_unused(one);
  return SUCCESS;
}
// The owner has access from the mapping on; another's access is what the emulator has not.
ACL aclError aclrtMemSetAccess(void *, size_t, void *, size_t) {
  return fail(NOT_SUPPORTED, "aclrtMemSetAccess: the emulator has one device");
}

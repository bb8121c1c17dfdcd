// SPDX-License-Identifier: Apache-2.0
//
// Memory: reservations and what is mapped into them, allocations, and host memory that is pinned.
// What nobody has written is not zero. Whatever takes memory away is an access of the host: CUDA
// does not promise that it waits for work that is queued.
#include "device.hpp"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <sys/mman.h>
#include <unistd.h>

namespace emu {

std::shared_mutex &mapping = *new std::shared_mutex;

namespace {

using Ranges = std::map<Address, size_t>;
struct Mapped {
  size_t size;
  bool accessible;
};
struct Handle {
  size_t size;
  bool written;
};
auto &reserved = *new Ranges, &allocated = *new Ranges, &pins = *new Ranges, &own = *new Ranges;
auto &mappings = *new std::map<Address, Mapped>;
auto &handles = *new std::map<unsigned long long, Handle>;
constexpr int UNWRITTEN = 0xCD;

size_t size_of(size_t size) { return size; }
size_t size_of(const Mapped &range) { return range.size; }

// The entry that has an address, or the end.
template <class Of> auto entry(Of &ranges, Address at) {
  auto next = ranges.upper_bound(at);
  if (next == ranges.begin() || (--next, at >= next->first + size_of(next->second)))
    return ranges.end();
  return next;
}

template <class Of> bool touched(Of &ranges, Address at, size_t size) {
  auto next = ranges.lower_bound(at);
  return (next != ranges.end() && next->first < at + size) || entry(ranges, at) != ranges.end();
}

// How many bytes from an address on are in these ranges.
size_t within(Ranges &ranges, Address at) {
  auto found = entry(ranges, at);
  return found == ranges.end() ? 0 : found->first + found->second - at;
}

template <class Part> bool all_of(Address at, size_t size, Part part) {
  for (size_t here; size; at += here, size -= here)
    if (!(here = std::min(size, part(at))))
      return false;
  return true;
}

bool multiple(size_t size) { return size && size % physical::GRANULARITY == 0; }

void taken(const char *what, Address at, size_t size) {
  Access access{at, size, true};
  if (!WITHOUT(what))
    host_access(what, &access, 1);
}

} // namespace

bool mapped(Address at, size_t size) {
  return all_of(at, size, [](Address from) -> size_t {
    if (size_t here = within(allocated, from))
      return here;
    auto found = entry(mappings, from);
    return found != mappings.end() && (found->second.accessible || WITHOUT("access"))
               ? found->first + found->second.size - from
               : 0;
  });
}
bool of_device(Address at, size_t size) { return touched(reserved, at, size) || touched(allocated, at, size); }
bool pinned(Address at, size_t size) {
  return all_of(at, size, [](Address from) { return within(pins, from); });
}
bool watched(Address at, size_t size) { return touched(reserved, at, size) || touched(pins, at, size); }

CUresult allocate(Address *out, size_t size) {
  if (!out || !size)
    return CUDA_ERROR_INVALID_VALUE;
  size_t whole = (size + physical::GRANULARITY - 1) / physical::GRANULARITY * physical::GRANULARITY;
  std::unique_lock<std::shared_mutex> lock(mapping);
  unsigned long long handle;
  if (!is_used(current()))
    return CUDA_ERROR_NOT_SUPPORTED;
  if (int status = physical::create(&handle, whole, current()))
    return CUresult(status);
  int status = physical::reserve(out, whole, 0, 0);
  if (!status)
    status = physical::map(*out, whole, handle);
  physical::release(handle);
  if (status)
    return CUresult(status);
  memset((void *)*out, UNWRITTEN, whole);
  allocated[*out] = whole;
  return CUDA_SUCCESS;
}

CUresult deallocate(Address at) {
  if (!at)
    return CUDA_SUCCESS;
  {
    Quiet here; // CUDA's implementation waits; no program may rely on it
    synchronize_all();
  }
  std::unique_lock<std::shared_mutex> lock(mapping);
  auto found = allocated.find(at);
  if (found == allocated.end())
    return CUDA_ERROR_INVALID_VALUE;
  physical::unmap(at, found->second);
  munmap((void *)at, found->second);
  allocated.erase(found);
  return CUDA_SUCCESS;
}

CUresult allocate_host(void **out, size_t size) {
  if (!out || !size)
    return CUDA_ERROR_INVALID_VALUE;
  size_t page = sysconf(_SC_PAGESIZE), whole = (size + page - 1) / page * page;
  void *got = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (got == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  memset(got, UNWRITTEN, whole);
  std::unique_lock<std::shared_mutex> lock(mapping);
  pins[(Address)got] = own[(Address)got] = whole;
  *out = got;
  return CUDA_SUCCESS;
}

CUresult deallocate_host(void *raw) {
  {
    Quiet here;
    synchronize_all();
  }
  std::unique_lock<std::shared_mutex> lock(mapping);
  auto found = own.find((Address)raw);
  if (found == own.end())
    return raw ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  taken("cudaFreeHost", found->first, found->second);
  munmap(raw, found->second);
  pins.erase(found->first);
  own.erase(found);
  return CUDA_SUCCESS;
}

CUresult register_host(void *raw, size_t size, unsigned flags) {
  auto at = (Address)raw;
  if (!raw || !size || flags & ~15u)
    return CUDA_ERROR_INVALID_VALUE;
  std::unique_lock<std::shared_mutex> lock(mapping);
  if (touched(pins, at, size) && !WITHOUT("register once"))
    return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  Address page = sysconf(_SC_PAGESIZE), first = at / page * page;
  std::vector<unsigned char> resident((at + size - first + page - 1) / page);
  if (of_device(at, size) || mincore((void *)first, at + size - first, resident.data()))
    return CUDA_ERROR_INVALID_VALUE; // of the device, or no memory at all
  pins[at] = size;
  return CUDA_SUCCESS;
}

CUresult unregister_host(void *raw) {
  std::unique_lock<std::shared_mutex> lock(mapping);
  auto found = pins.find((Address)raw);
  if (found == pins.end() || own.count(found->first))
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  taken("cudaHostUnregister", found->first, found->second);
  pins.erase(found);
  return CUDA_SUCCESS;
}

CUresult range_of(Address at, Address *base, size_t *size) {
  std::shared_lock<std::shared_mutex> lock(mapping);
  for (auto *ranges : {&allocated, &reserved, &pins}) {
    auto found = entry(*ranges, at);
    if (found == ranges->end())
      continue;
    *base = found->first;
    *size = found->second;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

} // namespace emu

// -- virtual memory

using namespace emu;
#define CU extern "C" __attribute__((visibility("default"))) CUresult

static bool of_this_device(const CUmemAllocationProp *of) {
  return of && of->type == CU_MEM_ALLOCATION_TYPE_PINNED && of->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
         of->location.id >= 0 && of->location.id < devices();
}

CU cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *of, CUmemAllocationGranularity_flags) {
  if (!size || !of_this_device(of))
    return CUDA_ERROR_INVALID_VALUE;
  *size = physical::GRANULARITY;
  return CUDA_SUCCESS;
}

CU cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *of,
               unsigned long long flags) {
  if (!handle || !multiple(size) || !of_this_device(of) || flags)
    return CUDA_ERROR_INVALID_VALUE;
  if (!is_used(of->location.id))
    return CUDA_ERROR_NOT_SUPPORTED;
  int status = physical::create(handle, size, of->location.id);
  std::unique_lock<std::shared_mutex> lock(mapping);
  if (!status)
    handles[*handle] = {size, false};
  return CUresult(status);
}

CU cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::unique_lock<std::shared_mutex> lock(mapping);
  if (!handles.erase(handle))
    return CUDA_ERROR_INVALID_VALUE;
  return CUresult(physical::release(handle));
}

CU cuMemAddressReserve(CUdeviceptr *at, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
  if (!at || !multiple(size) || alignment & (alignment - 1) || flags)
    return CUDA_ERROR_INVALID_VALUE;
  std::unique_lock<std::shared_mutex> lock(mapping);
  Address got;
  if (int status = physical::reserve(&got, size, std::max(alignment, physical::GRANULARITY), hint))
    return CUresult(status);
  reserved[*at = got] = size;
  return CUDA_SUCCESS;
}

CU cuMemAddressFree(CUdeviceptr at, size_t size) {
  std::unique_lock<std::shared_mutex> lock(mapping);
  auto found = reserved.find(at);
  if (found == reserved.end() || found->second != size || (touched(mappings, at, size) && !WITHOUT("free unmapped")))
    return CUDA_ERROR_INVALID_VALUE;
  munmap((void *)at, size);
  reserved.erase(found);
  return CUDA_SUCCESS;
}

CU cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  std::unique_lock<std::shared_mutex> lock(mapping);
  auto of = handles.find(handle);
  bool inside = at % physical::GRANULARITY == 0 && within(reserved, at) >= size;
  if (of == handles.end() || size != of->second.size || offset || flags || !inside || touched(mappings, at, size))
    return CUDA_ERROR_INVALID_VALUE;
  if (int status = physical::map(at, size, handle))
    return CUresult(status);
  if (!of->second.written && !WITHOUT("unwritten memory"))
    memset((void *)at, UNWRITTEN, size);
  of->second.written = true;
  mappings[at] = {size, false};
  ++counted(EMU_MAPS);
  return CUDA_SUCCESS;
}

CU cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc *to, size_t count) {
  std::unique_lock<std::shared_mutex> lock(mapping);
  auto found = mappings.find(at);
  for (size_t done = 0; done < size; done += (found++)->second.size)
    if (found == mappings.end() || found->first != at + done || done + found->second.size > size)
      return CUDA_ERROR_INVALID_VALUE;
  if (!to || count != 1 || to->location.type != CU_MEM_LOCATION_TYPE_DEVICE || !is_used(to->location.id))
    return CUDA_ERROR_INVALID_VALUE;
  for (auto range = mappings.find(at); range != found; ++range)
    range->second.accessible = to->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return CUDA_SUCCESS;
}

CU cuMemUnmap(CUdeviceptr at, size_t size) {
  std::unique_lock<std::shared_mutex> lock(mapping);
  auto first = mappings.find(at), last = first;
  for (size_t done = 0; done < size || first == mappings.end(); done += (last++)->second.size)
    if (last == mappings.end() || last->first != at + done || done + last->second.size > size)
      return CUDA_ERROR_INVALID_VALUE;
  taken("cuMemUnmap", at, size);
  if (int status = physical::unmap(at, size))
    return CUresult(status);
  mappings.erase(first, last);
  ++counted(EMU_UNMAPS);
  return CUDA_SUCCESS;
}

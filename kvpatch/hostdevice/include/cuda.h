// SPDX-License-Identifier: Apache-2.0
//
// The host device: CUDA's virtual memory calls on ordinary memory, for machines
// without a GPU. It implements exactly the calls kvcached 0.1.6 names in
// csrc/inc/gpu_vmm.hpp, so that kvcached's C++ is compiled unchanged and runs
// its real path: reserve, create, map, unmap, release, the shared scratch page.
//
//   physical memory   one memfd per process; a handle is a range of it that is
//                     committed on create and given back to the operating
//                     system (hole punched) on the last unmap after release
//   virtual memory    a PROT_NONE reservation: touching an address that nothing
//                     is mapped to faults, as it does on a GPU
//   device memory     a ledger file that every process on the machine charges,
//                     so one engine's pages shrink another's free memory;
//                     charges of dead processes are dropped
//
// The ledger's layout is shared with kvpatch/hostdevice/ledger.py.
#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <signal.h>
#include <string>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

typedef enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_OPERATING_SYSTEM = 304
} CUresult;
typedef enum {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2
} cudaError_t;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef enum { CU_MEM_ALLOCATION_TYPE_PINNED = 1 } CUmemAllocationType;
typedef enum { CU_MEM_LOCATION_TYPE_DEVICE = 1 } CUmemLocationType;
typedef enum { CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 } CUmemAccess_flags;
typedef enum { CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0 } CUmemGranularity_flags;
typedef enum {
  CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED_VALUE = 102
} CUdevice_attribute;
#define CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED                \
  CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED_VALUE
typedef struct {
  CUmemLocationType type;
  int id;
} CUmemLocation;
typedef struct {
  CUmemAllocationType type;
  CUmemLocation location;
} CUmemAllocationProp;
typedef struct {
  CUmemLocation location;
  CUmemAccess_flags flags;
} CUmemAccessDesc;

namespace kvpatch_host {

constexpr size_t kGranularity = 2u << 20;
constexpr uint64_t kLedgerMagic = 0x3144564854415650ull; // "PVATHVD1"
constexpr size_t kLedgerSlots = 128;

struct LedgerSlot {
  int64_t pid;
  int64_t started; // field 22 of /proc/<pid>/stat: tells a reused pid apart
  int64_t bytes;
};
struct Ledger {
  uint64_t magic;
  int64_t total;
  LedgerSlot slots[kLedgerSlots];
};

// "2GiB", "512MiB" or plain bytes; 0 when unset or unreadable (Python refuses
// such a value before the first call gets here).
inline int64_t size_from_environment() {
  const char *text = getenv("KVPATCH_HOST_DEVICE");
  if (!text || !*text)
    return 0;
  char *end = nullptr;
  double value = strtod(text, &end);
  std::string unit(end);
  double scale = unit == "GiB"   ? 1073741824.0
                 : unit == "MiB" ? 1048576.0
                 : unit.empty()  ? 1.0
                                 : 0.0;
  int64_t bytes = static_cast<int64_t>(value * scale);
  return bytes / static_cast<int64_t>(kGranularity) *
         static_cast<int64_t>(kGranularity);
}

// Kernel start time of a process, or -1 when there is none.
inline int64_t start_time(int64_t pid) {
  char path[64];
  snprintf(path, sizeof(path), "/proc/%lld/stat", static_cast<long long>(pid));
  FILE *file = fopen(path, "r");
  if (!file)
    return -1;
  char line[2048];
  size_t length = fread(line, 1, sizeof(line) - 1, file);
  fclose(file);
  line[length] = 0;
  char *field = strrchr(line, ')'); // the command may hold spaces and brackets
  if (!field)
    return -1;
  ++field;
  for (int skip = 0; skip < 19 && field; ++skip)
    field = strchr(field + 1, ' ');
  if (!field)
    return -1;
  return strtoll(field, nullptr, 10);
}

struct Handle {
  size_t offset;
  size_t size;
  int device;
  int maps = 0;
  bool released = false;
};

struct Mapping {
  size_t size;
  Handle *handle;
};

class Device {
public:
  static Device &get() {
    static Device *device = new Device(); // outlives every static destructor
    return *device;
  }

  CUresult memory(int index, size_t *free_bytes, size_t *total_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    return with_ledger(index, [&](Ledger &ledger) {
      int64_t used = 0;
      for (auto &slot : ledger.slots)
        used += slot.pid ? slot.bytes : 0;
      *total_bytes = static_cast<size_t>(ledger.total);
      *free_bytes =
          static_cast<size_t>(used < ledger.total ? ledger.total - used : 0);
      return CUDA_SUCCESS;
    });
  }

  CUresult create(CUmemGenericAllocationHandle *out, size_t size, int index) {
    std::lock_guard<std::mutex> lock(mutex_);
    adopt();
    if (size == 0 || size % kGranularity)
      return CUDA_ERROR_INVALID_VALUE;
    CUresult status = charge(index, static_cast<int64_t>(size));
    if (status != CUDA_SUCCESS)
      return status;
    size_t offset;
    auto &spare = spare_[size];
    if (spare.empty()) {
      offset = end_;
      end_ += size;
    } else {
      offset = spare.back();
      spare.pop_back();
    }
    if (memory_fd() < 0 ||
        fallocate(memory_fd_, 0, static_cast<off_t>(offset),
                  static_cast<off_t>(size)) != 0) {
      spare_[size].push_back(offset);
      charge(index, -static_cast<int64_t>(size));
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = reinterpret_cast<CUmemGenericAllocationHandle>(
        new Handle{offset, size, index});
    return CUDA_SUCCESS;
  }

  CUresult release(CUmemGenericAllocationHandle raw) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (getpid() != owner_)
      return CUDA_SUCCESS; // a forked child must not free its parent's memory
    auto *handle = reinterpret_cast<Handle *>(raw);
    handle->released = true;
    drop_if_unused(handle);
    return CUDA_SUCCESS;
  }

  CUresult reserve(CUdeviceptr *out, size_t size, size_t alignment,
                   CUdeviceptr hint) {
    alignment = alignment ? alignment : kGranularity;
    void *wanted = reinterpret_cast<void *>(hint);
    void *got = mmap(wanted, size, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got != MAP_FAILED && reinterpret_cast<uintptr_t>(got) % alignment) {
      munmap(got, size);
      got = mmap(nullptr, size + alignment, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (got != MAP_FAILED) {
        uintptr_t start = reinterpret_cast<uintptr_t>(got);
        uintptr_t aligned = (start + alignment - 1) / alignment * alignment;
        if (aligned > start)
          munmap(got, aligned - start);
        if (start + alignment > aligned)
          munmap(reinterpret_cast<void *>(aligned + size),
                 start + alignment - aligned);
        got = reinterpret_cast<void *>(aligned);
      }
    }
    if (got == MAP_FAILED)
      return CUDA_ERROR_OUT_OF_MEMORY;
    *out = reinterpret_cast<CUdeviceptr>(got);
    return CUDA_SUCCESS;
  }

  CUresult map(CUdeviceptr address, size_t size, size_t offset,
               CUmemGenericAllocationHandle raw) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto *handle = reinterpret_cast<Handle *>(raw);
    if (size != handle->size || offset != 0 || overlaps(address, size))
      return CUDA_ERROR_INVALID_VALUE;
    void *got = mmap(reinterpret_cast<void *>(address), size,
                     PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory_fd_,
                     static_cast<off_t>(handle->offset));
    if (got == MAP_FAILED)
      return CUDA_ERROR_OPERATING_SYSTEM;
    mappings_[address] = Mapping{size, handle};
    ++handle->maps;
    return CUDA_SUCCESS;
  }

  CUresult unmap(CUdeviceptr address, size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (getpid() != owner_)
      return CUDA_SUCCESS;
    auto first = mappings_.lower_bound(address);
    auto last = mappings_.lower_bound(address + size);
    if (first == last)
      return CUDA_ERROR_INVALID_VALUE;
    if (std::prev(last)->first + std::prev(last)->second.size > address + size)
      return CUDA_ERROR_INVALID_VALUE;
    void *got =
        mmap(reinterpret_cast<void *>(address), size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (got == MAP_FAILED)
      return CUDA_ERROR_OPERATING_SYSTEM;
    for (auto it = first; it != last; it = mappings_.erase(it)) {
      --it->second.handle->maps;
      drop_if_unused(it->second.handle);
    }
    return CUDA_SUCCESS;
  }

  void synchronize() {
    if (void (*callback)() = synchronize_)
      callback();
  }

  void (*synchronize_)() = nullptr;

private:
  bool overlaps(CUdeviceptr address, size_t size) const {
    auto next = mappings_.lower_bound(address);
    if (next != mappings_.end() && next->first < address + size)
      return true;
    if (next == mappings_.begin())
      return false;
    auto previous = std::prev(next);
    return previous->first + previous->second.size > address;
  }

  void drop_if_unused(Handle *handle) {
    if (!handle->released || handle->maps)
      return;
    fallocate(memory_fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(handle->offset),
              static_cast<off_t>(handle->size));
    spare_[handle->size].push_back(handle->offset);
    charge(handle->device, -static_cast<int64_t>(handle->size));
    delete handle;
  }

  // The process that first creates memory owns this object; a forked child
  // starts over, since the memfd's pages are shared with its parent.
  void adopt() {
    if (owner_ == getpid())
      return;
    owner_ = getpid();
    memory_fd_ = -1;
    mappings_.clear();
    spare_.clear();
    end_ = 0;
  }

  int memory_fd() {
    if (memory_fd_ < 0) {
      memory_fd_ = memfd_create("kvpatch-host-device", MFD_CLOEXEC);
      if (memory_fd_ >= 0 && ftruncate(memory_fd_, off_t(1) << 42) != 0) {
        close(memory_fd_);
        memory_fd_ = -1;
      }
    }
    return memory_fd_;
  }

  CUresult charge(int index, int64_t bytes) {
    return with_ledger(index, [&](Ledger &ledger) {
      int64_t used = 0;
      LedgerSlot *mine = nullptr, *empty = nullptr;
      for (auto &slot : ledger.slots) {
        if (!slot.pid) {
          empty = empty ? empty : &slot;
          continue;
        }
        used += slot.bytes;
        if (slot.pid == getpid())
          mine = &slot;
      }
      if (bytes > 0 && used + bytes > ledger.total)
        return CUDA_ERROR_OUT_OF_MEMORY;
      if (!mine) {
        if (bytes <= 0)
          return CUDA_SUCCESS;
        if (!empty)
          return CUDA_ERROR_OUT_OF_MEMORY;
        mine = empty;
        *mine = LedgerSlot{getpid(), start_time(getpid()), 0};
      }
      mine->bytes += bytes;
      if (mine->bytes <= 0)
        *mine = LedgerSlot{0, 0, 0};
      return CUDA_SUCCESS;
    });
  }

  // The name can be guessed, and another user may have made the file or a link.
  static bool is_ours(int fd) {
    struct stat status;
    return fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
           status.st_uid == geteuid() && status.st_nlink <= 1 &&
           (!(status.st_mode & 077) || fchmod(fd, 0600) == 0);
  }

  template <typename Action> CUresult with_ledger(int index, Action action) {
    const char *folder = getenv("KVPATCH_HOST_DEVICE_DIR");
    std::string path =
        (folder && *folder) ? std::string(folder) : std::string("/dev/shm");
    path += "/kvpatch-host-device-" + std::to_string(getuid()) + "-" +
            std::to_string(index);
    int fd = open(path.c_str(),
                  O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (fd < 0)
      return CUDA_ERROR_OPERATING_SYSTEM;
    CUresult status = CUDA_ERROR_OPERATING_SYSTEM;
    // Allocated, because a write to a sparse file on a full /dev/shm is SIGBUS.
    if (is_ours(fd) && flock(fd, LOCK_EX) == 0 &&
        posix_fallocate(fd, 0, sizeof(Ledger)) == 0) {
      void *at = mmap(nullptr, sizeof(Ledger), PROT_READ | PROT_WRITE,
                      MAP_SHARED, fd, 0);
      if (at != MAP_FAILED) {
        Ledger &ledger = *static_cast<Ledger *>(at);
        bool used = false;
        for (auto &slot : ledger.slots) {
          if (slot.pid && start_time(slot.pid) != slot.started)
            slot = LedgerSlot{0, 0, 0};
          used = used || slot.pid;
        }
        if (ledger.magic != kLedgerMagic || !used) {
          ledger.magic = kLedgerMagic;
          ledger.total = size_from_environment();
        }
        status = action(ledger);
        munmap(at, sizeof(Ledger));
      }
    }
    flock(fd, LOCK_UN); // a child forked meanwhile has the descriptor too
    close(fd);
    return status;
  }

  std::mutex mutex_;
  pid_t owner_ = 0;
  int memory_fd_ = -1;
  size_t end_ = 0;
  std::map<size_t, std::vector<size_t>> spare_;
  std::map<CUdeviceptr, Mapping> mappings_;
};

inline thread_local int current_device = 0;

} // namespace kvpatch_host

inline CUresult cuGetErrorString(CUresult status, const char **text) {
  *text = status == CUDA_SUCCESS               ? "no error"
          : status == CUDA_ERROR_OUT_OF_MEMORY ? "host device out of memory"
          : status == CUDA_ERROR_INVALID_VALUE
              ? "invalid value"
              : "operating system call failed on the host device";
  return CUDA_SUCCESS;
}
inline const char *cudaGetErrorString(cudaError_t status) {
  return status == cudaSuccess ? "no error" : "host device call failed";
}
inline cudaError_t cudaFree(int) { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int index) {
  kvpatch_host::current_device = index;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int *index) {
  *index = kvpatch_host::current_device;
  return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  return kvpatch_host::Device::get().memory(kvpatch_host::current_device,
                                            free_bytes,
                                            total_bytes) == CUDA_SUCCESS
             ? cudaSuccess
             : cudaErrorInvalidValue;
}
inline cudaError_t cudaDeviceSynchronize() {
  kvpatch_host::Device::get().synchronize();
  return cudaSuccess;
}
inline CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute, CUdevice) {
  *value = 1;
  return CUDA_SUCCESS;
}
inline CUresult cuMemGetAllocationGranularity(size_t *granularity,
                                              const CUmemAllocationProp *,
                                              CUmemGranularity_flags) {
  *granularity = kvpatch_host::kGranularity;
  return CUDA_SUCCESS;
}
inline CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                            const CUmemAllocationProp *prop,
                            unsigned long long) {
  return kvpatch_host::Device::get().create(handle, size, prop->location.id);
}
inline CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return kvpatch_host::Device::get().release(handle);
}
inline CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size,
                                    size_t alignment, CUdeviceptr hint,
                                    unsigned long long) {
  return kvpatch_host::Device::get().reserve(address, size, alignment, hint);
}
inline CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  return munmap(reinterpret_cast<void *>(address), size) == 0
             ? CUDA_SUCCESS
             : CUDA_ERROR_INVALID_VALUE;
}
inline CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                         CUmemGenericAllocationHandle handle,
                         unsigned long long) {
  return kvpatch_host::Device::get().map(address, size, offset, handle);
}
inline CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  return kvpatch_host::Device::get().unmap(address, size);
}
inline CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *,
                               size_t) {
  return CUDA_SUCCESS;
}

// For kvpatch/hostdevice: tells a host build of kvcached from a GPU build, and
// lets the device-wide wait include copies that Python threads still carry.
#define KVPATCH_HOST_EXPORT                                                    \
  extern "C" __attribute__((used, visibility("default"))) inline
KVPATCH_HOST_EXPORT int kvpatch_host_device_abi() { return 1; }
KVPATCH_HOST_EXPORT void kvpatch_host_on_synchronize(void (*callback)()) {
  kvpatch_host::Device::get().synchronize_ = callback;
}

// A "cuda" device makes kvcached take its virtual-memory path; the tensor over
// those addresses is an ordinary CPU tensor here.
#include <torch/csrc/stable/ops.h>

namespace torch::stable {
inline Tensor kvpatch_host_from_blob(void *data,
                                     torch::headeronly::IntHeaderOnlyArrayRef sizes,
                                     torch::headeronly::IntHeaderOnlyArrayRef strides,
                                     Device, torch::headeronly::ScalarType dtype) {
  return from_blob(data, sizes, strides, Device(DeviceType::CPU), dtype);
}
} // namespace torch::stable
#define from_blob kvpatch_host_from_blob

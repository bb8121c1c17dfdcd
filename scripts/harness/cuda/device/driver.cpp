// SPDX-License-Identifier: Apache-2.0
// libcuda.so.1: a driver for CUDA 13.0, with as many devices as KVPATCH_STAND_IN_GPUS says. Functions of virtual memory are in memory.cpp.
#include "device.hpp"

#include <dlfcn.h>
#include <unistd.h>

using namespace emu;

#define CU extern "C" __attribute__((visibility("default"))) CUresult
#define DEVICE(device)                                                                                                 \
  if (device < 0 || device >= devices())                                                                               \
  return CUDA_ERROR_INVALID_DEVICE
#define WANTED(...)                                                                                                    \
  if (!(__VA_ARGS__))                                                                                                  \
  return CUDA_ERROR_INVALID_VALUE
#define CONTEXT                                                                                                        \
  if (CUresult status = ready(true))                                                                                   \
  return status
#define STREAM(handle)                                                                                                 \
  CONTEXT;                                                                                                             \
  auto stream = stream_of(handle);                                                                                     \
  if (!stream)                                                                                                         \
  return CUDA_ERROR_INVALID_HANDLE

namespace {

constexpr const char *NAME = "NVIDIA H100 80GB HBM3 (emulated)";
char primary[64]; // contexts, by device
CUcontext context_of(int device) { return (CUcontext)(primary + device); }
bool is_primary(CUcontext context) { return (char *)context >= primary && (char *)context < primary + devices(); }
thread_local std::vector<CUcontext> contexts; // of this thread, the current one last
std::atomic<pid_t> initialized{0};
std::atomic<int> retained{0};

CUresult ready(bool context) {
  if (initialized != getpid())
    return CUDA_ERROR_NOT_INITIALIZED; // also in the fork of a process that was
  return context && (contexts.empty() || !contexts.back()) && !WITHOUT("current context") ? CUDA_ERROR_INVALID_CONTEXT
                                                                                         : CUDA_SUCCESS;
}

template <class Of> CUresult told(Of *to, Of value) {
  WANTED(to);
  *to = value;
  return CUDA_SUCCESS;
}

CUresult batch(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *of, size_t *firsts,
               size_t kinds, CUstream handle) {
  STREAM(handle);
  WANTED(to && from && sizes && count && of && firsts && kinds && kinds <= count && firsts[0] == 0 && handle &&
         handle != CU_STREAM_LEGACY);
  for (size_t kind = 0; kind < kinds; ++kind)
    WANTED((!kind || firsts[kind] > firsts[kind - 1]) && firsts[kind] < count &&
           of[kind].srcAccessOrder >= CU_MEMCPY_SRC_ACCESS_ORDER_STREAM &&
           of[kind].srcAccessOrder <= CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
  return copy_batch((Address *)to, (Address *)from, sizes, count, *stream);
}

// As it was before CUDA 13: with the index of the copy that failed.
CUresult batch_of_12(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *of,
                     size_t *firsts, size_t kinds, size_t *bad, CUstream handle) {
  if (bad)
    *bad = SIZE_MAX;
  return batch(to, from, sizes, count, of, firsts, kinds, handle);
}

} // namespace

namespace emu {

std::atomic<uint64_t> &counted(int of) {
  static std::atomic<uint64_t> all[EMU_COUNTS];
  return all[of];
}

CUresult use_device() {
  pid_t before = 0;
  if (!initialized.compare_exchange_strong(before, getpid()) && before != getpid())
    return CUDA_ERROR_NOT_INITIALIZED;
  if (contexts.empty())
    contexts.push_back(nullptr);
  if (!contexts.back())
    contexts.back() = context_of(0);
  return CUDA_SUCCESS;
}

int devices() {
  static const char *said = getenv("KVPATCH_STAND_IN_GPUS");
  static const int count = said ? atoi(said) : 1;
  return count;
}
int current() { return contexts.empty() || !contexts.back() ? 0 : (char *)contexts.back() - primary; }
CUresult set_current(int device) {
  CUresult status = use_device();
  if (!status)
    contexts.back() = context_of(device);
  return status;
}
bool is_used(int device) {
  static std::atomic<int> used{-1};
  int none = -1;
  if (used.compare_exchange_strong(none, device) || none == device)
    return true;
  complain("memory on two devices of one process is not emulated");
  return false;
}

int refused(const char *name) {
  complain(std::string(name) + " is not emulated");
  return CUDA_ERROR_NOT_SUPPORTED;
}

// An H100's, as far as programs ask.
int attribute(int of) {
  static const std::map<int, int> all = {
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
      {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
      {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
      {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},
      {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},
      {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 50 << 20},
      {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
      {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
      {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
      {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
      {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
      {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
      {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
  };
  auto found = all.find(of);
  return found == all.end() ? 0 : found->second;
}

} // namespace emu

EMU uint64_t emu_count(int of) { return of == EMU_COMPLAINTS ? complaints() : of < EMU_COUNTS ? counted(of).load() : 0; }

// -- device and contexts

CU cuInit(unsigned flags) {
  WANTED(!flags);
  pid_t none = 0;
  initialized.compare_exchange_strong(none, getpid());
  return ready(false);
}
CU cuDriverGetVersion(int *version) { return told(version, 13000); }
CU cuDeviceGetCount(int *count) { return ready(false) ?: told(count, devices()); }
CU cuDeviceGet(CUdevice *device, int index) {
  DEVICE(index);
  return ready(false) ?: told(device, index);
}
CU cuDeviceGetName(char *name, int size, CUdevice device) {
  DEVICE(device);
  WANTED(name && size > 0);
  snprintf(name, size, "%s", NAME);
  return CUDA_SUCCESS;
}
CU cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
  DEVICE(device);
  WANTED(uuid);
  memset(uuid, 0, sizeof *uuid);
  uuid->bytes[15] = 1 + device;
  return CUDA_SUCCESS;
}
CU cuDeviceTotalMem(size_t *total, CUdevice device) {
  DEVICE(device);
  WANTED(total);
  size_t free;
  physical::memory(device, &free, total);
  return CUDA_SUCCESS;
}
CU cuDeviceGetAttribute(int *value, CUdevice_attribute of, CUdevice device) {
  DEVICE(device);
  return told(value, attribute(of));
}
CU cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  DEVICE(device);
  return told(flags, 0u) ?: told(active, int(retained > 0 || initialized == getpid()));
}
CU cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  DEVICE(device);
  ++retained;
  return ready(false) ?: told(context, context_of(device));
}
CU cuDevicePrimaryCtxRelease(CUdevice device) {
  DEVICE(device);
  return retained-- > 0 ? CUDA_SUCCESS : (++retained, CUDA_ERROR_INVALID_CONTEXT);
}
CU cuCtxGetCurrent(CUcontext *context) {
  return ready(false) ?: told(context, contexts.empty() ? nullptr : contexts.back());
}
CU cuCtxSetCurrent(CUcontext context) {
  WANTED(!context || is_primary(context));
  if (contexts.empty())
    contexts.push_back(nullptr);
  contexts.back() = context;
  return ready(false);
}
CU cuCtxPushCurrent(CUcontext context) {
  WANTED(is_primary(context));
  contexts.push_back(context);
  return ready(false);
}
CU cuCtxPopCurrent(CUcontext *context) {
  CONTEXT;
  if (context)
    *context = contexts.back();
  contexts.pop_back();
  return CUDA_SUCCESS;
}
CU cuCtxGetDevice(CUdevice *device) {
  CONTEXT;
  return told(device, current());
}
CU cuCtxSynchronize() {
  CONTEXT;
  return synchronize_all();
}
CU cuGetErrorString(CUresult status, const char **text) {
  return told(text, status == CUDA_ERROR_ILLEGAL_ADDRESS ? why_failed()
                    : status                            ? "an error of the emulated device"
                                                        : "no error");
}
CU cuGetErrorName(CUresult status, const char **text) { return told(text, status ? "CUDA_ERROR" : "CUDA_SUCCESS"); }

// -- memory

CU cuMemGetInfo(size_t *free, size_t *total) {
  CONTEXT;
  WANTED(free && total);
  physical::memory(current(), free, total);
  return CUDA_SUCCESS;
}
CU cuMemAlloc(CUdeviceptr *at, size_t size) {
  CONTEXT;
  return allocate((Address *)at, size);
}
CU cuMemFree(CUdeviceptr at) {
  CONTEXT;
  return deallocate(at);
}
CU cuMemAllocHost(void **at, size_t size) {
  CONTEXT;
  return allocate_host(at, size);
}
CU cuMemHostAlloc(void **at, size_t size, unsigned flags) {
  CONTEXT;
  WANTED(!(flags & ~7u));
  return allocate_host(at, size);
}
CU cuMemFreeHost(void *at) {
  CONTEXT;
  WANTED(at);
  return deallocate_host(at);
}
CU cuMemHostRegister(void *at, size_t size, unsigned flags) {
  CONTEXT;
  return register_host(at, size, flags);
}
CU cuMemHostUnregister(void *at) {
  CONTEXT;
  return unregister_host(at);
}
CU cuMemHostGetDevicePointer(CUdeviceptr *to, void *at, unsigned flags) {
  CONTEXT;
  WANTED(!flags && pinned((Address)at, 1));
  return told(to, (CUdeviceptr)at);
}
CU cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr at) {
  CONTEXT;
  Address first;
  size_t whole;
  if (range_of(at, &first, &whole))
    return CUDA_ERROR_NOT_FOUND;
  if (base)
    *base = first;
  if (size)
    *size = whole;
  return CUDA_SUCCESS;
}
CU cuPointerGetAttribute(void *value, CUpointer_attribute of, CUdeviceptr at) {
  CONTEXT;
  Address base;
  size_t size;
  WANTED(value && !range_of(at, &base, &size));
  switch (of) {
  case CU_POINTER_ATTRIBUTE_CONTEXT:
    return told((CUcontext *)value, context_of(current()));
  case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    return told((unsigned *)value, unsigned(pinned(at, 1) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE));
  case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    return told((CUdeviceptr *)value, at);
  case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    WANTED(pinned(at, 1));
    return told((CUdeviceptr *)value, at);
  case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
    return told((int *)value, current());
  case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    return told((Address *)value, base);
  case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    return told((size_t *)value, size);
  default:
    return CUresult(refused(("cuPointerGetAttribute " + std::to_string(of)).c_str()));
  }
}

// -- copies

CU cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream handle) {
  STREAM(handle);
  return copy(to, from, size, *stream, false);
}
CU cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t size, CUstream handle) {
  return cuMemcpyAsync((CUdeviceptr)to, from, size, handle);
}
CU cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t size, CUstream handle) {
  return cuMemcpyAsync(to, (CUdeviceptr)from, size, handle);
}
CU cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream handle) {
  return cuMemcpyAsync(to, from, size, handle);
}
CU cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size) {
  STREAM(nullptr);
  return copy(to, from, size, *stream, true);
}
CU cuMemcpyDtoH(void *to, CUdeviceptr from, size_t size) { return cuMemcpy((CUdeviceptr)to, from, size); }
CU cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t size) { return cuMemcpy(to, (CUdeviceptr)from, size); }
CU cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t count, CUstream handle) {
  STREAM(handle);
  return fill(at, value, 1, count, *stream, false);
}
CU cuMemsetD32Async(CUdeviceptr at, unsigned value, size_t count, CUstream handle) {
  STREAM(handle);
  return fill(at, value, 4, count, *stream, false);
}
CU cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *of,
                      size_t *firsts, size_t kinds, CUstream handle) {
  return batch(to, from, sizes, count, of, firsts, kinds, handle);
}

// -- streams and events

CU cuStreamCreate(CUstream *handle, unsigned flags) {
  CONTEXT;
  WANTED(!(flags & ~1u));
  return told(handle, (CUstream)new_stream(!(flags & CU_STREAM_NON_BLOCKING)));
}
CU cuStreamDestroy(CUstream handle) {
  CONTEXT;
  return destroy_stream(handle);
}
CU cuStreamSynchronize(CUstream handle) {
  STREAM(handle);
  return synchronize(*stream);
}
CU cuStreamQuery(CUstream handle) {
  STREAM(handle);
  return query(*stream);
}
CU cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
  STREAM(handle);
  WANTED(!(flags & ~1u));
  return wait_event(*stream, event);
}
CU cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
  STREAM(handle);
  return told(status, CU_STREAM_CAPTURE_STATUS_NONE);
}
CU cuEventCreate(CUevent *event, unsigned flags) {
  CONTEXT;
  WANTED(event);
  return new_event((void **)event, flags);
}
CU cuEventDestroy(CUevent event) {
  CONTEXT;
  return destroy_event(event);
}
CU cuEventRecord(CUevent event, CUstream handle) {
  STREAM(handle);
  return record(event, *stream);
}
CU cuEventQuery(CUevent event) {
  CONTEXT;
  return query_event(event);
}
CU cuEventSynchronize(CUevent event) {
  CONTEXT;
  return synchronize_event(event);
}
CU cuEventElapsedTime(float *milliseconds, CUevent first, CUevent second) {
  CONTEXT;
  return elapsed(milliseconds, first, second);
}

CU cuGetProcAddress(const char *name, void **found, int version, cuuint64_t, CUdriverProcAddressQueryResult *status) {
  static void *self = [] {
    Dl_info own;
    dladdr((void *)&cuInit, &own);
    return dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  WANTED(name && found);
  *found = nullptr;
  if (!strcmp(name, "cuMemcpyBatchAsync"))
    *found = version < 13000 ? (void *)batch_of_12 : (void *)batch;
  for (const char *suffix : {"_v4", "_v3", "_v2", ""})
    if (!*found)
      *found = dlsym(self, (std::string(name) + suffix).c_str());
  if (status)
    *status = *found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

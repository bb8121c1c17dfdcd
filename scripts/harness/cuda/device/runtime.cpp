// SPDX-License-Identifier: Apache-2.0
// libcudart.so.13: CUDA's runtime on the driver beside it.
#include "device.hpp"

#define __CUDA_INTERNAL_SKIP_CPP_HEADERS__
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cxxabi.h>
#include <dlfcn.h>
#include <unordered_map>
#include <utility>

using namespace emu;

#define OF_RUNTIME extern "C" __attribute__((visibility("default")))
#define RT OF_RUNTIME cudaError_t
#define WANTED(...)                                                                                                    \
  if (!(__VA_ARGS__))                                                                                                  \
  return failed(cudaErrorInvalidValue)
#define DEVICE(device)                                                                                                 \
  if (device < 0 || device >= devices())                                                                               \
  return failed(cudaErrorInvalidDevice)
#define CONTEXT                                                                                                        \
  if (CUresult status = use_device())                                                                                  \
  return failed(status)
#define STREAM(handle)                                                                                                 \
  CONTEXT;                                                                                                             \
  auto stream = stream_of(handle);                                                                                     \
  if (!stream)                                                                                                         \
  return failed(cudaErrorInvalidResourceHandle)

namespace {

thread_local cudaError_t last = cudaSuccess;

cudaError_t failed(cudaError_t status) { return last = status; }
// The numbers are the driver's.
cudaError_t failed(CUresult status) {
  if (status && status != CUDA_ERROR_NOT_READY)
    last = cudaError_t(status);
  return cudaError_t(status);
}

template <class Of> cudaError_t told(Of *to, Of value) {
  WANTED(to);
  *to = value;
  return cudaSuccess;
}

// Kernels have registered themselves by name, and none of them can run here.
auto &kernels = *new std::unordered_map<const void *, const char *>;
struct Launch {
  dim3 grid, block;
  size_t shared;
  void *stream;
};
thread_local std::vector<Launch> launches;

cudaError_t launched(const void *kernel) {
  auto known = kernels.find(kernel);
  if (known == kernels.end())
    return failed(cudaErrorInvalidDeviceFunction);
  char *readable = abi::__cxa_demangle(known->second, nullptr, nullptr, nullptr);
  std::string name(readable ? readable : known->second);
  free(readable);
  // Few programs look whether a launch failed, and what it should have written is wrong from here on.
  emu_fail(("the kernel " + name.substr(0, 300) + " is not emulated").c_str());
  return failed(cudaErrorNotSupported);
}

// torch's allocator of pinned memory looks whether copies are done, which is luck: it orders nothing.
bool by_allocator(void *caller) {
  Dl_info from;
  return dladdr(caller, &from) && from.dli_fname && strstr(from.dli_fname, "libtorch_cuda.so");
}

} // namespace

// -- device

RT cudaGetDeviceCount(int *count) { return told(count, devices()); }
RT cudaGetDevice(int *device) { return told(device, current()); }
RT cudaSetDevice(int device) {
  DEVICE(device);
  return failed(set_current(device));
}
RT cudaDriverGetVersion(int *version) { return failed(cuDriverGetVersion(version)); }
RT cudaRuntimeGetVersion(int *version) { return told(version, 13000); }
RT cudaDeviceGetAttribute(int *value, cudaDeviceAttr of, int device) {
  DEVICE(device);
  return told(value, attribute(of));
}
RT cudaDeviceGetPCIBusId(char *text, int size, int device) {
  DEVICE(device);
  WANTED(text && size > 0);
  snprintf(text, size, "0000:%02x:00.0", 1 + device);
  return cudaSuccess;
}
RT cudaDeviceCanAccessPeer(int *can, int, int) { return told(can, 0); }
RT cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least)
    *least = 0;
  if (greatest)
    *greatest = -5;
  return cudaSuccess;
}
RT cudaDeviceSynchronize() {
  CONTEXT;
  return failed(synchronize_all());
}
RT cudaGetLastError() {
  cudaError_t found = last;
  last = cudaError_t(failure()); // a device that failed stays failed
  return found;
}
RT cudaPeekAtLastError() { return last; }
OF_RUNTIME const char *cudaGetErrorString(cudaError_t status) {
  switch (status) {
  case cudaSuccess:
    return "no error";
  case cudaErrorMemoryAllocation:
    return "out of memory";
  case cudaErrorIllegalAddress:
    return why_failed();
  case cudaErrorNotSupported:
    return "operation not supported by the emulated device";
  default:
    return "an error of the emulated device";
  }
}
OF_RUNTIME const char *cudaGetErrorName(cudaError_t status) { return status ? "cudaError" : "cudaSuccess"; }
RT cudaGetDeviceProperties(cudaDeviceProp *of, int device) {
  DEVICE(device);
  WANTED(of);
  memset(of, 0, sizeof *of);
  cuDeviceGetName(of->name, sizeof of->name, 0);
  cuDeviceGetUuid(&of->uuid, device);
  cuDeviceTotalMem(&of->totalGlobalMem, device);
  auto is = [](CUdevice_attribute which) { return attribute(which); };
  of->major = is(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  of->minor = is(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  of->multiProcessorCount = is(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  of->warpSize = is(CU_DEVICE_ATTRIBUTE_WARP_SIZE);
  of->maxThreadsPerBlock = is(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
  of->maxThreadsPerMultiProcessor = is(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
  of->sharedMemPerBlock = is(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
  of->sharedMemPerBlockOptin = is(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  of->sharedMemPerMultiprocessor = is(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  of->reservedSharedMemPerBlock = is(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK);
  of->regsPerBlock = is(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK);
  of->regsPerMultiprocessor = is(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR);
  of->l2CacheSize = is(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  of->memoryBusWidth = is(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
  of->asyncEngineCount = is(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
  for (int axis = 0; axis < 3; ++axis) {
    of->maxGridSize[axis] = attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + axis);
    of->maxThreadsDim[axis] = attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + axis);
  }
  of->unifiedAddressing = of->managedMemory = of->concurrentKernels = of->cooperativeLaunch = 1;
  of->canUseHostPointerForRegisteredMem = of->hostRegisterSupported = 1;
  return cudaSuccess;
}

// -- memory

RT cudaMemGetInfo(size_t *free, size_t *total) {
  CONTEXT;
  return failed(cuMemGetInfo(free, total));
}
RT cudaMalloc(void **at, size_t size) {
  CONTEXT;
  WANTED(at);
  *at = nullptr;
  return size ? failed(allocate((Address *)at, size)) : cudaSuccess;
}
RT cudaFree(void *at) {
  CONTEXT;
  return failed(deallocate((Address)at));
}
RT cudaHostAlloc(void **at, size_t size, unsigned flags) {
  CONTEXT;
  WANTED(!(flags & ~7u));
  return failed(allocate_host(at, size));
}
RT cudaMallocHost(void **at, size_t size) { return cudaHostAlloc(at, size, 0); }
RT cudaFreeHost(void *at) {
  CONTEXT;
  return failed(deallocate_host(at));
}
RT cudaHostRegister(void *at, size_t size, unsigned flags) {
  CONTEXT;
  return failed(register_host(at, size, flags));
}
RT cudaHostUnregister(void *at) {
  CONTEXT;
  return failed(unregister_host(at));
}
RT cudaHostGetDevicePointer(void **to, void *at, unsigned flags) {
  CONTEXT;
  WANTED(!flags && pinned((Address)at, 1));
  return told(to, at);
}
RT cudaPointerGetAttributes(cudaPointerAttributes *of, const void *at) {
  WANTED(of);
  *of = {};
  Address base;
  size_t size;
  if (range_of((Address)at, &base, &size)) {
    of->type = cudaMemoryTypeUnregistered;
    of->device = -1;
    of->hostPointer = (void *)at;
    return cudaSuccess;
  }
  bool host = pinned((Address)at, 1);
  of->type = host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  of->device = current();
  of->devicePointer = (void *)at;
  of->hostPointer = host ? (void *)at : nullptr;
  return cudaSuccess;
}

// -- copies

static bool is_kind(int kind) { return kind >= cudaMemcpyHostToHost && kind <= cudaMemcpyDefault; }

RT cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind) {
  if (!is_kind(kind))
    return failed(cudaErrorInvalidMemcpyDirection);
  STREAM(nullptr);
  return failed(copy((Address)to, (Address)from, size, *stream, true));
}
RT cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind, cudaStream_t handle) {
  if (!is_kind(kind))
    return failed(cudaErrorInvalidMemcpyDirection);
  STREAM(handle);
  return failed(copy((Address)to, (Address)from, size, *stream, false));
}
RT cudaMemcpyPeerAsync(void *to, int target, const void *from, int source, size_t size, cudaStream_t handle) {
  DEVICE(target || source);
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, handle);
}
RT cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows,
                     cudaMemcpyKind kind, cudaStream_t handle) {
  if (!is_kind(kind))
    return failed(cudaErrorInvalidMemcpyDirection);
  STREAM(handle);
  return failed(copy_rows((Address)to, to_pitch, (Address)from, from_pitch, width, rows, *stream));
}
RT cudaMemset(void *at, int value, size_t size) {
  STREAM(nullptr);
  return failed(fill((Address)at, value, 1, size, *stream, true));
}
RT cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t handle) {
  STREAM(handle);
  return failed(fill((Address)at, value, 1, size, *stream, false));
}

// -- streams and events

RT cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int) {
  CONTEXT;
  WANTED(!(flags & ~1u));
  return told(handle, (cudaStream_t)new_stream(!(flags & cudaStreamNonBlocking)));
}
RT cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}
RT cudaStreamCreate(cudaStream_t *handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
RT cudaStreamDestroy(cudaStream_t handle) {
  CONTEXT;
  return failed(destroy_stream(handle));
}
RT cudaStreamGetPriority(cudaStream_t handle, int *priority) {
  STREAM(handle);
  return told(priority, 0);
}
RT cudaStreamSynchronize(cudaStream_t handle) {
  STREAM(handle);
  return failed(synchronize(*stream));
}
RT cudaStreamQuery(cudaStream_t handle) {
  STREAM(handle);
  return failed(query(*stream));
}
RT cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  STREAM(handle);
  WANTED(!(flags & ~1u));
  return failed(wait_event(*stream, event));
}
RT cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
  STREAM(handle);
  return told(status, cudaStreamCaptureStatusNone);
}
RT cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus *status, unsigned long long *, cudaGraph_t *,
                            const cudaGraphNode_t **, const cudaGraphEdgeData **, size_t *) {
  STREAM(handle);
  return told(status, cudaStreamCaptureStatusNone);
}
RT cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  static thread_local cudaStreamCaptureMode now = cudaStreamCaptureModeGlobal;
  WANTED(mode);
  std::swap(*mode, now);
  return cudaSuccess;
}
RT cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t call, void *argument) {
  STREAM(handle);
  WANTED(call);
  enqueue(*stream, OTHER, "a host function", {}, [=] { return call(argument), std::string(); }, false);
  return cudaSuccess;
}
RT cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t call, void *argument, unsigned flags) {
  STREAM(handle);
  WANTED(call && !flags);
  auto work = [=] { return call(handle, cudaError_t(failure()), argument), std::string(); };
  enqueue(*stream, OTHER, "a callback", {}, work, false);
  return cudaSuccess;
}
RT cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  CONTEXT;
  WANTED(event);
  return failed(new_event((void **)event, flags));
}
RT cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
RT cudaEventDestroy(cudaEvent_t event) { return failed(destroy_event(event)); }
RT cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  STREAM(handle);
  return failed(record(event, *stream));
}
RT cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
  WANTED(!flags); // the other is for graphs
  return cudaEventRecord(event, handle);
}
RT cudaEventQuery(cudaEvent_t event) {
  CONTEXT;
  if (!by_allocator(__builtin_return_address(0)))
    return failed(query_event(event));
  Quiet here;
  return failed(query_event(event));
}
RT cudaEventSynchronize(cudaEvent_t event) {
  CONTEXT;
  return failed(synchronize_event(event));
}
RT cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t second) {
  CONTEXT;
  return failed(elapsed(milliseconds, first, second));
}

// -- the rest

RT cudaProfilerStart() { return cudaSuccess; }
RT cudaProfilerStop() { return cudaSuccess; }
RT cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long,
                                    cudaDriverEntryPointQueryResult *result) {
  CUdriverProcAddressQueryResult status;
  bool none = cuGetProcAddress(name, found, version, 0, &status);
  if (result)
    *result = none ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
RT cudaGetDriverEntryPoint(const char *name, void **found, unsigned long long flags,
                           cudaDriverEntryPointQueryResult *result) {
  return cudaGetDriverEntryPointByVersion(name, found, 13000, flags, result);
}

OF_RUNTIME void **__cudaRegisterFatBinary(void *) {
  static void *one;
  return &one;
}
OF_RUNTIME void __cudaRegisterFatBinaryEnd(void **) {}
OF_RUNTIME void __cudaUnregisterFatBinary(void **) {}
OF_RUNTIME void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
OF_RUNTIME void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, uint3 *, uint3 *,
                                       dim3 *, dim3 *, int *) {
  kernels[host] = name;
  ++counted(EMU_KERNELS);
}
OF_RUNTIME char __cudaInitModule(void **) { return 1; }
OF_RUNTIME unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  launches.push_back({grid, block, shared, stream});
  return 0;
}
RT __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  if (launches.empty())
    return failed(cudaErrorMissingConfiguration);
  Launch of = launches.back();
  launches.pop_back();
  *grid = of.grid, *block = of.block, *shared = of.shared, *(void **)stream = of.stream;
  return cudaSuccess;
}
RT __cudaGetKernel(cudaKernel_t *kernel, const void *of) { return told(kernel, (cudaKernel_t)of); }
RT __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void **, size_t, cudaStream_t) { return launched(kernel); }
RT cudaLaunchKernel(const void *kernel, dim3, dim3, void **, size_t, cudaStream_t) { return launched(kernel); }
RT cudaLaunchCooperativeKernel(const void *kernel, dim3, dim3, void **, size_t, cudaStream_t) { return launched(kernel); }
RT cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *kernel, void **) { return launched(kernel); }
RT cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
RT cudaFuncGetAttributes(cudaFuncAttributes *of, const void *) {
  WANTED(of);
  *of = {};
  of->maxThreadsPerBlock = 1024;
  of->binaryVersion = of->ptxVersion = 90;
  return cudaSuccess;
}
RT cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *, int, size_t) { return told(count, 2); }
RT cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *, int, size_t, unsigned) {
  return told(count, 2);
}

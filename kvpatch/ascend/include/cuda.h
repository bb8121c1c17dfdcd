// SPDX-License-Identifier: Apache-2.0
//
// The calls of CUDA that kvcached 0.1.6 names in csrc/inc/gpu_vmm.hpp, made on Huawei's ACL
// runtime, so that kvcached's C++ is compiled unchanged. Where the two differ:
//
//   unmap      ACL unmaps one mapping, by its first address; CUDA a range of whole ones
//   addresses  ACL takes no alignment and, on some devices, no wish; kvcached's are dropped
//   access     ACL's owner reads and writes from the mapping on; there is nothing to set
//   context    ACL wants one in every thread; kvcached's own threads select no device
//
// <acl/acl.h> is CANN's where it is installed, else the emulator's in kvpatch/hostdevice/acl.
#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <acl/acl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

// A status carries ACL's number.
typedef enum : int { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 107000 } CUresult;
typedef enum : int { cudaSuccess = 0 } cudaError_t;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef aclrtDrvMemHandle CUmemGenericAllocationHandle;
typedef enum { CU_MEM_ALLOCATION_TYPE_PINNED = 1 } CUmemAllocationType;
typedef enum { CU_MEM_LOCATION_TYPE_DEVICE = 1 } CUmemLocationType;
typedef enum { CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 } CUmemAccess_flags;
typedef enum { CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0 } CUmemGranularity_flags;
typedef enum { CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY = 102 } CUdevice_attribute;
#define CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY
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

namespace kvpatch_ascend {

// The device that kvcached selected. Its threads that map pages ahead of need select none.
inline std::atomic<int> device{-1};

inline void want_context() {
  int32_t current;
  if (device >= 0 && aclrtGetDevice(&current) != ACL_SUCCESS)
    aclrtSetDevice(device);
}

// Where each mapping begins, because ACL unmaps by that address only.
struct Mappings {
  std::mutex mutex;
  std::map<CUdeviceptr, size_t> sizes;
};
inline Mappings &mappings() {
  static Mappings *all = new Mappings; // outlives every static destructor
  return *all;
}

inline aclrtPhysicalMemProp huge_pages_of(int index) {
  aclrtPhysicalMemProp wanted{};
  wanted.handleType = ACL_MEM_HANDLE_TYPE_NONE;
  wanted.allocationType = ACL_MEM_ALLOCATION_TYPE_PINNED;
  wanted.memAttr = ACL_HBM_MEM_HUGE;
  wanted.location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
  wanted.location.id = static_cast<uint32_t>(index);
  return wanted;
}

inline const char *text_of(int status) {
  thread_local std::string text;
  if (status == ACL_SUCCESS)
    return "no error";
  const char *why = aclGetRecentErrMsg();
  text = "ACL error " + std::to_string(status);
  if (why && *why)
    text += std::string(": ") + why;
  return text.c_str();
}

} // namespace kvpatch_ascend

inline CUresult cuGetErrorString(CUresult status, const char **text) {
  *text = kvpatch_ascend::text_of(status);
  return CUDA_SUCCESS;
}
inline const char *cudaGetErrorString(cudaError_t status) {
  return kvpatch_ascend::text_of(status);
}
inline cudaError_t cudaFree(int) { // how kvcached starts the runtime
  aclError status = aclInit(nullptr);
  return cudaError_t(status == ACL_ERROR_REPEAT_INITIALIZE ? ACL_SUCCESS : status);
}
inline cudaError_t cudaSetDevice(int index) {
  aclError status = aclrtSetDevice(index);
  if (status == ACL_SUCCESS)
    kvpatch_ascend::device = index;
  return cudaError_t(status);
}
inline cudaError_t cudaGetDevice(int *index) {
  int32_t current = -1;
  aclError status = aclrtGetDevice(&current);
  *index = current;
  return cudaError_t(status);
}
inline cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  kvpatch_ascend::want_context();
  return cudaError_t(aclrtGetMemInfo(ACL_HBM_MEM, free_bytes, total_bytes));
}
inline cudaError_t cudaDeviceSynchronize() {
  kvpatch_ascend::want_context();
  return cudaError_t(aclrtSynchronizeDevice());
}
inline CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                              CUmemGranularity_flags) {
  kvpatch_ascend::want_context();
  auto wanted = kvpatch_ascend::huge_pages_of(prop->location.id);
  return CUresult(
      aclrtMemGetAllocationGranularity(&wanted, ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM, granularity));
}
// ACL has no such attribute; a device that names a granularity has virtual memory.
inline CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute, CUdevice index) {
  size_t granularity = 0;
  CUmemAllocationProp prop{CU_MEM_ALLOCATION_TYPE_PINNED, {CU_MEM_LOCATION_TYPE_DEVICE, index}};
  *value = cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM) ==
               CUDA_SUCCESS &&
           granularity > 0;
  return CUDA_SUCCESS;
}
inline CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                            const CUmemAllocationProp *prop, unsigned long long) {
  kvpatch_ascend::want_context();
  auto wanted = kvpatch_ascend::huge_pages_of(prop->location.id);
  return CUresult(aclrtMallocPhysical(handle, size, &wanted, 0));
}
inline CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  kvpatch_ascend::want_context();
  return CUresult(aclrtFreePhysical(handle));
}
inline CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t, CUdeviceptr,
                                    unsigned long long) {
  kvpatch_ascend::want_context();
  void *reserved = nullptr;
  aclError status = aclrtReserveMemAddress(&reserved, size, 0, nullptr, 0);
  *address = reinterpret_cast<CUdeviceptr>(reserved);
  return CUresult(status);
}
inline CUresult cuMemAddressFree(CUdeviceptr address, size_t) {
  kvpatch_ascend::want_context();
  return CUresult(aclrtReleaseMemAddress(reinterpret_cast<void *>(address)));
}
inline CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                         CUmemGenericAllocationHandle handle, unsigned long long) {
  kvpatch_ascend::want_context();
  auto &all = kvpatch_ascend::mappings();
  std::lock_guard<std::mutex> lock(all.mutex);
  aclError status = aclrtMapMem(reinterpret_cast<void *>(address), size, offset, handle, 0);
  if (status == ACL_SUCCESS)
    all.sizes[address] = size;
  return CUresult(status);
}
inline CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  kvpatch_ascend::want_context();
  auto &all = kvpatch_ascend::mappings();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto first = all.sizes.lower_bound(address);
  auto last = all.sizes.lower_bound(address + size);
  // As CUDA: nothing there, or a mapping that the range has a part of.
  if (first == last || std::prev(last)->first + std::prev(last)->second > address + size)
    return CUDA_ERROR_INVALID_VALUE;
  while (first != last) {
    aclError status = aclrtUnmapMem(reinterpret_cast<void *>(first->first));
    if (status != ACL_SUCCESS)
      return CUresult(status);
    first = all.sizes.erase(first);
  }
  return CUDA_SUCCESS;
}
inline CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) {
  return CUDA_SUCCESS;
}

// For kvpatch: tells this build of kvcached from the others, and on what it runs.
#ifdef KVPATCH_ACL_EMULATOR
#define KVPATCH_ASCEND_RUNTIME 2
#else
#define KVPATCH_ASCEND_RUNTIME 1
#endif
extern "C" __attribute__((used, visibility("default"))) inline int kvpatch_ascend_runtime() {
  return KVPATCH_ASCEND_RUNTIME;
}

// kvcached's tensors over its reservation are torch_npu's, made by its entry of the same shape as
// torch's. It is looked up, so that one build serves every torch_npu.
#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

namespace torch::stable {

inline Tensor kvpatch_ascend_from_blob(void *data, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                                       torch::headeronly::IntHeaderOnlyArrayRef strides,
                                       Device device, torch::headeronly::ScalarType dtype) {
  using Make = AOTITorchError (*)(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t,
                                  int32_t, int32_t, AtenTensorHandle *, int32_t, const uint8_t *,
                                  int64_t);
  void *library = dlopen("libtorch_npu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!library) {
#ifdef KVPATCH_ACL_EMULATOR
    // The emulated device's memory is the host's.
    return from_blob(data, sizes, strides, Device(DeviceType::CPU), dtype);
#else
    throw std::runtime_error("torch_npu is not imported, and makes the tensors of an NPU");
#endif
  }
  auto make = reinterpret_cast<Make>(dlsym(library, "aoti_torch_create_tensor_from_blob_npu_v2"));
  if (!make)
    throw std::runtime_error("this torch_npu has no aoti_torch_create_tensor_from_blob_npu_v2");
  constexpr int32_t kPrivateUse1 = 20; // c10's DeviceType
  AtenTensorHandle made = nullptr;
  auto type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  auto index = device.index() < 0 ? 0 : static_cast<int32_t>(device.index());
  if (make(data, static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), 0, type,
           kPrivateUse1, index, &made, 0, nullptr, 0) != 0)
    throw std::runtime_error("torch_npu made no tensor over kvcached's memory");
  return Tensor(made);
}

} // namespace torch::stable
#define from_blob kvpatch_ascend_from_blob

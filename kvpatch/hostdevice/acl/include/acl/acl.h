// SPDX-License-Identifier: Apache-2.0
//
// The calls of the ACL runtime that kvpatch/ascend/include/cuda.h makes, for a build against the
// emulator. Names and argument types only, written from how torch_npu (BSD-3-Clause) and
// vllm-ascend (Apache-2.0) call them and from the published API reference. On a machine with CANN
// its own header is included in place of this one.
#pragma once

#include <cstddef>
#include <cstdint>

#define KVPATCH_ACL_EMULATOR 1

extern "C" {

typedef int aclError;
typedef void *aclrtDrvMemHandle;

constexpr aclError ACL_SUCCESS = 0;
constexpr aclError ACL_ERROR_REPEAT_INITIALIZE = 100002;

typedef enum { ACL_HBM_MEM = 1, ACL_HBM_MEM_HUGE = 4, ACL_HBM_MEM_NORMAL = 5 } aclrtMemAttr;
typedef enum { ACL_MEM_HANDLE_TYPE_NONE = 0 } aclrtMemHandleType;
typedef enum { ACL_MEM_ALLOCATION_TYPE_PINNED = 0 } aclrtMemAllocationType;
typedef enum { ACL_MEM_LOCATION_TYPE_HOST = 0, ACL_MEM_LOCATION_TYPE_DEVICE = 1 } aclrtMemLocationType;
typedef enum { ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM = 0 } aclrtMemGranularityOptions;

struct aclrtMemLocation {
  uint32_t id;
  aclrtMemLocationType type;
};
struct aclrtPhysicalMemProp {
  aclrtMemHandleType handleType;
  aclrtMemAllocationType allocationType;
  aclrtMemAttr memAttr;
  aclrtMemLocation location;
  uint64_t reserve;
};

aclError aclInit(const char *configuration);
aclError aclrtSetDevice(int32_t device);
aclError aclrtGetDevice(int32_t *device);
aclError aclrtGetMemInfo(aclrtMemAttr kind, size_t *free_bytes, size_t *total_bytes);
aclError aclrtSynchronizeDevice();
const char *aclGetRecentErrMsg();

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *, aclrtMemGranularityOptions,
                                          size_t *granularity);
aclError aclrtReserveMemAddress(void **address, size_t size, size_t alignment, void *expected,
                                uint64_t flags);
aclError aclrtReleaseMemAddress(void *address);
aclError aclrtMallocPhysical(aclrtDrvMemHandle *, size_t size, const aclrtPhysicalMemProp *,
                             uint64_t flags);
aclError aclrtFreePhysical(aclrtDrvMemHandle);
aclError aclrtMapMem(void *address, size_t size, size_t offset, aclrtDrvMemHandle, uint64_t flags);
aclError aclrtUnmapMem(void *address);

} // extern "C"

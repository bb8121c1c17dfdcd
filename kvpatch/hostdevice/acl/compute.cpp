// SPDX-License-Identifier: Apache-2.0
//
// What torch_npu and vllm-ascend link to besides memory, streams and copies. The emulator computes
// nothing: a call that would is an error with its name. Calls that only set something up succeed,
// and say why they may.
#include "emulator.hpp"

using namespace acl;

#define REFUSED(name)                                                                              \
  ACL aclError name() { return fail(NOT_SUPPORTED, #name ": the ACL emulator does not have it"); }
#define NO_OBJECT(name)                                                                            \
  ACL void *name() {                                                                               \
    fail(NOT_SUPPORTED, #name ": the ACL emulator does not have it");                              \
    return nullptr;                                                                                \
  }
#define WITHOUT_EFFECT(name)                                                                       \
  ACL aclError name() { return SUCCESS; }

// -- computation

REFUSED(aclopCompileAndExecute)
REFUSED(aclopCompileAndExecuteV2)
REFUSED(aclGenGraphAndDumpForOp)
REFUSED(aclrtLaunchKernelWithHostArgs)
REFUSED(aclrtBinaryGetFunction)
REFUSED(aclrtBinaryGetFunctionByEntry)
REFUSED(aclrtBinaryLoadFromData)
REFUSED(aclrtBinaryUnLoad)
REFUSED(aclrtGetFunctionAddr)
REFUSED(rtKernelLaunch)
REFUSED(rtFunctionGetMetaInfo)
REFUSED(rtFunctionGetMetaInfoSize)
REFUSED(rtGetC2cCtrlAddr)
REFUSED(aclrtGetHardwareSyncAddr)

// What an operator is described with.
NO_OBJECT(aclCreateDataBuffer)
NO_OBJECT(aclCreateTensorDesc)
NO_OBJECT(aclopCreateAttr)
NO_OBJECT(aclCreateGraphDumpOpt)
REFUSED(aclDestroyDataBuffer)
REFUSED(aclDestroyTensorDesc)
REFUSED(aclDestroyGraphDumpOpt)
REFUSED(aclGetTensorDescDimV2)
REFUSED(aclGetTensorDescFormat)
REFUSED(aclGetTensorDescNumDims)
REFUSED(aclGetTensorDescType)
REFUSED(aclSetTensorDescName)
REFUSED(aclSetTensorFormat)
REFUSED(aclSetTensorPlaceMent)
REFUSED(aclSetTensorShape)
REFUSED(aclopDestroyAttr)
REFUSED(aclopSetAttrBool)
REFUSED(aclopSetAttrDataType)
REFUSED(aclopSetAttrFloat)
REFUSED(aclopSetAttrInt)
REFUSED(aclopSetAttrListBool)
REFUSED(aclopSetAttrListFloat)
REFUSED(aclopSetAttrListInt)
REFUSED(aclopSetAttrListListInt)
REFUSED(aclopSetAttrString)

// -- other devices and processes

REFUSED(aclrtDeviceEnablePeerAccess)
REFUSED(aclrtDeviceGetBareTgid)
REFUSED(aclrtMemExportToShareableHandle)
REFUSED(aclrtMemImportFromShareableHandle)
REFUSED(aclrtMemSetPidToShareableHandle)
REFUSED(aclrtProcessReport)
REFUSED(aclrtRegStreamStateCallback)
REFUSED(aclrtCtxGetCurrentDefaultStream)
ACL aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t, int32_t) {
  *can = 0;
  return SUCCESS;
}

// -- dumps

REFUSED(aclmdlFinalizeDump)
REFUSED(aclmdlInitDump)
REFUSED(aclmdlSetDump)

// -- settings: of computations, of which there are none

WITHOUT_EFFECT(aclrtSetOpWaitTimeout)
WITHOUT_EFFECT(aclrtSetDeviceSatMode)
WITHOUT_EFFECT(aclrtSetOpExecuteTimeOut)
WITHOUT_EFFECT(aclrtSetSysParamOpt)
WITHOUT_EFFECT(aclrtCtxSetSysParamOpt)
WITHOUT_EFFECT(aclSetCompileopt)
WITHOUT_EFFECT(aclopSetCompileFlag)
ACL aclError aclrtGetSysParamOpt(int, int64_t *value) {
  *value = 0;
  return SUCCESS;
}
ACL aclError aclrtCtxGetSysParamOpt(int, int64_t *value) {
  *value = 0;
  return SUCCESS;
}
ACL size_t aclGetCompileoptSize(int) { return 1; }
ACL aclError aclGetCompileopt(int, char *value, size_t room) {
  if (room)
    value[0] = 0;
  return SUCCESS;
}
ACL aclError aclGetDeviceCapability(uint32_t, int, int64_t *value) {
  *value = 24; // cores
  return SUCCESS;
}
REFUSED(aclrtGetDeviceInfo)
REFUSED(aclrtGetDevicesTopo)
REFUSED(aclrtGetDeviceUtilizationRate)

// A stream reports its own failure, where it is waited for.
WITHOUT_EFFECT(aclrtPeekAtLastError)
WITHOUT_EFFECT(aclrtGetLastError)

// -- logs and profiles: nobody reads them

ACL void aclAppLog(int, const char *, const char *, uint32_t, const char *, ...) {}
ACL int CheckLogLevel(int, int) { return 0; }
ACL void DlogRecord(int, int, const char *, ...) {}
WITHOUT_EFFECT(MsprofGetHashId)
WITHOUT_EFFECT(MsprofRegisterCallback)
WITHOUT_EFFECT(MsprofReportAdditionalInfo)
WITHOUT_EFFECT(MsprofReportApi)
WITHOUT_EFFECT(MsprofReportCompactInfo)
WITHOUT_EFFECT(MsprofStr2Id)
ACL uint64_t MsprofSysCycleTime() { return 0; }
ACL int mmGetTid() { return static_cast<int>(gettid()); }
ACL int strcpy_s(char *to, size_t room, const char *from) {
  if (!to || !from || strlen(from) >= room)
    return EINVAL;
  strcpy(to, from);
  return 0;
}

// -- kernels: a library registers its own while it is loaded; they cannot be launched

ACL aclError rtDevBinaryRegister(const void *, void **handle) {
  static int registered;
  *handle = &registered;
  return SUCCESS;
}
WITHOUT_EFFECT(rtFunctionRegister)

// What vllm-ascend's kernels ask about the chip, by the names of C++. They return values, so that
// there is no error to return.
#define ENDS(number, symbol)                                                                       \
  extern "C" __attribute__((visibility("default"))) void kvpatch_acl_platform_##number() asm(      \
      symbol);                                                                                     \
  void kvpatch_acl_platform_##number() {                                                           \
    fprintf(stderr, "the ACL emulator does not have %s\n", symbol);                                \
    abort();                                                                                       \
  }
ENDS(1, "_ZN2fe13PlatFormInfos13GetLocalMemBwERKNS_12LocalMemTypeERm")
ENDS(2, "_ZN2fe13PlatFormInfos15GetLocalMemSizeERKNS_12LocalMemTypeERm")
ENDS(3, "_ZN2fe13PlatFormInfos20SetCoreNumByCoreTypeERKSs")
ENDS(4, "_ZN2fe13PlatFormInfos22GetPlatformResWithLockERKSsS2_RSs")
ENDS(5, "_ZN2fe19PlatformInfoManager24InitRuntimePlatformInfosERKSs")
ENDS(6, "_ZN2fe19PlatformInfoManager31GetRuntimePlatformInfosByDeviceERKjRNS_13PlatFormInfosEb")
ENDS(7, "_ZN2fe19PlatformInfoManager8InstanceEv")
ENDS(8, "_ZNK2fe13PlatFormInfos10GetCoreNumEv")

// What torch_npu asks of ATB, by the names of C++: to make an operation and what it runs in.
#define NO_ATB(number, symbol)                                                                     \
  extern "C" __attribute__((visibility("default"))) int kvpatch_acl_atb_##number() asm(symbol);    \
  int kvpatch_acl_atb_##number() {                                                                 \
    return fail(NOT_SUPPORTED, symbol ": the ACL emulator does not have it");                      \
  }
NO_ATB(1, "_ZN3atb13CreateContextEPPNS_7ContextE")
NO_ATB(2, "_ZN3atb14DestroyContextEPNS_7ContextE")
NO_ATB(3, "_ZN3atb15CreateOperationINS_5infer11LinearParamEEEiRKT_PPNS_9OperationE")
NO_ATB(4, "_ZN3atb15CreateOperationINS_5infer12ElewiseParamEEEiRKT_PPNS_9OperationE")
NO_ATB(5, "_ZN3atb15CreateOperationINS_5infer12RmsNormParamEEEiRKT_PPNS_9OperationE")
NO_ATB(6, "_ZN3atb15CreateOperationINS_5infer14GroupTopkParamEEEiRKT_PPNS_9OperationE")
NO_ATB(7, "_ZN3atb15CreateOperationINS_5infer18SelfAttentionParamEEEiRKT_PPNS_9OperationE")
NO_ATB(8, "_ZN3atb15CreateOperationINS_5infer19PagedAttentionParamEEEiRKT_PPNS_9OperationE")
NO_ATB(9, "_ZN3atb15CreateOperationINS_5infer20ReshapeAndCacheParamEEEiRKT_PPNS_9OperationE")
NO_ATB(10, "_ZN3atb15CreateOperationINS_5infer9RopeParamEEEiRKT_PPNS_9OperationE")
NO_ATB(11, "_ZN3atb16DestroyOperationEPNS_9OperationE")
ENDS(9, "_ZN3atb5Utils13GetTensorSizeERKNS_6TensorE")

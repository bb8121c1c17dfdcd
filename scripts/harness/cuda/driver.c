// A driver of NVIDIA's with two functions that tell something: as many H100s as
// KVPATCH_STAND_IN_GPUS says, of a driver for CUDA KVPATCH_STAND_IN_CUDA. No device can be used.
// Built twice: as libnvidia-ml.so.1, and with DRIVER as libcuda.so.1.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int told(const char *name, int otherwise) {
  const char *value = getenv(name);
  return value ? atoi(value) : otherwise;
}

static int cuda(void) { return told("KVPATCH_STAND_IN_CUDA", 13000); }

#ifdef DRIVER

enum { NO_DEVICE = 100 };

int cuDriverGetVersion(int *version) {
  *version = cuda();
  return 0;
}

static int no_device(void) { return NO_DEVICE; }
#define NO(name) \
  int name(void) { return NO_DEVICE; }

int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags,
                        int *status) {
  *found = (void *)no_device;
  if (!strcmp(name, "cuDriverGetVersion"))
    *found = (void *)cuDriverGetVersion;
  if (!strcmp(name, "cuGetProcAddress") || !strcmp(name, "cuGetProcAddress_v2"))
    *found = (void *)cuGetProcAddress_v2;
  if (status)
    *status = 0;
  return 0;
}

#else

enum { OK = 0, INVALID_ARGUMENT = 2 };
typedef void *Device;
struct Memory {
  unsigned long long total, free, used;
};

static int gpus(void) { return told("KVPATCH_STAND_IN_GPUS", 1); }

int nvmlInit(void) { return OK; }
int nvmlInit_v2(void) { return OK; }
int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return "an error of the stand-in for NVML"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = gpus();
  return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
  *device = (Device)(index + 1ul);
  return index < (unsigned)gpus() ? OK : INVALID_ARGUMENT;
}

int nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor) {
  *major = 9, *minor = 0;
  return OK;
}

int nvmlDeviceGetName(Device device, char *name, unsigned size) {
  snprintf(name, size, "NVIDIA H100 80GB HBM3");
  return OK;
}

int nvmlDeviceGetUUID(Device device, char *uuid, unsigned size) {
  snprintf(uuid, size, "GPU-00000000-0000-0000-0000-%012lx", (unsigned long)device);
  return OK;
}

int nvmlDeviceGetMemoryInfo(Device device, struct Memory *memory) {
  *memory = (struct Memory){80ull << 30, 79ull << 30, 1ull << 30};
  return OK;
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
  snprintf(version, size, "580.0");
  return OK;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = cuda();
  return OK;
}

int nvmlDeviceGetP2PStatus(Device one, Device other, int kind, int *status) {
  *status = OK;
  return OK;
}

#endif

// SPDX-License-Identifier: Apache-2.0
//
// Asks a CUDA device what the documentation promises:
//
//   conformance LIBCUDA LIBCUDART [--list | CHECK...]
//
// Each check is a process of its own, and a line: "right NAME", or "WRONG NAME: ...". Checks of
// order and of what CUDA leaves undefined are asked of the emulated device only. No kernel is
// needed, and no nvcc. Exit status: how many were wrong.
#include <cuda.h>
#define __CUDA_INTERNAL_SKIP_CPP_HEADERS__
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "work.h"

namespace {

void *driver, *runtime;

void *found(const char *name) {
  void *at = dlsym(strncmp(name, "cuda", 4) ? driver : runtime, name);
  if (!at)
    fprintf(stderr, "%s is not there\n", name), _exit(2);
  return at;
}

#define TEXT(name) #name
#define CALL(name) ((decltype(&name))found(TEXT(name)))
// The check ends as wrong unless a call gives this status.
#define EXPECT(status, call)                                                                                           \
  if (int got = (call); got != (status))                                                                               \
  return std::string(#call).substr(0, 80) + " gave " + std::to_string(got) + ", not " + std::to_string(status)
#define OK(call) EXPECT(0, call)
#define THAT(...)                                                                                                      \
  if (!(__VA_ARGS__))                                                                                                  \
  return std::string("not so: ") + #__VA_ARGS__

constexpr size_t PAGE = 2 << 20;
const CUmemAllocationProp ON_DEVICE = [] {
  CUmemAllocationProp of = {};
  of.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  of.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  return of;
}();
const CUmemAccessDesc ACCESS = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

uint64_t complaints() { return CALL(emu_count)(EMU_COMPLAINTS); }
bool complains_of(const char *what) {
  for (size_t index = 0; index < complaints(); ++index)
    if (strstr(CALL(emu_complaint)(index), what))
      return true;
  return false;
}

CUdeviceptr page() { // mapped, accessible, in a reservation of two
  CUdeviceptr at;
  CUmemGenericAllocationHandle handle;
  CALL(cuMemAddressReserve)(&at, 2 * PAGE, 0, 0, 0);
  CALL(cuMemCreate)(&handle, PAGE, &ON_DEVICE, 0);
  CALL(cuMemMap)(at, PAGE, 0, handle, 0);
  CALL(cuMemRelease)(handle);
  CALL(cuMemSetAccess)(at, PAGE, &ACCESS, 1);
  return at;
}

CUstream stream() {
  CUstream made;
  CALL(cuStreamCreate)(&made, CU_STREAM_NON_BLOCKING);
  return made;
}

CUevent event() {
  CUevent made;
  CALL(cuEventCreate)(&made, CU_EVENT_DISABLE_TIMING);
  return made;
}

char *host() {
  void *made;
  CALL(cuMemHostAlloc)(&made, PAGE, 0);
  memset(made, 1, PAGE);
  return (char *)made;
}

// What is queued behind it waits until it is opened.
struct Gate {
  std::atomic<bool> open{false};
  explicit Gate(CUstream on) { CALL(cudaLaunchHostFunc)(on, pass, this); }
  static void pass(void *raw) {
    while (!((Gate *)raw)->open)
      std::this_thread::yield();
  }
};

int write_to(CUdeviceptr at, char *from, CUstream on) { return CALL(cuMemcpyHtoDAsync)(at, from, PAGE, on); }
int read_from(CUdeviceptr at, char *to, CUstream on) { return CALL(cuMemcpyDtoHAsync)(to, at, PAGE, on); }

using Wrong = std::string;

// -- what any device answers

Wrong initialization() {
  CUdevice device;
  EXPECT(CUDA_ERROR_NOT_INITIALIZED, CALL(cuDeviceGet)(&device, 0));
  OK(CALL(cuInit)(0));
  CUdeviceptr at;
  EXPECT(CUDA_ERROR_INVALID_CONTEXT, CALL(cuMemAlloc)(&at, 16));
  EXPECT(CUDA_ERROR_INVALID_VALUE, CALL(cuInit)(1));
  EXPECT(CUDA_ERROR_INVALID_DEVICE, CALL(cuDeviceGet)(&device, 1 << 20));
  EXPECT(cudaErrorInvalidDevice, CALL(cudaSetDevice)(1 << 20));
  EXPECT(cudaErrorInvalidDevice, CALL(cudaGetLastError)());
  OK(CALL(cudaGetLastError)());
  return "";
}

Wrong mapping() {
  CUdeviceptr at = page();
  CUmemGenericAllocationHandle other;
  EXPECT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemCreate)(&other, PAGE / 2, &ON_DEVICE, 0));
  EXPECT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressReserve)(&at, PAGE / 2, 0, 0, 0));
  OK(CALL(cuMemCreate)(&other, PAGE, &ON_DEVICE, 0));
  EXPECT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemMap)(at, PAGE, 0, other, 0));            // is mapped
  EXPECT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemMap)(at + 64 * PAGE, PAGE, 0, other, 0)); // is not reserved
  EXPECT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemUnmap)(at + PAGE, PAGE));                // is not mapped
  EXPECT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemSetAccess)(at + PAGE, PAGE, &ACCESS, 1));
  EXPECT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressFree)(at, 2 * PAGE)); // has a mapping
  OK(CALL(cuMemUnmap)(at, PAGE));
  EXPECT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressFree)(at, PAGE)); // another size
  OK(CALL(cuMemAddressFree)(at, 2 * PAGE));
  OK(CALL(cuMemRelease)(other));
  return "";
}

Wrong access() {
  CUdeviceptr at = page();
  char *memory = host();
  CUmemGenericAllocationHandle handle;
  OK(CALL(cuMemCreate)(&handle, PAGE, &ON_DEVICE, 0));
  OK(CALL(cuMemMap)(at + PAGE, PAGE, 0, handle, 0));
  THAT(CALL(cuMemcpyHtoD)(at + PAGE, memory, PAGE) != CUDA_SUCCESS); // no access was set
  OK(CALL(cuMemSetAccess)(at + PAGE, PAGE, &ACCESS, 1));
  OK(CALL(cuMemcpyHtoD)(at + PAGE, memory, PAGE));
  OK(CALL(cuMemcpyHtoD)(at + PAGE / 2, memory, PAGE)); // over two mappings
  return "";
}

Wrong accounting() {
  size_t before, now, total;
  OK(CALL(cuMemGetInfo)(&before, &total));
  CUdeviceptr at = page();
  OK(CALL(cuMemGetInfo)(&now, &total));
  THAT(now == before - PAGE);
  OK(CALL(cuMemUnmap)(at, PAGE));
  OK(CALL(cuMemGetInfo)(&now, &total));
  THAT(now == before);
  EXPECT(CUDA_ERROR_OUT_OF_MEMORY, CALL(cuMemAlloc)(&at, total + PAGE));
  OK(CALL(cuMemGetInfo)(&now, &total));
  THAT(now == before);
  return "";
}

Wrong registration() {
  void *memory = mmap(nullptr, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CUdeviceptr at;
  EXPECT(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, CALL(cuMemHostUnregister)(memory));
  OK(CALL(cuMemHostRegister)(memory, PAGE, 0));
  EXPECT(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, CALL(cuMemHostRegister)(memory, PAGE, 0));
  cudaPointerAttributes of;
  OK(CALL(cudaPointerGetAttributes)(&of, memory));
  THAT(of.type == cudaMemoryTypeHost);
  OK(CALL(cuMemHostUnregister)(memory));
  EXPECT(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, CALL(cuMemHostUnregister)(memory));
  EXPECT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemHostRegister)(memory, 0, 0));
  OK(CALL(cudaPointerGetAttributes)(&of, memory));
  THAT(of.type == cudaMemoryTypeUnregistered);
  OK(CALL(cuMemAlloc)(&at, PAGE));
  THAT(CALL(cuMemHostRegister)((void *)at, PAGE, 0) != CUDA_SUCCESS);
  return "";
}

Wrong batches() {
  CUdeviceptr at = page(), to[2] = {at, at + PAGE / 2}, from[2];
  char *memory = host(), *back = host();
  from[0] = (CUdeviceptr)memory, from[1] = from[0] + PAGE / 2;
  size_t sizes[2] = {PAGE / 2, PAGE / 2}, first = 0, later = 1;
  CUmemcpyAttributes of = {};
  of.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  CUstream on = stream();
  auto call = CALL(cuMemcpyBatchAsync);
  EXPECT(CUDA_ERROR_INVALID_VALUE, call(to, from, sizes, 0, &of, &first, 1, on));
  EXPECT(CUDA_ERROR_INVALID_VALUE, call(to, from, sizes, 2, &of, &first, 1, nullptr)); // the default stream
  EXPECT(CUDA_ERROR_INVALID_VALUE, call(to, from, sizes, 2, &of, &later, 1, on));
  memset(memory, 7, PAGE);
  OK(call(to, from, sizes, 2, &of, &first, 1, on));
  OK(read_from(at, back, on));
  OK(CALL(cuStreamSynchronize)(on));
  THAT(!memcmp(memory, back, PAGE));
  return "";
}

Wrong events() {
  CUevent never = event(), timed;
  CUstream on = stream();
  float milliseconds;
  OK(CALL(cuEventQuery)(never)); // of no work
  OK(CALL(cuEventCreate)(&timed, CU_EVENT_DEFAULT));
  EXPECT(CUDA_ERROR_INVALID_HANDLE, CALL(cuEventElapsedTime)(&milliseconds, timed, timed)); // was not recorded
  EXPECT(CUDA_ERROR_INVALID_VALUE, CALL(cuEventCreate)(&timed, 1u << 20));
  Gate gate(on);
  OK(CALL(cuEventRecord)(timed, on));
  EXPECT(CUDA_ERROR_NOT_READY, CALL(cuEventQuery)(timed));
  EXPECT(CUDA_ERROR_NOT_READY, CALL(cuStreamQuery)(on));
  gate.open = true;
  OK(CALL(cuEventSynchronize)(timed));
  OK(CALL(cuEventElapsedTime)(&milliseconds, timed, timed));
  OK(CALL(cuEventRecord)(never, on));
  OK(CALL(cuStreamSynchronize)(on));
  EXPECT(CUDA_ERROR_INVALID_HANDLE, CALL(cuEventElapsedTime)(&milliseconds, timed, never)); // has no time
  return "";
}

// A copy on one stream, and behind its event one on another, read what was written.
Wrong ordered() {
  CUdeviceptr at = page();
  char *memory = host(), *back = host();
  CUstream one = stream(), other = stream();
  CUevent written = event();
  for (int round = 2; round < 6; ++round) {
    Gate gate(one);
    memset(memory, round, PAGE);
    OK(write_to(at, memory, one));
    OK(CALL(cuEventRecord)(written, one));
    OK(CALL(cuStreamWaitEvent)(other, written, 0));
    OK(read_from(at, back, other));
    gate.open = true;
    OK(CALL(cuStreamSynchronize)(other));
    THAT(back[0] == round && back[PAGE - 1] == round);
  }
  return "";
}

Wrong synchronized() {
  CUdeviceptr at = page();
  char *memory = host(), *back = host();
  CUstream one = stream(), other = stream();
  CUevent written = event();
  for (int round = 2; round < 6; ++round) {
    memset(memory, round, PAGE);
    OK(write_to(at, memory, one));
    OK(CALL(cuEventRecord)(written, one));
    if (round % 2) {
      OK(CALL(cuEventSynchronize)(written));
    } else {
      while (CALL(cuEventQuery)(written) == CUDA_ERROR_NOT_READY)
        std::this_thread::yield();
    }
    OK(read_from(at, back, other));
    OK(CALL(cuStreamSynchronize)(other));
    THAT(back[0] == round && back[PAGE - 1] == round);
  }
  return "";
}

Wrong legacy() {
  CUdeviceptr at = page();
  char *memory = host(), *back = host();
  CUstream blocking;
  OK(CALL(cuStreamCreate)(&blocking, CU_STREAM_DEFAULT));
  for (int round = 2; round < 6; ++round) {
    memset(memory, round, PAGE);
    OK(write_to(at, memory, round % 2 ? nullptr : blocking));
    OK(read_from(at, back, round % 2 ? blocking : nullptr));
    OK(CALL(cuCtxSynchronize)());
    THAT(back[0] == round && back[PAGE - 1] == round);
  }
  return "";
}

// What is not pinned is staged before the call returns.
Wrong staged() {
  CUdeviceptr at = page();
  std::vector<char> memory(PAGE, 3), back(PAGE);
  CUstream on = stream();
  OK(write_to(at, memory.data(), on));
  memset(memory.data(), 4, PAGE);
  OK(read_from(at, back.data(), on)); // has waited
  THAT(back[0] == 3 && back[PAGE - 1] == 3);
  return "";
}

// -- what CUDA leaves undefined, and order

Wrong unwritten() {
  char *back = host();
  OK(read_from(page(), back, nullptr));
  OK(CALL(cuCtxSynchronize)());
  THAT(back[0] != 0 && back[PAGE - 1] != 0);
  return "";
}

Wrong races(bool first_writes, bool second_writes) {
  CUdeviceptr at = page();
  char *memory = host(), *other = host();
  CUstream one = stream(), two = stream();
  OK(first_writes ? write_to(at, memory, one) : read_from(at, memory, one));
  OK(second_writes ? write_to(at, other, two) : read_from(at, other, two));
  CALL(cuCtxSynchronize)();
  THAT(complaints() == (first_writes || second_writes ? 1 : 0));
  return "";
}
Wrong read_after_write() { return races(true, false); }
Wrong write_after_read() { return races(false, true); }
Wrong write_after_write() { return races(true, true); }
Wrong read_after_read() { return races(false, false); }

// What waits only inside of the implementation orders nothing.
Wrong quiet() {
  CUdeviceptr at = page(), other;
  char *memory = host(), *back = host();
  OK(CALL(cuMemAlloc)(&other, PAGE));
  OK(write_to(at, memory, stream()));
  OK(CALL(cuMemFree)(other));
  OK(read_from(at, back, stream()));
  THAT(complaints() == 1);
  return "";
}

// The host's own accesses of the tier.
Wrong by_host() {
  CUdeviceptr at = page();
  char *memory = host();
  CUstream on = stream();
  emu_access whole = {(uintptr_t)memory, PAGE, false};
  OK(read_from(at, memory, on));
  CALL(emu_host_access)("a read", &whole, 1);
  THAT(complaints() == 1 && complains_of("a read reads"));
  OK(CALL(cuStreamSynchronize)(on));
  CALL(emu_host_access)("a later read", &whole, 1);
  THAT(complaints() == 1);
  OK(write_to(at, memory, on));
  whole.write = true;
  CALL(emu_host_access)("a hole", &whole, 1);
  THAT(complaints() == 2 && complains_of("a hole writes"));
  return "";
}

// Work that says only when it runs what it uses is still before what waits for it.
Wrong late() {
  static CUdeviceptr at = page();
  CUstream one = stream(), other = stream();
  CUevent written = event();
  auto touches = [](void *) {
    emu_access whole = {(uintptr_t)at, PAGE, true};
    CALL(emu_touch)(&whole, 1);
  };
  Gate gate(one);
  CALL(emu_enqueue)(one, "late", nullptr, 0, touches, nullptr, false);
  OK(CALL(cuEventRecord)(written, one));
  OK(CALL(cuStreamWaitEvent)(other, written, 0));
  OK(read_from(at, host(), other));
  gate.open = true;
  OK(CALL(cuStreamSynchronize)(other));
  THAT(complaints() == 0);
  CALL(emu_enqueue)(one, "later", nullptr, 0, touches, nullptr, true);
  OK(read_from(at, host(), other));
  OK(CALL(cuCtxSynchronize)());
  THAT(complaints() == 1 && complains_of("later"));
  return "";
}

Wrong unmapped(bool waits) {
  CUdeviceptr at = page();
  char *memory = host();
  CUstream on = stream();
  Gate gate(on);
  OK(write_to(at, memory, on));
  if (waits) {
    gate.open = true;
    OK(CALL(cuStreamSynchronize)(on));
  }
  OK(CALL(cuMemUnmap)(at, PAGE));
  gate.open = true;
  EXPECT(waits ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cuStreamSynchronize)(on));
  THAT(complains_of("cuMemUnmap writes") == !waits && complains_of("USE AFTER UNMAP") == !waits);
  EXPECT(waits ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cuCtxSynchronize)()); // for good
  return "";
}
Wrong unmapped_early() { return unmapped(false); }
Wrong unmapped_in_order() { return unmapped(true); }

Wrong unregistered_early() {
  CUdeviceptr at = page();
  void *memory = mmap(nullptr, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CUstream on = stream();
  OK(CALL(cuMemHostRegister)(memory, PAGE, 0));
  OK(write_to(at, (char *)memory, on));
  OK(CALL(cuMemHostUnregister)(memory));
  THAT(complains_of("cudaHostUnregister writes"));
  return "";
}

Wrong freed_early() {
  CUdeviceptr at = page();
  char *memory = host();
  OK(write_to(at, memory, stream()));
  OK(CALL(cuMemFreeHost)(memory));
  THAT(complains_of("cudaFreeHost writes"));
  return "";
}

Wrong missing() {
  EXPECT(CUDA_ERROR_NOT_SUPPORTED, CALL(cuGraphCreate)(nullptr, 0));
  THAT(complains_of("cuGraphCreate is not emulated"));
  return "";
}

struct Check {
  const char *name;
  Wrong (*ask)();
  bool emulated; // asked of the emulated device only
};

#define ANY(name) {#name, name, false}
#define EMULATED(name) {#name, name, true}
const Check CHECKS[] = {
    ANY(initialization),          ANY(mapping),
    ANY(access),                  ANY(accounting),
    ANY(registration),            ANY(batches),
    ANY(events),                  ANY(ordered),
    ANY(synchronized),            ANY(legacy),
    ANY(staged),                  EMULATED(unwritten),
    EMULATED(read_after_write),   EMULATED(write_after_read),
    EMULATED(write_after_write),  EMULATED(read_after_read),
    EMULATED(quiet),              EMULATED(by_host),
    EMULATED(unmapped_early),     EMULATED(unmapped_in_order),
    EMULATED(unregistered_early), EMULATED(freed_early),
    EMULATED(missing),            EMULATED(late),
};
// In which the device may not complain.
const char *const IN_ORDER[] = {"ordered", "synchronized", "legacy", "staged", "batches", "events"};

Wrong asked(const Check &check, const char *cuda, const char *cudart) {
  driver = dlopen(cuda, RTLD_NOW | RTLD_GLOBAL);
  runtime = driver ? dlopen(cudart, RTLD_NOW) : nullptr;
  if (!runtime)
    return dlerror();
  bool emulated = dlsym(driver, "emu_count");
  if (check.emulated && !emulated)
    return "?";
  if (check.ask != initialization) {
    OK(CALL(cuInit)(0));
    OK(CALL(cudaSetDevice)(0));
    OK(CALL(cudaFree)(nullptr));
  }
  Wrong wrong = check.ask();
  for (auto name : IN_ORDER)
    if (wrong.empty() && emulated && !strcmp(name, check.name) && complaints())
      wrong = CALL(emu_complaint)(0);
  return wrong;
}

} // namespace

int main(int count, char **words) {
  if (count < 3)
    return fprintf(stderr, "conformance LIBCUDA LIBCUDART [--list | CHECK...]\n"), 2;
  int wrong = 0;
  for (auto &check : CHECKS) {
    bool chosen = count == 3;
    for (int word = 3; word < count; ++word)
      chosen |= !strcmp(words[word], check.name);
    if (!strcmp(words[count - 1], "--list"))
      puts(check.name);
    if (!chosen)
      continue;
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
      alarm(20);
      Wrong what = asked(check, words[1], words[2]);
      if (what == "?")
        printf("not asked %s\n", check.name);
      else
        printf(what.empty() ? "right %s\n" : "WRONG %s: %s\n", check.name, what.c_str());
      fflush(stdout);
      _exit(!what.empty() && what != "?");
    }
    int status;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status))
      printf("WRONG %s: ended by signal %d\n", check.name, WTERMSIG(status));
    wrong += status != 0;
  }
  return wrong;
}

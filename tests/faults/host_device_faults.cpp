// SPDX-License-Identifier: Apache-2.0
//
// The life of a page of the host device while the n-th call of one kind fails.
//
//   host_device_faults CALL ERRNO
//
// For n = 1, 2, ... a fork runs the same sequence: reserve, create, map, write, unmap, release. A
// status that says so is all that a failing call may lead to. Afterwards, with nothing failing any
// more, the sequence must succeed, no more than one page may be charged, and none once the process
// has ended. Prints how many calls there are, each of which has failed.
// Linked with --wrap for every call below, so that cuda.h is the one that kvcached is built with.
#include "cuda.h"

#include <cassert>
#include <cstdarg>
#include <sys/wait.h>

static int left_until_failure = 0, reached = 0, code = 0;
static const char *failing = "";

static bool fails(const char *call) {
  if (strcmp(call, failing) != 0 || --left_until_failure != 0)
    return false;
  reached = 1;
  errno = code;
  return true;
}

extern "C" {
int __real_open(const char *, int, ...);
int __wrap_open(const char *path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  int mode = va_arg(more, int);
  va_end(more);
  return fails("open") ? -1 : __real_open(path, flags, mode);
}
FILE *__real_fopen(const char *, const char *);
FILE *__wrap_fopen(const char *path, const char *mode) {
  return fails("fopen") ? nullptr : __real_fopen(path, mode);
}
int __real_flock(int, int);
int __wrap_flock(int file, int how) { return fails("flock") ? -1 : __real_flock(file, how); }
int __real_ftruncate(int, off_t);
int __wrap_ftruncate(int file, off_t size) {
  return fails("ftruncate") ? -1 : __real_ftruncate(file, size);
}
int __real_fallocate(int, int, off_t, off_t);
int __wrap_fallocate(int file, int mode, off_t at, off_t size) {
  return fails("fallocate") ? -1 : __real_fallocate(file, mode, at, size);
}
int __real_memfd_create(const char *, unsigned);
int __wrap_memfd_create(const char *name, unsigned flags) {
  return fails("memfd_create") ? -1 : __real_memfd_create(name, flags);
}
void *__real_mmap(void *, size_t, int, int, int, off_t);
void *__wrap_mmap(void *at, size_t size, int access, int flags, int file, off_t offset) {
  return fails("mmap") ? MAP_FAILED : __real_mmap(at, size, access, flags, file, offset);
}
}

static const size_t PAGE = kvpatch_host::kGranularity;

// Two pages at neighbouring addresses, written and read back; whether every call succeeded.
static bool lives() {
  auto &device = kvpatch_host::Device::get();
  size_t available, total;
  bool good = device.memory(0, &available, &total) == CUDA_SUCCESS;
  CUdeviceptr address = 0;
  if (device.reserve(&address, 2 * PAGE, 0, 0) != CUDA_SUCCESS)
    return false;
  for (int page = 0; page < 2; ++page) {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at = address + page * PAGE;
    if (device.create(&handle, PAGE, 0) != CUDA_SUCCESS) {
      good = false;
      continue;
    }
    if (device.map(at, PAGE, 0, handle) == CUDA_SUCCESS) {
      char *bytes = reinterpret_cast<char *>(at);
      memset(bytes, page + 1, PAGE);
      assert(bytes[0] == page + 1 && bytes[PAGE - 1] == page + 1);
      while (device.unmap(at, PAGE) != CUDA_SUCCESS)
        good = false; // as kvcached does: it tries again
    } else {
      good = false;
    }
    device.release(handle);
  }
  munmap(reinterpret_cast<void *>(address), 2 * PAGE);
  return good;
}

int main(int, char **words) {
  for (int nth = 1;; ++nth) {
    pid_t child = fork();
    if (child == 0) {
      failing = words[1];
      code = atoi(words[2]);
      left_until_failure = nth;
      bool good = lives();
      failing = "";
      if (!reached)
        _exit(2);
      (void)good; // a failure that changes nothing is as good as a status
      if (!lives())
        _exit(3);
      size_t available, total;
      if (kvpatch_host::Device::get().memory(0, &available, &total) != CUDA_SUCCESS)
        _exit(4);
      // A page whose release could not be noted stays charged, to this process.
      _exit(available + PAGE >= total ? 0 : 5);
    }
    int status;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status)) {
      printf("n = %d: signal %d\n", nth, WTERMSIG(status));
      return 1;
    }
    if (WEXITSTATUS(status) == 2) {
      printf("%d\n", nth - 1);
      return 0;
    }
    size_t available, total;
    if (kvpatch_host::Device::get().memory(0, &available, &total) != CUDA_SUCCESS ||
        available != total) {
      printf("n = %d: memory stays charged to a process that has ended\n", nth);
      return 1;
    }
    if (WEXITSTATUS(status) != 0) {
      printf("n = %d: %s\n", nth,
             WEXITSTATUS(status) == 5   ? "memory stays charged"
             : WEXITSTATUS(status) == 3 ? "the device is not usable afterwards"
                                        : "the ledger cannot be read afterwards");
      return 1;
    }
  }
}

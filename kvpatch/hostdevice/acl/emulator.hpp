// SPDX-License-Identifier: Apache-2.0
//
// An NPU without one: the calls of Huawei's ACL runtime on the memory of the host device, strict
// by the published documentation. It is a test device. What it accepts is what the documents
// allow; what it lacks is an error (compute.cpp), never a success without an effect.
//
//   memory    a page of the device is a page of the host device (../include/cuda.h): committed
//             when made, charged to the ledger that all processes share, zero for the next owner
//   streams   a thread each; an event is a point in one (streams.cpp)
//   copies    checked when they are asked for and again when they run (copies.cpp)
#pragma once

#include "cuda.h" // the host device's, not the one that kvcached is built with here

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <shared_mutex>
#include <thread>

#define ACL extern "C" __attribute__((visibility("default")))

typedef int aclError;

namespace acl {

// Numbers of the published list of return codes.
enum Status : aclError {
  SUCCESS = 0,
  REPEATED_INIT = 100002,
  PARAMETER = 107000,
  NO_DEVICE = 107001,
  NO_CONTEXT = 107002,
  NOT_SUPPORTED = 207000,
  OUT_OF_MEMORY = 207001,
  BUSY = 507000,
  STREAM_FAILED = 507011,
};

// What a copy says of its two sides.
enum Kind { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS };

constexpr size_t PAGE = kvpatch_host::kGranularity;

// Remember why for aclGetRecentErrMsg, and return the status.
aclError fail(aclError status, const std::string &why);

// The device that this thread selected, or -1.
extern thread_local int selected;
#define WANT_CONTEXT(call)                                                                         \
  do {                                                                                             \
    if (acl::selected < 0)                                                                         \
      return acl::fail(acl::NO_CONTEXT, std::string(call) + ": this thread selected no device");   \
  } while (0)

class Stream {
public:
  Stream();
  ~Stream();
  // Queue work; it returns "" or why it failed, after which the stream stays failed.
  void put(std::function<std::string()> work);
  aclError synchronize(int milliseconds = -1);
  bool idle();
  std::string failure(); // of the first work that failed

private:
  void run();
  std::mutex mutex_;
  std::condition_variable more_, done_;
  std::deque<std::function<std::string()>> queue_;
  bool busy_ = false, stop_ = false;
  std::string failure_;
  std::thread thread_;
};

Stream *default_stream();
Stream *stream_of(void *handle); // null is the default stream; unknown gives null
aclError synchronize_all();

// Every byte of it is memory of the device now.
bool on_device(const void *address, size_t size);
// None of it is.
bool on_host(const void *address, size_t size);
bool pinned(const void *address, size_t size);

// Held by whoever touches device memory; maps and unmaps hold it alone.
std::shared_mutex &mapping_lock();

} // namespace acl

// SPDX-License-Identifier: Apache-2.0
// Copies: checked when they are asked for, and again when they run, because a page can be unmapped
// in between.
#include "emulator.hpp"

namespace acl {

namespace {

struct Copy {
  void *to;
  const void *from;
  size_t size;
};

// Only what a caller says of an address is checked, against what it is.
std::string wrong(const Copy &copy, int kind) {
  bool to_device = kind == HOST_TO_DEVICE || kind == DEVICE_TO_DEVICE;
  bool from_device = kind == DEVICE_TO_HOST || kind == DEVICE_TO_DEVICE;
  if (kind == BY_ADDRESS) {
    to_device = !on_host(copy.to, copy.size);
    from_device = !on_host(copy.from, copy.size);
  }
  if (to_device ? !on_device(copy.to, copy.size) : !on_host(copy.to, copy.size))
    return to_device ? "the destination is not mapped on the device"
                     : "the destination is not on the host";
  if (from_device ? !on_device(copy.from, copy.size) : !on_host(copy.from, copy.size))
    return from_device ? "the source is not mapped on the device" : "the source is not on the host";
  return "";
}

std::string run(const Copy &copy, int kind) {
  std::shared_lock<std::shared_mutex> lock(mapping_lock());
  std::string why = wrong(copy, kind);
  if (why.empty())
    memmove(copy.to, copy.from, copy.size);
  return why;
}

bool waits(const Copy &copy, int kind) {
  return (kind == HOST_TO_DEVICE && !pinned(copy.from, copy.size)) ||
         (kind == DEVICE_TO_HOST && !pinned(copy.to, copy.size));
}

// A test holds the copies of connectors, in any process: ../ledger.py, hold_copies.
class Permit {
public:
  Permit() {
    const char *folder = getenv("KVPATCH_HOST_DEVICE_DIR");
    std::string path = folder && *folder ? folder : "/dev/shm";
    path += "/kvpatch-host-device-" + std::to_string(getuid()) + "-0.hold";
    file_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file_ >= 0)
      while (flock(file_, LOCK_SH) != 0 && errno == EINTR)
        ;
  }
  ~Permit() {
    if (file_ >= 0)
      close(file_);
  }

private:
  int file_;
};

} // namespace

} // namespace acl

using namespace acl;

ACL aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
  WANT_CONTEXT("aclrtMemcpy");
  if (size > room)
    return fail(PARAMETER, "aclrtMemcpy: more bytes than the destination has room for");
  std::string why = run({to, from, size}, kind);
  return why.empty() ? aclError(SUCCESS) : fail(PARAMETER, "aclrtMemcpy: " + why);
}
ACL aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind,
                              void *handle) {
  WANT_CONTEXT("aclrtMemcpyAsync");
  auto *stream = stream_of(handle);
  if (!stream)
    return fail(PARAMETER, "aclrtMemcpyAsync: this is no stream");
  if (size > room)
    return fail(PARAMETER, "aclrtMemcpyAsync: more bytes than the destination has room for");
  Copy copy{to, from, size};
  bool synchronous;
  {
    std::shared_lock<std::shared_mutex> lock(mapping_lock());
    std::string why = wrong(copy, kind);
    if (!why.empty())
      return fail(PARAMETER, "aclrtMemcpyAsync: " + why);
    synchronous = waits(copy, kind);
  }
  stream->put([=] { return run(copy, kind); });
  return synchronous ? stream->synchronize() : aclError(SUCCESS);
}
ACL aclError aclrtMemcpyAsyncWithCondition(void *to, size_t room, const void *from, size_t size,
                                           int kind, void *handle) {
  return aclrtMemcpyAsync(to, room, from, size, kind, handle);
}

struct Side {
  uint32_t id;
  int type; // 0 the host, 1 a device
};
struct Direction {
  Side to, from;
  uint8_t reserved[16];
};

static std::atomic<uint64_t> batches{0}, batched{0};

ACL aclError aclrtMemcpyBatchAsync(void **to, size_t *room, void **from, size_t *sizes, size_t count,
                                   Direction *directions, size_t *starts, size_t kinds,
                                   size_t *failed, void *handle) {
  WANT_CONTEXT("aclrtMemcpyBatchAsync");
  *failed = SIZE_MAX;
  auto *stream = stream_of(handle);
  if (!stream)
    return fail(PARAMETER, "aclrtMemcpyBatchAsync: this is no stream");
  if (!count || !kinds || kinds > count || starts[0] != 0)
    return fail(PARAMETER, "aclrtMemcpyBatchAsync: an empty batch, or copies without a direction");
  for (size_t one = 1; one < kinds; ++one)
    if (starts[one] <= starts[one - 1] || starts[one] >= count)
      return fail(PARAMETER, "aclrtMemcpyBatchAsync: the directions are out of order");
  auto copies = std::make_shared<std::vector<Copy>>();
  int kind = -1;
  bool synchronous = false;
  {
    std::shared_lock<std::shared_mutex> lock(mapping_lock());
    for (size_t at = 0, group = 0; at < count; ++at) {
      if (group + 1 < kinds && starts[group + 1] <= at)
        ++group;
      const Direction &one = directions[group];
      *failed = at;
      if (one.to.type + one.from.type != 1)
        return fail(PARAMETER, "aclrtMemcpyBatchAsync: between the host and the device only");
      int here = one.to.type == 1 ? HOST_TO_DEVICE : DEVICE_TO_HOST;
      if (kind >= 0 && kind != here)
        return fail(PARAMETER, "aclrtMemcpyBatchAsync: a batch has one direction");
      kind = here;
      if (sizes[at] > room[at])
        return fail(PARAMETER, "aclrtMemcpyBatchAsync: more bytes than there is room for");
      Copy copy{to[at], from[at], sizes[at]};
      std::string why = wrong(copy, kind);
      if (!why.empty())
        return fail(PARAMETER, "aclrtMemcpyBatchAsync: " + why);
      synchronous = synchronous || waits(copy, kind);
      copies->push_back(copy);
    }
    *failed = SIZE_MAX;
    ++batches;
    batched += count;
  }
  stream->put([copies, kind] {
    Permit permit;
    // The order within a batch is undefined; the last comes first, so that nothing relies on it.
    std::string first;
    for (auto copy = copies->rbegin(); copy != copies->rend(); ++copy)
      if (std::string why = run(*copy, kind); !why.empty() && first.empty())
        first = "aclrtMemcpyBatchAsync: " + why;
    return first;
  });
  return synchronous ? stream->synchronize() : aclError(SUCCESS);
}

ACL aclError aclrtMemset(void *at, size_t room, int32_t value, size_t size) {
  WANT_CONTEXT("aclrtMemset");
  std::shared_lock<std::shared_mutex> lock(mapping_lock());
  if (size > room || !on_device(at, size))
    return fail(PARAMETER, "aclrtMemset: not mapped on the device");
  memset(at, value, size);
  return SUCCESS;
}
ACL aclError aclrtMemsetAsync(void *at, size_t room, int32_t value, size_t size, void *handle) {
  WANT_CONTEXT("aclrtMemsetAsync");
  auto *stream = stream_of(handle);
  if (!stream)
    return fail(PARAMETER, "aclrtMemsetAsync: this is no stream");
  {
    std::shared_lock<std::shared_mutex> lock(mapping_lock());
    if (size > room || !on_device(at, size))
      return fail(PARAMETER, "aclrtMemsetAsync: not mapped on the device");
  }
  stream->put([=]() -> std::string {
    std::shared_lock<std::shared_mutex> lock(mapping_lock());
    if (!on_device(at, size))
      return "aclrtMemsetAsync: no longer mapped on the device";
    memset(at, value, size);
    return "";
  });
  return SUCCESS;
}

// For tests: that a batch was one call.
ACL uint64_t kvpatch_acl_batches() { return batches; }
ACL uint64_t kvpatch_acl_batched_copies() { return batched; }

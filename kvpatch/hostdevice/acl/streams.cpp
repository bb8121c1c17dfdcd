// SPDX-License-Identifier: Apache-2.0
// Streams and events.
#include "emulator.hpp"

#include <chrono>

namespace acl {

namespace {

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, reached = 0;
  double milliseconds = 0;
  std::string failure; // of the stream before the point

  void wait_for(uint64_t point) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return reached >= point; });
  }
};

// They outlive every static destructor: torch_npu destroys its streams after ours.
auto &table = *new std::mutex; // of the two below
auto &streams = *new std::set<Stream *>;
auto &events = *new std::set<std::shared_ptr<Event>>;

std::shared_ptr<Event> event_of(void *raw) {
  std::lock_guard<std::mutex> lock(table);
  for (auto &event : events)
    if (event.get() == raw)
      return event;
  return nullptr;
}

double now() {
  auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since).count();
}

} // namespace

Stream::Stream() : thread_([this] { run(); }) {}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  more_.notify_all();
  thread_.join();
}

void Stream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    more_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty())
      return;
    auto work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    std::string why = work();
    lock.lock();
    busy_ = false;
    if (!why.empty() && failure_.empty())
      failure_ = why;
    done_.notify_all();
  }
}

void Stream::put(std::function<std::string()> work) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
  }
  more_.notify_one();
}

aclError Stream::synchronize(int milliseconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto empty = [&] { return queue_.empty() && !busy_; };
  if (milliseconds < 0)
    done_.wait(lock, empty);
  else if (!done_.wait_for(lock, std::chrono::milliseconds(milliseconds), empty))
    return fail(STREAM_FAILED, "the stream did not finish in time");
  return failure_.empty() ? aclError(SUCCESS) : fail(STREAM_FAILED, failure_);
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_;
}

std::string Stream::failure() {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

Stream *default_stream() {
  static Stream *one = [] {
    auto *made = new Stream; // its thread ends with the process
    std::lock_guard<std::mutex> lock(table);
    streams.insert(made);
    return made;
  }();
  return one;
}

Stream *stream_of(void *handle) {
  if (!handle)
    return default_stream();
  std::lock_guard<std::mutex> lock(table);
  auto *stream = static_cast<Stream *>(handle);
  return streams.count(stream) ? stream : nullptr;
}

aclError synchronize_all() {
  std::vector<Stream *> all;
  {
    std::lock_guard<std::mutex> lock(table);
    all.assign(streams.begin(), streams.end());
  }
  aclError first = SUCCESS;
  for (auto *stream : all)
    if (aclError status = stream->synchronize(); status && !first)
      first = status;
  return first;
}

} // namespace acl

using namespace acl;

#define WANT_STREAM(name, handle)                                                                  \
  WANT_CONTEXT(name);                                                                              \
  auto *stream = stream_of(handle);                                                                \
  if (!stream)                                                                                     \
  return fail(PARAMETER, name ": this is no stream")
#define WANT_EVENT(name, raw)                                                                      \
  auto event = event_of(raw);                                                                      \
  if (!event)                                                                                      \
  return fail(PARAMETER, name ": this is no event")

ACL aclError aclrtSynchronizeDevice() {
  WANT_CONTEXT("aclrtSynchronizeDevice");
  return synchronize_all();
}
ACL aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

ACL aclError aclrtCreateStreamWithConfig(void **made, uint32_t, uint32_t) {
  WANT_CONTEXT("aclrtCreateStream");
  auto *stream = new Stream;
  std::lock_guard<std::mutex> lock(table);
  streams.insert(stream);
  *made = stream;
  return SUCCESS;
}
ACL aclError aclrtCreateStream(void **made) { return aclrtCreateStreamWithConfig(made, 0, 0); }
ACL aclError aclrtDestroyStream(void *handle) {
  WANT_STREAM("aclrtDestroyStream", handle);
  if (!handle)
    return fail(PARAMETER, "aclrtDestroyStream: the default stream stays");
  stream->synchronize();
  {
    std::lock_guard<std::mutex> lock(table);
    streams.erase(stream);
  }
  delete stream;
  return SUCCESS;
}
ACL aclError aclrtDestroyStreamForce(void *handle) { return aclrtDestroyStream(handle); }
ACL aclError aclrtSynchronizeStream(void *handle) {
  WANT_STREAM("aclrtSynchronizeStream", handle);
  return stream->synchronize();
}
ACL aclError aclrtSynchronizeStreamWithTimeout(void *handle, int32_t milliseconds) {
  WANT_STREAM("aclrtSynchronizeStreamWithTimeout", handle);
  return stream->synchronize(milliseconds);
}
ACL aclError aclrtStreamQuery(void *handle, int *status) {
  WANT_STREAM("aclrtStreamQuery", handle);
  *status = stream->idle() ? 0 : 1; // complete, not ready
  return SUCCESS;
}
// What a test holds a stream with.
ACL aclError aclrtLaunchHostFunc(void *handle, void (*call)(void *), void *argument) {
  WANT_STREAM("aclrtLaunchHostFunc", handle);
  stream->put([=] {
    call(argument);
    return std::string();
  });
  return SUCCESS;
}

ACL aclError aclrtCreateEventExWithFlag(void **made, uint32_t) {
  WANT_CONTEXT("aclrtCreateEvent");
  auto event = std::make_shared<Event>();
  std::lock_guard<std::mutex> lock(table);
  events.insert(event);
  *made = event.get();
  return SUCCESS;
}
ACL aclError aclrtCreateEventWithFlag(void **made, uint32_t flag) {
  return aclrtCreateEventExWithFlag(made, flag);
}
ACL aclError aclrtCreateEvent(void **made) { return aclrtCreateEventExWithFlag(made, 0); }
ACL aclError aclrtDestroyEvent(void *raw) {
  WANT_EVENT("aclrtDestroyEvent", raw);
  std::lock_guard<std::mutex> lock(table);
  events.erase(event); // queued work keeps it
  return SUCCESS;
}
ACL aclError aclrtResetEvent(void *raw, void *) {
  WANT_EVENT("aclrtResetEvent", raw);
  return SUCCESS;
}
ACL aclError aclrtRecordEvent(void *raw, void *handle) {
  WANT_STREAM("aclrtRecordEvent", handle);
  WANT_EVENT("aclrtRecordEvent", raw);
  uint64_t point;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    point = ++event->recorded;
  }
  stream->put([event, point, stream] {
    std::string why = stream->failure();
    std::lock_guard<std::mutex> lock(event->mutex);
    event->failure = why;
    event->reached = point;
    event->milliseconds = now();
    event->changed.notify_all();
    return std::string();
  });
  return SUCCESS;
}
ACL aclError aclrtStreamWaitEvent(void *handle, void *raw) {
  WANT_STREAM("aclrtStreamWaitEvent", handle);
  WANT_EVENT("aclrtStreamWaitEvent", raw);
  uint64_t point;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    point = event->recorded;
  }
  stream->put([event, point] {
    event->wait_for(point);
    return std::string();
  });
  return SUCCESS;
}
ACL aclError aclrtStreamWaitEventWithTimeout(void *handle, void *raw, int32_t) {
  return aclrtStreamWaitEvent(handle, raw);
}
ACL aclError aclrtSynchronizeEvent(void *raw) {
  WANT_EVENT("aclrtSynchronizeEvent", raw);
  uint64_t point;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    point = event->recorded;
  }
  event->wait_for(point);
  return event->failure.empty() ? aclError(SUCCESS) : fail(STREAM_FAILED, event->failure);
}
ACL aclError aclrtSynchronizeEventWithTimeout(void *raw, int32_t) {
  return aclrtSynchronizeEvent(raw);
}
// The two calls number their answers differently.
ACL aclError aclrtQueryEventStatus(void *raw, int *status) {
  WANT_EVENT("aclrtQueryEventStatus", raw);
  std::lock_guard<std::mutex> lock(event->mutex);
  *status = event->reached >= event->recorded ? 1 : 0;
  return event->failure.empty() ? aclError(SUCCESS) : fail(STREAM_FAILED, event->failure);
}
ACL aclError aclrtQueryEvent(void *raw, int *status) {
  WANT_EVENT("aclrtQueryEvent", raw);
  std::lock_guard<std::mutex> lock(event->mutex);
  *status = event->reached >= event->recorded ? 0 : 1;
  return event->failure.empty() ? aclError(SUCCESS) : fail(STREAM_FAILED, event->failure);
}
ACL aclError aclrtQueryEventWaitStatus(void *raw, int *status) {
  WANT_EVENT("aclrtQueryEventWaitStatus", raw);
  *status = 0;
  return SUCCESS;
}
ACL aclError aclrtEventElapsedTime(float *milliseconds, void *from, void *to) {
  auto first = event_of(from), last = event_of(to);
  if (!first || !last || !first->reached || !last->reached)
    return fail(PARAMETER, "aclrtEventElapsedTime: a point that was not reached has no time");
  *milliseconds = static_cast<float>(last->milliseconds - first->milliseconds);
  return SUCCESS;
}

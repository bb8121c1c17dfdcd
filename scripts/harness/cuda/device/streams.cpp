// SPDX-License-Identifier: Apache-2.0
//
// Streams and events. A stream is a thread and a queue; an event is a place in a queue.
//
// How late work runs (emu_delay, EMU_DELAY, EMU_SEED):
//   random                        each work waits up to a millisecond
//   copies last, compute last     work of that kind waits until the host, or other work, waits for it,
//                                 or for HELD: as late as a program that polls can bear
// In all of them an event says at first that it is not ready.
#include "device.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <random>
#include <set>
#include <unistd.h>

namespace emu {

namespace {

constexpr auto HELD = std::chrono::milliseconds(10);
enum Delay { NONE, RANDOM, COPIES_LAST, COMPUTE_LAST, DELAYS };
const char *const NAMES[] = {"none", "random", "copies last", "compute last"};

unsigned seed_of_environment() { return getenv("EMU_SEED") ? atoi(getenv("EMU_SEED")) : 0; }
int delay_of_environment() {
  const char *wanted = getenv("EMU_DELAY");
  for (int kind = 0; wanted && kind < DELAYS; ++kind)
    if (!strcmp(wanted, NAMES[kind]))
      return kind;
  if (wanted && *wanted)
    fprintf(stderr, "emulated CUDA device: EMU_DELAY=%s is none of: none, random, copies last, compute last\n", wanted),
        abort();
  return NONE;
}

std::atomic<int> delay{delay_of_environment()};
std::atomic<unsigned> seed{seed_of_environment()};
auto &streams = *new Streams;
auto &events = *new std::map<void *, std::shared_ptr<Event>>;
std::string failed;

// Of the work that this thread runs.
thread_local const Participant *running;
thread_local bool unlocked; // it does not hold `mapping`

double now() {
  auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since).count();
}

unsigned random(unsigned of, unsigned below) {
  thread_local std::minstd_rand numbers;
  thread_local unsigned begun = ~0u;
  if (begun != seed)
    numbers.seed((begun = seed) * 7919 + of + 1);
  return numbers() % below;
}

std::shared_ptr<Stream> added(bool blocking) {
  auto stream = std::make_shared<Stream>(blocking);
  std::lock_guard<std::recursive_mutex> lock(table);
  streams.push_back(stream);
  return stream;
}

const std::shared_ptr<Stream> &legacy() {
  static auto &one = *new std::shared_ptr<Stream>(added(true));
  return one;
}

Streams all_streams() {
  std::lock_guard<std::recursive_mutex> lock(table);
  return streams;
}

void fail(const std::string &why) {
  complain(why);
  std::lock_guard<std::recursive_mutex> lock(table);
  if (failed.empty() && !WITHOUT("sticky errors"))
    failed = why;
}

std::atomic<int> made{0};

} // namespace

Stream::Stream(bool joins) : id(++made), blocking(joins) {}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  more_.notify_all();
  if (thread_.joinable())
    thread_.join();
}

uint64_t Stream::put(Kind kind, Work work) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!thread_.joinable())
    thread_ = std::thread([this] { run(); });
  queue_.emplace_back(kind, std::move(work));
  more_.notify_all();
  return ++put_;
}

bool Stream::held(Kind kind) { return (delay == COPIES_LAST && kind == COPY) || (delay == COMPUTE_LAST && kind == COMPUTE); }

void Stream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  bool idle = true; // work is held once: what follows it is as late
  for (;;) {
    idle = idle || queue_.empty();
    more_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty())
      return;
    auto [kind, work] = std::move(queue_.front());
    queue_.pop_front();
    if (idle && held(kind)) {
      more_.wait_for(lock, HELD, [&] { return stop_ || wanted_ > ended_; });
      idle = false;
    }
    lock.unlock();
    if (delay == RANDOM && kind != OTHER)
      usleep(random(id, 1000));
    std::string why = work();
    work = nullptr;
    if (!why.empty())
      fail(why);
    lock.lock();
    ++ended_;
    done_.notify_all();
  }
}

void Stream::wait(uint64_t place) {
  std::unique_lock<std::mutex> lock(mutex_);
  wanted_ = std::max(wanted_, place);
  more_.notify_all();
  done_.wait(lock, [&] { return ended_ >= place; });
}

bool Stream::reached(uint64_t place) {
  std::lock_guard<std::mutex> lock(mutex_);
  return ended_ >= place;
}

uint64_t Stream::last() {
  std::lock_guard<std::mutex> lock(mutex_);
  return put_;
}

std::shared_ptr<Stream> stream_of(void *handle) {
  if (!handle || handle == (void *)CU_STREAM_LEGACY)
    return legacy();
  std::lock_guard<std::recursive_mutex> lock(table);
  auto found = std::find_if(streams.begin(), streams.end(), [&](auto &one) { return one.get() == handle; });
  return found == streams.end() ? nullptr : *found;
}

void *new_stream(bool blocking) { return added(blocking).get(); }

CUresult destroy_stream(void *handle) {
  auto stream = stream_of(handle);
  if (!stream || stream == legacy())
    return CUDA_ERROR_INVALID_HANDLE;
  stream->wait(stream->last()); // its work is done first; whoever destroys it does not wait in CUDA
  std::lock_guard<std::recursive_mutex> lock(table);
  streams.erase(std::find(streams.begin(), streams.end(), stream));
  return CUDA_SUCCESS;
}

Point enqueue(Stream &stream, Kind kind, const char *what, std::vector<Access> accesses, Work work, bool locks) {
  std::shared_lock<std::shared_mutex> mappings(mapping);
  std::lock_guard<std::recursive_mutex> lock(table);
  ++counted(EMU_WORK);
  // The legacy default stream and blocking streams wait for each other.
  std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> before;
  auto after = [&](const std::shared_ptr<Stream> &other) {
    if (WITHOUT("legacy stream"))
      return;
    join(stream.clock, other->clock);
    before.emplace_back(other, other->last());
  };
  if (&stream == legacy().get()) {
    for (auto &other : streams)
      if (other.get() != &stream && other->blocking)
        after(other);
  } else if (stream.blocking) {
    after(legacy());
  }
  join(stream.clock, host);
  stream.clock.resize(std::max<size_t>(stream.clock.size(), stream.id + 1));
  ++stream.clock[stream.id];
  std::string name(what);
  for (auto &access : accesses)
    look(access, {stream.id, &stream.clock, &name});
  ++host[0];
  Point point{0, stream.clock};
  point.place = stream.put(kind, [=, id = stream.id, clock = stream.clock, before = std::move(before), accesses = std::move(accesses),
                    work = std::move(work)]() -> std::string {
    for (auto &[other, place] : before)
      other->wait(place);
    std::shared_lock<std::shared_mutex> mappings(mapping);
    for (auto &access : accesses)
      if (of_device(access.at, access.size) && !mapped(access.at, access.size) && !WITHOUT("mapped when it runs"))
        return "USE AFTER UNMAP: " + name + " touches " + hex(access.at) + ", which is not mapped now";
    if (!locks)
      mappings.unlock();
    Participant here{id, &clock, &name};
    running = &here;
    unlocked = !locks;
    auto why = work();
    running = nullptr;
    return why;
  });
  return point;
}

CUresult failure() {
  std::lock_guard<std::recursive_mutex> lock(table);
  return failed.empty() ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}
const char *why_failed() { return failed.c_str(); }

static Point end_of(Stream &stream) {
  std::lock_guard<std::recursive_mutex> lock(table);
  return {stream.last(), stream.clock};
}

CUresult synchronize(Stream &stream) {
  Point end = end_of(stream);
  stream.wait(end.place);
  host_joins(end.clock);
  return failure();
}

CUresult query(Stream &stream) {
  Point end = end_of(stream);
  if (!stream.reached(end.place))
    return CUDA_ERROR_NOT_READY;
  host_joins(end.clock);
  return failure();
}

CUresult synchronize_all() {
  for (auto &stream : all_streams())
    synchronize(*stream);
  return failure();
}

std::shared_ptr<Event> event_of(void *handle) {
  std::lock_guard<std::recursive_mutex> lock(table);
  auto found = events.find(handle);
  return found == events.end() ? nullptr : found->second;
}

CUresult new_event(void **handle, unsigned flags) {
  if (flags & ~7u || (flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING)))
    return CUDA_ERROR_INVALID_VALUE;
  auto event = std::make_shared<Event>();
  event->timed = !(flags & CU_EVENT_DISABLE_TIMING);
  std::lock_guard<std::recursive_mutex> lock(table);
  events[*handle = event.get()] = event;
  return CUDA_SUCCESS;
}

CUresult destroy_event(void *handle) {
  std::lock_guard<std::recursive_mutex> lock(table);
  return events.erase(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult record(void *handle, Stream &stream) {
  auto event = event_of(handle);
  if (!event)
    return CUDA_ERROR_INVALID_HANDLE;
  auto at = std::make_shared<double>();
  Point point = enqueue(stream, OTHER, "an event", {}, [=] { return *at = now(), std::string(); });
  std::lock_guard<std::recursive_mutex> lock(table);
  event->milliseconds = at;
  event->on = stream_of(&stream);
  event->point = point;
  event->denials = delay == NONE ? 0 : random(stream.id, 3);
  return CUDA_SUCCESS;
}

CUresult wait_event(Stream &stream, void *handle) {
  auto event = event_of(handle);
  if (!event)
    return CUDA_ERROR_INVALID_HANDLE;
  std::lock_guard<std::recursive_mutex> lock(table);
  if (event->on && !WITHOUT("wait for events")) {
    join(stream.clock, event->point.clock);
    stream.put(OTHER, [on = event->on, place = event->point.place] {
      on->wait(place);
      return std::string();
    });
  }
  return CUDA_SUCCESS;
}

CUresult synchronize_event(void *handle) {
  auto event = event_of(handle);
  if (!event)
    return CUDA_ERROR_INVALID_HANDLE;
  std::unique_lock<std::recursive_mutex> lock(table);
  auto [on, point] = std::pair(event->on, event->point);
  lock.unlock();
  if (on && !WITHOUT("synchronize events"))
    on->wait(point.place), host_joins(point.clock);
  return failure();
}

// What the host has heard of is not denied any more: a wait, or a later event of the stream, told it.
static bool heard(const Clock &clock) {
  for (size_t id = 0; id < clock.size(); ++id)
    if (id >= host.size() || host[id] < clock[id])
      return false;
  return true;
}

CUresult query_event(void *handle) {
  auto event = event_of(handle);
  if (!event)
    return CUDA_ERROR_INVALID_HANDLE;
  std::lock_guard<std::recursive_mutex> lock(table);
  if (event->on && !WITHOUT("query events")) {
    bool known = heard(event->point.clock);
    if (!event->on->reached(event->point.place) || (!known && event->denials-- > 0))
      return CUDA_ERROR_NOT_READY;
    host_joins(event->point.clock);
  }
  return failure();
}

CUresult elapsed(float *milliseconds, void *first, void *second) {
  auto one = event_of(first), other = event_of(second);
  if (!milliseconds)
    return CUDA_ERROR_INVALID_VALUE;
  if (!one || !other || !one->timed || !other->timed || !one->on || !other->on)
    return CUDA_ERROR_INVALID_HANDLE;
  if (!one->on->reached(one->point.place) || !other->on->reached(other->point.place))
    return CUDA_ERROR_NOT_READY;
  *milliseconds = float(*other->milliseconds - *one->milliseconds);
  return CUDA_SUCCESS;
}

} // namespace emu

EMU void emu_enqueue(void *stream, const char *what, const emu_access *accesses, size_t count, void (*call)(void *),
                     void *argument, bool lockless) {
  std::vector<emu::Access> all(accesses, accesses + count);
  auto work = [=] { return call(argument), std::string(); };
  emu::enqueue(*emu::stream_of(stream), emu::COMPUTE, what, std::move(all), work, !lockless);
}

EMU void emu_touch(const emu_access *accesses, size_t count) {
  if (!emu::running)
    return;
  std::shared_lock<std::shared_mutex> lock(emu::mapping, std::defer_lock);
  if (emu::unlocked)
    lock.lock();
  for (size_t index = 0; index < count; ++index) {
    auto &access = accesses[index];
    if (emu::of_device(access.at, access.size) && !emu::mapped(access.at, access.size))
      emu::fail("USE AFTER UNMAP: " + *emu::running->what + " touches " + emu::hex(access.at));
    emu::look(access, *emu::running);
  }
}

EMU void emu_fail(const char *why) { emu::fail(why); }

EMU void emu_wait(void *stream) {
  auto on = emu::stream_of(stream);
  on->wait(on->last());
}

EMU void emu_delay(int kind, unsigned of) {
  emu::seed = of;
  emu::delay = kind;
}

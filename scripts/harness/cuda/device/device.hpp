// SPDX-License-Identifier: Apache-2.0
//
// A CUDA device without one: the calls of CUDA's runtime and driver on the memory of the host
// device, strict by CUDA's published documentation, and as late as it allows.
//
//   physical.cpp   pages: those of the host device, on a ledger that all processes share
//   memory.cpp     reservations, mappings, allocations, host memory that is pinned
//   order.cpp      happens-before: what is not ordered after what it needs is a complaint
//   streams.cpp    streams, events, and how late their work runs
//   copies.cpp     checked when they are asked for, and again when they run
//   driver.cpp     libcuda.so.1
//   runtime.cpp    libcudart.so.13
//   operators.cpp, vllm.cpp   torch's and vLLM's operators, queued (need torch)
#pragma once

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "work.h"

// One of the device's own rules is left out: only in the build that its tests are tried with.
#ifdef KVPATCH_MUTANTS
#define WITHOUT(rule) emu::is_without(rule)
#else
#define WITHOUT(rule) false
#endif

namespace __attribute__((visibility("default"))) emu { // libcudart.so.13 uses libcuda.so.1's

bool is_without(const char *rule);

using Address = uintptr_t;
using Access = emu_access;
using Clock = std::vector<uint64_t>; // by participant: 0 is the host, the others are streams
using Work = std::function<std::string()>; // returns why it failed, or ""

// -- order.cpp
void complain(const std::string &what);
uint64_t complaints();
std::string hex(Address);

// Guards streams, events and clocks. Taken after `mapping`.
extern std::recursive_mutex &table;

// A part of the program that is in order with itself, now.
struct Participant {
  int id;
  const Clock *clock;
  const std::string *what;
};
void join(Clock &, const Clock &);
// Note an access, and complain of an earlier one that conflicts and is not ordered before it.
void look(const Access &, const Participant &);
// The host does something to memory now.
void host_access(const char *what, const Access *, size_t count);
extern Clock &host;
// The host has waited for what is before this; its waits order nothing while it is `quiet`.
void host_joins(const Clock &);
struct Quiet {
  Quiet();
  ~Quiet();
};

// -- streams.cpp
enum Kind { COMPUTE, COPY, OTHER };

class Stream {
public:
  explicit Stream(bool blocking);
  ~Stream();
  uint64_t put(Kind, Work); // its place
  void wait(uint64_t place);
  bool reached(uint64_t place);
  uint64_t last();
  const int id;
  const bool blocking; // joins the legacy default stream
  Clock clock;         // of all that was put

private:
  void run();
  bool held(Kind);
  std::mutex mutex_;
  std::condition_variable more_, done_;
  std::deque<std::pair<Kind, Work>> queue_;
  uint64_t put_ = 0, ended_ = 0, wanted_ = 0;
  bool stop_ = false;
  std::thread thread_;
};
struct Point { // of a stream
  uint64_t place;
  Clock clock;
};
using Streams = std::vector<std::shared_ptr<Stream>>;

std::shared_ptr<Stream> stream_of(void *handle); // null where it is none
void *new_stream(bool blocking);
CUresult destroy_stream(void *handle);
// Queue work that touches this memory, after what CUDA orders before it. The memory is looked at
// now, and must be mapped when the work runs. Unless `locks`, mappings may change while it runs.
Point enqueue(Stream &, Kind, const char *what, std::vector<Access>, Work, bool locks = true);
// Wait for a stream, or for all, and return the first failure of the device.
CUresult synchronize(Stream &);
CUresult synchronize_all();
CUresult query(Stream &);
CUresult failure();
const char *why_failed();

struct Event {
  bool timed = true;
  std::shared_ptr<Stream> on; // where it was recorded last
  Point point;
  std::shared_ptr<double> milliseconds;
  int denials = 0; // how often it still says that it is not ready
};
std::shared_ptr<Event> event_of(void *handle);
CUresult new_event(void **handle, unsigned flags);
CUresult destroy_event(void *handle);
CUresult record(void *event, Stream &);
CUresult wait_event(Stream &, void *event);
CUresult synchronize_event(void *event);
CUresult query_event(void *event);
CUresult elapsed(float *, void *first, void *second);

// -- physical.cpp: results are CUDA's
namespace physical {
constexpr size_t GRANULARITY = 2u << 20;
int create(unsigned long long *handle, size_t size, int device);
int release(unsigned long long handle);
int reserve(Address *, size_t size, size_t alignment, Address hint);
int map(Address, size_t size, unsigned long long handle);
int unmap(Address, size_t size);
void memory(int device, size_t *free, size_t *total);
} // namespace physical

// -- memory.cpp
// Held by what touches memory of the device; whoever maps and unmaps holds it alone.
extern std::shared_mutex &mapping;
bool mapped(Address, size_t);      // all of it may be read and written by the device
bool of_device(Address, size_t);   // some of it is in an allocation or a reservation
bool pinned(Address, size_t);      // all of it
bool watched(Address, size_t);     // its order is looked at: reservations and pinned memory
CUresult allocate(Address *, size_t);
CUresult deallocate(Address);
CUresult allocate_host(void **, size_t);
CUresult deallocate_host(void *);
CUresult register_host(void *, size_t, unsigned flags);
CUresult unregister_host(void *);
CUresult range_of(Address, Address *base, size_t *size);

// -- copies.cpp
CUresult copy(Address to, Address from, size_t, Stream &, bool wait);
CUresult copy_rows(Address to, size_t to_pitch, Address from, size_t from_pitch, size_t width, size_t rows,
                   Stream &);
CUresult fill(Address, int value, size_t width, size_t count, Stream &, bool wait);
CUresult copy_batch(const Address *to, const Address *from, const size_t *sizes, size_t count, Stream &);

// -- driver.cpp
int attribute(int of);
int devices();
// That of this thread's context.
int current();
CUresult set_current(int device);
// A process has memory on one device, and so its streams are of one.
bool is_used(int device);
std::atomic<uint64_t> &counted(int of); // emu_count's
// The primary context of this thread, made current as the runtime does.
CUresult use_device();
int refused(const char *name);

} // namespace emu

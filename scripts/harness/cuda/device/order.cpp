// SPDX-License-Identifier: Apache-2.0
//
// Happens-before, by vector clocks. It does not depend on when anything ran: two accesses of the
// same bytes, one of them a write, are a complaint if nothing that the program did orders them.
//
//   work on a stream    after what was put before it, and after what the host knew when it was put
//   an event            has the clock of its stream; who waits for it gets that clock
//   the host            all its threads are one participant: what orders them is not seen here, so a
//                       wait by one thread counts for all, and races between threads are not found
#include "device.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fcntl.h>
#include <memory>
#include <set>
#include <unistd.h>
#include <unordered_map>

namespace emu {

std::recursive_mutex &table = *new std::recursive_mutex;
Clock &host = *new Clock(1, 1);

namespace {

constexpr size_t GRAIN = 256, GRAINS = 4096; // bytes looked at as one, and how many of them are kept together
auto &said = *new std::vector<std::string>;
thread_local int quiet;

struct Last {
  int id = -1;
  uint64_t when = 0;
  const std::string *what = nullptr;
  std::shared_ptr<const Clock> clock;
};
struct Grain {
  Last write;
  std::vector<Last> reads;
};
auto &grains = *new std::unordered_map<Address, std::unique_ptr<std::array<Grain, GRAINS>>>;

uint64_t time_of(const Clock &clock, size_t id) { return id < clock.size() ? clock[id] : 0; }

// Names live for ever, so that an access can be told of long after.
const std::string *kept(const std::string &name) {
  static auto &all = *new std::set<std::string>;
  return &*all.insert(name).first;
}

// What only running work knows is looked at when it runs, and work that waits for it may have been
// looked at before, when it was put.
bool comes_after(const Last &other, const Last &now) {
  return other.id >= 0 && other.id != now.id && time_of(*other.clock, now.id) >= now.when;
}

bool unordered(const Last &other, const Last &now) {
  return other.id >= 0 && other.id != now.id && time_of(*now.clock, other.id) < other.when && !comes_after(other, now);
}

} // namespace

bool is_without(const char *rule) {
  static const char *left_out = getenv("EMU_WITHOUT");
  return left_out && !strcmp(left_out, rule);
}

std::string hex(Address at) {
  char text[24];
  snprintf(text, sizeof text, "0x%zx", at);
  return text;
}

void complain(const std::string &what) {
  std::lock_guard<std::recursive_mutex> lock(table);
  said.push_back(what);
  if (said.size() > 1000)
    return; // the first say what is wrong
  fprintf(stderr, "emulated CUDA device: %s\n", what.c_str());
  static const char *file = getenv("EMU_COMPLAINTS");
  if (!file || !*file)
    return;
  int to = open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  std::string line = std::to_string(getpid()) + " " + what + "\n";
  if (to < 0 || write(to, line.data(), line.size()) < 0)
    perror(file);
  close(to);
}

uint64_t complaints() {
  std::lock_guard<std::recursive_mutex> lock(table);
  return said.size();
}

void join(Clock &into, const Clock &other) {
  if (into.size() < other.size())
    into.resize(other.size());
  for (size_t id = 0; id < other.size(); ++id)
    into[id] = std::max(into[id], other[id]);
}

void look(const Access &access, const Participant &who) {
  if (!access.size || !watched(access.at, access.size))
    return;
  std::lock_guard<std::recursive_mutex> lock(table);
  Last now{who.id, time_of(*who.clock, who.id), kept(*who.what), std::make_shared<const Clock>(*who.clock)};
  for (Address grain = access.at / GRAIN; grain <= (access.at + access.size - 1) / GRAIN; ++grain) {
    auto &together = grains[grain / GRAINS];
    if (!together)
      together = std::make_unique<std::array<Grain, GRAINS>>();
    Grain &at = (*together)[grain % GRAINS];
    const Last *other = nullptr;
    if (!(access.write ? WITHOUT("write after write") : WITHOUT("read after write")) && unordered(at.write, now))
      other = &at.write;
    if (access.write && !other && !WITHOUT("write after read"))
      for (auto &read : at.reads)
        if (unordered(read, now))
          other = &read;
    if (other) {
      complain("RACE: " + *now.what + (access.write ? " writes" : " reads") + " at " + hex(grain * GRAIN) +
               ", not ordered after " + *other->what + " of " +
               (other->id ? "stream " + std::to_string(other->id) : "the host"));
      at = Grain(); // it is told once
    }
    if (access.write) {
      if (!comes_after(at.write, now))
        at.write = now;
      std::erase_if(at.reads, [&](const Last &read) { return !comes_after(read, now); });
    } else {
      auto same = [&](const Last &read) { return read.id == who.id; };
      auto mine = std::find_if(at.reads.begin(), at.reads.end(), same);
      mine == at.reads.end() ? at.reads.push_back(now) : void(*mine = now);
    }
    if (other)
      return;
  }
}

void host_access(const char *what, const Access *accesses, size_t count) {
  std::lock_guard<std::recursive_mutex> lock(table);
  std::string name(what);
  for (size_t index = 0; index < count; ++index)
    look(accesses[index], {0, &host, &name});
  ++host[0];
}

void host_joins(const Clock &clock) {
  std::lock_guard<std::recursive_mutex> lock(table);
  if (quiet && !WITHOUT("quiet waits"))
    return;
  join(host, clock);
  ++host[0];
}

Quiet::Quiet() { ++quiet; }
Quiet::~Quiet() { --quiet; }

} // namespace emu

EMU const char *emu_complaint(size_t index) {
  std::lock_guard<std::recursive_mutex> lock(emu::table);
  return index < emu::said.size() ? emu::said[index].c_str() : "";
}

EMU void emu_host_access(const char *what, const emu_access *accesses, size_t count) {
  std::shared_lock<std::shared_mutex> lock(emu::mapping);
  emu::host_access(what, accesses, count);
}

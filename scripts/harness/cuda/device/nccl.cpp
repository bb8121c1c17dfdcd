// SPDX-License-Identifier: Apache-2.0
//
// libnccl.so.2: collectives among the processes of one machine, over a file that they map. They are
// work of the device's streams, in order with what is before and behind them; that one rank waits
// for another orders nothing else.
#include "device.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#define NCCL extern "C" __attribute__((visibility("default"))) int

namespace {

enum { SUCCESS, SYSTEM = 2, INVALID = 4 };
constexpr int VERSION = 22809; // with what torch and vLLM ask for, of 2.28.9
constexpr size_t SLOT = 1 << 20, RANKS = 8;
constexpr double LIMIT = 300; // seconds for the other ranks

struct Id {
  char path[128];
};
struct Shared { // zero at first
  std::atomic<uint64_t> arrived;
  alignas(64) unsigned char slots[RANKS][SLOT];
};
struct Comm {
  Shared *shared;
  int rank, ranks;
  uint64_t turns = 0; // of its one stream of work at a time
};

template <class Done> bool until(Done done) {
  for (double waited = 0; !done(); waited += 2e-5) {
    if (waited > LIMIT)
      return false;
    usleep(20);
  }
  return true;
}

bool all_are_here(Comm &comm) {
  uint64_t wanted = ++comm.turns * comm.ranks;
  ++comm.shared->arrived;
  return until([&] { return comm.shared->arrived >= wanted; });
}

float as_float(uint16_t bits, int type) {
  if (type == 9) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  _Float16 half;
  memcpy(&half, &bits, sizeof half);
  return half;
}
uint16_t as_bits(float value, int type) {
  uint16_t bits;
  if (type == 9) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    return std::isnan(value) ? 0x7fc0 : (wide + 0x7fff + (wide >> 16 & 1)) >> 16; // to the nearest, even
  }
  _Float16 half = value;
  memcpy(&bits, &half, sizeof bits);
  return bits;
}

template <class Of, class Load, class Store>
void reduce(Comm &comm, void *to, size_t count, int op, Load load, Store store) {
  for (size_t index = 0; index < count; ++index) {
    auto of = [&](int rank) { return load(((Of *)comm.shared->slots[rank])[index]); };
    auto total = of(0);
    for (int rank = 1; rank < comm.ranks; ++rank) {
      auto next = of(rank);
      total = op == 0 || op == 4 ? total + next : op == 1 ? total * next : op == 2 ? std::max(total, next) : std::min(total, next);
    }
    ((Of *)to)[index] = store(op == 4 ? total / comm.ranks : total);
  }
}
template <class Of> void reduce_as(Comm &comm, void *to, size_t count, int op) {
  reduce<Of>(comm, to, count, op, [](Of value) { return value; }, [](Of value) { return value; });
}

size_t size_of(int type) { return type < 2 || type > 9 ? 1 : type < 4 || type == 7 ? 4 : type == 6 || type == 9 ? 2 : 8; }

void reduce(Comm &comm, void *to, size_t bytes, int type, int op) {
  size_t count = bytes / size_of(type);
  switch (type) {
  case 0: return reduce_as<int8_t>(comm, to, count, op);
  case 1: return reduce_as<uint8_t>(comm, to, count, op);
  case 2: return reduce_as<int32_t>(comm, to, count, op);
  case 3: return reduce_as<uint32_t>(comm, to, count, op);
  case 4: return reduce_as<int64_t>(comm, to, count, op);
  case 5: return reduce_as<uint64_t>(comm, to, count, op);
  case 7: return reduce_as<float>(comm, to, count, op);
  case 8: return reduce_as<double>(comm, to, count, op);
  default:
    return reduce<uint16_t>(comm, to, count, op, [=](uint16_t bits) { return as_float(bits, type); },
                            [=](float value) { return as_bits(value, type); });
  }
}

struct Call {
  std::function<bool()> run;
  const char *name;
};
void run(void *raw) {
  std::unique_ptr<Call> call((Call *)raw);
  if (!call->run())
    emu_fail((std::string(call->name) + ": another rank did not come").c_str());
}

int put(const char *name, Comm *comm, void *stream, const void *from, size_t read, void *to, size_t written, std::function<bool()> work) {
  if (!comm || !from || !to)
    return INVALID;
  emu_access accesses[] = {{(uintptr_t)from, read, false}, {(uintptr_t)to, written, true}};
  emu_enqueue(stream, name, accesses, 2, run, new Call{std::move(work), name}, true);
  return SUCCESS;
}

// All ranks show their bytes, a slot after another, and `take` has each.
template <class Take> bool exchange(Comm &comm, const void *from, size_t bytes, Take take) {
  for (size_t done = 0; done < bytes; done += SLOT) {
    size_t size = std::min(SLOT, bytes - done);
    memcpy(comm.shared->slots[comm.rank], (const char *)from + done, size);
    if (!all_are_here(comm))
      return false;
    take(done, size);
    if (!all_are_here(comm))
      return false;
  }
  return true;
}

} // namespace

NCCL ncclGetVersion(int *version) { return *version = VERSION, SUCCESS; }
extern "C" __attribute__((visibility("default"))) const char *ncclGetErrorString(int status) {
  return status ? "an error of the emulated NCCL" : "no error";
}
extern "C" __attribute__((visibility("default"))) const char *ncclGetLastError(void *) { return "none"; }
NCCL ncclGetUniqueId(Id *id) {
  static std::atomic<int> made{0};
  const char *folder = getenv("EMU_DEVICE_DIR");
  *id = {};
  snprintf(id->path, sizeof *id, "%s/nccl-%d-%d", folder ? folder : "/dev/shm", getpid(), made++);
  return SUCCESS;
}
NCCL ncclCommInitRank(Comm **comm, int ranks, Id id, int rank) {
  if (!comm || ranks < 1 || ranks > int(RANKS) || rank < 0 || rank >= ranks)
    return INVALID;
  int file = open(id.path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  void *at = file < 0 || ftruncate(file, sizeof(Shared)) ? MAP_FAILED
             : mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (file >= 0)
    close(file);
  if (at == MAP_FAILED)
    return SYSTEM;
  *comm = new Comm{(Shared *)at, rank, ranks};
  if (!all_are_here(**comm))
    return SYSTEM;
  if (!rank)
    unlink(id.path);
  return SUCCESS;
}
NCCL ncclCommInitRankConfig(Comm **comm, int ranks, Id id, int rank, void *) { return ncclCommInitRank(comm, ranks, id, rank); }
NCCL ncclCommDestroy(Comm *) { return SUCCESS; } // work may be left
NCCL ncclCommAbort(Comm *) { return SUCCESS; }
NCCL ncclCommFinalize(Comm *) { return SUCCESS; }
NCCL ncclCommCount(Comm *comm, int *count) { return *count = comm->ranks, SUCCESS; }
NCCL ncclCommUserRank(Comm *comm, int *rank) { return *rank = comm->rank, SUCCESS; }
NCCL ncclCommCuDevice(Comm *, int *device) { return *device = emu::current(), SUCCESS; }
NCCL ncclCommGetAsyncError(Comm *, int *status) { return *status = SUCCESS; }
NCCL ncclGroupStart() { return SUCCESS; } // no call waits for another
NCCL ncclGroupEnd() { return SUCCESS; }

NCCL ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Comm *comm, void *stream) {
  size_t bytes = count * size_of(type);
  return put("ncclAllReduce", comm, stream, from, bytes, to, bytes, [=] {
    return exchange(*comm, from, bytes, [=](size_t at, size_t size) { reduce(*comm, (char *)to + at, size, type, op); });
  });
}
NCCL ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, void *stream) {
  size_t bytes = count * size_of(type);
  return put("ncclAllGather", comm, stream, from, bytes, to, bytes * (comm ? comm->ranks : 0), [=] {
    return exchange(*comm, from, bytes, [=](size_t at, size_t size) {
      for (int rank = 0; rank < comm->ranks; ++rank)
        memcpy((char *)to + rank * bytes + at, comm->shared->slots[rank], size);
    });
  });
}
NCCL ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, void *stream) {
  size_t bytes = count * size_of(type);
  const void *own = comm && comm->rank == root ? from : to;
  return put("ncclBroadcast", comm, stream, own, bytes, to, bytes, [=] {
    return exchange(*comm, own, bytes, [=](size_t at, size_t size) { memcpy((char *)to + at, comm->shared->slots[root], size); });
  });
}

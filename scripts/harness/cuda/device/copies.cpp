// SPDX-License-Identifier: Apache-2.0
//
// Copies. Their direction is that of the addresses. Of host memory that is not pinned, CUDA stages
// what goes to the device before it returns, which orders nothing, and waits for what comes from it.
#include "device.hpp"

#include <algorithm>

namespace emu {

namespace {

struct Piece {
  Address to, from;
  size_t size;
};

// Nothing that is of the device is not mapped. Said by the name of the call.
bool fits(const char *what, std::initializer_list<Address> sides, size_t size) {
  std::shared_lock<std::shared_mutex> lock(mapping);
  for (Address at : sides)
    if (of_device(at, size) && !mapped(at, size)) {
      complain(std::string(what) + " of " + std::to_string(size) + " bytes is asked for at " + hex(at) +
               ", which is not mapped");
      return false;
    }
  return true;
}

bool pageable(Address at, size_t size) {
  std::shared_lock<std::shared_mutex> lock(mapping);
  return !of_device(at, size) && !pinned(at, size);
}

void put(Stream &stream, const char *what, std::vector<Piece> pieces) {
  std::vector<Access> accesses;
  for (auto &piece : pieces) {
    accesses.push_back({piece.to, piece.size, true});
    accesses.push_back({piece.from, piece.size, false});
  }
  // Backwards: their order among each other is not defined.
  enqueue(stream, COPY, what, std::move(accesses), [pieces = std::move(pieces)] {
    for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece)
      memmove((void *)piece->to, (void *)piece->from, piece->size);
    return std::string();
  });
}

} // namespace

CUresult copy(Address to, Address from, size_t size, Stream &stream, bool wait) {
  return copy_rows(to, size, from, size, size, 1, stream) ?: (wait ? synchronize(stream) : CUDA_SUCCESS);
}

CUresult copy_rows(Address to, size_t to_pitch, Address from, size_t from_pitch, size_t width, size_t rows,
                   Stream &stream) {
  if (!width || !rows)
    return CUDA_SUCCESS;
  if (!to || !from || to_pitch < width || from_pitch < width)
    return CUDA_ERROR_INVALID_VALUE;
  bool staged = pageable(from, width), waits = pageable(to, width);
  std::vector<Piece> pieces;
  for (size_t row = 0; row < rows; ++row)
    pieces.push_back({to + row * to_pitch, from + row * from_pitch, width});
  for (auto &piece : pieces)
    if (!fits("a copy", {piece.to, piece.from}, width))
      return CUDA_ERROR_INVALID_VALUE;
  if (!staged) {
    put(stream, "memcpy", std::move(pieces));
    return waits ? synchronize(stream) : CUDA_SUCCESS;
  }
  auto bytes = std::make_shared<std::vector<char>>(width * rows);
  std::vector<Access> accesses;
  for (size_t row = 0; row < rows; ++row) {
    memcpy(bytes->data() + row * width, (void *)pieces[row].from, width);
    accesses.push_back({pieces[row].to, width, true});
  }
  enqueue(stream, COPY, "memcpy (staged)", std::move(accesses), [=] {
    for (size_t row = 0; row < rows; ++row)
      memcpy((void *)(to + row * to_pitch), bytes->data() + row * width, width);
    return std::string();
  });
  return waits ? synchronize(stream) : CUDA_SUCCESS;
}

CUresult fill(Address at, int value, size_t width, size_t count, Stream &stream, bool wait) {
  size_t size = width * count;
  if (!size)
    return CUDA_SUCCESS;
  if (!at || at % width || pageable(at, size) || !fits("a memset", {at}, size))
    return CUDA_ERROR_INVALID_VALUE;
  enqueue(stream, COMPUTE, "memset", {{at, size, true}}, [=] {
    for (size_t index = 0; index < count; ++index)
      memcpy((void *)(at + index * width), &value, width);
    return std::string();
  });
  return wait ? synchronize(stream) : CUDA_SUCCESS;
}

CUresult copy_batch(const Address *to, const Address *from, const size_t *sizes, size_t count, Stream &stream) {
  std::vector<Piece> pieces;
  for (size_t index = 0; index < count; ++index) {
    if (!to[index] || !from[index] || !fits("cuMemcpyBatchAsync", {to[index], from[index]}, sizes[index]))
      return CUDA_ERROR_INVALID_VALUE;
    pieces.push_back({to[index], from[index], sizes[index]});
  }
  ++counted(EMU_BATCHES);
  counted(EMU_COPIES) += count;
  put(stream, "cuMemcpyBatchAsync", std::move(pieces));
  return CUDA_SUCCESS;
}

} // namespace emu

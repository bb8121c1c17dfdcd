// SPDX-License-Identifier: Apache-2.0
// The names of torch at the end of ../include/cuda.h, which the emulator includes for its memory
// alone: it makes no tensor, and is built without torch.
#pragma once

namespace torch {
namespace headeronly {
struct IntHeaderOnlyArrayRef {};
enum class ScalarType {};
} // namespace headeronly
namespace stable {
enum class DeviceType { CPU };
struct Device {
  explicit Device(DeviceType) {}
};
struct Tensor {};
inline Tensor from_blob(void *, headeronly::IntHeaderOnlyArrayRef, headeronly::IntHeaderOnlyArrayRef,
                        Device, headeronly::ScalarType) {
  return Tensor();
}
} // namespace stable
} // namespace torch

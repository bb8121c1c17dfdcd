// SPDX-License-Identifier: Apache-2.0
//
// Computation of the emulated NPU: torch's own operators, by their CPU kernels over the same bytes,
// because the emulator's memory is the host's. torch_npu keeps what makes tensors and views of
// memory, and copies between host and device. What has no CPU kernel stays torch_npu's, and fails.
//
// The calling thread computes, after its current stream did what was queued before. So computation
// waits for what the stream waits for, and for nothing else.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <atomic>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr auto KEY = c10::DispatchKey::PrivateUse1;

// Of the memory and its copies, and not computed.
const std::set<std::string> OF_TORCH_NPU = {
    "_copy_from_and_resize", "_local_scalar_dense", "_pin_memory",   "_reshape_alias",
    "_to_copy",              "as_strided",          "copy_",         "empty",
    "empty_like",            "empty_strided",       "is_pinned",     "item",
    "new_empty",             "new_empty_strided",   "pin_memory",    "record_stream",
    "reshape",               "resize_",             "resize_as_",    "set_",
    "to",                    "view",                "view_as",
};

std::atomic<uint64_t> computed{0};

bool on_npu(const at::Tensor &tensor) {
  return tensor.defined() && tensor.device().type() == NPU;
}

void wait_for_stream() {
  c10::impl::VirtualGuardImpl device(NPU);
  device.getStream(device.getDevice()).synchronize();
}

// The same bytes as a tensor of the host.
at::Tensor on_host(const at::Tensor &tensor) {
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .options(tensor.options().device(at::kCPU))
      .make_tensor();
}

// The arguments of one call, on the host, and what they were.
class Call {
public:
  at::Tensor host(const at::Tensor &tensor) {
    if (!on_npu(tensor))
      return tensor;
    device_ = tensor.device();
    auto made = on_host(tensor);
    pairs_.emplace_back(made, tensor);
    return made;
  }

  void argument(c10::IValue &value) {
    if (value.isTensor()) {
      value = host(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor &one : value.toTensorVector())
        all.push_back(host(one));
      value = std::move(all);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (std::optional<at::Tensor> one : value.toOptionalTensorList())
        all.push_back(one ? std::optional<at::Tensor>(host(*one)) : std::nullopt);
      value = std::move(all);
    } else if (value.isDevice() && value.toDevice().type() == NPU) {
      device_ = value.toDevice();
      value = c10::Device(at::kCPU);
    } else if (value.isGenerator()) {
      TORCH_CHECK(value.toGenerator().device().type() != NPU,
                  "the emulated NPU has no random numbers of its own generators");
    }
  }

  at::Tensor device(const at::Tensor &made) {
    if (!made.defined())
      return made;
    for (auto &[host, device] : pairs_)
      if (host.is_same(made)) {
        if (host.sizes() != device.sizes())
          device.resize_(host.sizes());
        return device;
      }
    auto target = device_.value_or(c10::Device(NPU, 0));
    auto moved = at::empty_strided(made.sizes(), made.strides(), made.options().device(target));
    if (made.numel())
      on_host(moved).copy_(made);
    return moved;
  }

  void result(c10::IValue &value) {
    if (value.isTensor()) {
      value = device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor &one : value.toTensorVector())
        all.push_back(device(one));
      value = std::move(all);
    }
  }

private:
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
  std::optional<c10::Device> device_;
};

void by_cpu_kernel(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  ++computed;
  wait_for_stream();
  Call call;
  size_t first = stack->size() - op.schema().arguments().size();
  for (size_t at = first; at < stack->size(); ++at)
    call.argument((*stack)[at]);
  op.callBoxed(*stack);
  first = stack->size() - op.schema().returns().size();
  for (size_t at = first; at < stack->size(); ++at)
    call.result((*stack)[at]);
}

// torch_npu's, which copies between host and device, and within the device by a computation.
std::optional<c10::SafeKernelFunction> copied_by_torch_npu;

at::Tensor &copy(at::Tensor &to, const at::Tensor &from, bool non_blocking) {
  bool same = to.dtype() == from.dtype() && to.sizes() == from.sizes() && to.is_contiguous() &&
              from.is_contiguous();
  if (same && on_npu(to) != on_npu(from)) {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    torch::jit::Stack stack{to, from, non_blocking};
    copied_by_torch_npu->callBoxed(op, c10::DispatchKeySet(KEY), &stack);
    return to;
  }
  ++computed;
  wait_for_stream();
  auto target = on_npu(to) ? on_host(to) : to;
  target.copy_(on_npu(from) ? on_host(from) : from);
  return to;
}

bool is_view(const c10::FunctionSchema &schema) {
  for (const auto &one : schema.returns())
    if (one.alias_info() && !one.alias_info()->isWrite())
      return true;
  return false;
}

// They live as long as the process.
auto &registered = *new std::vector<c10::RegistrationHandleRAII>;

int64_t install() {
  if (!registered.empty())
    return static_cast<int64_t>(registered.size());
  auto &all = c10::Dispatcher::singleton();
  copied_by_torch_npu.emplace(
      all.findSchemaOrThrow("aten::copy_", "").getComputedKernelForDispatchKey(KEY));
  for (const auto &name : all.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || OF_TORCH_NPU.count(name.name.substr(6)))
      continue;
    auto op = all.findOp(name);
    if (!op || !op->hasSchema() || is_view(op->schema()))
      continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU) && !op->hasKernelForDispatchKey(KEY))
      continue;
    registered.push_back(all.registerImpl(
        name, KEY, c10::KernelFunction::makeFromBoxedFunction<&by_cpu_kernel>(), std::nullopt,
        nullptr, "kvpatch's emulated NPU"));
  }
  static auto *copies = new torch::Library(torch::Library::IMPL, "aten", KEY, __FILE__, __LINE__);
  copies->impl("copy_", TORCH_FN(copy));
  return static_cast<int64_t>(registered.size());
}

// For operators in Python: the same bytes, once what was queued before has run.
at::Tensor host(const at::Tensor &tensor) {
  TORCH_CHECK(on_npu(tensor), "this is no tensor of the NPU");
  wait_for_stream();
  return on_host(tensor);
}

int64_t count() { return static_cast<int64_t>(computed.load()); }

} // namespace

TORCH_LIBRARY(kvpatch_npu, library) {
  library.def("install() -> int", &install);
  library.def("computed() -> int", &count);
  // Its result is not said to alias the argument, because it is on another device.
  library.def("host(Tensor tensor) -> Tensor");
}
TORCH_LIBRARY_IMPL(kvpatch_npu, PrivateUse1, library) { library.impl("host", &host); }

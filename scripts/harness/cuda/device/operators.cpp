// SPDX-License-Identifier: Apache-2.0
//
// torch's operators of the CUDA key, by their CPU kernels. The meta kernel says the shape of a
// result, torch's own allocator has its memory, and the CPU kernel is queued on the current stream
// over the same bytes. An operator waits where its result is a value, or its shape depends on data:
// there it waits on a GPU too.
#include "operators.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAStream.h>


namespace emu {

namespace {

using c10::IValue;
using torch::jit::Stack;
constexpr auto KEY = c10::DispatchKey::CUDA;

// torch's own for CUDA: views, allocation, and copies, which are the device's.
const std::set<std::string> OF_TORCH = {
    "_local_scalar_dense", "_pin_memory", "_reshape_alias", "_to_copy", "as_strided", "copy_", "empty", "empty_like",
    "empty_strided", "is_pinned", "item", "new_empty", "new_empty_strided", "pin_memory", "record_stream", "reshape",
    "resize_", "resize_as_", "set_", "to", "view", "view_as", "_copy_from_and_resize", "_copy_from", "is_set_to",
    "_fused_sdp_choice", "_resize_output_", "_assert_async"};

auto &registered = *new std::vector<c10::RegistrationHandleRAII>;
auto &owners = *new std::map<std::string, std::set<std::string>>;
std::optional<c10::SafeKernelFunction> copy_of_torch;

bool on_gpu(const at::Tensor &tensor) { return tensor.defined() && tensor.device().is_cuda(); }

bool is_number(const at::Tensor &tensor) { return tensor.unsafeGetTensorImpl()->is_wrapped_number(); }

// A Python number is a tensor that does not take part in the choice of a dtype.
at::Tensor number_as(at::Tensor made, const at::Tensor &tensor) {
  if (is_number(tensor))
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

at::TensorOptions on_cpu(const at::Tensor &tensor) {
  return tensor.options().device(at::kCPU).pinned_memory(false);
}

// The same bytes as a tensor of the CPU.
at::Tensor host_alias(const at::Tensor &tensor) {
  auto made = at::for_blob(tensor.data_ptr(), tensor.sizes())
                  .strides(tensor.strides())
                  .options(on_cpu(tensor))
                  .make_tensor();
  return number_as(std::move(made), tensor);
}

emu_access span(const at::Tensor &tensor, bool write) {
  size_t count = tensor.numel() ? 1 : 0;
  for (int64_t axis = 0; count && axis < tensor.dim(); ++axis)
    count += (tensor.size(axis) - 1) * tensor.stride(axis);
  return {(uintptr_t)tensor.data_ptr(), count * tensor.element_size(), write};
}

// Put others in the place of a value's tensors.
template <class Change> void each(IValue &value, Change change) {
  if (value.isTensor()) {
    if (value.toTensor().defined())
      value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor &tensor : value.toTensorVector())
      all.push_back(change(tensor));
    value = std::move(all);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      all.push_back(tensor && tensor->defined() ? std::optional(change(*tensor)) : std::nullopt);
    value = std::move(all);
  }
}

std::string name_of(const c10::OperatorHandle &op) {
  auto &schema = op.schema();
  return schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
}

bool writes(const c10::Argument &argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

struct Call {
  c10::OperatorHandle op;
  Stack stack;
  std::vector<at::Tensor> results; // where they belong; none if it writes its arguments
};

void run(void *raw) {
  std::unique_ptr<Call> call(static_cast<Call *>(raw));
  c10::InferenceMode mode;
  try {
    call->op.callBoxed(call->stack);
    size_t index = 0;
    auto place = [&](const at::Tensor &made) {
      auto &result = call->results[index++];
      TORCH_CHECK(result.sizes() == made.sizes(), "a result of another shape than was inferred");
      return result.numel() ? result.copy_(made) : result;
    };
    if (!call->results.empty())
      for (auto &value : call->stack)
        each(value, place);
  } catch (const std::exception &error) {
    emu_fail((name_of(call->op) + ": " + std::string(error.what()).substr(0, 300)).c_str());
  }
}

void put(const c10::OperatorHandle &op, Stack stack, std::vector<at::Tensor> results,
         const std::vector<emu_access> &accesses) {
  auto *call = new Call{op, std::move(stack), std::move(results)};
  auto stream = c10::cuda::getCurrentCUDAStream().stream();
  emu_enqueue(stream, name_of(op).c_str(), accesses.data(), accesses.size(), run, call, false);
}

// A generator of the device's numbers: as many as it gives, in its state.
IValue numbers(const IValue &value) {
  auto given = value.toGenerator();
  auto made = at::detail::createCPUGenerator();
  std::lock_guard<std::mutex> lock(given.mutex());
  made.set_current_seed(given.current_seed() * 1000003 + given.get_offset());
  given.set_offset(given.get_offset() + 4);
  return made;
}

// An operator is called: its arguments as the CPU has them, and as the meta device does.
struct Asked {
  Stack cpu, meta;
  std::vector<emu_access> accesses;
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases; // of the CPU's, of the device's
  c10::Device target{at::kCUDA, c10::cuda::current_device()};
  bool in_place = false, resizes = false;
};

Asked asked_for(const c10::OperatorHandle &op, const Stack &stack) {
  auto &schema = op.schema();
  Asked asked;
  auto own = owners.find(schema.name());
  size_t first = stack.size() - schema.arguments().size();
  for (size_t index = 0; index < schema.arguments().size(); ++index) {
    auto &argument = schema.arguments()[index];
    bool write = writes(argument);
    asked.in_place |= write;
    IValue cpu = stack[first + index], meta = cpu;
    bool own_memory = own != owners.end() && own->second.count(argument.name());
    each(cpu, [&](const at::Tensor &tensor) -> at::Tensor {
      if (tensor.device().is_cpu()) // the caller may change it before the work runs
        return number_as(tensor.clone(), tensor);
      if (!on_gpu(tensor))
        return tensor;
      if (!own_memory)
        asked.accesses.push_back(span(tensor, write));
      bool fresh = write && argument.is_out() && !tensor.numel(); // an alias cannot be resized
      asked.resizes |= fresh;
      asked.aliases.emplace_back(fresh ? at::empty({0}, on_cpu(tensor)) : host_alias(tensor), tensor);
      return asked.aliases.back().first;
    });
    each(meta, [&](const at::Tensor &tensor) -> at::Tensor {
      if (tensor.device().is_meta() || (tensor.device().is_cpu() && is_number(tensor)))
        return tensor;
      auto options = tensor.options().device(at::kMeta).pinned_memory(false);
      return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    });
    if (cpu.isDevice()) {
      asked.target = cpu.toDevice().is_cuda() ? cpu.toDevice() : asked.target;
      cpu = c10::Device(at::kCPU), meta = c10::Device(at::kMeta);
    }
    if (argument.name() == "pin_memory")
      cpu = meta = IValue();
    if (cpu.isGenerator()) {
      cpu = cpu.toGenerator().device().is_cuda() ? numbers(cpu) : cpu;
      meta = IValue();
    }
    asked.cpu.push_back(cpu);
    asked.meta.push_back(meta);
  }
  return asked;
}

// Run it now. The host waits for it on a GPU too if it is `known` to depend on data.
void run_now(const c10::OperatorHandle &op, Asked &asked, Stack *stack, bool known) {
  auto stream = c10::cuda::getCurrentCUDAStream();
  known ? stream.synchronize() : emu_wait(stream.stream());
  op.callBoxed(asked.cpu);
  for (auto &value : asked.cpu) {
    each(value, [&](const at::Tensor &made) -> at::Tensor {
      for (auto &[of_cpu, of_device] : asked.aliases)
        if (of_cpu.is_same(made)) {
          if (of_cpu.sizes() != of_device.sizes())
            host_alias(of_device.resize_(of_cpu.sizes())).copy_(of_cpu);
          return of_device;
        }
      auto result = at::empty_strided(made.sizes(), made.strides(), made.options().device(asked.target));
      if (made.numel())
        host_alias(result).copy_(made);
      return result;
    });
    stack->push_back(value);
  }
}

// The arguments that an operator in place returns, or nothing if it returns something new besides.
std::optional<Stack> returned(const c10::FunctionSchema &schema, const Stack &arguments) {
  Stack found;
  for (auto &result : schema.returns()) {
    size_t before = found.size();
    for (size_t index = 0; index < arguments.size() && found.size() == before; ++index) {
      auto &argument = schema.arguments()[index];
      if (result.alias_info() && writes(argument) &&
          argument.alias_info()->beforeSets() == result.alias_info()->beforeSets())
        found.push_back(arguments[index]);
    }
    if (found.size() == before)
      return std::nullopt;
  }
  return found;
}

void queued(const c10::OperatorHandle &op, Stack *stack) {
  auto &schema = op.schema();
  Asked asked = asked_for(op, *stack);
  size_t first = stack->size() - schema.arguments().size();
  Stack arguments(stack->begin() + first, stack->end());
  stack->resize(first);
  for (auto &result : schema.returns()) {
    auto kind = result.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType)
      return run_now(op, asked, stack, true); // a value
  }
  if (asked.in_place) {
    auto results = returned(schema, arguments);
    if (asked.resizes || !results)
      return run_now(op, asked, stack, false);
    put(op, std::move(asked.cpu), {}, asked.accesses);
    stack->insert(stack->end(), results->begin(), results->end());
    return;
  }
  try {
    c10::InferenceMode mode(false);
    at::AutoDispatchBelowAutograd guard;
    op.callBoxed(asked.meta);
  } catch (const std::exception &) {
    return run_now(op, asked, stack, true); // its shape depends on data
  }
  std::vector<at::Tensor> results;
  for (auto &value : asked.meta) {
    each(value, [&](const at::Tensor &shape) {
      auto result = at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(asked.target));
      results.push_back(host_alias(result));
      asked.accesses.push_back(span(result, true));
      return result;
    });
    stack->push_back(value);
  }
  put(op, std::move(asked.cpu), std::move(results), asked.accesses);
}

// Copies inside of the device are an operator; all others are torch's, by cudaMemcpyAsync.
at::Tensor &copied(at::Tensor &to, const at::Tensor &from, bool non_blocking) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  if (on_gpu(to) && on_gpu(from)) {
    put(op, {host_alias(to), host_alias(from), false}, {}, {span(to, true), span(from, false)});
  } else {
    Stack stack{to, from, non_blocking};
    copy_of_torch->callBoxed(op, c10::DispatchKeySet(KEY), &stack);
  }
  return to;
}

// Attention by its definition; the kernels of CUDA have no twin.
int64_t attention(const at::Tensor &, const at::Tensor &, const at::Tensor &, const std::optional<at::Tensor> &, double,
                  bool, std::optional<double>, bool) {
  return 0;
}

bool is_view(const c10::FunctionSchema &schema) {
  for (auto &result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite())
      return true;
  return false;
}

// Whether the CPU has it, or it is made of others that the device has.
bool is_possible(const c10::OperatorHandle &op) {
  using c10::DispatchKey;
  bool made_of_others = false;
  for (auto key : {DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeImplicitAutograd,
                   DispatchKey::CompositeExplicitAutogradNonFunctional})
    made_of_others |= op.hasKernelForDispatchKey(key);
  return op.hasKernelForDispatchKey(DispatchKey::CPU) || (made_of_others && op.hasKernelForDispatchKey(KEY));
}

void install_torch() {
  auto &all = c10::Dispatcher::singleton();
  copy_of_torch.emplace(all.findSchemaOrThrow("aten::copy_", "").getComputedKernelForDispatchKey(KEY));
  auto kernel = c10::KernelFunction::makeFromBoxedFunction<&queued>();
  for (auto &name : all.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) || OF_TORCH.count(name.name.substr(6)))
      continue;
    auto op = all.findOp(name);
    if (op && op->hasSchema() && !is_view(op->schema()) && is_possible(*op))
      registered.push_back(all.registerImpl(name, KEY, kernel, std::nullopt, nullptr, "the emulated device"));
  }
  static auto &own = *new torch::Library(torch::Library::IMPL, "aten", KEY, __FILE__, __LINE__);
  own.impl("copy_", TORCH_FN(copied));
  own.impl("_fused_sdp_choice", TORCH_FN(attention));
}

// For Triton's interpreter: a tensor's bytes, when what was queued before is done.
at::Tensor host(const at::Tensor &tensor) {
  emu_wait(c10::cuda::getCurrentCUDAStream().stream());
  return host_alias(tensor);
}

void install() {
  if (registered.empty())
    install_torch();
  install_vllm();
}

} // namespace

void queue_operator(const std::string &name, std::set<std::string> own) {
  owners[name] = std::move(own);
  auto kernel = c10::KernelFunction::makeFromBoxedFunction<&queued>();
  registered.push_back(c10::Dispatcher::singleton().registerImpl(c10::OperatorName(name, ""), KEY, kernel, std::nullopt,
                                                                 nullptr, "the emulated device"));
}

void touch(const at::Tensor &tensor, bool write) {
  auto access = span(tensor, write);
  emu_touch(&access, 1);
}

} // namespace emu

TORCH_LIBRARY_FRAGMENT(emu, library) {
  library.def("install() -> ()", &emu::install);
  library.def("host(Tensor tensor) -> Tensor");
}
TORCH_LIBRARY_IMPL(emu, CUDA, library) { library.impl("host", &emu::host); }

// SPDX-License-Identifier: Apache-2.0
//
// vLLM's operators by the definition of what they compute, under their names: those that a dense
// decoder in bfloat16 uses on an H100. Their schemas are the same in 0.26.0 to 0.33.0. An operator
// that is not here launches its kernel, which the device refuses by the kernel's name.
#include "operators.hpp"


namespace emu {

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

Tensor normed(const Tensor &input, const Maybe &weight, double epsilon) {
  auto exact = input.to(at::kFloat);
  exact = exact * at::rsqrt(exact.square().mean(-1, true) + epsilon);
  return (weight ? exact * weight->to(at::kFloat) : exact).to(input.scalar_type());
}

void rms_norm(Tensor result, const Tensor &input, const Maybe &weight, double epsilon) {
  result.copy_(normed(input, weight, epsilon));
}

void fused_add_rms_norm(Tensor input, Tensor residual, const Maybe &weight, double epsilon) {
  residual.add_(input);
  input.copy_(normed(residual, weight, epsilon));
}

void silu_and_mul(Tensor result, const Tensor &input) {
  auto halves = input.chunk(2, -1);
  result.copy_(at::silu(halves[0]) * halves[1]);
}

void rotary_embedding(const Tensor &positions, Tensor query, Maybe key, int64_t head_size, const Tensor &cache,
                      bool is_neox, int64_t offset, bool inverse) {
  TORCH_CHECK(!offset && !inverse, "only a rotation of the first dimensions, forwards");
  auto count = positions.numel(), dimensions = cache.size(-1);
  auto rows = cache.index_select(0, positions.flatten().to(at::kLong)).to(at::kFloat).unsqueeze(1).chunk(2, -1);
  auto rotate = [&](Tensor all) {
    auto heads = all.reshape({count, -1, head_size}).clone();
    auto part = heads.narrow(-1, 0, dimensions).to(at::kFloat);
    auto pairs = is_neox ? part.chunk(2, -1) : part.unflatten(-1, {-1, 2}).unbind(-1);
    auto one = pairs[0] * rows[0] - pairs[1] * rows[1], other = pairs[1] * rows[0] + pairs[0] * rows[1];
    heads.narrow(-1, 0, dimensions)
        .copy_(is_neox ? at::cat({one, other}, -1) : at::stack({one, other}, -1).flatten(-2));
    all.copy_(heads.reshape(all.sizes()));
  };
  rotate(query);
  if (key)
    rotate(*key);
}

void reshape_and_cache_flash(const Tensor &key, const Tensor &value, Tensor key_cache, Tensor value_cache,
                             const Tensor &slots, c10::string_view, const Tensor &, const Tensor &) {
  auto slot = slots.accessor<int64_t, 1>();
  int64_t tokens = key_cache.size(1);
  for (int64_t index = 0; index < slots.size(0); ++index)
    if (slot[index] >= 0)
      for (auto &[from, cache] : {std::pair(key, key_cache), std::pair(value, value_cache)}) {
        auto to = cache[slot[index] / tokens][slot[index] % tokens];
        touch(to, true);
        to.copy_(from[index]);
      }
}

// The rows of the ids that this rank has, and zeros.
void vocab_parallel_embedding(Tensor result, const Tensor &ids, const Tensor &weight, int64_t first, int64_t end,
                              int64_t padding, int64_t first_added, int64_t end_added) {
  auto own = ids.ge(first).logical_and(ids.lt(end)), added = ids.ge(first_added).logical_and(ids.lt(end_added));
  auto offset = own * first + added * (first_added - (end - first) - padding);
  auto mine = own.logical_or(added);
  auto rows = weight.index_select(0, ((ids - offset) * mine).to(at::kLong));
  result.copy_(rows.masked_fill(mine.logical_not().unsqueeze(-1), 0));
}

// What FlashAttention computes of keys and values in pages of a block table.
void attend(Tensor result, const Tensor &query, const Tensor &key, const Tensor &value, const Tensor &starts,
            const Tensor &lengths, const Tensor &table, double scale, bool causal, int64_t left, double softcap) {
  auto start = starts.accessor<int32_t, 1>(), length = lengths.accessor<int32_t, 1>();
  auto block_of = table.accessor<int32_t, 2>();
  int64_t tokens = key.size(1), groups = query.size(1) / key.size(2);
  for (int64_t row = 0; row + 1 < starts.size(0); ++row) {
    int64_t begin = start[row], asked = start[row + 1] - begin, there = length[row];
    if (asked <= 0 || there <= 0)
      continue;
    std::vector<int64_t> blocks;
    for (int64_t index = 0; index * tokens < there; ++index)
      blocks.push_back(block_of[row][index]);
    auto ids = at::tensor(blocks, at::kLong);
    auto of = [&](const Tensor &cache) { // [heads of the query, there, size of a head]
      for (int64_t block : blocks)
        touch(cache[block], false);
      auto all = cache.index_select(0, ids).flatten(0, 1).narrow(0, 0, there).to(at::kFloat);
      return all.repeat_interleave(groups, 1).transpose(0, 1);
    };
    auto keys = of(key), values = of(value);
    auto queries = query.narrow(0, begin, asked).to(at::kFloat).transpose(0, 1);
    auto scores = at::matmul(queries, keys.transpose(1, 2)) * scale;
    if (softcap > 0)
      scores = at::tanh(scores / softcap) * softcap;
    auto at_query = at::arange(there - asked, there).unsqueeze(1), at_key = at::arange(there).unsqueeze(0);
    auto unseen = at::zeros({asked, there}, at::kBool);
    if (causal)
      unseen.logical_or_(at_key.gt(at_query));
    if (left >= 0)
      unseen.logical_or_(at_key.lt(at_query - left));
    auto weights = at::softmax(scores.masked_fill(unseen, -INFINITY), -1);
    result.narrow(0, begin, asked).copy_(at::matmul(weights, values).transpose(0, 1));
  }
}

// FlashAttention 3's, whose many arguments are taken by their names.
void flash_attention(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  std::map<std::string, c10::IValue> given;
  auto &arguments = op.schema().arguments();
  for (size_t index = 0; index < arguments.size(); ++index)
    given[arguments[index].name()] = (*stack)[stack->size() - arguments.size() + index];
  stack->resize(stack->size() - arguments.size());
  for (auto name : {"k_new", "v_new", "q_v", "seqused_q", "leftpad_k", "rotary_cos", "q_descale", "s_aux"})
    TORCH_CHECK_NOT_IMPLEMENTED(given[name].isNone() || std::string(name) == "q_descale",
                                "the emulated FlashAttention 3 has no ", name);
  for (auto name : {"cu_seqlens_q", "seqused_k", "page_table"})
    TORCH_CHECK_NOT_IMPLEMENTED(!given[name].isNone(), "the emulated FlashAttention 3 needs ", name);
  auto query = given["q"].toTensor();
  auto result = given["out"].isNone() ? at::empty_like(query) : given["out"].toTensor();
  static auto attention = c10::Dispatcher::singleton().findSchemaOrThrow("emu::attend", "");
  torch::jit::Stack of{result, query};
  for (auto name : {"k", "v", "cu_seqlens_q", "seqused_k", "page_table", "softmax_scale", "is_causal",
                    "window_size_left", "softcap"})
    of.push_back(given[name]);
  attention.callBoxed(of);
  auto sums = at::empty({query.size(1), query.size(0)}, query.options().dtype(at::kFloat));
  auto none = at::empty({0}, sums.options());
  stack->push_back(c10::List<Tensor>({result, sums, none, none}));
}

void scheduler_metadata(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  auto options = at::TensorOptions(at::kCUDA).dtype(at::kInt);
  stack->resize(stack->size() - op.schema().arguments().size());
  stack->push_back(at::zeros({1}, options));
}

} // namespace

void install_vllm() {
  static std::set<std::string> done;
  auto &all = c10::Dispatcher::singleton();
  auto is_new = [&](const char *name) {
    auto op = all.findSchema(c10::OperatorName(name, ""));
    return op && done.insert(name).second;
  };
  for (auto name : {"_C::rms_norm", "_C::fused_add_rms_norm", "_C::silu_and_mul", "_C::rotary_embedding",
                    "_C::vocab_parallel_embedding"})
    if (is_new(name))
      queue_operator(name);
  if (is_new("_C_cache_ops::reshape_and_cache_flash"))
    queue_operator("_C_cache_ops::reshape_and_cache_flash", {"key_cache", "value_cache"});
  if (is_new("emu::attend"))
    queue_operator("emu::attend", {"key", "value"});
  if (is_new("_vllm_fa3_C::fwd")) {
    static auto &library = *new torch::Library(torch::Library::IMPL, "_vllm_fa3_C", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    library.impl("fwd", torch::CppFunction::makeFromBoxedFunction<&flash_attention>());
    library.impl("get_scheduler_metadata", torch::CppFunction::makeFromBoxedFunction<&scheduler_metadata>());
  }
}

} // namespace emu

// Boxed, as the types by which vLLM itself calls them differ by release.
template <class Function> static void boxed(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
  using Kernel = typename c10::impl::WrapFunctionIntoFunctor<Function>::type;
  static Kernel kernel;
  c10::impl::make_boxed_from_unboxed_functor<Kernel, false>::call(&kernel, op, keys, stack);
}
#define BOXED(function) torch::CppFunction::makeFromBoxedFunction<&boxed<decltype(TORCH_FN(function))>>()

TORCH_LIBRARY_IMPL(_C, CPU, library) {
  library.impl("rms_norm", BOXED(emu::rms_norm));
  library.impl("fused_add_rms_norm", BOXED(emu::fused_add_rms_norm));
  library.impl("silu_and_mul", BOXED(emu::silu_and_mul));
  library.impl("rotary_embedding", BOXED(emu::rotary_embedding));
  library.impl("vocab_parallel_embedding", BOXED(emu::vocab_parallel_embedding));
}
TORCH_LIBRARY_IMPL(_C_cache_ops, CPU, library) {
  library.impl("reshape_and_cache_flash", BOXED(emu::reshape_and_cache_flash));
}
TORCH_LIBRARY_FRAGMENT(emu, library) {
  library.def("attend(Tensor(a!) result, Tensor query, Tensor key, Tensor value, Tensor starts, Tensor lengths, "
              "Tensor table, float scale, bool causal, int left, float softcap) -> ()");
}
TORCH_LIBRARY_IMPL(emu, CPU, library) { library.impl("attend", TORCH_FN(emu::attend)); }

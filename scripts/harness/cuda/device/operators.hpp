// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <set>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "work.h"

namespace emu {

// Let an operator of the device run as its CPU kernel, queued on the current stream. The arguments
// in `own` are memory of which the operator itself says (touch) what it uses.
void queue_operator(const std::string &name, std::set<std::string> own = {});
// From inside of an operator: it uses this tensor.
void touch(const at::Tensor &, bool write);
// Those of vLLM that are there by now.
void install_vllm();

} // namespace emu

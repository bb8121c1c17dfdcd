// SPDX-License-Identifier: Apache-2.0
// kvcached includes both CUDA headers; here everything is in one.
#pragma once
#include "cuda.h"

// SPDX-License-Identifier: Apache-2.0
// kvcached includes both CUDA headers; the host device keeps everything in one.
#pragma once
#include "cuda.h"

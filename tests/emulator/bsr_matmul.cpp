// Products of block-sparse and dense matrices by the portable kernels.
#include "problem.h"

using Params = blockflash_bsr_matmul_portable_params;
constexpr int kStrips = 1;
#include "bsr_matmul.h"

namespace {
void launch() { VARIANT_SYMBOL(params); }
}  // namespace

// Products of block-sparse matrices and dense ones with few columns.
#include "problem.h"

using Params = blockflash_bsr_matmul_narrow_params;
constexpr int kStrips = blockflash::kStrips;
#include "bsr_matmul.h"

namespace {
void launch() { VARIANT_SYMBOL(params); }
}  // namespace

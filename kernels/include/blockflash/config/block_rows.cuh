// How many block rows a CTA of attention forward on Hopper computes.
#pragma once

namespace blockflash {

// With 2, neighbouring tiles of 64 queries share a CTA, one per consumer warpgroup, and each visits
// a list of key tiles of its own.
constexpr int kBlockRows = VARIANT_BLOCK_ROWS;

}  // namespace blockflash

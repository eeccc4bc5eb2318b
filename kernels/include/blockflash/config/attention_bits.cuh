// Which score terms a kernel of attention has.
#pragma once

#include "blockflash/config/attention_terms.cuh"

namespace blockflash {

// Whether it adds a bias or ALiBi to scores, as kernels with terms do but those for bits alone.
#ifdef VARIANT_BITS_ONLY
constexpr bool kAddsTerms = kHasTerms && !VARIANT_BITS_ONLY;
#else
constexpr bool kAddsTerms = kHasTerms;
#endif

}  // namespace blockflash

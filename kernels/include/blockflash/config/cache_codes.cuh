// Whether the elements of a cache are codes of 8 bits, beside queries of 16.
#pragma once

namespace blockflash {

#ifdef VARIANT_CACHE_CODES
constexpr int kCacheCodes = VARIANT_CACHE_CODES;  // BLOCKFLASH_DTYPE_…
#else
constexpr int kCacheCodes = -1;
#endif
constexpr bool kHasCodes = kCacheCodes >= 0;

}  // namespace blockflash

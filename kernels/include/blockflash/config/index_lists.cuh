// Whether lists tell each query of a kernel of attention over a cache the keys that it attends to.
#pragma once

namespace blockflash {

#ifdef VARIANT_INDEX
constexpr bool kHasIndex = VARIANT_INDEX;
#else
constexpr bool kHasIndex = false;
#endif

}  // namespace blockflash

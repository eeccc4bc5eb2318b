// Whether a kernel of attention has score terms.
#pragma once

#include <type_traits>

namespace blockflash {

#ifdef VARIANT_TERMS
constexpr bool kHasTerms = VARIANT_TERMS;
#else
constexpr bool kHasTerms = false;
#endif

// The parameters of a kernel without or with terms.
template <class Without, class With>
using ParamsFor = std::conditional_t<kHasTerms, With, Without>;

}  // namespace blockflash

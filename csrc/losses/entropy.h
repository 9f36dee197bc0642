// Entropy of the softmax (TENT), and SAR's filter: rows with H >= limit are out. own = (limit, filter?).
// A NaN row shows without the filter and is dropped by it.
#pragma once

namespace PYL_ISA {

struct entropy {
  template <class T, class V>
  static PYL_INLINE EntropyResult<V> row(const Scalars<T>& k, const EntropyRow<V>& r) {
    V zero = splat<V>(0), one = splat<V>(1);
    if (k.own[1] == 0) return {r.entropy, one, one};
    auto kept = r.entropy < k.own[0];
    return {where(kept, r.entropy, zero), where(kept, one, zero), where(kept, one, zero)};
  }
};

}  // namespace PYL_ISA

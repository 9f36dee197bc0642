// Entropy of the softmax (TENT), and SAR's filter: rows with H >= limit are out.
// A NaN row shows without the filter and is dropped by it.
#pragma once

namespace PYL_ISA {

struct entropy : EntropyFormula {
  PYL_OWN(limit, filter)

  template <class T>
  static EntropyView view(const Own<T>& own) {
    return EntropyView{own.filter != 0};
  }
  template <class T, class V>
  static PYL_INLINE EntropyResult<V> row(const Own<T>& own, const Batch<T>&, const EntropyRow<V>& r) {
    V zero = splat<V>(0), one = splat<V>(1);
    if (own.filter == 0) return {r.entropy, one, one};
    auto kept = r.entropy < own.limit;
    return {where(kept, r.entropy, zero), where(kept, one, zero), where(kept, one, zero)};
  }
};

}  // namespace PYL_ISA

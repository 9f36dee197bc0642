// High error margin and its ablations. own = (margin, power, delta, margin of the label?, threshold?, above zero?).
//   h(x) = x^power for x >= delta, delta^(power - 1) x below it (power < 1 only), 0 for x <= 0.
#pragma once

namespace PYL_ISA {

struct hem {
  template <class T, class V>
  static PYL_INLINE MarginResult<V> row(const Scalars<T>& k, const MarginRow<V>& r) {
    V divisor = k.own[5] != 0 ? larger(r.kept_count, splat<V>(1)) : splat<V>(k.classes);
    return {weighted(r.w, r.kept_sum) / divisor, r.w / divisor};
  }
};

}  // namespace PYL_ISA

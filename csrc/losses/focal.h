// Softmax focal loss, p = p_y: L = -w (1 - p)^gamma log p,
//   f'(a) = (1 - p)^gamma (1 - p - gamma p log p): zero at p = 1, finite at p = 0 with p log p = 0.
#pragma once

namespace PYL_ISA {

struct focal : SoftmaxFormula {
  PYL_OWN(gamma)

  template <class T, class V>
  static PYL_INLINE SoftmaxResult<V> with_gamma(T gamma, const SoftmaxRow<V>& r) {
    V power = gamma == 0 ? splat<V>(1) : exp(-gamma * r.nll_miss());  // gamma = 0 must not meet 0 * inf
    V p_nll = where(r.nll() == infinity<T>(), splat<V>(0), r.hit() * r.nll());
    return through_a(r, where(power == 0, power, power * r.nll()), power * (r.miss() + gamma * p_nll));
  }
  template <class T, class V>
  static PYL_INLINE SoftmaxResult<V> row(const Own<T>& own, const Batch<T>&, const SoftmaxRow<V>& r) {
    return with_gamma(own.gamma, r);
  }
};

}  // namespace PYL_ISA

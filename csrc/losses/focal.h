// Softmax focal loss, p = p_y: L = -w (1 - p)^gamma log p,
//   f'(a) = (1 - p)^gamma (1 - p - gamma p log p): zero at p = 1, finite at p = 0 with p log p = 0.
#pragma once

namespace PYL_ISA {

struct focal {
  template <class V, class T>
  static PYL_INLINE SoftmaxResult<V> with_gamma(T gamma, V w, V a) {
    V nll = softplus(a), miss = sigmoid(a);
    // log(1 - p) = -softplus(-a): full precision on confident rows. gamma = 0 must not meet 0 * inf.
    V power = gamma == 0 ? splat<V>(1) : exp(-gamma * softplus(-a));
    V p_nll = where(nll == infinity<T>(), splat<V>(0), sigmoid(-a) * nll);
    V value = where(power == 0, power, power * nll);
    return through_a(w, value, power * (miss + gamma * p_nll));
  }
  template <class T, class V>
  static PYL_INLINE SoftmaxResult<V> row(const Scalars<T>& k, const SoftmaxRow<V>& r) {
    return with_gamma(k.own[0], r.w, r.a);
  }
};

}  // namespace PYL_ISA

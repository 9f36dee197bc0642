// Cross-entropy with smoothing eps and z-loss: q_j = w_j ((1 - eps) [j = y] + eps / C), Q = sum q,
//   L = sum_j q_j (lse - u_j) + z lse^2,      dL/du_j = p_j (Q + 2 z lse) - q_j.
// At the label p_y Q - q_y is written as sum_{j != y} q_j - Q (1 - p_y), which does not cancel.
#pragma once

namespace PYL_ISA {

struct cross_entropy : SoftmaxFormula {
  PYL_OWN(label_smoothing, temperature, softcap, z_loss)
  static constexpr bool soft_targets = true;

  template <class T>
  static SoftmaxView<T> view(const Own<T>& own, T classes) {
    T eps = own.label_smoothing;
    return {1 / own.temperature, own.softcap, true, 1 - eps, eps / classes, eps > 0, own.z_loss > 0};
  }
  template <class T, class V>
  static PYL_INLINE SoftmaxResult<V> row(const Own<T>& own, const Batch<T>& k, const SoftmaxRow<V>& r) {
    T eps = own.label_smoothing, each = eps / k.classes, z = own.z_loss;
    V hit = (1 - eps) * r.w;
    V q = hit + each * k.weight_sum;
    V loss = weighted(hit, r.nll());
    if (eps > 0) loss += each * r.spread;
    V slope = k.main * q * r.miss();
    V label = k.main * (each * (k.weight_sum - r.w) - q * r.miss());
    V extra = splat<V>(0);
    if (z > 0) {
      extra = z * r.lse() * r.lse();
      slope += 2 * z * r.lse() * r.miss();
      label += 2 * z * r.lse() * r.hit();
    }
    return {loss, extra, slope, splat<V>(k.main * each), label};
  }
  template <class T, class V>
  static PYL_INLINE SoftResult<V> soft(const Own<T>& own, const Batch<T>& k, const SoftRow<V>& r) {
    T z = own.z_loss;
    V extra = z > 0 ? z * r.lse * r.lse : splat<V>(0);
    return {extra, k.main * r.mass + 2 * z * r.lse, splat<V>(k.main)};
  }
};

}  // namespace PYL_ISA

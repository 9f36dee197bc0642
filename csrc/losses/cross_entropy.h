// Cross-entropy with smoothing eps and z-loss: q_j = w_j ((1 - eps) [j = y] + eps / C), Q = sum q,
//   L = sum_j q_j (lse - u_j) + z lse^2,      dL/du_j = p_j (Q + 2 z lse) - q_j.
// At the label p_y Q - q_y is written as sum_{j != y} q_j - Q (1 - p_y), which does not cancel.
#pragma once

namespace PYL_ISA {

struct cross_entropy {
  template <class T, class V>
  static PYL_INLINE SoftmaxResult<V> row(const Scalars<T>& k, const SoftmaxRow<V>& r) {
    T eps = k.own[0], each = eps / k.classes, z = k.own[3];
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
};

}  // namespace PYL_ISA

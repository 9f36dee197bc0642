// LogitNorm: u = x / (temperature (n + eps)) with n = |x|, L = w CE(u). A masked class takes no part in n.
#pragma once

namespace PYL_ISA {

struct logit_norm : SoftmaxFormula {
  PYL_OWN(temperature, eps)
  static constexpr bool normed = true;

  // From the norm of the classes beside the label, which is what is saved: with it
  //   dL/dx_y = dL/du_y scale (1 - (x_y^2 - mean x_y) / (n (n + eps)))
  // does not cancel when the label is most of the norm. Lengths are computed in units of `unit`, so that squares do not
  // overflow.
  template <class T, class Wide>
  static PYL_INLINE RowNorm<T, Wide> norm(const Own<Wide>& own, Wide others, Wide x_label, Wide mean_x, Wide unit) {
    Wide rest = others / unit, x = x_label == -infinity<Wide>() ? Wide(0) : x_label / unit, mean = mean_x / unit;
    Wide eps = own.eps / unit, n = square_root(rest * rest + x * x);
    RowNorm<T, Wide> r;
    r.scale = static_cast<T>(1 / (own.temperature * (unit * n + own.eps)));
    if (!(n > 0)) return r;
    Wide square = n * (n + eps);
    r.share = (rest * rest + n * eps + mean * x) / square;
    r.drag = (mean - x) * r.scale / square / unit;
    return r;
  }
  template <class T, class V>
  static PYL_INLINE SoftmaxResult<V> row(const Own<T>&, const Batch<T>&, const SoftmaxRow<V>& r) {
    return through_a(r, r.nll(), r.miss());
  }
};

}  // namespace PYL_ISA

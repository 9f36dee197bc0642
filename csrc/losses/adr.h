// Adaptive discriminative regularizer, with t = sum_selected p^2 (l2) or p (l1) over the `top` largest classes and phi the
// uncertainty H / log C or C / (C - 1) (1 - sum p^2), of the row or its mean over the batch:
//   F = (2 pi)^(-top / 2) phi^-a exp(-t / (2 phi)),   dF/dphi = F (t / 2 - a phi) / phi^2,   dF/dt = -F / (2 phi),
// with a = top / 2 (gauss) or top (literal).
#pragma once

namespace PYL_ISA {

struct adr : SelectFormula {
  PYL_OWN(top, variance, batch, l1, literal, detach_phi)

  template <class T>
  static Selection selection(const Own<T>& own, T classes) {
    Selection s;
    double c = static_cast<double>(classes);
    s.first = 0, s.last = static_cast<int>(own.top) - 1;
    s.kind = own.variance != 0 ? Uncertainty::variance : Uncertainty::entropy;
    s.dense = s.softmax = s.tilts = true;
    s.batch = own.batch != 0, s.mass = own.l1 != 0;
    if (c > 1) s.phi_scale = own.variance != 0 ? c / (c - 1) : 1 / __builtin_log(c);
    return s;
  }
  template <class T, class V>
  static PYL_INLINE SelectedClass<V> selected(const Own<T>& own, V p, V) {
    if (own.l1 != 0) return {p, p};
    return {p * p, 2 * p * p};
  }
  template <class T, class V>
  static PYL_INLINE SelectResult<V> row(const Own<T>& own, const Batch<T>&, const SelectRow<V>& r) {
    T top = own.top, a = own.literal != 0 ? top : top / 2;
    V zero = splat<V>(0), one = splat<V>(1), log_phi = log(r.phi);
    V log_f = T(-0.91893853320467274178) * top - a * log_phi - r.total / (2 * r.phi);
    // Where even the derivatives vanish, powers of 1 / phi may already overflow.
    auto vanishes = (log_f - 4 * log_phi < T(-708)) | (r.phi <= 0);
    V phi = where(vanishes, one, r.phi), f = where(vanishes, zero, exp(log_f)), each = -f / (2 * phi);
    V slope = own.detach_phi != 0 ? zero * f : f * (r.total / 2 - a * phi) / (phi * phi);
    return {f, one, zero, each, each * r.total * T(own.l1 != 0 ? -1 : -2), slope};
  }
};

}  // namespace PYL_ISA

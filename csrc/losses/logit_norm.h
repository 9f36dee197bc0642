// LogitNorm: u = x / (temperature (|x| + eps)), L = w CE(u). own = (temperature, eps).
// The driver computes the norm and adds its part of the gradient.
#pragma once

namespace PYL_ISA {

struct logit_norm {
  template <class T, class V>
  static PYL_INLINE SoftmaxResult<V> row(const Scalars<T>&, const SoftmaxRow<V>& r) {
    return through_a(r, r.nll(), r.miss());
  }
};

}  // namespace PYL_ISA

// The losses of the target probability p = p_y alone: L = w f(a).
#pragma once

namespace PYL_ISA {

struct target : SoftmaxFormula {
  PYL_OWN(kind, gamma, q, tau, n, a, b, floor)
  enum Kind { ce, focal_kind, gce, mae, sumexp, compsum, dco, sce };

  template <class T, class V>
  static PYL_INLINE SoftmaxResult<V> row(const Own<T>& own, const Batch<T>&, const SoftmaxRow<V>& r) {
    V zero = splat<V>(0);
    switch (static_cast<Kind>(static_cast<int>(own.kind))) {
      case ce:
        return through_a(r, r.nll(), r.miss());
      case focal_kind:
        return focal::with_gamma(own.gamma, r);
      case gce: {  // (1 - p^q) / q
        T q = own.q;
        return through_a(r, -expm1(-q * r.nll()) / q, exp(-q * r.nll()) * r.miss());
      }
      case mae:
        return through_a(r, r.miss(), r.hit() * r.miss());
      case sumexp:
        return through_a(r, r.odds(), r.odds());
      case compsum: {  // ((1 + e^a)^(1 - tau) - 1) / (1 - tau), log(1 + e^a) at tau = 1
        T rest = 1 - own.tau;
        if (rest == 0) return through_a(r, r.nll(), r.miss());
        return through_a(r, expm1(rest * r.nll()) / rest, r.miss() * exp(rest * r.nll()));
      }
      case dco: {  // -log(1 - (1 - p)^n)
        T n = own.n;
        V all_miss = exp(-n * r.nll_miss()), some = -expm1(-n * r.nll_miss());
        V value = where(some > T(0.5), -log1p(-all_miss), -log(some));
        // Where p is lost to underflow, 1 - (1 - p)^n is n p.
        auto faint = r.hit() < T(1e-30);
        return through_a(r, where(faint, r.nll() - log(splat<V>(n)), value),
                         where(faint, r.miss(), n * r.hit() * all_miss / some));
      }
      case sce: {  // b (-floor) (1 - p) - a log p
        T alpha = own.a, beta = -own.b * own.floor;
        V forward = alpha == 0 ? zero : alpha * r.nll();
        return through_a(r, forward + beta * r.miss(), alpha * r.miss() + beta * r.hit() * r.miss());
      }
    }
    return through_a(r, zero, zero);
  }
};

}  // namespace PYL_ISA

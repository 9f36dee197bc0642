// The losses of the target probability p = p_y alone: L = w f(a). own = (kind, gamma, q, tau, n, a, b, floor).
#pragma once

namespace PYL_ISA {

struct target {
  enum Kind { ce, focal_kind, gce, mae, sumexp, compsum, dco, sce };

  template <class T, class V>
  static PYL_INLINE SoftmaxResult<V> row(const Scalars<T>& k, const SoftmaxRow<V>& r) {
    V a = r.a, nll = softplus(a), miss = sigmoid(a), p = sigmoid(-a), zero = splat<V>(0);
    V log_miss = -softplus(-a);
    switch (static_cast<Kind>(static_cast<int>(k.own[0]))) {
      case ce: return through_a(r.w, nll, miss);
      case focal_kind: return focal::with_gamma(k.own[1], r.w, a);
      case gce: {  // (1 - p^q) / q
        T q = k.own[2];
        return through_a(r.w, -expm1(-q * nll) / q, exp(-q * nll) * miss);
      }
      case mae: return through_a(r.w, miss, p * miss);
      case sumexp: return through_a(r.w, exp(a), exp(a));
      case compsum: {  // ((1 + e^a)^(1 - tau) - 1) / (1 - tau), log(1 + e^a) at tau = 1
        T tau = k.own[3];
        V value = tau == 1 ? nll : expm1((1 - tau) * nll) / (1 - tau);
        // e^a (1 + e^a)^-tau = miss e^{(1 - tau) nll}
        return through_a(r.w, value, tau == 1 ? miss : miss * exp((1 - tau) * nll));
      }
      case dco: {  // -log(1 - (1 - p)^n)
        T n = k.own[4];
        V none = n * log_miss;  // log of the chance that n draws all miss
        V some = -expm1(none);
        V value = where(some > T(0.5), -log1p(-exp(none)), -log(some));
        // Where p is lost to underflow, 1 - (1 - p)^n is n p.
        auto faint = p < T(1e-30);
        V log_n = log(splat<V>(n));
        return through_a(r.w, where(faint, nll - log_n, value), where(faint, miss, n * p * exp(none) / some));
      }
      case sce: {  // b (-floor) (1 - p) - a log p
        T alpha = k.own[5], beta = -k.own[6] * k.own[7];
        V forward = alpha == 0 ? zero : alpha * nll;
        return through_a(r.w, forward + beta * miss, alpha * miss + beta * p * miss);
      }
    }
    return through_a(r.w, zero, zero);
  }
};

}  // namespace PYL_ISA

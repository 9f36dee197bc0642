// Sparse cross-logit and k-hard negative learning: L = -v x_top + lambda sum_selected s_j, with v = 0, 1 or p_top (a constant
// for the gradient) and s = -log(1 - p) or, in the logit form, x. SAR's filter: rows with H >= limit are out, NaN rows among
// them. own = (v: 0 none, 1 one, 2 p_top; lambda, k, skip, logit form?, limit, filter?).
#pragma once

namespace PYL_ISA {

struct tta {
  template <class T>
  static Selection selection(const Scalars<T>& k) {
    int skip = static_cast<int>(k.own[3]), count = k.own[1] != 0 ? static_cast<int>(k.own[2]) : 0;
    bool filter = k.own[6] != 0, dense = count > 0 && k.own[4] == 0;
    Selection s;
    s.first = count ? skip + 1 : 1, s.last = count ? skip + count : 0;
    s.kind = filter ? Uncertainty::entropy : Uncertainty::none;
    s.dense = dense, s.softmax = dense || filter || k.own[0] == 2;
    return s;
  }
  template <class T, class V>
  static PYL_INLINE SelectedClass<V> selected(const Scalars<T>& k, V p, V x) {
    if (k.own[4] == 0) return {-log1p(-p), p / (1 - p)};  // p <= 1/2 below the first rank
    auto masked = x == -infinity<T>();                    // cannot be pushed further
    return {where(masked, splat<V>(0), x), where(masked, splat<V>(0), splat<V>(1))};
  }
  template <class T, class V>
  static PYL_INLINE SelectResult<V> row(const Scalars<T>& k, const SelectRow<V>& r) {
    V zero = splat<V>(0), one = splat<V>(1), lambda = splat<V>(k.own[1]);
    V v = k.own[0] == 2 ? r.p_top : splat<V>(k.own[0]);
    V loss = lambda * r.total - v * r.top, pull = k.own[4] != 0 ? zero : -lambda * r.own;
    if (k.own[6] == 0) return {loss, one, -v, lambda, pull, zero};
    auto kept = r.phi < k.own[5];
    auto only = [&](V value) { return where(kept, value, zero); };
    return {only(loss), only(one), only(-v), only(lambda), only(pull), zero};
  }
};

}  // namespace PYL_ISA

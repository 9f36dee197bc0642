// Sparse cross-logit and k-hard negative learning: L = -v x_top + lambda sum_selected s_j, with v = 0, 1 or p_top (a constant
// for the gradient) and s = -log(1 - p) or, in the logit form, x. SAR's filter: rows with H >= limit are out, NaN rows among
// them.
#pragma once

namespace PYL_ISA {

struct tta : SelectFormula {
  PYL_OWN(top, lambda, count, skip, logit_form, limit, filter)
  enum Top { none, one, p_top };

  template <class T>
  static Selection selection(const Own<T>& own, T) {
    int skip = static_cast<int>(own.skip), count = own.lambda != 0 ? static_cast<int>(own.count) : 0;
    bool filter = own.filter != 0, dense = count > 0 && own.logit_form == 0;
    Selection s;
    s.first = count ? skip + 1 : 1, s.last = count ? skip + count : 0;
    s.kind = filter ? Uncertainty::entropy : Uncertainty::none;
    s.dense = dense, s.softmax = dense || filter || own.top == p_top;
    s.filters = filter, s.pulls_top = own.top != none;
    return s;
  }
  template <class T, class V>
  static PYL_INLINE SelectedClass<V> selected(const Own<T>& own, V p, V x) {
    if (own.logit_form == 0) return {-log1p(-p), p / (1 - p)};  // p <= 1/2 below the first rank
    auto masked = x == -infinity<T>();                          // cannot be pushed further
    return {where(masked, splat<V>(0), x), where(masked, splat<V>(0), splat<V>(1))};
  }
  template <class T, class V>
  static PYL_INLINE SelectResult<V> row(const Own<T>& own, const Batch<T>&, const SelectRow<V>& r) {
    V zero = splat<V>(0), unit = splat<V>(1), lambda = splat<V>(own.lambda);
    V v = own.top == p_top ? r.p_top : splat<V>(own.top);
    V loss = lambda * r.total - v * r.top, pull = own.logit_form != 0 ? zero : -lambda * r.own;
    if (own.filter == 0) return {loss, unit, -v, lambda, pull, zero};
    auto kept = r.phi < own.limit;
    auto only = [&](V value) { return where(kept, value, zero); };
    return {only(loss), only(unit), only(-v), only(lambda), only(pull), zero};
  }
};

}  // namespace PYL_ISA

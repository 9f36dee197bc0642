// Cross-entropy plus gamma times ADR, which sees the logits themselves. The row here is ADR's; the driver adds the
// cross-entropy. own = (the four of cross_entropy, gamma, the six of adr).
#pragma once

namespace PYL_ISA {

struct cross_entropy_adr {
  template <class T>
  static PYL_INLINE Scalars<T> of_adr(const Scalars<T>& k) {
    Scalars<T> own = k;
    for (int i = 0; i + 5 < kMaxScalars; ++i) own.own[i] = k.own[i + 5];
    return own;
  }
  template <class T>
  static Selection selection(const Scalars<T>& k) {
    return adr::selection(of_adr(k));
  }
  template <class T, class V>
  static PYL_INLINE SelectedClass<V> selected(const Scalars<T>& k, V p, V x) {
    return adr::selected(of_adr(k), p, x);
  }
  template <class T, class V>
  static PYL_INLINE SelectResult<V> row(const Scalars<T>& k, const SelectRow<V>& r) {
    SelectResult<V> f = adr::row(of_adr(k), r);
    T gamma = k.own[4];
    return {gamma * f.loss, f.mass, f.top, gamma * f.each, gamma * f.pull, gamma * f.slope};
  }
};

}  // namespace PYL_ISA

// weight Main(x) + side_weight Side(u), for one look at the logits: Side is a softmax formula, Main one of another family. The
// driver of Main's family runs both; what it gets from here is Main's, times the weight where Main gives rows.
#pragma once

namespace PYL_ISA {

template <class Main, class Side>
struct plus {
  static_assert(Side::family == Family::softmax && !Side::normed, "beside a loss there may be a softmax formula");
  typedef Side Beside;
  static constexpr Family family = Main::family;
  static constexpr bool labels = true, normed = false, beside = true;
  static constexpr bool soft_targets = Side::soft_targets && family == Family::select;  // areas are sums over labels
  template <class T>
  struct __attribute__((may_alias)) Own {
    typename Side::template Own<T> side;  // first: the softmax formula of a loss finds its numbers where the loss's begin
    T weight, side_weight;
    typename Main::template Own<T> main;
  };
  static constexpr OwnNames own_names{{Side::own_names.parts[0], "weight, side_weight", Main::own_names.parts[0]}};

  template <class T>
  static Parts parts(const Own<T>& own) {
    return {own.weight, own.side_weight};
  }

  template <class T>
  static Selection selection(const Own<T>& own, T classes) {
    return Main::selection(own.main, classes);
  }
  template <class T, class V>
  static PYL_INLINE SelectedClass<V> selected(const Own<T>& own, V p, V x) {
    return Main::selected(own.main, p, x);
  }
  template <class T, class V>
  static PYL_INLINE SelectResult<V> row(const Own<T>& own, const Batch<T>& k, const SelectRow<V>& r) {
    SelectResult<V> f = Main::row(own.main, k, r);
    T by = own.weight;
    return {by * f.loss, f.mass, by * f.top, by * f.each, by * f.pull, by * f.slope};
  }

  template <class T>
  static RegionView view(const Own<T>& own) {
    return Main::view(own.main);
  }
  template <class T>
  static PYL_INLINE RegionResult of_class(const Own<T>& own, const RegionClass& c) {
    return Main::of_class(own.main, c);
  }
};

}  // namespace PYL_ISA

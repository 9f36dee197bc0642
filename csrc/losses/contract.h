// Formulas by number, and the table of their facts: all of it is made of list.h and of what formulas say of themselves.
#pragma once

namespace PYL_ISA {

// visit_<family><R>(loss, f) and visit<R>(loss, f) call f(formula) with the formula of that number.
#define PYL_CASE(name) \
  case id_##name:      \
    return f(name{});
#if defined(__CUDACC__)
#define PYL_VISITOR _Pragma("nv_exec_check_disable") template <class R, class F>
#else
#define PYL_VISITOR template <class R, class F>
#endif
#define PYL_VISIT(name, losses)                  \
  PYL_VISITOR PYL_INLINE R name(int loss, F f) { \
    switch (loss) { losses(PYL_CASE) }           \
    __builtin_unreachable();                     \
  }
PYL_VISIT(visit_softmax, PYL_SOFTMAX_LOSSES)
PYL_VISIT(visit_margin, PYL_MARGIN_LOSSES)
PYL_VISIT(visit_entropy, PYL_ENTROPY_LOSSES)
PYL_VISIT(visit_select, PYL_SELECT_LOSSES)
PYL_VISIT(visit_region, PYL_REGION_LOSSES)
PYL_VISIT(visit, PYL_LOSSES)
#undef PYL_VISIT
#undef PYL_VISITOR
#undef PYL_CASE

template <class F>
struct NumberOf;
#define PYL_NUMBER(name)                    \
  template <>                               \
  struct NumberOf<name> {                   \
    static constexpr int value = id_##name; \
  };
PYL_LOSSES(PYL_NUMBER)
#undef PYL_NUMBER
template <class F, bool beside = F::beside>
struct SoftmaxOf {
  static constexpr int value = F::family == Family::softmax ? NumberOf<F>::value : -1;
};
template <class F>
struct SoftmaxOf<F, true> : NumberOf<typename F::Beside> {};

template <class F>
constexpr Facts facts_of() {
  return {F::family,
          F::labels,
          F::soft_targets,
          F::normed,
          F::beside,
          SoftmaxOf<F>::value,
          sizeof(typename F::template Own<char>),
          F::own_names};
}
#define PYL_FACTS(name) facts_of<name>(),
constexpr Facts kFacts[] = {PYL_LOSSES(PYL_FACTS)};
#undef PYL_FACTS

// Views of a call, from the loss's own numbers.
template <class T>
SoftmaxView<T> softmax_view(const Facts& facts, const T* numbers, T classes) {
  if (facts.softmax < 0) return {};
  return visit_softmax<SoftmaxView<T>>(facts.softmax, [&](auto f) { return f.view(own_of<decltype(f)>(numbers), classes); });
}
inline Selection selection_of(int loss, const double* numbers, double classes) {
  return visit_select<Selection>(loss, [&](auto f) { return f.selection(own_of<decltype(f)>(numbers), classes); });
}
template <class T>
MarginView<T> margin_view(int loss, const T* numbers) {
  return visit_margin<MarginView<T>>(loss, [&](auto f) { return f.view(own_of<decltype(f)>(numbers)); });
}
inline EntropyView entropy_view(int loss, const double* numbers) {
  return visit_entropy<EntropyView>(loss, [&](auto f) { return f.view(own_of<decltype(f)>(numbers)); });
}
inline RegionView region_view(int loss, const double* numbers) {
  return visit_region<RegionView>(loss, [&](auto f) { return f.view(own_of<decltype(f)>(numbers)); });
}
inline Parts parts_of(int loss, const double* numbers) {
  return visit<Parts>(loss, [&](auto f) { return f.parts(own_of<decltype(f)>(numbers)); });
}
// Is cross-entropy's, or another formula's, u anything else than the logit?
template <class T>
bool is_mapped(const SoftmaxView<T>& view, bool shift) {
  return view.scale != 1 || view.cap != 0 || (view.shifted && shift);
}
// A mean of two parts that divide by different masses has two divisors: a select loss counts rows, whatever its side weighs.
template <class T>
bool has_second_divisor(const Facts& facts, const SoftmaxView<T>& view) {
  return view.second_divisor || (facts.beside && facts.family == Family::select);
}
// Is what a mean divides by known before the losses are, so that forward may write the gradient?
inline bool known_early(int loss, const double* numbers) {
  switch (kFacts[loss].family) {
    case Family::softmax:
      return true;
    case Family::entropy:
      return !entropy_view(loss, numbers).filters;
    case Family::select: {
      Selection s = selection_of(loss, numbers, 2);
      return !s.filters && !s.batch;
    }
    default:  // margin: most of its gradient is nothing; region: it needs the sums of all rows
      return false;
  }
}

// Formulas of a row, a switch once a row.
template <class T, class V>
PYL_INLINE SoftmaxResult<V> softmax_formula(int formula, const T* numbers, const Batch<T>& k, const SoftmaxRow<V>& r) {
  return visit_softmax<SoftmaxResult<V>>(formula, [&](auto f) { return f.row(own_of<decltype(f)>(numbers), k, r); });
}
template <class T, class V>
PYL_INLINE SelectedClass<V> selected_class(int loss, const T* numbers, V p, V x) {
  return visit_select<SelectedClass<V>>(loss, [&](auto f) { return f.selected(own_of<decltype(f)>(numbers), p, x); });
}
// Those that take class probabilities, and those of normed rows; what other formulas have not got is never called.
template <class T, class V>
PYL_INLINE SoftResult<V> soft_formula(int formula, const T* numbers, const Batch<T>& k, const SoftRow<V>& r) {
  return visit_softmax<SoftResult<V>>(formula, [&](auto f) {
    typedef decltype(f) F;
    if constexpr (F::soft_targets) return F::soft(own_of<F>(numbers), k, r);
    else return SoftResult<V>{};
  });
}
template <class T, class Wide>
PYL_INLINE RowNorm<T, Wide> norm_formula(int formula, const Wide* numbers, Wide others, Wide x_label, Wide mean_x, Wide unit) {
  return visit_softmax<RowNorm<T, Wide>>(formula, [&](auto f) {
    typedef decltype(f) F;
    if constexpr (F::normed) return F::template norm<T>(own_of<F>(numbers), others, x_label, mean_x, unit);
    else return RowNorm<T, Wide>{};
  });
}

}  // namespace PYL_ISA

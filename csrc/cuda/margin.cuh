// The margin family. A threshold asks for two looks at the errors: forward reads a row twice, unless no error is above zero.
// Saved: the threshold, the factor (0 in a row without errors, to which backward only writes zeros) and the sum of slopes.
// The kept classes are found again in backward.
#pragma once
#include "cuda/rows.cuh"

namespace PYL_ISA {

// What the kernels of this family know besides the call. They are templates of the formula F: its errors are in the inner loop.
template <class F, class T>
struct MarginPlan {
  MarginView<T> view;
  typename F::template Errors<T> errors;
};
// The raw errors of a row; a masked class, the label and what is no class have raw = -inf.
template <class E, class T>
struct RowErrors {
  const E& h;
  const T* margins;  // of each class, or null: `margin` then is every class's
  T margin, x_label;
  int y;

  PYL_DEVICE T raw(T x, int j) const {
    if (x == -infinity<T>() || j == y) return -infinity<T>();
    return (x - x_label) + (margins ? margins[j] : margin);
  }
  PYL_DEVICE T value(T raw) const { return h.value(raw); }
  PYL_DEVICE T slope(T raw) const { return h.slope(raw); }
};
template <class F, class T>
PYL_DEVICE RowErrors<typename F::template Errors<T>, T> errors_of(const Call<T>& c, const MarginPlan<F, T>& plan,
                                                                  const Label& label, T x_label) {
  bool own = plan.view.of_label && c.shift && label.live;
  return {plan.errors, plan.view.of_label ? nullptr : c.shift, own ? c.shift[label.y] : plan.view.margin, x_label, label.y};
}

// All errors of a row: what the threshold is made of. Comparisons drop NaN, so it is kept apart.
template <class T>
struct ErrorSums {
  double total = 0;
  T largest = 0, nans = 0;
  template <class E, class Chunk>
  PYL_DEVICE void add(const RowErrors<E, T>& h, const Chunk& x) {
    T sum = 0;
#pragma unroll
    for (int i = 0; i < Chunk::kCount; ++i) {
      T raw = x.has(i) ? h.raw(x.x[i], x.at(i)) : -infinity<T>(), e = h.value(raw);
      sum += e, largest = larger(e, largest), nans += raw != raw ? T(1) : T(0);
    }
    total += static_cast<double>(sum);
  }
  template <class G>
  PYL_DEVICE void merge(const G& g) {
    total = sum_of(g, total), largest = max_of(g, largest), nans = sum_of(g, nans);
  }
  // The mean error, but not more than the largest, over which rounding may lift it.
  PYL_DEVICE T threshold(int classes) const {
    T t = not_below(total / classes, T(0));
    return t < largest ? t : largest;
  }
};
// The errors that reach the threshold.
template <class T>
struct KeptSums {
  T errors = 0, count = 0, slopes = 0, nans = 0;
  template <class E, class Chunk>
  PYL_DEVICE void add(const RowErrors<E, T>& h, T t, const Chunk& x) {
    T sum = 0, of_slopes = 0;
#pragma unroll
    for (int i = 0; i < Chunk::kCount; ++i) {
      T raw = x.has(i) ? h.raw(x.x[i], x.at(i)) : -infinity<T>(), e = h.value(raw);
      nans += raw != raw ? T(1) : T(0);
      if (!(e >= t && e > 0)) continue;
      sum += e, count += 1, of_slopes += h.slope(raw);
    }
    errors += sum, slopes += of_slopes;
  }
  template <class G>
  PYL_DEVICE void merge(const G& g) {
    T v[4] = {errors, count, slopes, nans};
    add_up(g, v);
    errors = v[0], count = v[1], slopes = v[2], nans = v[3];
  }
};

template <class F, class T>
PYL_DEVICE void end_row(const Call<T>& c, const Place& p, const Label& label, const KeptSums<T>& kept, bool nans, T t,
                        T x_label, Totals<T>& totals) {
  Weights<T> w = weights_of(c, p, label);
  bool none = kept.count == 0;
  // A row with a NaN, or with every class masked, has no margin to speak of.
  bool lost = nans || kept.nans != 0 || x_label != x_label || (none && x_label == -infinity<T>());
  T bad = lost ? nan<T>() : T(0);
  MarginResult<T> result = F::row(own_of<F>(c.numbers), c.k, MarginRow<T>{kept.errors + bad, kept.count, w.w});
  emit(c, p, label, w, result.loss, T(0), totals);
  save(c, p, 0, t, label.live);
  save(c, p, 1, none ? bad : result.factor + bad, label.live);
  save(c, p, 2, kept.slopes, label.live);
}

// Numbers of a part: of all errors (the total in double, as two), of the kept ones and the label's logit.
template <class T>
PYL_DEVICE ErrorSums<T> fetch_errors(const Call<T>& c, int part, int64_t row) {
  ErrorSums<T> all;
  all.largest = part_number(c, c.first_parts, 0, part, row), all.nans = part_number(c, c.first_parts, 1, part, row);
  all.total = c.part_totals[part * c.rows + row];
  return all;
}

template <class F, class D, class G>
PYL_KERNEL(G::kThreads)
margin_rows(PYL_PARAMETER Call<Accumulate<D>> c, PYL_PARAMETER MarginPlan<F, Accumulate<D>> plan) {
  typedef Accumulate<D> T;
  G g(c.width);
  Totals<T> totals;
  over_tiles(g, c, [&](const Place& p) {
    Label label = label_of(c, p);
    Place mine = p;
    if (!label.live) mine.end = mine.begin;
    const D* row = logits_of<D>(c, p);
    int64_t stride = c.x_walk.class_stride;
    T x_label = logit_at(row, stride, label.y, label.live), t = 0;
    auto h = errors_of(c, plan, label, x_label);
    bool nans = false;
    if (plan.view.threshold) {
      ErrorSums<T> all;
      if (c.phase == 0) {
        visit(g, row, stride, mine, [&](const auto& x) { all.add(h, x); });
        all.merge(g);
      } else {  // the second launch of a split row: a lane has a part's
        if (g.rank % kWarp < c.parts) all = fetch_errors(c, g.rank % kWarp, p.row);
        all.merge(Lanes(kWarp));
      }
      if (c.parts > 1 && c.phase == 0) {
        if (g.rank == 0) {
          part_number(c, c.first_parts, 0, p.part, p.row) = all.largest;
          part_number(c, c.first_parts, 1, p.part, p.row) = all.nans;
          c.part_totals[p.part * c.rows + p.row] = all.total;
        }
        return;
      }
      t = all.threshold(c.classes);
      nans = all.nans != 0;
      if (all.largest == 0) mine.end = mine.begin;  // nothing to keep
    }
    KeptSums<T> kept;
    visit(g, row, stride, mine, [&](const auto& x) { kept.add(h, t, x); });
    kept.merge(g);
    if (g.rank) return;
    if (c.parts == 1) return end_row<F>(c, p, label, kept, nans, t, x_label, totals);
    const T v[6] = {kept.errors, kept.count, kept.slopes, kept.nans + (nans ? T(1) : T(0)), t, x_label};
    for (int i = 0; i < 6; ++i) part_number(c, c.second_parts, i, p.part, p.row) = v[i];
  });
  if (c.parts == 1) leave(c, totals);
}

template <class F, class T>
PYL_KERNEL(kLanesThreads)
margin_parts(PYL_PARAMETER Call<T> c) {
  Lanes g(kWarp);
  Totals<T> totals;
  over_tiles(g, c, [&](const Place& p) {
    Label label = label_of(c, p);
    KeptSums<T> kept;
    T t = 0, x_label = 0;
    if (label.live) {
      t = part_number(c, c.second_parts, 4, 0, p.row), x_label = part_number(c, c.second_parts, 5, 0, p.row);
      if (g.rank < c.parts) {
        kept.errors = part_number(c, c.second_parts, 0, g.rank, p.row);
        kept.count = part_number(c, c.second_parts, 1, g.rank, p.row);
        kept.slopes = part_number(c, c.second_parts, 2, g.rank, p.row);
        kept.nans = part_number(c, c.second_parts, 3, g.rank, p.row);
      }
    }
    kept.merge(g);
    if (g.rank == 0) end_row<F>(c, p, label, kept, false, t, x_label, totals);
  });
  leave(c, totals);
}

template <class F, class D, class G>
PYL_KERNEL(G::kThreads)
margin_gradient(PYL_PARAMETER Call<Accumulate<D>> c, PYL_PARAMETER MarginPlan<F, Accumulate<D>> plan) {
  typedef Accumulate<D> T;
  G g(c.width);
  over_tiles(g, c, [&](const Place& p) {
    if (!p.exists) return;
    Label label = label_of(c, p);
    Weights<T> w = weights_of(c, p, label);
    T t = saved(c, p, 0, label.live), factor = saved(c, p, 1, label.live), slopes = saved(c, p, 2, label.live);
    bool lost = factor != factor, live = label.live && !lost && factor != 0 && counted(c, w, factor);
    T fill = lost ? nan<T>() : T(0);
    const D* row = logits_of<D>(c, p);
    int64_t stride = c.x_walk.class_stride;
    auto h = errors_of(c, plan, label, logit_at(row, stride, label.y, live));
    factor *= upstream_of(c, p, label, w).up;
    T at_label = -factor * slopes;
    rewrite(g, row, stride, gradient_of<D>(c, p), c.grad_walk.class_stride, live, p, [&](const auto& x, T(&value)[kChunk<D>]) {
#pragma unroll
      for (int i = 0; i < kChunk<D>; ++i) {
        T raw = live && x.has(i) ? h.raw(x.x[i], x.at(i)) : -infinity<T>(), e = h.value(raw);
        T v = e >= t && e > 0 ? factor * h.slope(raw) : T(0);
        value[i] = !live ? fill : x.at(i) == label.y ? at_label : v;
      }
    });
  });
}

template <class F, class T>
MarginPlan<F, T> plan_of(const Call<T>& c) {
  const auto& own = own_of<F>(c.numbers);
  return {F::view(own), typename F::template Errors<T>(own)};
}

template <class F, class D>
void forward_margin(Run& run, const Request& r) {
  typedef Accumulate<D> T;
  Call<T> c = call_of<T>(r);
  MarginPlan<F, T> plan = plan_of<F>(c);
  Shape shape = shape_of(r), end = shape.parts > 1 ? shape_of_parts(r) : shape;
  set_shape(c, shape);
  c.partial = run.take<double>(4 * static_cast<int64_t>(end.blocks()));
  if (shape.parts > 1) {
    c.first_parts = run.take<T>(2 * shape.parts * r.rows);
    c.part_totals = run.take<double>(shape.parts * r.rows);
    c.second_parts = run.take<T>(6 * shape.parts * r.rows);
    if (plan.view.threshold) {
      PYL_RUN_ROWS(run, margin_rows, PYL_TYPES(F, D), shape, c, plan);
      c.phase = 1;
    }
  }
  PYL_RUN_ROWS(run, margin_rows, PYL_TYPES(F, D), shape, c, plan);
  if (shape.parts > 1) {
    auto kernel = margin_parts<F, T>;
    PYL_RUN(run, kernel, end.blocks(), end.threads, c);
  }
  finish(run, r, c, end.blocks());
}

template <class F, class D>
void backward_margin(Run& run, const Request& r) {
  Call<Accumulate<D>> c = call_of<Accumulate<D>>(r);
  MarginPlan<F, Accumulate<D>> plan = plan_of<F>(c);
  Shape shape = shape_of(r);
  set_shape(c, shape);
  PYL_RUN_ROWS(run, margin_gradient, PYL_TYPES(F, D), shape, c, plan);
}

template <class D>
void forward_margin(Run& run, const Request& r) {
  visit_margin<void>(r.loss, [&](auto f) { forward_margin<decltype(f), D>(run, r); });
}
template <class D>
void backward_margin(Run& run, const Request& r) {
  visit_margin<void>(r.loss, [&](auto f) { backward_margin<decltype(f), D>(run, r); });
}

}  // namespace PYL_ISA

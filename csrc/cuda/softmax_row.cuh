// A row as the softmax family sees it: its running sums, and the view of it that a formula gets. Cross-entropy beside another
// family (select, region) uses the same.
#pragma once
#include "cuda/rows.cuh"

namespace PYL_ISA {

template <class T>
PYL_DEVICE T centre(T m) {  // what exponentials are relative to
  return m == -infinity<T>() ? T(0) : m;
}

// What class j of a row weighs in cross-entropy's loss: with class probabilities t as targets q_j = w_j (hit t_j + each), else
// w_j alone, for smoothing.
template <class T>
PYL_DEVICE int64_t target_at(const Call<T>& c, const Place& p) {
  return c.soft && p.exists ? c.soft_walk.offset(p.row) : 0;
}
template <class T>
PYL_DEVICE T target_weight(const Call<T>& c, int64_t at, int j) {
  T w = c.weight ? c.weight[j] : T(1);
  if (!c.soft) return w;
  T t = load_as<T>(c.soft, c.soft_dtype, at + j * c.soft_walk.class_stride);
  return w * (c.view.hit * t + c.view.each);
}

// Sums over the classes other than the label's (over all with class probabilities), relative to the largest u so far.
template <class T>
struct Sums {
  static constexpr int kNumbers = 5;
  T m = -infinity<T>(), d = 0;  // sum of exp(u - m)
  T moment = 0;                 // normed rows: sum of exp(late (x - m)) x
  T spread = 0, seen = 0;       // smoothing and class probabilities: sum of w (m - u), and of w

  PYL_DEVICE void raise(T top, T late) {
    if (!(top > m)) return;
    T shrink = exp((m - top) * late);
    d *= shrink, moment *= shrink;
    if (seen != 0) spread += (top - centre(m)) * seen;
    m = top;
  }
  // `late` multiplies differences of u: normed rows' u are large, their differences not. y < 0: no class is left out.
  template <class Chunk>
  PYL_DEVICE void add(const Call<T>& c, const Map<T>& map, bool spreads, const Chunk& x, int y, T late, bool norm,
                      int64_t target) {
    T u[Chunk::kCount], top = -infinity<T>();
#pragma unroll
    for (int i = 0; i < Chunk::kCount; ++i) {
      bool other = x.has(i) && x.at(i) != y;
      u[i] = other ? map(x.x[i], x.at(i)) : -infinity<T>();
      top = larger(u[i], top);
    }
    raise(top, late);
    T base = centre(m), sum = 0, more = 0;
#pragma unroll
    for (int i = 0; i < Chunk::kCount; ++i) {
      T e = exp((u[i] - base) * late);
      sum += e;
      if (norm) more += u[i] == -infinity<T>() ? T(0) : e * x.x[i];
    }
    d += sum, moment += more;
    if (!spreads) return;
#pragma unroll
    for (int i = 0; i < Chunk::kCount; ++i) {
      if (!x.has(i) || x.at(i) == y) continue;
      T w = target_weight(c, target, x.at(i));
      if (w != 0) spread += w * (base - u[i]);
      seen += w;
    }
  }
  template <class G>
  PYL_DEVICE void merge(const G& g, T late) {
    raise(max_of(g, m), late);
    T v[4] = {d, moment, spread, seen};
    add_up(g, v);
    d = v[0], moment = v[1], spread = v[2], seen = v[3];
  }
  // Of a part of a split row, to the workspace and back.
  PYL_DEVICE void leave(const Call<T>& c, T* parts, int from, const Place& p) const {
    const T v[kNumbers] = {m, d, moment, spread, seen};
    for (int i = 0; i < kNumbers; ++i) part_number(c, parts, from + i, p.part, p.row) = v[i];
  }
  PYL_DEVICE void fetch(const Call<T>& c, T* parts, int from, int part, int64_t row) {
    m = part_number(c, parts, from, part, row), d = part_number(c, parts, from + 1, part, row);
    moment = part_number(c, parts, from + 2, part, row);
    spread = part_number(c, parts, from + 3, part, row), seen = part_number(c, parts, from + 4, part, row);
  }
};

// The formula's view of a row, from the statistics that backward has too.
template <class T>
PYL_DEVICE SoftmaxRow<T> softmax_row(T m, T d, T u_label, T late, T w) {
  T log_d = log(d), a = (m - u_label) * late + log_d;
  if (u_label == infinity<T>()) a = nan<T>();  // as the softmax of +inf
  return {a, T(1), w, u_label * late, m * late + log_d};
}
// sum_j w_j (lse - u_j), with lse - m by what does not cancel
template <class T>
PYL_DEVICE T spread_of(const Sums<T>& s, const SoftmaxRow<T>& r, T mass) {
  T base = s.m == -infinity<T>() ? r.u_label : s.m;
  T rest = (r.s > 0 ? log(s.d) : r.u_label - base) + r.log_total();
  T spread = s.seen != 0 ? s.spread + s.seen * rest : s.spread;
  return mass == 0 ? spread : spread + mass * r.nll();
}

template <class T>
struct RowLoss {
  T loss, extra;
};
// The softmax formula's, of a row from its sums.
template <class T>
PYL_DEVICE RowLoss<T> loss_of(const Call<T>& c, const Sums<T>& s, T u_label, T late, const Weights<T>& w) {
  SoftmaxRow<T> r = softmax_row(s.m, s.d, u_label, late, w.w);
  if (c.view.smooth) r.spread = spread_of(s, r, w.mass);
  SoftmaxResult<T> result = softmax_formula(c.softmax, c.numbers, batch_of(c, T(1)), r);
  return {result.loss, result.extra};
}
// With class probabilities: sum q (lse - u), and what the formula adds.
template <class T>
PYL_DEVICE RowLoss<T> soft_loss_of(const Call<T>& c, const Sums<T>& s) {
  T rest = s.m == -infinity<T>() ? nan<T>() : log(s.d), lse = s.m + rest;  // a row of -inf has no softmax
  SoftResult<T> result = soft_formula(c.softmax, c.numbers, batch_of(c, T(1)), SoftRow<T>{lse, s.seen});
  return {s.spread + (s.seen == 0 ? rest * 0 : s.seen * rest), result.extra};
}

// What a row's gradient is made of: dL/du_j = slope e^((u_j - base) late) - pull w_j, `label` at the label.
template <class T>
struct SoftmaxGradient {
  T slope = 0, pull = 0, label = 0, base = 0;
  bool counts = true;
};
template <class T>
PYL_DEVICE SoftmaxGradient<T> gradient_of(const Call<T>& c, T m, T d, T u_label, T late, const Weights<T>& w,
                                          const Upstream<T>& up) {
  SoftmaxRow<T> r = softmax_row(m, d, u_label, late, w.w);
  SoftmaxResult<T> result = softmax_formula(c.softmax, c.numbers, batch_of(c, up.main), r);
  SoftmaxGradient<T> g;
  g.counts = !(d < 0);
  g.slope = up.up * result.slope, g.pull = up.up * result.pull, g.label = up.up * result.label;
  g.slope = d == 0 ? g.slope * 0 : g.slope / d;  // no other class: nothing to push, unless the row is NaN
  g.base = centre(m);
  return g;
}
template <class T>
PYL_DEVICE SoftmaxGradient<T> soft_gradient_of(const Call<T>& c, T m, T d, T mass, const Upstream<T>& up) {
  SoftmaxGradient<T> g;
  SoftResult<T> result = soft_formula(c.softmax, c.numbers, batch_of(c, up.main), SoftRow<T>{m + log(d), mass});
  g.counts = !(d < 0);
  g.slope = up.up * result.slope / d, g.pull = up.up * result.pull, g.base = m;
  return g;
}

}  // namespace PYL_ISA

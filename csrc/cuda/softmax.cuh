// The softmax family. Forward reads a row once (normed rows twice), backward once. Saved: m = max_{j != y} u_j and
// d = sum_{j != y} exp(u_j - m), separately: their sum would lose the digits of d in a row of large logits; normed rows also
// the norm of the other classes and the mean of x under their softmax; class probabilities their mass.
#pragma once
#include "cuda/softmax_row.cuh"

namespace PYL_ISA {

// Sum of squares in units of the largest |x_j| so far, which neither overflows nor vanishes; masked classes take no part.
template <class T>
struct Squares {
  T sum = 0, unit = T(1e-30);
  PYL_DEVICE void raise(T largest) {
    if (!(largest > unit)) return;
    T step = unit / largest;
    sum *= step * step, unit = largest;
  }
  template <class Chunk>
  PYL_DEVICE void add(const Chunk& x, int y) {
    T v[Chunk::kCount], largest = 0;
#pragma unroll
    for (int i = 0; i < Chunk::kCount; ++i) {
      v[i] = x.has(i) && x.at(i) != y && x.x[i] != -infinity<T>() ? x.x[i] : T(0);
      largest = larger(absolute(v[i]), largest);
    }
    raise(largest);
    T inverse = 1 / unit;
#pragma unroll
    for (int i = 0; i < Chunk::kCount; ++i) sum += (v[i] * inverse) * (v[i] * inverse);
  }
  template <class G>
  PYL_DEVICE void merge(const G& g) {
    raise(max_of(g, unit));
    sum = sum_of(g, sum);
  }
  PYL_DEVICE T norm() const { return unit * square_root(sum); }
};
template <class T>
PYL_DEVICE T unmasked(T x) {
  return x == -infinity<T>() ? T(0) : x;
}
// What the formula makes of the norm: in units of what is largest, float32 squares neither overflow nor vanish.
template <class T>
PYL_DEVICE RowNorm<T, T> norm_of(const Call<T>& c, T rest, T x_label, T mean_x) {
  T unit = larger(larger(rest, absolute(unmasked(x_label))), T(1e-30));
  return norm_formula<T, T>(c.softmax, c.numbers, rest, x_label, mean_x, unit);
}

// Loss and saved numbers of a row, from one thread.
template <class T>
PYL_DEVICE void end_row(const Call<T>& c, const Place& p, const Label& label, const Sums<T>& s, T u_label, T late, T rest,
                        Totals<T>& totals) {
  Weights<T> w = weights_of(c, p, label);
  RowLoss<T> row{0, 0};
  if (label.live) row = c.soft ? soft_loss_of(c, s) : loss_of(c, s, u_label, late, w);
  emit(c, p, label, w, row.loss, row.extra, totals);
  save(c, p, 0, s.m, label.live);
  save(c, p, 1, counted(c, w, row.loss + row.extra) ? s.d : T(kLeftOut), label.live);
  if (c.soft) save(c, p, 2, s.seen, label.live);
  if (c.normed) save(c, p, 2, rest, label.live), save(c, p, 3, s.d == 0 ? T(0) : s.moment / s.d, label.live);
}

template <class D, class G>
PYL_KERNEL(G::kThreads)
softmax_rows(PYL_PARAMETER Call<Accumulate<D>> c) {
  typedef Accumulate<D> T;
  G g(c.width);
  Totals<T> totals;
  over_tiles(g, c, [&](const Place& p) {
    Label label = label_of(c, p);
    Place mine = p;
    if (!label.live) mine.end = mine.begin;  // nothing is read
    const D* row = logits_of<D>(c, p);
    int64_t stride = c.x_walk.class_stride;
    T x_label = logit_at(row, stride, label.y, label.live && !c.soft), late = 1, rest = 0;
    int y = c.soft ? -1 : label.y;
    if (c.normed) {
      Squares<T> squares;
      if (c.phase == 0) visit(g, row, stride, mine, [&](const auto& x) { squares.add(x, y); });
      else if (g.rank % kWarp < c.parts) {  // the second launch of a split row: a lane has a part's
        squares.sum = part_number(c, c.first_parts, 0, g.rank % kWarp, p.row);
        squares.unit = part_number(c, c.first_parts, 1, g.rank % kWarp, p.row);
      }
      if (c.phase == 0) squares.merge(g);
      else squares.merge(Lanes(kWarp));
      if (c.parts > 1 && c.phase == 0) {
        if (g.rank == 0) {
          part_number(c, c.first_parts, 0, p.part, p.row) = squares.sum;
          part_number(c, c.first_parts, 1, p.part, p.row) = squares.unit;
        }
        return;
      }
      rest = squares.norm();
      late = norm_of(c, rest, x_label, T(0)).scale;
    }
    int64_t target = target_at(c, p);
    Sums<T> s;
    visit(g, row, stride, mine, [&](const auto& x) { s.add(c, c.map, c.view.smooth || c.soft, x, y, late, c.normed, target); });
    s.merge(g, late);
    if (g.rank) return;
    if (c.parts > 1) {
      s.leave(c, c.second_parts, 0, p);
      if (p.part == 0) part_number(c, c.second_parts, Sums<T>::kNumbers, 0, p.row) = x_label;
      return;
    }
    end_row(c, p, label, s, c.soft ? x_label : c.map(x_label, label.y), late, rest, totals);
  });
  if (c.parts == 1) leave(c, totals);
}

// The parts of split rows, put together: a warp a row.
template <class T>
PYL_KERNEL(kLanesThreads)
softmax_parts(PYL_PARAMETER Call<T> c) {
  Lanes g(kWarp);
  Totals<T> totals;
  over_tiles(g, c, [&](const Place& p) {
    Label label = label_of(c, p);
    bool has = label.live && g.rank < c.parts;
    T x_label = label.live && !c.soft ? part_number(c, c.second_parts, Sums<T>::kNumbers, 0, p.row) : T(0), late = 1, rest = 0;
    if (c.normed) {
      Squares<T> squares;
      if (has) {
        squares.sum = part_number(c, c.first_parts, 0, g.rank, p.row);
        squares.unit = part_number(c, c.first_parts, 1, g.rank, p.row);
      }
      squares.merge(g);
      rest = squares.norm();
      late = norm_of(c, rest, x_label, T(0)).scale;
    }
    Sums<T> s;
    if (has) s.fetch(c, c.second_parts, 0, g.rank, p.row);
    s.merge(g, late);
    if (g.rank == 0) end_row(c, p, label, s, c.soft ? x_label : c.map(x_label, label.y), late, rest, totals);
  });
  leave(c, totals);
}

template <class D, class G>
PYL_KERNEL(G::kThreads)
softmax_gradient(PYL_PARAMETER Call<Accumulate<D>> c) {
  typedef Accumulate<D> T;
  G g(c.width);
  over_tiles(g, c, [&](const Place& p) {
    if (!p.exists) return;
    Label label = label_of(c, p);
    const D* row = logits_of<D>(c, p);
    int64_t stride = c.x_walk.class_stride;
    Weights<T> w = weights_of(c, p, label);
    Upstream<T> up = upstream_of(c, p, label, w);
    T m = saved(c, p, 0, label.live), d = saved(c, p, 1, label.live), late = 1, drag = 0;
    SoftmaxGradient<T> to;
    int y = c.soft ? -1 : label.y;
    if (label.live && c.soft) to = soft_gradient_of(c, m, d, saved(c, p, 2, true), up);
    if (label.live && !c.soft) {
      T x_label = logit_at(row, stride, y, true);
      RowNorm<T, T> norm;
      if (c.normed) norm = norm_of(c, saved(c, p, 2, true), x_label, saved(c, p, 3, true));
      late = norm.scale;
      T du_label;
      to = gradient_of(c, m, d, c.map.with_slope(x_label, y, du_label), late, w, up);
      drag = -to.label * norm.drag;  // the norm's own part of the gradient, along x
      to.label *= norm.share * du_label * late;
    }
    bool live = label.live && to.counts;
    int64_t target = target_at(c, p);
    rewrite(g, row, stride, gradient_of<D>(c, p), c.grad_walk.class_stride, live, p, [&](const auto& x, T(&value)[kChunk<D>]) {
#pragma unroll
      for (int i = 0; i < kChunk<D>; ++i) {
        value[i] = 0;
        if (!live || !x.has(i)) continue;
        int j = x.at(i);
        T du, v = to.slope * exp((c.map.with_slope(x.x[i], j, du) - to.base) * late);
        if (c.soft || c.view.smooth) v -= to.pull * target_weight(c, target, j);
        v *= du * late;
        if (c.normed) v -= drag * unmasked(x.x[i]);
        value[i] = j == y ? to.label : v;
      }
    });
  });
}

template <class D>
void forward_softmax(Run& run, const Request& r) {
  typedef Accumulate<D> T;
  Call<T> c = call_of<T>(r);
  Shape shape = shape_of(r), end = shape.parts > 1 ? shape_of_parts(r) : shape;
  set_shape(c, shape);
  c.partial = run.take<double>(4 * static_cast<int64_t>(end.blocks()));
  if (shape.parts > 1) {
    c.first_parts = run.take<T>(2 * shape.parts * r.rows);
    c.second_parts = run.take<T>((Sums<T>::kNumbers + 1) * shape.parts * r.rows);
    if (c.normed) {
      PYL_RUN_ROWS(run, softmax_rows, D, shape, c);
      c.phase = 1;
    }
  }
  PYL_RUN_ROWS(run, softmax_rows, D, shape, c);
  if (shape.parts > 1) {
    auto kernel = softmax_parts<T>;
    PYL_RUN(run, kernel, end.blocks(), end.threads, c);
  }
  finish(run, r, c, end.blocks());
}

template <class D>
void backward_softmax(Run& run, const Request& r) {
  Call<Accumulate<D>> c = call_of<Accumulate<D>>(r);
  Shape shape = shape_of(r);
  set_shape(c, shape);
  PYL_RUN_ROWS(run, softmax_gradient, D, shape, c);
}

}  // namespace PYL_ISA

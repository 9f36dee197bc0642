// The entropy family, without labels: one read forward, one backward; filtered rows only write zeros. Saved: m,
// d = sum e^(x - m), mu = sum p (x - m) and the slope.
#pragma once
#include "cuda/entropy_row.cuh"

namespace PYL_ISA {

template <class T>
PYL_DEVICE void end_row(const Call<T>& c, const Place& p, Label label, const Moments<T>& s, Totals<T>& totals) {
  Weights<T> w = weights_of(c, p, label);
  T more = s.more(), d = 1 + more, mu = s.moment / d;
  EntropyResult<T> result = entropy_formula(c.loss, c.numbers, c.k, EntropyRow<T>{log1p(more) - mu});
  label.live = label.live && result.mass != 0;
  w.mass = result.mass;
  emit(c, p, label, w, result.loss, T(0), totals);
  save(c, p, 0, s.m, label.live);
  save(c, p, 1, d, label.live);
  save(c, p, 2, mu, label.live);
  save(c, p, 3, counted(c, w, result.loss) ? result.slope : T(0), label.live);
}

template <class D, class G>
PYL_KERNEL(G::kThreads)
entropy_rows(PYL_PARAMETER Call<Accumulate<D>> c) {
  typedef Accumulate<D> T;
  G g(c.width);
  Totals<T> totals;
  over_tiles(g, c, [&](const Place& p) {
    Label label = label_of(c, p);
    Place mine = p;
    if (!label.live) mine.end = mine.begin;
    Moments<T> s;
    visit(g, logits_of<D>(c, p), c.x_walk.class_stride, mine, [&](const auto& x) { s.add(x); });
    s.merge(g);
    if (g.rank) return;
    if (c.parts > 1) s.leave(c, c.first_parts, p);
    else end_row(c, p, label, s, totals);
  });
  if (c.parts == 1) leave(c, totals);
}

template <class T>
PYL_KERNEL(kLanesThreads)
entropy_parts(PYL_PARAMETER Call<T> c) {
  Lanes g(kWarp);
  Totals<T> totals;
  over_tiles(g, c, [&](const Place& p) {
    Label label = label_of(c, p);
    Moments<T> s;
    if (label.live && g.rank < c.parts) s.fetch(c, c.first_parts, g.rank, p.row);
    s.merge(g);
    if (g.rank == 0) end_row(c, p, label, s, totals);
  });
  leave(c, totals);
}

template <class D, class G>
PYL_KERNEL(G::kThreads)
entropy_gradient(PYL_PARAMETER Call<Accumulate<D>> c) {
  typedef Accumulate<D> T;
  G g(c.width);
  over_tiles(g, c, [&](const Place& p) {
    if (!p.exists) return;
    Label label = label_of(c, p);
    Weights<T> w = weights_of(c, p, label);
    T slope = saved(c, p, 3, label.live);
    bool live = label.live && slope != 0 && counted(c, w, slope);
    T m = saved(c, p, 0, live), d = saved(c, p, 1, live), mu = saved(c, p, 2, live);
    T factor = live ? -slope * upstream_of(c, p, label, w).up / d : T(0);
    rewrite(g, logits_of<D>(c, p), c.x_walk.class_stride, gradient_of<D>(c, p), c.grad_walk.class_stride, live, p,
            [&](const auto& x, T(&value)[kChunk<D>]) {
#pragma unroll
              for (int i = 0; i < kChunk<D>; ++i) {
                T step = x.x[i] - m, v = x.x[i] == -infinity<T>() ? T(0) : exp(step) * (step - mu);
                value[i] = live ? factor * v : T(0);
              }
            });
  });
}

template <class D>
void forward_entropy(Run& run, const Request& r) {
  typedef Accumulate<D> T;
  Call<T> c = call_of<T>(r);
  Shape shape = shape_of(r), end = shape.parts > 1 ? shape_of_parts(r) : shape;
  set_shape(c, shape);
  c.partial = run.take<double>(4 * static_cast<int64_t>(end.blocks()));
  if (shape.parts > 1) c.first_parts = run.take<T>(Moments<T>::kNumbers * shape.parts * r.rows);
  PYL_RUN_ROWS(run, entropy_rows, D, shape, c);
  if (shape.parts > 1) {
    auto kernel = entropy_parts<T>;
    PYL_RUN(run, kernel, end.blocks(), end.threads, c);
  }
  finish(run, r, c, end.blocks());
}

template <class D>
void backward_entropy(Run& run, const Request& r) {
  Call<Accumulate<D>> c = call_of<Accumulate<D>>(r);
  Shape shape = shape_of(r);
  set_shape(c, shape);
  PYL_RUN_ROWS(run, entropy_gradient, D, shape, c);
}

}  // namespace PYL_ISA

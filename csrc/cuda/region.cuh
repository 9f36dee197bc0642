// The region family: losses of sums over all positions of the batch or of each image, alone or beside cross-entropy. Forward
// reads the logits twice, for the softmax of each row and for the sums over the rows; backward twice, for sum_c p_c q_c and the
// gradient. Saved: m, d and the leading one of each row's other classes, and cross-entropy's m and d; then in double how many
// areas count, and two coefficients of each area and class.
#pragma once
#include "cuda/region_sums.cuh"

namespace PYL_ISA {

enum RegionSaved { kOthersTop, kOthersSum, kLeader, kCeTop, kCeSum };

template <class D, class G>
PYL_KERNEL(G::kThreads)
region_rows(PYL_PARAMETER Call<Accumulate<D>> c, PYL_PARAMETER RegionPlan<Accumulate<D>> plan) {
  typedef Accumulate<D> T;
  G g(c.width);
  Totals<T> totals;
  const Map<T> plain{1, 0, nullptr};
  over_tiles(g, c, [&](const Place& p) {
    Label label = label_of(c, p);
    Place mine = p;
    if (!label.live) mine.end = mine.begin;
    const D* row = logits_of<D>(c, p);
    int64_t stride = c.x_walk.class_stride;
    Sums<T> s, other;
    Candidate<T> leader;
    visit(g, row, stride, mine, [&](const auto& x) {
      s.add(c, plain, c.view.smooth && plan.ce && !plan.mapped, x, label.y, T(1), false, 0);
      if (plan.mapped) other.add(c, c.map, c.view.smooth, x, label.y, T(1), false, 0);
#pragma unroll
      for (int i = 0; i < kChunk<D>; ++i)
        if (x.has(i) && x.at(i) != label.y) leader.offer(x.x[i], x.at(i));
    });
    s.merge(g, T(1));
    if (plan.mapped) other.merge(g, T(1));
    else other = s;
    leader = best_of(g, leader);
    if (g.rank || !p.exists) return;
    if (label.bad) totals.v[0] = nan<T>();
    T x_label = logit_at(row, stride, label.y, label.live);
    Weights<T> w = weights_of(c, p, label);
    if (label.live) {
      Odds<T> odds = odds_of(s.m, s.d, x_label);
      T hit = odds.hit, miss = odds.miss;
      T* to = plan.numbers + p.row;
      to[kShare * c.rows] = s.d == 0 ? miss * 0 : w.s * (miss / s.d);
      to[kHit * c.rows] = w.s * hit, to[kMissed * c.rows] = w.s * miss;
      if (plan.faint) to[kLogShare * c.rows] = -log(s.d) - softmax_row(s.m, s.d, x_label, T(1), T(1)).nll_miss();
      if (plan.ce) {
        RowLoss<T> ce = loss_of(c, other, c.map(x_label, label.y), T(1), w);
        totals.v[0] += weighted(w.s, ce.loss), totals.v[1] += w.s * w.mass;
        totals.v[2] += weighted(w.s, ce.extra), totals.v[3] += w.s;
      }
    }
    save(c, p, kOthersTop, s.m, label.live);
    save(c, p, kOthersSum, s.d, label.live);
    save(c, p, kLeader, number_of(leader.at, T(0)), label.live);
    if (plan.beside) save(c, p, kCeTop, other.m, label.live), save(c, p, kCeSum, other.d, label.live);
  });
  leave_totals(c.partial, totals);
}

template <class D, class G>
PYL_KERNEL(G::kThreads)
region_gradient(PYL_PARAMETER Call<Accumulate<D>> c, PYL_PARAMETER RegionPlan<Accumulate<D>> plan) {
  typedef Accumulate<D> T;
  G g(c.width);
  over_tiles(g, c, [&](const Place& p) {
    Label label = label_of(c, p);
    bool live = label.live;
    Place mine = p;
    if (!live) mine.end = mine.begin;
    const D* row = logits_of<D>(c, p);
    int64_t stride = c.x_walk.class_stride;
    int y = label.y;
    T m = centre(saved(c, p, kOthersTop, live)), d = saved(c, p, kOthersSum, live), x_label = logit_at(row, stride, y, live);
    Odds<T> odds = odds_of(saved(c, p, kOthersTop, live), d, x_label);
    T hit = odds.hit, miss = odds.miss, s = weights_of(c, p, label).s;
    // q - sum p q cancels where one class has all but all of p: all push are taken relative to that class's.
    const T* push = plan.factors + (live ? p.row / plan.area_rows * 2 * c.classes : 0);
    T top = live ? push[y] : T(0), top_pull = live ? push[c.classes + y] : T(0), push_label = top;
    int leader = live ? class_of(c.stat(kLeader, p.row)) : kNowhere;
    if (hit < miss && leader < kNowhere) top = push[leader];
    T sum = 0;
    visit(g, row, stride, mine, [&](const auto& x) {
      T more = 0;
#pragma unroll
      for (int i = 0; i < kChunk<D>; ++i)
        if (x.has(i) && x.at(i) != y) more += exp(x.x[i] - m) * (push[x.at(i)] - top);
      sum += more;
    });
    sum = sum_of(g, sum);
    if (!p.exists) return;
    T others = d == 0 ? miss * 0 : miss / d;  // of every exponential
    T mean = others * sum + hit * (push_label - top), gain = s * others, offset = gain * (top_pull * hit - mean);
    T at_label = s * hit * ((push_label - top) - mean - top_pull * miss);
    SoftmaxGradient<T> to;
    if (plan.ce && live) {
      Weights<T> w = weights_of(c, p, label);
      Upstream<T> up = upstream_of(c, p, label, w);
      up.up *= static_cast<T>(plan.parts.side);
      T du_label, u_label = c.map.with_slope(x_label, y, du_label);
      to = gradient_of(c, c.stat(kCeTop, p.row), c.stat(kCeSum, p.row), u_label, T(1), w, up);
      at_label += to.label * du_label;
    }
    rewrite(g, row, stride, gradient_of<D>(c, p), c.grad_walk.class_stride, live, p, [&](const auto& x, T(&value)[kChunk<D>]) {
#pragma unroll
      for (int i = 0; i < kChunk<D>; ++i) {
        value[i] = 0;
        if (!live || !x.has(i)) continue;
        int j = x.at(i);
        T v = exp(x.x[i] - m) * (gain * (push[j] - top) + offset);
        if (plan.ce) {
          T du, ce = to.slope * exp(c.map.with_slope(x.x[i], j, du) - to.base);
          if (c.view.smooth) ce -= to.pull * target_weight(c, 0, j);
          v += ce * du;
        }
        value[i] = j == y ? at_label : v;
      }
    });
  });
}

template <class T>
RegionPlan<T> region_of(const Request& r) {
  RegionPlan<T> plan{};
  Call<T> c = call_of<T>(r);
  for (int i = 0; i < kMostOwn; ++i) plan.loss_numbers[i] = r.numbers[i];
  plan.view = region_view(r.loss, r.numbers), plan.parts = parts_of(r.loss, r.numbers);
  plan.beside = kFacts[r.loss].beside, plan.ce = plan.beside && plan.parts.side != 0;
  plan.mapped = plan.ce && is_mapped(c.view, r.shift);
  plan.faint = plan.view.smooth == 0 && plan.view.absent != Absent::zero;
  plan.areas = plan.view.by_image ? r.images : 1, plan.area_rows = r.rows / plan.areas;
  plan.weight = plan.beside ? nullptr : c.weight;  // the softmax formula's
  int64_t most = kRegionDoubles / (plan.areas * r.classes * kRegionSums);
  most = most < 1 ? 1 : most < kMostChunks ? most : kMostChunks;
  int64_t each = (plan.area_rows + most - 1) / most;
  plan.chunk_rows = each < kFewestRows ? kFewestRows : each;
  plan.chunks = (plan.area_rows + plan.chunk_rows - 1) / plan.chunk_rows;
  if (r.saved) {
    int64_t numbers = 2 + r.rows * row_numbers(kFacts[r.loss], false);  // whole pairs, so that doubles are aligned
    plan.counted = reinterpret_cast<double*>(static_cast<T*>(r.saved) + (numbers + 1) / 2 * 2);
    plan.pushes = plan.counted + 1;
  }
  return plan;
}
// Rows are not split: their sums over the classes are needed as they are written.
inline Shape region_shape(const Request& r) {
  Shape shape = shape_of(r);
  if (shape.parts == 1) return shape;
  return {Walkers::block, kBlockThreads, 1, r.classes, kBlockThreads, r.rows};
}
inline unsigned blocks_for(int64_t count) { return static_cast<unsigned>(count < kMostBlocks ? count : kMostBlocks); }

template <class D>
void forward_region(Run& run, const Request& request) {
  typedef Accumulate<D> T;
  Request r = request;
  RegionPlan<T> plan = region_of<T>(r);
  if (!r.saved) r.saved = run.take<T>(2 + r.rows * row_numbers(kFacts[r.loss], false));  // the sums are made of it
  Call<T> c = call_of<T>(r);
  Shape shape = region_shape(r);
  set_shape(c, shape);
  c.partial = run.take<double>(4 * static_cast<int64_t>(shape.blocks()));
  plan.numbers = run.take<T>(kRegionNumbers * r.rows);
  plan.sums = run.take<double>(plan.areas * r.classes * kRegionSums * plan.chunks);
  plan.totals = run.take<double>(plan.areas * r.classes * kRegionSums);
  plan.of_rows = run.take<double>(4), plan.of_areas = run.take<double>(2 * plan.areas);
  PYL_RUN_ROWS(run, region_rows, D, shape, c, plan);
  add_partials(run, c.partial, shape.blocks(), plan.of_rows);
  int64_t chunks = plan.areas * plan.chunks, warps = kLanesThreads / kWarp;
  if (shape.walkers == Walkers::lanes && shape.width == 1) {
    auto kernel = region_pixel_sums<D>;
    PYL_RUN(run, kernel, blocks_for((chunks + warps - 1) / warps), kLanesThreads, c, plan);
  } else {
    int threads = r.classes < kLanesThreads ? (r.classes + kWarp - 1) / kWarp * kWarp : kLanesThreads;
    auto kernel = region_class_sums<D>;
    PYL_RUN(run, kernel, blocks_for(chunks), threads, c, plan);
  }
  auto totals = region_totals<T>;
  PYL_RUN(run, totals, blocks_for((plan.areas * r.classes + warps - 1) / warps), kLanesThreads, plan, r.classes);
  auto areas = region_areas<T>;
  PYL_RUN(run, areas, blocks_for(plan.areas), kBlockThreadsShort, c, plan);
  auto loss = region_loss<T>;
  PYL_RUN(run, loss, 1, kFinishThreads, c, plan);
}

template <class D>
void backward_region(Run& run, const Request& r) {
  typedef Accumulate<D> T;
  Call<T> c = call_of<T>(r);
  RegionPlan<T> plan = region_of<T>(r);
  Shape shape = region_shape(r);
  set_shape(c, shape);
  plan.factors = run.take<T>(2 * plan.areas * r.classes);
  auto factors = region_factors<T>;
  PYL_RUN(run, factors, blocks_for(plan.areas), kBlockThreadsShort, c, plan);
  PYL_RUN_ROWS(run, region_gradient, D, shape, c, plan);
}

}  // namespace PYL_ISA

// The select family, without labels but for the cross-entropy beside ADR: the largest logits of a row, in order, beside the
// moments of its softmax. Each thread has a list of its best classes; the best of the group is the next rank, and a thread
// looks through its classes again only when it has lost a whole list: a group of lanes reads a row once, a single lane, as for
// pixels, 1 + min(ranks - 1, C) / kShortlist times. Backward reads once.
#pragma once
#include "cuda/select_row.cuh"

namespace PYL_ISA {

template <class D, class G>
PYL_KERNEL(G::kThreads)
select_rows(PYL_PARAMETER Call<Accumulate<D>> c, PYL_PARAMETER SelectPlan<Accumulate<D>> plan) {
  typedef Accumulate<D> T;
  G g(c.width);
  over_tiles(g, c, [&](const Place& p) {
    Label label = label_of(c, p);
    Place mine = p;
    if (!label.live) mine.end = mine.begin;
    const D* row = logits_of<D>(c, p);
    int64_t stride = c.x_walk.class_stride;
    int y = c.labels ? label.y : -1;
    int64_t target = target_at(c, p);
    Moments<T> s;
    Sums<T> other;
    Shortlist<T, G::kShortlist> best;
    visit(g, row, stride, mine, [&](const auto& x) {
      s.add(x);
#pragma unroll
      for (int i = 0; i < kChunk<D>; ++i) best.offer(x.x[i], x.at(i));
      if (plan.ce) other.add(c, c.map, c.view.smooth || c.soft, x, y, T(1), false, target);
    });
    s.merge(g);
    if (plan.ce) other.merge(g, T(1));
    Selected<T> ranks;
    T d = 1 + s.more();
    int64_t list = (p.row * c.parts + p.part) * plan.ranks();
    auto next = [&](T value, int at) {
      if (best.take()) {
        best = {};
        visit(g, row, stride, mine, [&](const auto& x) {
#pragma unroll
          for (int i = 0; i < kChunk<D>; ++i)
            if (behind(x.x[i], x.at(i), value, at)) best.offer(x.x[i], x.at(i));
        });
      }
      return best.first();
    };
    over_ranks(g, best.first(), plan.ranks(), next, [&](int rank, T value, int j) {
      if (g.rank) return;
      if (c.parts == 1) ranks.add(c, plan, rank, value, j, s.m, d);
      else plan.list_values[list + rank] = value, plan.list_classes[list + rank] = j;
    });
    if (g.rank) return;
    T x_label = logit_at(row, stride, label.y, label.live && c.labels);
    if (c.parts == 1) return leave_statistics(c, plan, p, label, s, ranks, other, x_label);
    s.leave(c, c.first_parts, p);
    if (!plan.ce) return;
    other.leave(c, c.second_parts, 0, p);
    if (p.part == 0) part_number(c, c.second_parts, Sums<T>::kNumbers, 0, p.row) = x_label;
  });
}

// The parts of split rows: a lane has the list of a part.
template <class T>
PYL_KERNEL(kLanesThreads)
select_parts(PYL_PARAMETER Call<T> c, PYL_PARAMETER SelectPlan<T> plan) {
  Lanes g(kWarp);
  over_tiles(g, c, [&](const Place& p) {
    Label label = label_of(c, p);
    bool has = label.live && g.rank < c.parts;
    Moments<T> s;
    Sums<T> other;
    if (has) s.fetch(c, c.first_parts, g.rank, p.row);
    if (has && plan.ce) other.fetch(c, c.second_parts, 0, g.rank, p.row);
    s.merge(g);
    if (plan.ce) other.merge(g, T(1));
    T d = 1 + s.more();
    int64_t list = (p.row * c.parts + g.rank) * plan.ranks();
    int place = -1;
    auto next = [&](T, int) {
      Candidate<T> found;
      if (++place < plan.ranks() && has)
        found.value = plan.list_values[list + place], found.at = plan.list_classes[list + place];
      return found;
    };
    Selected<T> ranks;
    over_ranks(g, next(T(0), 0), plan.ranks(), next, [&](int rank, T value, int j) {
      if (g.rank == 0) ranks.add(c, plan, rank, value, j, s.m, d);
    });
    T x_label = label.live && plan.ce && c.labels ? part_number(c, c.second_parts, Sums<T>::kNumbers, 0, p.row) : T(0);
    if (g.rank == 0) leave_statistics(c, plan, p, label, s, ranks, other, x_label);
  });
}

template <class D, class G>
PYL_KERNEL(G::kThreads)
select_gradient(PYL_PARAMETER Call<Accumulate<D>> c, PYL_PARAMETER SelectPlan<Accumulate<D>> plan) {
  typedef Accumulate<D> T;
  G g(c.width);
  bool variance = plan.kind == Uncertainty::variance;
  over_tiles(g, c, [&](const Place& p) {
    if (!p.exists) return;
    Label label = label_of(c, p);
    T mark = saved(c, p, kMark, label.live);
    bool live = label.live && (mark == 1 || (plan.batch && mark == 2));
    const D* row = logits_of<D>(c, p);
    int64_t stride = c.x_walk.class_stride;
    T m = saved(c, p, kTop, live), more = saved(c, p, kMore, live), lost = more - more, by_d = 1 / (1 + more);
    int first = kNowhere, before = kNowhere, last = kNowhere;
    T each = 0, pull = 0, tilt = 0, mean = 0, at_first = 0;
    if (live) {
      const T* to = plan.numbers + p.row;
      each = to[kEach * c.rows], pull = to[kPull * c.rows], tilt = to[kTilt * c.rows], mean = to[kMean * c.rows];
      if (plan.batch) tilt *= static_cast<T>(*plan.batch_slope / plan.batch_sums[1]);
      at_first = to[kAtFirst * c.rows] + tilt * to[kTiltAtFirst * c.rows];
      first = class_of(c.stat(kFirstClass, p.row)), last = class_of(c.stat(kLastClass, p.row));
      if (!plan.tilts) before = class_of(c.stat(kClassBefore, p.row));
    }
    bool some = last < kNowhere, all_before = before >= kNowhere;
    T x_last = logit_at(row, stride, last, some), x_before = logit_at(row, stride, before, some && !all_before);
    Weights<T> w = weights_of(c, p, label);
    Upstream<T> up = upstream_of(c, p, label, w);
    up.up *= plan.side_weight;
    bool ce = plan.ce && live && mark == 1 && up.up != 0;
    int y = c.labels ? label.y : -1;
    SoftmaxGradient<T> to;
    if (ce) {
      T other_m = c.stat(kOtherTop, p.row), other_d = c.stat(kOtherSum, p.row);
      if (c.soft) {
        to = soft_gradient_of(c, other_m, other_d, c.stat(kMass, p.row), up);
      } else {
        T x_label = logit_at(row, stride, y, true);
        T du_label;
        to = gradient_of(c, other_m, other_d, c.map.with_slope(x_label, y, du_label), T(1), w, up);
        to.label *= du_label;
      }
    }
    int64_t target = target_at(c, p);
    rewrite(g, row, stride, gradient_of<D>(c, p), c.grad_walk.class_stride, live, p, [&](const auto& x, T(&value)[kChunk<D>]) {
#pragma unroll
      for (int i = 0; i < kChunk<D>; ++i) {
        value[i] = 0;
        if (!live || !x.has(i)) continue;
        int j = x.at(i);
        T v = x.x[i], prob = exp(v - m) * by_d, sum = 0;
        bool selected =
            some && v > -infinity<T>() && !behind(v, j, x_last, last) && (all_before || behind(v, j, x_before, before));
        if (v > -infinity<T>()) {
          sum = prob * ((selected && plan.mass ? each : pull) + tilt * ((variance ? prob : v - m) - mean));
          if (selected && !plan.mass) sum += each * selected_class(c.loss, c.numbers, prob, v).own;
        }
        if (j == first) sum = at_first;
        if (ce) {
          T du, more_of = to.slope * exp(c.map.with_slope(v, j, du) - to.base);
          if (c.soft || c.view.smooth) more_of -= to.pull * target_weight(c, target, j);
          sum += j == y ? to.label : more_of * du;
        }
        value[i] = sum + lost;
      }
    });
  });
}

template <class T>
SelectPlan<T> plan_of(const Request& r) {
  SelectPlan<T> plan{};
  const Facts& facts = kFacts[r.loss];
  for (int i = 0; i < kMostOwn; ++i) plan.loss_numbers[i] = r.numbers[i];
  plan.k = {static_cast<double>(r.classes), static_cast<double>(r.classes), 1};
  Selection s = selection_of(r.loss, r.numbers, r.classes);
  plan.first = s.first, plan.last = s.last, plan.kind = s.kind;
  plan.batch = s.batch, plan.mass = s.mass, plan.tilts = s.tilts, plan.phi_scale = s.phi_scale;
  plan.ce = facts.beside, plan.side_weight = static_cast<T>(parts_of(r.loss, r.numbers).side);
  return plan;
}

template <class D>
void forward_select(Run& run, const Request& request) {
  typedef Accumulate<D> T;
  Request r = request;
  if (!r.saved) r.saved = run.take<T>(2 + r.rows * row_numbers(kFacts[r.loss], r.soft));  // losses are made of it
  Call<T> c = call_of<T>(r);
  SelectPlan<T> plan = plan_of<T>(r);
  Shape shape = shape_of(r), alone = shape_of_rows(r);
  set_shape(c, shape);
  plan.numbers = run.take<T>(kScratches * r.rows);
  plan.batch_sums = run.take<double>(4);
  c.partial = run.take<double>(4 * static_cast<int64_t>(alone.blocks()));
  if (shape.parts > 1) {
    c.first_parts = run.take<T>(Moments<T>::kNumbers * shape.parts * r.rows);
    c.second_parts = run.take<T>((Sums<T>::kNumbers + 1) * shape.parts * r.rows);
    plan.list_values = run.take<T>(r.rows * shape.parts * plan.ranks());
    plan.list_classes = run.take<int>(r.rows * shape.parts * plan.ranks());
  }
  PYL_RUN_ROWS(run, select_rows, D, shape, c, plan);
  if (shape.parts > 1) {
    auto kernel = select_parts<T>;
    Shape parts = shape_of_parts(r);
    PYL_RUN(run, kernel, parts.blocks(), parts.threads, c, plan);
  }
  if (plan.batch) {
    auto kernel = select_phi<T>;
    PYL_RUN(run, kernel, alone.blocks(), alone.threads, c, plan);
    add_partials(run, c.partial, alone.blocks(), plan.batch_sums);
  }
  auto kernel = select_losses<T>;
  PYL_RUN(run, kernel, alone.blocks(), alone.threads, c, plan);
  finish(run, r, c, alone.blocks());
}

template <class D>
void backward_select(Run& run, const Request& r) {
  typedef Accumulate<D> T;
  Call<T> c = call_of<T>(r);
  SelectPlan<T> plan = plan_of<T>(r);
  Shape shape = shape_of(r), alone = shape_of_rows(r);
  set_shape(c, shape);
  plan.numbers = run.take<T>(kFactors * r.rows);
  plan.batch_sums = run.take<double>(4), plan.batch_slope = run.take<double>(4);
  c.partial = run.take<double>(4 * static_cast<int64_t>(alone.blocks()));
  auto factors = select_factors<T>;
  if (plan.batch) {
    auto kernel = select_phi<T>;
    PYL_RUN(run, kernel, alone.blocks(), alone.threads, c, plan);
    add_partials(run, c.partial, alone.blocks(), plan.batch_sums);
  }
  PYL_RUN(run, factors, alone.blocks(), alone.threads, c, plan);
  if (plan.batch) add_partials(run, c.partial, alone.blocks(), plan.batch_slope);
  PYL_RUN_ROWS(run, select_gradient, D, shape, c, plan);
}

}  // namespace PYL_ISA

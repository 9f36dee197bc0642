// The select family's ranks, and its kernels over the rows alone: losses from the statistics, and what backward multiplies.
// Formulas of rows are evaluated in double, once a row, away from the kernels over the logits in select.cuh.
#pragma once
#include "cuda/entropy_row.cuh"
#include "cuda/softmax_row.cuh"

namespace PYL_ISA {

// Numbers of a row, in Call::stats. A loss that tilts has its second sum and its shares where others have the sum of own
// derivatives and the class before the selected ones.
enum SelectSaved {
  kMark,  // 0: no gradient, 1: counts, 2: left out by the reduction, but part of the mean of phi
  kTop,   // the largest logit
  kMore,  // sum of e^(x - top) = 1 + more
  kSecond,
  kShares,
  kFirstClass,
  kLastClass,
  kOtherTop,  // of the softmax formula beside: m and d of the other classes, and the mass of class probabilities
  kOtherSum,
  kMass,
  kOwn = kSecond,
  kClassBefore = kShares
};
enum SelectScratch { kBeyond, kPhi, kLoss, kExtra, kScratches };                     // forward's
enum SelectFactor { kEach, kPull, kTilt, kMean, kAtFirst, kTiltAtFirst, kFactors };  // backward's

// What the kernels of this family know besides the call.
template <class T>
struct SelectPlan {
  double loss_numbers[kMostOwn];
  Batch<double> k;
  int first, last;  // ranks
  Uncertainty kind;
  bool batch, mass, tilts;
  bool ce;        // is there a cross-entropy, or another softmax formula, beside it?
  T side_weight;  // what that is multiplied with
  double phi_scale;
  T* numbers;                        // (kScratches, rows) forward, (kFactors, rows) backward
  double *batch_sums, *batch_slope;  // phi and its rows; dL/dphi
  T* list_values;                    // ranks of the parts of split rows: (rows, parts, ranks)
  int* list_classes;
  PYL_INLINE T& number(int i, int64_t row, int64_t rows) const { return numbers[i * rows + row]; }
  PYL_INLINE int ranks() const { return last < 0 ? 1 : last + 1; }
};

template <class T>
PYL_DEVICE bool behind(T x, int j, T value, int at) {  // does (x, j) rank after (value, at)?
  return x < value || (x == value && j > at);
}
// The N best classes of a thread, in order: so many ranks cost one read of its classes.
template <class T, int N>
struct Shortlist {
  T value[N];
  int at[N], taken = 0;
  PYL_DEVICE Shortlist() {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = -infinity<T>(), at[i] = kNowhere;
  }
  PYL_DEVICE void offer(T x, int j) {
    constexpr int last = N - 1;
    if (!(x > value[last] || (x == value[last] && j < at[last] && at[last] < kNowhere))) return;
    value[last] = x, at[last] = j;
#pragma unroll
    for (int i = last; i > 0; --i) {
      if (behind(value[i], at[i], value[i - 1], at[i - 1])) continue;
      T v = value[i];
      int k = at[i];
      value[i] = value[i - 1], at[i] = at[i - 1], value[i - 1] = v, at[i - 1] = k;
    }
  }
  PYL_DEVICE Candidate<T> first() const { return {value[0], at[0]}; }
  PYL_DEVICE bool take() {  // the first; was it the last of a full list, so that others may follow?
#pragma unroll
    for (int i = 1; i < N; ++i) value[i - 1] = value[i], at[i - 1] = at[i];
    value[N - 1] = -infinity<T>(), at[N - 1] = kNowhere;
    return ++taken == N;
  }
};
// Calls f(rank, value, class) in every thread for each rank of a group's classes; class kNowhere past the last. `next` gives a
// thread's best class behind the one it has just lost.
template <class G, class T, class N, class F>
PYL_DEVICE void over_ranks(const G& g, Candidate<T> mine, int ranks, N next, F f) {
  for (int rank = 0; rank < ranks; ++rank) {
    Candidate<T> best = best_of(g, mine);
    f(rank, best.value, best.at);
    if (mine.at == best.at && best.at < kNowhere && rank + 1 < ranks) mine = next(best.value, best.at);
  }
}

// What the ranks give.
template <class T>
struct Selected {
  T beyond = 0, own = 0;  // sums over the selected classes beyond the first rank
  int first = kNowhere, before = kNowhere, last = kNowhere;
  PYL_DEVICE void add(const Call<T>& c, const SelectPlan<T>& plan, int rank, T value, int j, T m, T d) {
    if (rank == 0) first = j;
    if (rank == plan.first - 1) before = j;
    if (j >= kNowhere || rank < plan.first || rank > plan.last) return;
    last = j;
    if (rank == 0) return;
    SelectedClass<T> s = selected_class(c.loss, c.numbers, exp(value - m) / d, value);
    beyond += s.share, own += s.own;
  }
};

// The statistics of a row to where losses and backward find them; one thread of its group calls it.
template <class T>
PYL_DEVICE void leave_statistics(const Call<T>& c, const SelectPlan<T>& plan, const Place& p, const Label& label,
                                 const Moments<T>& s, const Selected<T>& ranks, const Sums<T>& other, T x_label) {
  if (!p.exists) return;
  T more = s.more(), d = 1 + more, mu = s.moment / d;
  T second = plan.kind == Uncertainty::variance ? (s.ties - 1) + s.square : mu;
  more += s.moment - s.moment;
  // 1 - t must keep its digits in rows that the selected classes dominate.
  T shares = plan.mass ? more / d - ranks.beyond : ranks.beyond;
  save(c, p, kMark, T(1), label.live);
  save(c, p, kTop, s.m, label.live);
  save(c, p, kMore, more, label.live);
  save(c, p, kSecond, plan.tilts ? second : ranks.own, label.live);
  save(c, p, kShares, plan.tilts ? shares : number_of(ranks.before, T(0)), label.live);
  save(c, p, kFirstClass, number_of(ranks.first, T(0)), label.live);
  save(c, p, kLastClass, number_of(ranks.last, T(0)), label.live);
  if (!plan.tilts) {
    plan.number(kBeyond, p.row, c.rows) = ranks.beyond;
    plan.number(kPhi, p.row, c.rows) = log1p(more) - mu;
  }
  if (!plan.ce) return;
  RowLoss<T> row{0, 0};
  Weights<T> w = weights_of(c, p, label);
  if (label.live) row = c.soft ? soft_loss_of(c, other) : loss_of(c, other, c.map(x_label, label.y), T(1), w);
  plan.number(kLoss, p.row, c.rows) = plan.side_weight * row.loss;
  plan.number(kExtra, p.row, c.rows) = plan.side_weight * row.extra;
  save(c, p, kOtherTop, other.m, label.live);
  save(c, p, kOtherSum, other.d, label.live);
  if (c.soft) save(c, p, kMass, other.seen, label.live);
}

// What a row gives to a formula, in double. Sums leave out the 1 of the largest entry.
struct RowSums {
  double m, more, second;
  PYL_DEVICE double d() const { return 1 + more; }
  PYL_DEVICE double uncertainty(bool variance) const {
    return variance ? (more * (2 + more) - second) / (d() * d()) : log1p(more) - second;
  }
  // What the uncertainty's derivative is relative to: mu, or the sum of p^2.
  PYL_DEVICE double mean(bool variance) const { return variance ? (1 + second) / (d() * d()) : second; }
};
template <class T>
PYL_DEVICE RowSums sums_of(const Call<T>& c, const SelectPlan<T>& plan, const Place& p) {
  RowSums r{c.stat(kTop, p.row), c.stat(kMore, p.row), plan.tilts ? c.stat(kSecond, p.row) : T(0)};
  if (r.more != r.more) r.m = r.more;  // no softmax
  return r;
}
template <class T>
PYL_DEVICE double phi_of(const SelectPlan<T>& plan, const RowSums& r) {
  return plan.phi_scale * r.uncertainty(plan.kind == Uncertainty::variance);
}
// The formula of a row; a filter needs its uncertainty in forward alone.
template <class T>
PYL_DEVICE SelectResult<double> result_of(const Call<T>& c, const SelectPlan<T>& plan, const Place& p, const RowSums& r,
                                          double total, double phi) {
  double own = 0;
  if (plan.tilts) {
    phi = plan.batch ? plan.batch_sums[0] / plan.batch_sums[1] : phi_of(plan, r);
    double saved = c.stat(kShares, p.row);
    total = plan.mass ? 1 - saved : saved + selected_class(c.loss, plan.loss_numbers, 1 / r.d(), r.m).share;
  } else {
    own = c.stat(kOwn, p.row);
  }
  return select_formula(c.loss, plan.loss_numbers, plan.k, SelectRow<double>{total, own, r.m, 1 / r.d(), phi});
}

// Sums of phi for its mean over the rows that count: (loss, mass) of the partial sums.
template <class T>
PYL_KERNEL(kLanesThreads)
select_phi(PYL_PARAMETER Call<T> c, PYL_PARAMETER SelectPlan<T> plan) {
  Totals<T> totals;
  over_tiles(Lanes(1), c, [&](const Place& p) {
    if (!p.exists || !label_of(c, p).live || c.stat(kMark, p.row) == 0) return;
    totals.v[0] += static_cast<T>(phi_of(plan, sums_of(c, plan, p))), totals.v[1] += 1;
  });
  leave_totals(c.partial, totals);
}

template <class T>
PYL_KERNEL(kLanesThreads)
select_losses(PYL_PARAMETER Call<T> c, PYL_PARAMETER SelectPlan<T> plan) {
  Totals<T> totals;
  over_tiles(Lanes(1), c, [&](const Place& p) {
    Label label = label_of(c, p);
    Weights<T> w = weights_of(c, p, label);
    T loss = 0, extra = 0;
    if (label.live) {
      double total = 0, phi = 0;
      if (!plan.tilts) total = plan.number(kBeyond, p.row, c.rows), phi = plan.number(kPhi, p.row, c.rows);
      SelectResult<double> result = result_of(c, plan, p, sums_of(c, plan, p), total, phi);
      loss = static_cast<T>(result.loss);
      if (plan.ce) {
        extra = plan.number(kExtra, p.row, c.rows) + loss;
        loss = plan.number(kLoss, p.row, c.rows);
      }
      label.live = result.mass != 0;  // not filtered out
      c.stat(kMark, p.row) = !label.live ? T(0) : counted(c, w, loss + extra) ? T(1) : T(2);
    }
    emit(c, p, label, w, loss, extra, totals);
  });
  leave(c, totals);
}

// What backward multiplies, upstream gradient included; with a phi of the batch also the sum of dL/dphi.
template <class T>
PYL_KERNEL(kLanesThreads)
select_factors(PYL_PARAMETER Call<T> c, PYL_PARAMETER SelectPlan<T> plan) {
  Totals<T> totals;
  bool variance = plan.kind == Uncertainty::variance;
  over_tiles(Lanes(1), c, [&](const Place& p) {
    Label label = label_of(c, p);
    T mark = saved(c, p, kMark, label.live);
    if (mark == 0) return;
    Weights<T> w = weights_of(c, p, label);
    double up = mark == 1 ? static_cast<double>(upstream_of(c, p, label, w).up) : 0.0;
    RowSums r = sums_of(c, plan, p);
    SelectResult<double> result = result_of(c, plan, p, r, 0, -infinity<double>());
    double each = up * result.each, pull = up * result.pull, p_top = 1 / r.d(), mean = plan.tilts ? r.mean(variance) : 0;
    double tilt = plan.tilts ? plan.phi_scale * (variance ? -2 : -1) : 0;
    double at_first = p_top * pull + up * result.top;
    if (plan.first == 0) at_first += each * selected_class(c.loss, plan.loss_numbers, p_top, r.m).own;
    T* to = plan.numbers + p.row;
    to[kEach * c.rows] = static_cast<T>(plan.mass ? each + pull : each), to[kPull * c.rows] = static_cast<T>(pull);
    to[kTilt * c.rows] = static_cast<T>(plan.batch ? tilt : tilt * up * result.slope),
               to[kMean * c.rows] = static_cast<T>(mean);
    to[kAtFirst * c.rows] = static_cast<T>(at_first);
    to[kTiltAtFirst * c.rows] = static_cast<T>(p_top * ((variance ? p_top : 0) - mean));
    totals.v[0] += static_cast<T>(up * result.slope);
  });
  if (plan.batch) leave_totals(c.partial, totals);
}

}  // namespace PYL_ISA

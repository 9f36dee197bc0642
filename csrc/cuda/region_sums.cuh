// The region family's sums over positions, and its kernels over the classes alone, which turn sums into losses and
// coefficients. region.cuh has the passes over the rows.
#pragma once
#include "cuda/softmax_row.cuh"

namespace PYL_ISA {

enum RegionNumber { kShare, kHit, kMissed, kLogShare, kRegionNumbers };  // of a row, sample weight included
enum RegionSum { kHits, kMisses, kStrays, kLargest, kRegionSums };       // of a class; the last is the largest log p

// What the kernels of this family know besides the call.
template <class T>
struct RegionPlan {
  double loss_numbers[kMostOwn];
  RegionView view;
  Parts parts;
  bool beside, ce;  // is there a cross-entropy, or another softmax formula, beside it? Does it weigh anything?
  bool mapped;      // is its u something else than the logits?
  bool faint;       // does it matter whether a class without a target has any mass?
  int64_t areas, area_rows, chunks, chunk_rows;
  const T* weight;   // of the classes
  T* numbers;        // (kRegionNumbers, rows)
  double* sums;      // (areas, classes, kRegionSums, chunks)
  double* totals;    // (areas, classes, kRegionSums)
  double* of_rows;   // four: cross-entropy's sums; NaN where a label is bad
  double* of_areas;  // (areas, 2): loss, and does it count?
  double* counted;   // saved: how many areas count,
  double* pushes;    // and push and pull of each area and class, or null
  T* factors;        // backward: (areas, 2, classes), upstream gradient included
};

// p_y and 1 - p_y. From the odds themselves, not from their logarithm: sums of tiny probabilities keep all their digits.
template <class T>
struct Odds {
  T hit, miss;
};
template <class T>
PYL_DEVICE Odds<T> odds_of(T m, T d, T x_label) {
  if (x_label == infinity<T>()) return {nan<T>(), nan<T>()};  // as the softmax of +inf
  if (x_label >= m) {
    T against = d * exp(m - x_label);
    return {1 / (1 + against), against / (1 + against)};
  }
  T in_favour = exp(x_label - m) / d;
  return {in_favour / (1 + in_favour), 1 / (1 + in_favour)};
}

// A class without a target whose probabilities are lost to T may still have a mass that float64 can tell from 0.
constexpr double kNoMass = -745;

// Sums over the positions of a chunk, lanes across positions: a warp a chunk.
template <class D>
PYL_KERNEL(kLanesThreads)
region_pixel_sums(PYL_PARAMETER Call<Accumulate<D>> c, PYL_PARAMETER RegionPlan<Accumulate<D>> plan) {
  typedef Accumulate<D> T;
  Lanes g(kWarp);
  int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarp), stride = c.x_walk.class_stride;
  for (int64_t chunk = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
       chunk < plan.areas * plan.chunks; chunk += warps) {
    int64_t area = chunk / plan.chunks, from = chunk % plan.chunks * plan.chunk_rows;
    int64_t to = from + plan.chunk_rows < plan.area_rows ? from + plan.chunk_rows : plan.area_rows;
    for (int64_t tile = from; tile < to; tile += kRegionRows * kWarp) {
      const D* at[kRegionRows];
      T m[kRegionRows], share[kRegionRows], hit[kRegionRows], missed[kRegionRows], log_share[kRegionRows];
      int y[kRegionRows];
#pragma unroll
      for (int k = 0; k < kRegionRows; ++k) {
        int64_t n = tile + k * kWarp + g.rank, row = area * plan.area_rows + n;
        Place p{row, n < to, 0, 0, c.classes};
        Label label = label_of(c, p);
        at[k] = label.live ? logits_of<D>(c, p) : nullptr;
        y[k] = label.y;
        m[k] = centre(saved(c, p, 0, label.live));
        share[k] = label.live ? plan.numbers[kShare * c.rows + row] : T(0);
        hit[k] = label.live ? plan.numbers[kHit * c.rows + row] : T(0);
        missed[k] = label.live ? plan.numbers[kMissed * c.rows + row] : T(0);
        log_share[k] = label.live && plan.faint ? plan.numbers[kLogShare * c.rows + row] : T(0);
      }
      for (int j = 0; j < c.classes; ++j) {
        T v[3] = {0, 0, 0}, largest = -infinity<T>();
#pragma unroll
        for (int k = 0; k < kRegionRows; ++k) {
          if (!at[k]) continue;
          T step = Stored<D>::load(at[k][j * stride]) - m[k];
          if (j == y[k]) v[kHits] += hit[k], v[kMisses] += missed[k];
          else v[kStrays] += share[k] * exp(step), largest = larger(step + log_share[k], largest);
        }
        add_up(g, v);
        if (plan.faint) largest = max_of(g, largest);
        if (g.rank) continue;
        double* sums = plan.sums + (area * c.classes + j) * kRegionSums * plan.chunks + chunk % plan.chunks;
        bool first = tile == from;
#pragma unroll
        for (int i = 0; i < 3; ++i) sums[i * plan.chunks] = (first ? 0.0 : sums[i * plan.chunks]) + static_cast<double>(v[i]);
        double* faint = sums + kLargest * plan.chunks;
        *faint = first ? static_cast<double>(largest) : larger(static_cast<double>(largest), *faint);
      }
    }
  }
}

// The same, lanes across classes: a block a chunk, a thread a class.
template <class D>
PYL_KERNEL(kLanesThreads)
region_class_sums(PYL_PARAMETER Call<Accumulate<D>> c, PYL_PARAMETER RegionPlan<Accumulate<D>> plan) {
  typedef Accumulate<D> T;
  int64_t stride = c.x_walk.class_stride;
  for (int64_t chunk = blockIdx.x; chunk < plan.areas * plan.chunks; chunk += gridDim.x) {
    int64_t area = chunk / plan.chunks, from = chunk % plan.chunks * plan.chunk_rows;
    int64_t to = from + plan.chunk_rows < plan.area_rows ? from + plan.chunk_rows : plan.area_rows;
    for (int j = static_cast<int>(threadIdx.x); j < c.classes; j += static_cast<int>(blockDim.x)) {
      double v[3] = {0, 0, 0};
      T largest = -infinity<T>();
      for (int64_t n = from; n < to; ++n) {
        int64_t row = area * plan.area_rows + n;
        Place p{row, true, 0, 0, c.classes};
        Label label = label_of(c, p);
        if (!label.live) continue;
        T step = Stored<D>::load(logits_of<D>(c, p)[j * stride]) - centre(saved(c, p, 0, true));
        if (j == label.y) {
          v[kHits] += static_cast<double>(plan.numbers[kHit * c.rows + row]);
          v[kMisses] += static_cast<double>(plan.numbers[kMissed * c.rows + row]);
        } else {
          v[kStrays] += static_cast<double>(plan.numbers[kShare * c.rows + row] * exp(step));
          if (plan.faint) largest = larger(step + plan.numbers[kLogShare * c.rows + row], largest);
        }
      }
      double* sums = plan.sums + (area * c.classes + j) * kRegionSums * plan.chunks + chunk % plan.chunks;
      for (int i = 0; i < 3; ++i) sums[i * plan.chunks] = v[i];
      sums[kLargest * plan.chunks] = static_cast<double>(largest);
    }
  }
}

// The chunks of each area and class, added in a fixed order: a warp for each.
PYL_DEVICE void add_chunks(const double* sums, double* totals, int64_t count, int64_t chunks) {
  Lanes g(kWarp);
  int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarp);
  for (int64_t one = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp; one < count; one += warps) {
    double v[3] = {0, 0, 0}, largest = -infinity<double>();
    const double* mine = sums + one * kRegionSums * chunks;
    for (int64_t i = g.rank; i < chunks; i += kWarp) {
      for (int k = 0; k < 3; ++k) v[k] += mine[k * chunks + i];
      largest = larger(mine[kLargest * chunks + i], largest);
    }
    add_up(g, v);
    largest = max_of(g, largest);
    if (g.rank) continue;
    for (int k = 0; k < 3; ++k) totals[one * kRegionSums + k] = v[k];
    totals[one * kRegionSums + kLargest] = largest;
  }
}
template <class T>
PYL_KERNEL(kLanesThreads)
region_totals(PYL_PARAMETER RegionPlan<T> plan, int classes) {
  add_chunks(plan.sums, plan.totals, plan.areas * classes, plan.chunks);
}

template <class T>
PYL_DEVICE RegionClass class_of_area(const RegionPlan<T>& plan, int64_t at) {
  const double* v = plan.totals + at * kRegionSums;
  return {v[kHits], v[kMisses], v[kStrays], v[kStrays] > 0 || v[kLargest] > kNoMass};
}

// Losses of an area's classes, their coefficients for backward, and the area's own loss: a block an area.
template <class T>
PYL_KERNEL(kBlockThreadsShort)
region_areas(PYL_PARAMETER Call<T> c, PYL_PARAMETER RegionPlan<T> plan) {
  Block g(0);
  bool none = c.reduction == Reduction::none, mean = c.reduction == Reduction::mean;
  T bad = none && plan.of_rows[0] != plan.of_rows[0] ? nan<T>() : T(0);
  for (int64_t area = blockIdx.x; area < plan.areas; area += gridDim.x) {
    int64_t from = area * c.classes;
    int present = 0;
    for (int j = g.rank; j < c.classes; j += g.size) present += class_of_area(plan, from + j).present() ? 1 : 0;
    bool some = sum_of(g, present) > 0;
    double v[2] = {0, 0};  // loss, weight
    for (int j = g.rank; j < c.classes; j += g.size) {
      RegionClass one = class_of_area(plan, from + j);
      RegionResult r = region_formula(c.loss, plan.loss_numbers, one);
      if (!some || (plan.view.absent == Absent::zero && !one.present())) r = {0, 0, 0};
      double w = plan.weight && !none ? static_cast<double>(plan.weight[j]) : 1.0;
      if (none) c.out[from + j] = static_cast<T>(r.loss) + bad;
      else if (plan.view.absent == Absent::exclude ? !one.present() : !some) w = 0;
      if (w == 0) r = {0, 0, 0};
      v[0] += w * r.loss, v[1] += w;
      if (plan.pushes) plan.pushes[2 * (from + j)] = w * r.push, plan.pushes[2 * (from + j) + 1] = w * r.pull;
    }
    add_up(g, v);
    bool counts = v[1] != 0;
    double share = !mean ? 1 : counts ? 1 / v[1] : 0;
    if (plan.pushes && mean)  // each thread what it has written
      for (int j = g.rank; j < c.classes; j += g.size)
        plan.pushes[2 * (from + j)] *= share, plan.pushes[2 * (from + j) + 1] *= share;
    if (g.rank) continue;
    plan.of_areas[2 * area] = mean ? (counts ? v[0] / v[1] : 0) : v[0];
    plan.of_areas[2 * area + 1] = counts ? 1 : 0;
  }
}

// The loss: areas in a fixed order, and the cross-entropy.
template <class T>
PYL_KERNEL(kFinishThreads)
region_loss(PYL_PARAMETER Call<T> c, PYL_PARAMETER RegionPlan<T> plan) {
  double v[2] = {0, 0};
  for (int64_t i = threadIdx.x; i < plan.areas; i += blockDim.x) v[0] += plan.of_areas[2 * i], v[1] += plan.of_areas[2 * i + 1];
  add_up(Block(0), v);
  if (threadIdx.x) return;
  bool mean = c.reduction == Reduction::mean;
  double mass = mean ? plan.of_rows[1] : 1, extra_mass = mean ? plan.of_rows[3] : 1, rows = plan.of_rows[0];
  if (plan.counted) *plan.counted = v[1];
  if (c.divisors) {
    bool none = c.reduction == Reduction::none;
    c.divisors[0] = none ? T(1) : static_cast<T>(mass), c.divisors[1] = none ? T(1) : static_cast<T>(extra_mass);
  }
  if (c.reduction == Reduction::none) return;
  double loss = plan.parts.main * (mean && v[1] > 0 ? v[0] / v[1] : v[0]);
  if (plan.ce) loss += plan.parts.side * ((mass != 0 ? rows / mass : 0) + (extra_mass != 0 ? plan.of_rows[2] / extra_mass : 0));
  *c.out = static_cast<T>(rows == rows ? loss : rows);  // a bad label shows
}

// push and pull with the upstream gradient. Only differences of push matter: where all have one sign they are taken relative to
// the one next to 0, which keeps most digits.
template <class T>
PYL_KERNEL(kBlockThreadsShort)
region_factors(PYL_PARAMETER Call<T> c, PYL_PARAMETER RegionPlan<T> plan) {
  Block g(0);
  bool none = c.reduction == Reduction::none, mean = c.reduction == Reduction::mean;
  double counted = mean && *plan.counted > 0 ? *plan.counted : 1;
  double factor = none ? 1 : static_cast<double>(c.up[0]) * plan.parts.main / counted;
  for (int64_t area = blockIdx.x; area < plan.areas; area += gridDim.x) {
    int64_t from = area * c.classes;
    double low[1] = {infinity<double>()}, high[1] = {-infinity<double>()};
    for (int j = g.rank; j < c.classes; j += g.size) {
      double push = plan.pushes[2 * (from + j)] * (none ? static_cast<double>(c.up[from + j]) : factor);
      low[0] = push < low[0] ? push : low[0], high[0] = larger(push, high[0]);
    }
    g.fold(low, [](double a, double b) { return a < b ? a : b; });
    g.fold(high, [](double a, double b) { return larger(a, b); });
    double common = low[0] > 0 ? low[0] : high[0] < 0 ? high[0] : 0;
    for (int j = g.rank; j < c.classes; j += g.size) {
      double up = none ? static_cast<double>(c.up[from + j]) : factor;
      plan.factors[2 * from + j] = static_cast<T>(plan.pushes[2 * (from + j)] * up - common);
      plan.factors[2 * from + c.classes + j] = static_cast<T>(plan.pushes[2 * (from + j) + 1] * up);
    }
  }
}

}  // namespace PYL_ISA

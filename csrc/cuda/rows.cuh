// What every family does with a row besides its maths: label, weights, loss, saved numbers, upstream gradient. Losses leave as
// one partial sum a block, which finish.cu adds up in a fixed order: no atomics, the same bits every time.
#pragma once
#include "cuda/rowwise.cuh"

namespace PYL_ISA {

struct Label {
  int y;      // 0 where there is none
  bool live;  // does the row count? If not, its logits are never read
  bool bad;   // no class: the loss is NaN, the gradient 0
};
template <class T>
PYL_DEVICE Label label_of(const Call<T>& c, const Place& p) {
  if (!c.y || !p.exists) return {0, p.exists, false};
  int64_t y = 0;
  switch (c.y_type) {
    case Index::u8:
      y = static_cast<const uint8_t*>(c.y)[p.row];
      break;
    case Index::i16:
      y = static_cast<const int16_t*>(c.y)[p.row];
      break;
    case Index::i32:
      y = static_cast<const int32_t*>(c.y)[p.row];
      break;
    case Index::i64:
      y = static_cast<const int64_t*>(c.y)[p.row];
      break;
  }
  bool counts = y != c.ignore_index, inside = y >= 0 && y < c.classes;
  if (!c.labels) return {0, counts, false};
  return {counts && inside ? static_cast<int>(y) : 0, counts && inside, counts && !inside};
}

template <class T>
struct Weights {
  T w;     // class weight and factor of the label: multiplies the loss
  T mass;  // share of the mean's divisor, before the sample weight
  T s;     // sample weight
};
template <class T>
PYL_DEVICE Weights<T> weights_of(const Call<T>& c, const Place& p, const Label& label) {
  Weights<T> w{1, 1, 1};
  if (!label.live) return w;
  if (c.weight && c.labels) w.mass = c.weight[label.y];
  w.w = c.factor ? w.mass * c.factor[label.y] : w.mass;
  if (c.sample) w.s = c.sample[p.row];
  return w;
}

// The logit of the label, or of any class.
template <class D>
PYL_DEVICE Accumulate<D> logit_at(const D* row, int64_t stride, int j, bool read) {
  return read ? Stored<D>::load(row[j * stride]) : Accumulate<D>(0);
}
template <class T>
PYL_DEVICE T load_as(const void* p, Dtype dtype, int64_t at) {
  switch (dtype) {
    case Dtype::f32:
      return static_cast<T>(static_cast<const float*>(p)[at]);
    case Dtype::bf16:
      return static_cast<T>(__bfloat162float(static_cast<const __nv_bfloat16*>(p)[at]));
    case Dtype::f16:
      return static_cast<T>(__half2float(static_cast<const __half*>(p)[at]));
    case Dtype::f64:
      return static_cast<T>(static_cast<const double*>(p)[at]);
  }
  return 0;
}

// Is a row of this loss one that the reduction leaves in? NaN is, so that it shows.
template <class T>
PYL_DEVICE bool counted(const Call<T>& c, const Weights<T>& w, T loss) {
  return c.reduction != Reduction::above_zero || !(w.s * loss <= 0);
}

// In the place of a row's sum of exponentials: the reduction left the row out.
constexpr int kLeftOut = -1;

// What a thread has of the sums of its block.
template <class T>
struct Totals {
  T v[4] = {0, 0, 0, 0};  // loss, mass, extra, extra mass
};
// Takes a row's loss, from one thread of its group.
template <class T>
PYL_DEVICE void emit(const Call<T>& c, const Place& p, const Label& label, const Weights<T>& w, T loss, T extra,
                     Totals<T>& sums) {
  if (!p.exists) return;
  if (c.reduction == Reduction::none) {
    c.out[p.row] = label.live ? weighted(w.s, loss + extra) : label.bad ? nan<T>() : T(0);
  } else if (label.bad) {
    sums.v[0] = nan<T>();
  } else if (label.live && counted(c, w, loss + extra)) {
    sums.v[0] += weighted(w.s, loss), sums.v[1] += w.s * w.mass, sums.v[2] += weighted(w.s, extra), sums.v[3] += w.s;
  }
}
// The sums of the block's threads: of a warp in T, of the warps in double.
template <class T>
PYL_DEVICE void leave_totals(double* partial, Totals<T>& sums) {
  PYL_SHARED(double, of_warps, 4 * kWarp);
  int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    for (int step = kWarp / 2; step > 0; step /= 2) sums.v[i] += __shfl_xor_sync(kAllLanes, sums.v[i], step);
    if (lane == 0) of_warps[i * kWarp + warp] = static_cast<double>(sums.v[i]);
  }
  __syncthreads();
  if (threadIdx.x < 4) {
    double all = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x) / kWarp; ++w) all += of_warps[threadIdx.x * kWarp + w];
    partial[static_cast<int64_t>(threadIdx.x) * gridDim.x + blockIdx.x] = all;
  }
}
template <class T>
PYL_DEVICE void leave(const Call<T>& c, Totals<T>& sums) {
  if (c.reduction != Reduction::none) leave_totals(c.partial, sums);
  else if (c.divisors && blockIdx.x == 0 && threadIdx.x < 2) c.divisors[threadIdx.x] = 1;  // nothing is divided
}

// Number i of a row for backward; one thread of its group calls it.
template <class T>
PYL_DEVICE void save(const Call<T>& c, const Place& p, int i, T value, bool live) {
  if (c.stats && p.exists) c.stat(i, p.row) = live ? value : T(0);
}
template <class T>
PYL_DEVICE T saved(const Call<T>& c, const Place& p, int i, bool live) {
  return live ? c.stat(i, p.row) : T(0);
}

// The share of a second term whose divisor is 0, while the first has one.
constexpr double kNothing = 1e-30;

// The factor of a row's gradient, and that of the main term beside an extra term with a divisor of its own.
template <class T>
struct Upstream {
  T up, main;
};
template <class T>
PYL_DEVICE Upstream<T> upstream_of(const Call<T>& c, const Place& p, const Label& label, const Weights<T>& w) {
  if (!label.live) return {0, 1};
  if (c.reduction == Reduction::none) return {c.up[p.row] * w.s, 1};
  T main = c.divisors[0], extra = c.divisors[1];
  T by_main = main != 0 ? 1 / main : T(0), by_extra = extra != 0 ? 1 / extra : T(kNothing) * by_main;
  if (c.two_divisors) return {c.up[0] * by_extra * w.s, extra != 0 ? by_main * extra : T(1 / kNothing)};
  return {c.up[0] * by_main * w.s, 1};
}

// What a formula knows of the call, on the device.
template <class T>
PYL_DEVICE Batch<T> batch_of(const Call<T>& c, T main) {
  Batch<T> k = c.k;
  if (c.weight_sum) k.weight_sum = *c.weight_sum;
  k.main = main;
  return k;
}

// Adds the partial sums of `blocks` blocks to the loss and its divisors (finish.cu).
template <class T>
void finish(Run& run, const Request& r, const Call<T>& c, unsigned blocks);
// The same without a division: four doubles.
void add_partials(Run& run, const double* partial, unsigned blocks, double* result);

// Launches a kernel that is a template of the logits' type, or of PYL_TYPES(what else, that), and the group.
#define PYL_TYPES(...) __VA_ARGS__
#define PYL_RUN_ROWS(run, kernel, D, shape, ...)                              \
  do {                                                                        \
    if ((shape).walkers == Walkers::lanes) {                                  \
      auto of_lanes = kernel<D, Lanes>;                                       \
      PYL_RUN(run, of_lanes, (shape).blocks(), (shape).threads, __VA_ARGS__); \
    } else {                                                                  \
      auto of_block = kernel<D, Block>;                                       \
      PYL_RUN(run, of_block, (shape).blocks(), (shape).threads, __VA_ARGS__); \
    }                                                                         \
  } while (0)

// The groups of a launch over the parts of split rows: a lane for each part, a warp a row.
inline Shape shape_of_parts(const Request& r) {
  int64_t each = kLanesThreads / kWarp;
  return {Walkers::lanes, kWarp, 1, r.classes, kLanesThreads, (r.rows + each - 1) / each};
}
// And over rows without their logits: a lane a row.
inline Shape shape_of_rows(const Request& r) {
  return {Walkers::lanes, 1, 1, r.classes, kLanesThreads, (r.rows + kLanesThreads - 1) / kLanesThreads};
}
// Number i of a part of a row.
template <class T>
PYL_DEVICE T& part_number(const Call<T>& c, T* parts, int i, int part, int64_t row) {
  return parts[(static_cast<int64_t>(i) * c.parts + part) * c.rows + row];
}

}  // namespace PYL_ISA

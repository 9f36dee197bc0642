// What a call is: Request as bindings.cpp fills it, Call<T> as kernels get it by value, and Run, which launches.
#pragma once
#include <cstdint>

#include "cuda/formulas.cuh"
#include "cuda/tuning.h"

namespace PYL_ISA {

// Where row n and class j of an (N, C, *) tensor lie; dimensions that can be walked as one are merged.
constexpr int kMostDims = 4;
struct Walk {
  int dims = 0;
  bool narrow = false;  // are row numbers and sizes of 32 bits enough to divide with?
  int64_t size[kMostDims] = {}, stride[kMostDims] = {};
  int64_t class_stride = 1;

  PYL_INLINE int64_t offset(int64_t row) const {
    if (dims < 2) return row * stride[0];  // stride 0 without dimensions
    return narrow ? divided<uint32_t>(row) : divided<int64_t>(row);
  }
  template <class I>
  PYL_INLINE int64_t divided(int64_t row) const {
    I n = static_cast<I>(row);
    int64_t at = 0;
#pragma unroll
    for (int d = kMostDims - 1; d > 0; --d)
      if (d < dims) {
        I each = static_cast<I>(size[d]), next = n / each;
        at += static_cast<int64_t>(n - next * each) * stride[d];
        n = next;
      }
    return at + static_cast<int64_t>(n) * stride[0];
  }
};

struct Request {
  int loss;
  Dtype dtype;
  int64_t rows, images;
  int classes;
  const void* x;
  Walk x_walk;
  const void* y;  // null without labels; for a label-free loss a mask: rows that hold ignore_index are out
  Index y_type;
  int64_t ignore_index;
  const void* soft;  // class probabilities, null with labels
  Dtype soft_dtype;
  Walk soft_walk;
  const void *weight, *shift, *factor, *sample_weight;  // (C) and (rows), in the accumulation type; null when absent
  const void* weight_sum;                               // one number: of the class weights, where smoothing asks for it
  double numbers[kMostOwn];                             // the loss's own
  Reduction reduction;
  double normalizer;            // negative when absent
  const double* normalizer_at;  // one that lies on the device, or null

  void* out;       // (rows), (areas, classes) or one number, accumulation type
  void* saved;     // what backward needs: two divisors, K numbers of every row, accumulation type; then the region family's
                   // doubles: how many areas count, and two coefficients of each area and class
  const void* up;  // upstream gradient, shaped like out
  void* grad;
  Walk grad_walk;
};

// u = scale softcap(x) + shift
template <class T>
struct Map {
  T scale, cap;
  const T* shift;
  PYL_INLINE T operator()(T x, int j) const {
    T unused;
    return with_slope(x, j, unused);
  }
  PYL_INLINE T with_slope(T x, int j, T& du) const {
    T u = x;
    du = 1;
    if (cap > 0 && x != -infinity<T>()) u = cap * tanh(x / cap, du);  // a masked class stays masked
    u *= scale, du *= scale;
    return shift ? u + shift[j] : u;
  }
};

template <class T>
struct Call {
  int loss, classes;
  int softmax;  // the softmax formula that the loss is, or that is beside it
  bool normed;  // has that normed rows?
  Reduction reduction;
  int64_t rows;
  const void* x;
  Walk x_walk;
  const void* y;
  Index y_type;
  bool labels;  // are y labels, or a mask?
  int64_t ignore_index;
  const void* soft;
  Dtype soft_dtype;
  Walk soft_walk;
  const T *weight, *shift, *factor, *sample, *weight_sum;
  T numbers[kMostOwn];  // the loss's own
  Batch<T> k;
  SoftmaxView<T> view;
  Map<T> map;
  bool two_divisors;
  T *out, *divisors, *stats;
  const T* up;
  void* grad;
  Walk grad_walk;

  double* partial;                // (4, blocks): loss, mass, extra and extra mass
  int width;                      // lanes of a row
  int parts, per_part;            // blocks of a row, and classes of each
  int phase;                      // of a split row that is read twice
  T *first_parts, *second_parts;  // numbers of each part: (numbers, parts, rows)
  double* part_totals;            // one more of each
  PYL_INLINE T& stat(int i, int64_t row) const { return stats[i * rows + row]; }
};

template <class T>
Call<T> call_of(const Request& r) {
  const Facts& facts = kFacts[r.loss];
  Call<T> c{};
  c.loss = r.loss, c.softmax = facts.softmax, c.normed = facts.normed, c.classes = r.classes, c.reduction = r.reduction,
  c.rows = r.rows;
  c.x = r.x, c.x_walk = r.x_walk;
  c.y = r.y, c.y_type = r.y_type, c.labels = r.y && facts.labels, c.ignore_index = r.ignore_index;
  c.soft = r.soft, c.soft_dtype = r.soft_dtype, c.soft_walk = r.soft_walk;
  c.weight = static_cast<const T*>(r.weight), c.shift = static_cast<const T*>(r.shift);
  c.factor = static_cast<const T*>(r.factor), c.sample = static_cast<const T*>(r.sample_weight);
  c.weight_sum = static_cast<const T*>(r.weight_sum);
  for (int i = 0; i < kMostOwn; ++i) c.numbers[i] = static_cast<T>(r.numbers[i]);
  c.k = {static_cast<T>(r.classes), static_cast<T>(r.classes), 1};
  c.view = softmax_view(facts, c.numbers, c.k.classes);
  c.map = {c.view.scale, c.view.cap, c.view.shifted ? c.shift : nullptr};
  c.two_divisors = has_second_divisor(facts, c.view);
  c.out = static_cast<T*>(r.out);
  c.divisors = static_cast<T*>(r.saved);
  c.stats = r.saved ? c.divisors + 2 : nullptr;
  c.up = static_cast<const T*>(r.up);
  c.grad = r.grad, c.grad_walk = r.grad_walk;
  c.parts = 1, c.per_part = r.classes, c.phase = 0, c.width = 1;
  return c;
}

// Who walks the rows of a launch.
enum class Walkers { lanes, block };
struct Shape {
  Walkers walkers;
  int width, parts, per_part, threads;
  int64_t tiles;  // rows, groups of rows or parts of rows
  unsigned blocks() const { return static_cast<unsigned>(tiles < kMostBlocks ? tiles : kMostBlocks); }
};
inline Shape shape_of(const Request& r) {
  int64_t row_stride = r.x_walk.dims ? r.x_walk.stride[r.x_walk.dims - 1] : r.classes;
  int64_t row_step = row_stride < 0 ? -row_stride : row_stride;
  int64_t class_step = r.x_walk.class_stride < 0 ? -r.x_walk.class_stride : r.x_walk.class_stride;
  bool pixels = r.rows > 1 && row_step < class_step && (r.classes <= kPixelClasses || r.rows >= kPixelRows);
  if (pixels || r.classes <= kWarpClasses) {
    int width = 1;
    while (!pixels && width < kWarp && width * kLaneClasses < r.classes) width *= 2;
    int64_t each = kLanesThreads / width;
    return {Walkers::lanes, width, 1, r.classes, kLanesThreads, (r.rows + each - 1) / each};
  }
  int parts = 1, per_part = r.classes;
  if (r.classes > kSplitClasses && r.rows < kSplitRows) {
    parts = (r.classes + kPartClasses - 1) / kPartClasses;
    parts = parts < kMostParts ? parts : kMostParts;
    per_part = ((r.classes + parts - 1) / parts + 63) / 64 * 64;
    parts = (r.classes + per_part - 1) / per_part;
  }
  int threads = per_part <= kShortRow ? kBlockThreadsShort : kBlockThreads;
  return {Walkers::block, threads, parts, per_part, threads, r.rows * parts};
}
template <class T>
void set_shape(Call<T>& c, const Shape& s) {
  c.width = s.width, c.parts = s.parts, c.per_part = s.per_part;
}

// Launches, or, without memory, only counts the bytes of workspace that the launches would take: the same code does both.
struct Run {
  char* memory;
  cudaStream_t stream;
  size_t used = 0;
  bool dry() const { return memory == nullptr; }
  template <class T>
  T* take(int64_t n) {
    size_t at = used;
    used += (static_cast<size_t>(n) * sizeof(T) + 255) / 256 * 256;
    return dry() ? nullptr : reinterpret_cast<T*>(memory + at);
  }
};
struct LaunchError {
  cudaError_t error;
};
inline void check_launch() {
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw LaunchError{error};
}
#define PYL_RUN(run, kernel, grid, block, ...)                                                          \
  do {                                                                                                  \
    if (!(run).dry()) {                                                                                 \
      PYL_LAUNCH(kernel, dim3(grid), dim3(static_cast<unsigned>(block)), 0, (run).stream, __VA_ARGS__); \
      check_launch();                                                                                   \
    }                                                                                                   \
  } while (0)

// Numbers that a row saves for backward: what the kernels of its family save.
inline int row_numbers(const Facts& facts, bool soft) {
  switch (facts.family) {
    case Family::softmax:
      return facts.normed ? 4 : soft ? 3 : 2;
    case Family::margin:
      return 3;
    case Family::entropy:
      return 4;
    case Family::select:  // SelectSaved
      return 7 + (facts.beside ? 2 : 0) + (soft ? 1 : 0);
    case Family::region:  // RegionSaved
      return facts.beside ? 5 : 3;
  }
  return 0;
}

// What each family's .cu defines.
#define PYL_DECLARE_FAMILY(family)             \
  void family##_forward(Run&, const Request&); \
  void family##_backward(Run&, const Request&);
PYL_FAMILIES(PYL_DECLARE_FAMILY)
#undef PYL_DECLARE_FAMILY

// Calls function<D>(run, request) with the type of the logits.
#define PYL_BY_DTYPE(function, run, request)        \
  switch ((request).dtype) {                        \
    case Dtype::f32:                                \
      return function<float>(run, request);         \
    case Dtype::bf16:                               \
      return function<__nv_bfloat16>(run, request); \
    case Dtype::f16:                                \
      return function<__half>(run, request);        \
    case Dtype::f64:                                \
      return function<double>(run, request);        \
  }

}  // namespace PYL_ISA

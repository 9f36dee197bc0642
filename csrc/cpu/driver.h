// What rowwise.h and pixelwise.h share: a typed view of the problem, the formula of each loss, the reduction, the threads.
#pragma once
#include "cpu/simd.h"
#if defined(_OPENMP)
#include <omp.h>
#endif
#include "losses/all.h"

namespace PYL_ISA {

// Out of line: each is needed once a row.
template <class T, class V>
__attribute__((noinline)) EntropyResult<V> entropy_formula(int loss, const T* numbers, const Batch<T>& k,
                                                           const EntropyRow<V>& r) {
  return visit_entropy<EntropyResult<V>>(loss, [&](auto f) { return f.row(own_of<decltype(f)>(numbers), k, r); });
}
template <class V>
__attribute__((noinline)) SelectResult<V> select_formula(int loss, const double* numbers, const Batch<double>& k,
                                                         const SelectRow<V>& r) {
  return visit_select<SelectResult<V>>(loss, [&](auto f) { return f.row(own_of<decltype(f)>(numbers), k, r); });
}

// Numbers that a row saves for backward: what the drivers of its family save.
template <class T>
int row_numbers(const Facts& facts, const SoftmaxView<T>& view, bool soft, bool shift) {
  switch (facts.family) {
    case Family::softmax:  // m, d; the norm and the mean, or the mass
      return facts.normed ? 4 : soft ? 3 : 2;
    case Family::margin:  // threshold, factor, slopes
      return 3;
    case Family::entropy:  // m, d, mu, slope
      return 4;
    case Family::select:  // SelectSaved
      return facts.beside ? 6 : 4;
    case Family::region:  // m and d, of two softmaxes where u is not x; even, so that doubles behind them are aligned
      return facts.beside && is_mapped(view, shift) ? 4 : 2;
  }
  return 0;
}

// Calls f(labels) with the labels' own type.
template <class F>
PYL_INLINE void with_labels(const Problem& p, F f) {
  switch (p.y_type) {
    case Index::u8:
      return f(static_cast<const uint8_t*>(p.y));
    case Index::i16:
      return f(static_cast<const int16_t*>(p.y));
    case Index::i32:
      return f(static_cast<const int32_t*>(p.y));
    case Index::i64:
      return f(static_cast<const int64_t*>(p.y));
  }
}

// An area of fewer rows is summed again in backward, while it is in the cache: for tiny images the coefficients of every class
// would be as many as the logits.
constexpr int64_t kLargeArea = 64;

// What one row weighs.
template <class T>
struct RowWeights {
  T w;     // class weight and factor of the label: multiplies the loss
  T mass;  // share of the mean's divisor, before the sample weight
  T s;     // sample weight
};

// The share of a second term whose divisor is 0, while the first has one.
constexpr double kNothing = 1e-30;

// In the place of a row's sum of exponentials: the reduction left the row out.
constexpr int kLeftOut = -1;

// Sums of a chunk of rows. Chunks are cut by the problem alone and added in order: the same bits for any number of threads.
struct Partial {
  double sum = 0, mass = 0, extra = 0, extra_mass = 0;
  int64_t bad = -1;  // the first label that is neither a class nor ignored
  void add(const Partial& o) {
    sum += o.sum, mass += o.mass, extra += o.extra, extra_mass += o.extra_mass;
    if (bad < 0) bad = o.bad;
  }
};

template <class T>
struct Context {
  const Problem& p;
  Facts facts;
  T numbers[kMostOwn];  // the loss's own
  Batch<T> k;
  SoftmaxView<T> softmax;  // of the softmax formula that the loss is, or that is beside it
  Parts parts;
  const T *weight, *shift, *factor, *sample;
  T *out, *divisors, *stats;
  int saved_numbers;  // of a row
  double base = 1;    // backward: what multiplies every row's gradient besides its sample weight

  explicit Context(const Problem& p)
      : p(p),
        k{static_cast<T>(p.classes), static_cast<T>(p.classes), 1},
        weight(static_cast<const T*>(p.weight)),
        shift(static_cast<const T*>(p.shift)),
        factor(static_cast<const T*>(p.factor)),
        sample(static_cast<const T*>(p.sample_weight)),
        out(static_cast<T*>(p.loss_out)),
        divisors(static_cast<T*>(p.saved)),
        stats(p.saved ? divisors + 2 : nullptr) {
    for (int i = 0; i < kMostOwn; ++i) numbers[i] = static_cast<T>(p.numbers[i]);
    if (p.loss >= 0) {
      facts = kFacts[p.loss];
      softmax = softmax_view(facts, numbers, k.classes);
      parts = parts_of(p.loss, p.numbers);
    }
    saved_numbers = row_numbers(facts, softmax, p.soft, shift);
    if (weight && softmax.smooth) {  // smoothing alone asks for their sum
      double sum = 0;
      for (int64_t j = 0; j < p.classes; ++j) sum += weight[j];
      k.weight_sum = static_cast<T>(sum);
    }
  }

  // The label of a row, or -1 when it is ignored; 0 without labels.
  int64_t label(int64_t row) const {
    if (!p.y) return 0;
    int64_t y = 0;
    with_labels(p, [&](auto labels) { y = labels[row]; });
    return y == p.ignore_index ? -1 : y;
  }
  RowWeights<T> weights(int64_t row, int64_t y) const {
    T mass = weight && p.y ? weight[y] : 1;
    return {factor ? mass * factor[y] : mass, mass, sample ? sample[row] : 1};
  }
  // Are logits and gradient stored in T, so that no conversion is needed?
  bool as_it_is() const { return p.dtype == (sizeof(T) == 4 ? Dtype::f32 : Dtype::f64); }
  T& stat(int i, int64_t row) const { return stats[i * p.rows + row]; }

  // Takes a row's loss: into the output, or into the sums of its chunk.
  void emit(int64_t row, const RowWeights<T>& w, T loss, T extra, Partial& sums) const {
    T total = weighted(w.s, loss + extra);
    if (p.reduction == Reduction::none) {
      out[row] = total;
    } else if (p.reduction != Reduction::above_zero || !(total <= 0)) {
      double s = w.s;
      sums.add({weighted<double>(s, loss), s * w.mass, weighted<double>(s, extra), s, -1});
    }
  }
  void emit_ignored(int64_t row) const {
    if (p.reduction == Reduction::none) out[row] = 0;
    for (int i = 0; stats && i < saved_numbers; ++i) stat(i, row) = 0;
  }

  // Writes the reduced loss and the divisors that backward needs.
  void finish(const Partial& sums) const {
    if (divisors) divisors[0] = divisors[1] = 1;
    if (p.reduction != Reduction::none) *out = static_cast<T>(reduced(sums));
  }
  // The reduced loss of rows; keeps its divisors.
  double reduced(const Partial& sums) const {
    keep_divisors(sums);
    return divide(sums.sum, divisor(sums.mass)) + divide(sums.extra, divisor(sums.extra_mass));
  }
  double divisor(double mass) const {
    return p.reduction == Reduction::sum ? 1 : p.normalizer == -__builtin_inf() ? mass : p.normalizer;
  }
  void keep_divisors(const Partial& sums) const {
    if (!divisors) return;
    divisors[0] = static_cast<T>(divisor(sums.mass));
    divisors[1] = static_cast<T>(divisor(sums.extra_mass));
  }
  // 0 when nothing counts, unless a NaN is to show
  static double divide(double sum, double mass) { return mass != 0 ? sum / mass : (sum == sum ? 0.0 : sum); }

  // The factor that the gradients of all rows share, and the share of the main term where a second term has another divisor.
  void set_base(double g, double mass, double extra_mass) {
    double main = mass != 0 ? 1 / mass : 0, extra = extra_mass != 0 ? 1 / extra_mass : kNothing * main;
    bool two = has_second_divisor(facts, softmax);
    base = g * (two ? extra : main);
    if (two) k.main = static_cast<T>(extra != 0 ? main / extra : 0);
  }
  void begin_backward() {
    if (p.reduction != Reduction::none) set_base(*static_cast<const T*>(p.grad_out), divisors[0], divisors[1]);
  }
  // Before a forward that writes the gradient: the divisors are known from the labels.
  void begin_ahead(const Partial& counted) { set_base(1, divisor(counted.mass), divisor(counted.extra_mass)); }
  bool ahead() const { return out && p.grad; }
  // A gradient that no cache holds until it is read had better not pass through one: memory is not read before it is written.
  bool streams() const { return p.rows * p.classes * static_cast<int64_t>(sizeof(T)) > (int64_t(32) << 20); }
  // The margin family's kept classes, one bit each, after the statistics.
  uint8_t* bits() const { return reinterpret_cast<uint8_t*>(stats + saved_numbers * p.rows); }
  // The softmax formula's u of other numbers than the logits?
  bool mapped() const { return is_mapped(softmax, shift); }
  // Is there a softmax formula beside the loss, and does it weigh anything?
  bool beside() const { return facts.beside && parts.side != 0; }
  // The region family's numbers of classes, there too.
  double* after_rows() const { return reinterpret_cast<double*>(stats + saved_numbers * p.rows); }
  T upstream(int64_t row, const RowWeights<T>& w) const {
    double g = p.reduction == Reduction::none ? static_cast<const T*>(p.grad_out)[row] : base;
    return static_cast<T>(g * w.s);
  }
  // Rows that the reduction left out have no gradient: forward decides, and saves it.
  bool counted(const RowWeights<T>& w, T loss) const { return p.reduction != Reduction::above_zero || !(w.s * loss <= 0); }
};

// Memory for one thread's tiles, aligned to cache lines.
template <class T>
struct Scratch {
  void* raw;
  T* data;
  explicit Scratch(int64_t n) : raw(__builtin_malloc(n * sizeof(T) + 64)) {
    data = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(raw) + 63) & ~uintptr_t(63));
  }
  ~Scratch() { __builtin_free(raw); }
  Scratch(const Scratch&) = delete;
};

// How many threads a problem is worth.
inline int64_t threads_for(const Problem& p, int64_t numbers_a_row) {
  constexpr int64_t worth_a_thread = 16384;  // numbers: below, waking a thread costs more than it brings
  int64_t threads = p.rows * numbers_a_row / worth_a_thread;
  threads = threads < 1 ? 1 : threads;
  return threads > p.threads ? p.threads : threads;
}

// Runs body(tools, piece, sums) on every piece of the work: contiguous pieces to each thread. Each thread makes its tools, the
// buffers of a driver, once.
template <class M, class F>
void for_pieces(int64_t pieces, int64_t threads, Partial* total, M make_tools, F body) {
  Partial one;
  Scratch<Partial> many(total && pieces > 1 ? pieces : 1);
  Partial* sums = pieces > 1 ? many.data : &one;
  threads = threads > pieces ? (pieces ? pieces : 1) : threads;
  auto work = [&](int64_t t, int64_t n) {
    auto tools = make_tools();
    for (int64_t piece = pieces * t / n; piece < pieces * (t + 1) / n; ++piece) {
      Partial mine;
      body(tools, piece, mine);
      if (total) sums[piece] = mine;
    }
    fence();
  };
#if defined(_OPENMP)
  if (threads > 1) {
#pragma omp parallel num_threads(static_cast<int>(threads))
    work(omp_get_thread_num(), omp_get_num_threads());
  } else
#endif
    work(0, 1);
  if (total)
    for (int64_t piece = 0; piece < pieces; ++piece) total->add(sums[piece]);
}

// Runs body(tools, first row, last row, sums) on every chunk of rows, small problems on one thread.
template <class M, class F>
void for_chunks(const Problem& p, int64_t chunk_rows, int64_t numbers_a_row, Partial* total, M make_tools, F body) {
  int64_t chunks = (p.rows + chunk_rows - 1) / chunk_rows;
  for_pieces(chunks, threads_for(p, numbers_a_row), total, make_tools, [&](auto& tools, int64_t chunk, Partial& sums) {
    int64_t end = (chunk + 1) * chunk_rows;
    body(tools, chunk * chunk_rows, end < p.rows ? end : p.rows, sums);
  });
}
template <class M, class F>
void for_chunks(const Problem& p, int64_t chunk_rows, Partial* total, M make_tools, F body) {
  for_chunks(p, chunk_rows, p.classes, total, make_tools, body);
}

// A look at the labels before the logits: the first bad one, and, where the gradient is written ahead, what a mean divides by.
template <class T>
Partial look_at_labels(const Context<T>& c) {
  const Problem& p = c.p;
  Partial found;
  bool check = p.y && c.facts.labels, plain = !c.weight && !c.sample;
  if (!p.y && plain) found.mass = found.extra_mass = static_cast<double>(p.rows);
  if ((!p.y && plain) || (!check && !c.ahead())) return found;
  for_chunks(
      p, 8192, 1, &found, [] { return 0; },
      [&](int, int64_t begin, int64_t end, Partial& sums) {
        if (check)
          with_labels(p, [&](auto y) {
            int64_t live = 0, bad = 0, ignored = p.ignore_index, classes = p.classes;
            for (int64_t i = begin; i < end; ++i) {  // without branches
              int64_t label = y[i], in = label != ignored;
              live += in;
              bad |= in & ((label < 0) | (label >= classes));
            }
            sums.mass = sums.extra_mass = static_cast<double>(live);
            for (int64_t i = begin; bad && i < end; ++i)
              if (y[i] != ignored && (y[i] < 0 || static_cast<int64_t>(y[i]) >= classes)) {
                sums.bad = i;
                return;
              }
          });
        if (!c.ahead() || (check && plain) || sums.bad >= 0) return;
        long double mass = 0, extra = 0;  // the loss adds them up in another order
        for (int64_t i = begin; i < end; ++i) {
          int64_t y = c.label(i);
          if (y < 0) continue;
          RowWeights<T> w = c.weights(i, y);
          mass += static_cast<double>(w.s) * w.mass, extra += w.s;
        }
        sums.mass = static_cast<double>(mass), sums.extra_mass = static_cast<double>(extra);
      });
  return found;
}

}  // namespace PYL_ISA

// Each family is compiled by itself, in <family>.cpp: GCC stops inlining the innermost loops when a unit grows too much.
#define PYL_DECLARE_FAMILY(family)                                \
  void family##_family_forward(const Context<float>&, Partial&);  \
  void family##_family_forward(const Context<double>&, Partial&); \
  void family##_family_backward(Context<float>&);                 \
  void family##_family_backward(Context<double>&);
#define PYL_FORWARD(family)            \
  case Family::family:                 \
    family##_family_forward(c, total); \
    break;
#define PYL_BACKWARD(family)     \
  case Family::family:           \
    family##_family_backward(c); \
    break;
#define PYL_DEFINE_FAMILY_AS(family, T)                                                  \
  void family##_family_forward(const Context<T>& c, Partial& total) {                    \
    across_rows(c.p) ? pixels_##family##_forward(c, total) : family##_forward(c, total); \
  }                                                                                      \
  void family##_family_backward(Context<T>& c) { across_rows(c.p) ? pixels_##family##_backward(c) : family##_backward(c); }
#define PYL_DEFINE_FAMILY(family)      \
  namespace PYL_ISA {                  \
  PYL_DEFINE_FAMILY_AS(family, float)  \
  PYL_DEFINE_FAMILY_AS(family, double) \
  }

namespace PYL_ISA {

PYL_FAMILIES(PYL_DECLARE_FAMILY)

// Lanes across rows pay off when a row is short, or when neighbouring rows are closer in memory than neighbouring classes.
inline bool across_rows(const Problem& p) {
  const Layout& l = p.x_layout;
  int64_t row_stride = l.dims ? l.stride[l.dims - 1] : p.classes;
  return p.classes < 32 || row_stride < l.class_stride;
}

}  // namespace PYL_ISA

// Driver for rows of many classes: lanes run across the classes of one row.
// A row is read in blocks that stay in the first-level cache between the passes over them; float32 and float64 rows that need
// no map are read in place. The label's own logit is put to -inf for the loops, so that "the other classes" needs no mask.
#pragma once
#include "cpu/driver.h"

namespace PYL_ISA {

constexpr int64_t kBlock = 2048;

// Calls f(vector, index, accumulator number) over n numbers; lanes past the end hold `fill`. Four accumulators hide latency.
template <class T, class F>
PYL_INLINE void over_lanes(const T* p, int64_t n, T fill, F f) {
  constexpr int W = Lanes<T>::W;
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    f(load(p + i), i, 0);
    f(load(p + i + W), i + W, 1);
    f(load(p + i + 2 * W), i + 2 * W, 2);
    f(load(p + i + 3 * W), i + 3 * W, 3);
  }
  for (; i + W <= n; i += W) f(load(p + i), i, 0);
  if (i < n) f(load_some(p + i, n - i, fill), i, 1);
}
// The same, and writes what f returns.
template <class T, class F>
PYL_INLINE void map_lanes(const T* p, int64_t n, T* out, F f) {
  constexpr int W = Lanes<T>::W;
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, f(load(p + i), i));
  if (i < n) store_some(out + i, n - i, f(load_some(p + i, n - i, T(0)), i));
}
// Numbers i.. of a (C) vector beside a block of n.
template <class T>
PYL_INLINE typename Lanes<T>::V beside(const T* p, int64_t i, int64_t n) {
  return i + Lanes<T>::W <= n ? load(p + i) : load_some(p + i, n - i, T(0));
}

// sum of w (lse - u) with lse = m + rest and 0 * inf = 0; w null is 1. Every term is a true difference: nothing cancels in the
// sum.
template <class T>
double block_spread(const T* u, const T* w, int64_t n, T m, T rest) {
  typedef typename Lanes<T>::V V;
  V s[4] = {};
  over_lanes(u, n, m + rest, [&](V v, int64_t i, int k) {
    V d = (m - v) + rest;
    if (w) {
      V weight = beside(w, i, n);
      d = where(weight == 0, V{}, weight * d);
    } else if (i + Lanes<T>::W > n) {
      d = where(first_lanes<T>(n - i), d, V{});
    }
    s[k] += d;
  });
  return sum_of((s[0] + s[1]) + (s[2] + s[3]));
}
template <class T>
double block_squares(const T* x, int64_t n) {
  typedef typename Lanes<T>::V V;
  V s[4] = {};
  over_lanes(x, n, T(0), [&](V v, int64_t, int k) { s[k] += where(v == -infinity<T>(), V{}, v * v); });
  return sum_of((s[0] + s[1]) + (s[2] + s[3]));
}

// u = scale softcap(x) + shift
template <class T>
struct Map {
  T scale, cap;
  const T* shift;
  bool identity() const { return scale == 1 && cap == 0 && !shift; }

  // In place on classes j.. ; `slope`, if given, takes du/dx.
  void apply(T* x, int64_t j, int64_t n, T* slope) const {
    typedef typename Lanes<T>::V V;
    map_lanes(x, n, x, [&](V v, int64_t i) {
      V u = v, du = splat<V>(scale);
      if (cap > 0) {
        V t = tanh(v / cap, du);
        Int<V> masked = v == -infinity<T>();  // stays masked
        u = where(masked, v, cap * t);
        du = where(masked, splat<V>(1), du) * scale;
      }
      if (slope) {
        if (i + Lanes<T>::W <= n) store(slope + i, du);
        else store_some(slope + i, n - i, du);
      }
      u *= scale;
      return shift ? u + beside(shift + j, i, n) : u;
    });
  }
};
template <class T>
Map<T> map_of(const Context<T>& c) {
  if (c.p.loss == id_cross_entropy) return {1 / c.k.own[1], c.k.own[2], c.shift};
  return {1, 0, c.shift};
}

// One row's logits, block by block.
template <class T>
struct RowReader {
  const Context<T>& c;
  int64_t at;
  bool in_place;
  alignas(64) T buffer[kBlock];

  explicit RowReader(const Context<T>& c)
      : c(c), in_place(c.p.x_layout.class_stride == 1 && c.p.dtype == (sizeof(T) == 4 ? Dtype::f32 : Dtype::f64)) {}
  void seek(int64_t row) { at = c.p.x_layout.offset(row); }
  const T* raw(int64_t j, int64_t n) {
    int64_t stride = c.p.x_layout.class_stride;
    if (in_place) return static_cast<const T*>(c.p.x) + at + j;
    load_as(c.p.dtype, c.p.x, at + j * stride, stride, n, buffer);
    return buffer;
  }
  bool direct(const Map<T>& map) const { return in_place && map.identity(); }
  const T* mapped(const Map<T>& map, int64_t j, int64_t n, T* slope = nullptr) {
    const T* x = raw(j, n);
    if (map.identity()) return x;
    if (x != buffer) __builtin_memcpy(buffer, x, n * sizeof(T));
    map.apply(buffer, j, n, slope);
    return buffer;
  }
};

// Calls f(first class, count) on the blocks of [begin, end).
template <class F>
PYL_INLINE void over_blocks(int64_t begin, int64_t end, F f) {
  for (int64_t j = begin; j < end; j += kBlock) f(j, end - j < kBlock ? end - j : kBlock);
}
// Calls f(numbers, first class, count) on the blocks of the seeked row, with -inf in the place of class y.
template <class T, class F>
PYL_INLINE void over_others(RowReader<T>& x, const Map<T>& map, int64_t y, F f) {
  constexpr int64_t W = Lanes<T>::W;
  int64_t classes = x.c.p.classes;
  if (!x.direct(map)) {
    over_blocks(0, classes, [&](int64_t j, int64_t n) {
      const T* u = x.mapped(map, j, n);
      if (y >= j && y < j + n) x.buffer[y - j] = -infinity<T>();
      f(u, j, n);
    });
    return;
  }
  // Read in place: only the vector that holds the label is copied.
  int64_t at = y / W * W, end = at + W < classes ? at + W : classes;
  over_blocks(0, at, [&](int64_t j, int64_t n) { f(x.raw(j, n), j, n); });
  typename Lanes<T>::V v = end - at == W ? load(x.raw(at, W)) : load_some(x.raw(at, end - at), end - at, -infinity<T>());
  v[y - at] = -infinity<T>();
  store(x.buffer, v);
  f(x.buffer, at, end - at);
  over_blocks(end, classes, [&](int64_t j, int64_t n) { f(x.raw(j, n), j, n); });
}

template <class T>
struct RowGradient {
  const Context<T>& c;
  int64_t at = 0;
  bool in_place;
  alignas(64) T buffer[kBlock];

  explicit RowGradient(const Context<T>& c)
      : c(c), in_place(c.p.grad_layout.class_stride == 1 && c.p.dtype == (sizeof(T) == 4 ? Dtype::f32 : Dtype::f64)) {}
  void seek(int64_t row) { at = c.p.grad_layout.offset(row); }
  T* block(int64_t j) { return in_place ? static_cast<T*>(c.p.grad) + at + j : buffer; }
  void done(int64_t j, int64_t n) {
    int64_t stride = c.p.grad_layout.class_stride;
    if (!in_place) store_as(c.p.dtype, buffer, n, c.p.grad, at + j * stride, stride);
  }
  void fill(T value) {
    over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
      T* out = block(j);
      for (int64_t i = 0; i < n; ++i) out[i] = value;
      done(j, n);
    });
  }
  void put(int64_t j, T value) {
    *block(j) = value;
    done(j, 1);
  }
};

inline int64_t rows_per_chunk(const Problem& p) {
  int64_t n = 65536 / p.classes;
  return n < 1 ? 1 : n;
}

// ---- softmax ----

// Sums below it are of rows that one class dominates.
constexpr double kDominated = 1.01;

// How far the guess of OnlineSum may be from the largest u.
struct Slack {
  double above, below;  // the largest u may be this much above the guess, and this much below it
};
constexpr Slack kWide{20, 40};  // nothing is lost in sums of e^(u - m)
constexpr Slack kTight{1, 1};   // for sums of e^(u - m) (u - m), which are to be small

// A second sum beside that of e^(u - m): none, of e^(u - m) (u - m), or of e^(u - m) x.
enum class Moment { none, about_m, of_x };

// sum of e^(u - m) in one pass, without knowing the largest u before: m is a guess. A block that shows it too low is done again
// with a better one.
template <class T>
struct OnlineSum {
  typedef typename Lanes<T>::V V;
  T m;
  Slack slack;
  Moment kind;
  T late;  // u = late x, multiplied in the same rounding as the subtraction of m: LogitNorm's u are large, their differences
           // not
  V lanes[4] = {}, lanes_moment[4] = {}, max;  // since the last flush; the largest u so far
  double sum = 0, moment = 0;                  // of e^(u - m), and the second sum
  int64_t since_flush = 0;

  OnlineSum(T guess, Slack slack, Moment kind, T late = 1)
      : m(guess - guess == 0 ? guess : 0), slack(slack), kind(kind), late(late), max(splat<V>(-infinity<T>())) {}

  void block(const T* u, int64_t n) {
    if (since_flush + n > 2 * kBlock) flush();
    since_flush += n;
    V before[4], before_moment[4];
    for (int k = 0; k < 4; ++k) before[k] = lanes[k], before_moment[k] = lanes_moment[k];
    add(u, n);
    if (!any(max > m + static_cast<T>(slack.above))) return;
    for (int k = 0; k < 4; ++k) lanes[k] = before[k], lanes_moment[k] = before_moment[k];
    flush();
    recentre(max_of(max));
    add(u, n);
  }
  void add(const T* u, int64_t n) {
    V base = splat<V>(m), top = max, by = splat<V>(late), s[4];
    for (int k = 0; k < 4; ++k) s[k] = lanes[k];
    if (kind != Moment::none) {
      V sm[4];
      bool of_x = kind == Moment::of_x;
      for (int k = 0; k < 4; ++k) sm[k] = lanes_moment[k];
      over_lanes(u, n, -infinity<T>(), [&](V v, int64_t, int k) {
        V d = v * by - base, e = exp_below(d);
        s[k] += e;
        sm[k] += where(v == -infinity<T>(), V{}, e * (of_x ? v : d));  // a masked class counts nothing
        top = larger(v * by, top);
      });
      for (int k = 0; k < 4; ++k) lanes_moment[k] = sm[k];
    } else {
      over_lanes(u, n, -infinity<T>(), [&](V v, int64_t, int k) {
        s[k] += exp_below(v - base);
        top = larger(v, top);
      });
    }
    for (int k = 0; k < 4; ++k) lanes[k] = s[k];
    max = top;
  }
  void flush() {
    sum += sum_of((lanes[0] + lanes[1]) + (lanes[2] + lanes[3]));
    if (kind != Moment::none) moment += sum_of((lanes_moment[0] + lanes_moment[1]) + (lanes_moment[2] + lanes_moment[3]));
    for (int k = 0; k < 4; ++k) lanes[k] = lanes_moment[k] = V{};
    since_flush = 0;
  }
  void recentre(T better) {
    double step = static_cast<double>(m) - better, shrink = __builtin_exp(step);
    if (kind == Moment::about_m && sum != 0) moment += step * sum;
    sum *= shrink, moment *= shrink, m = better;
  }
  // Ends the row, with m the largest u. False when m was so far above it that digits were lost: start again from here.
  bool done() {
    flush();
    T top = max_of(max);
    if (top == -infinity<T>() || sum != sum) return true;
    if (top < m - static_cast<T>(slack.below)) {
      *this = OnlineSum(top, slack, kind, late);
      return false;
    }
    recentre(top);
    return true;
  }
};

// LogitNorm's scale 1 / (temperature (|x| + eps)), and the norm back from it: the scale is what is saved, with one rounding.
template <class T>
T norm_scale(const Context<T>& c, double norm) {
  return static_cast<T>(1 / (c.p.scalars[0] * (norm + c.p.scalars[1])));
}
template <class T>
T norm_of(const Context<T>& c, T scale) {
  return static_cast<T>(1 / (c.p.scalars[0] * scale) - c.p.scalars[1]);
}

template <class T>
double row_norm(RowReader<T>& x, int64_t classes) {
  double squares = 0;
  over_blocks(0, classes, [&](int64_t j, int64_t n) { squares += block_squares(x.raw(j, n), n); });
  if (!(squares > 1e-30 && squares < 1e38)) {  // float32 squares overflow or vanish: again, in double
    squares = 0;
    over_blocks(0, classes, [&](int64_t j, int64_t n) {
      const T* v = x.raw(j, n);
      for (int64_t i = 0; i < n; ++i)
        if (v[i] != -infinity<T>()) squares += static_cast<double>(v[i]) * v[i];
    });
  }
  return __builtin_sqrt(squares);
}

// The formula's view of one row, from the statistics that backward has too.
template <class T>
SoftmaxRow<typename Lanes<T>::V> softmax_row(double m, double d, double u_label, T w) {
  typedef typename Lanes<T>::V V;
  double a = (m - u_label) + __builtin_log(d);
  if (u_label == __builtin_inf()) a = __builtin_nan("");  // as the softmax of +inf
  SoftmaxRow<V> r = odds(splat<V>(static_cast<T>(a)), splat<V>(w));
  r.lse = a > 0 ? r.nll_miss + static_cast<T>(m + __builtin_log(d)) : r.nll + static_cast<T>(u_label);
  return r;
}

// Class probabilities of a row as weights q_j = w_j ((1 - eps) t_j + eps / C).
template <class T>
struct SoftReader {
  const Context<T>& c;
  int64_t at = 0;
  alignas(64) T buffer[kBlock];
  explicit SoftReader(const Context<T>& c) : c(c) {}
  void seek(int64_t row) { at = c.p.soft_layout.offset(row); }
  const T* block(int64_t j, int64_t n) {
    int64_t stride = c.p.soft_layout.class_stride;
    load_as(c.p.soft_dtype, c.p.soft, at + j * stride, stride, n, buffer);
    T eps = c.k.own[0], each = eps / c.k.classes;
    for (int64_t i = 0; i < n; ++i) {
      T q = (1 - eps) * buffer[i] + each;
      buffer[i] = c.weight ? q * c.weight[j + i] : q;
    }
    return buffer;
  }
};

template <class T>
void soft_forward(const Context<T>& c, RowReader<T>& x, SoftReader<T>& target, const Map<T>& map, int64_t row, Partial& sums) {
  x.seek(row);
  target.seek(row);
  OnlineSum<T> online(*x.mapped(map, 0, 1), kWide, Moment::none);
  do over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) { online.block(x.mapped(map, j, n), n); });
  while (!online.done());
  double log_d = __builtin_log(online.sum), lse = online.m + log_d, mass = 0, loss = 0;
  over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
    const T *u = x.mapped(map, j, n), *q = target.block(j, n);
    loss += block_spread(u, q, n, online.m, static_cast<T>(log_d));
    for (int64_t i = 0; i < n; ++i) mass += q[i];
  });
  RowWeights<T> w = c.weights(row, 0);
  T z = c.k.own[3];
  c.emit(row, w, static_cast<T>(loss), z > 0 ? static_cast<T>(z * lse * lse) : 0, sums);
  if (!c.stats) return;
  c.stat(0, row) = online.m;
  c.stat(1, row) = static_cast<T>(online.sum);
  c.stat(2, row) = static_cast<T>(mass);
}

template <class T>
void softmax_forward(const Context<T>& c, Partial& total) {
  bool norm = c.p.loss == id_logit_norm, smooth = c.p.loss == id_cross_entropy && c.k.own[0] > 0;
  for_chunks(c.p, rows_per_chunk(c.p), &total, [&](int64_t begin, int64_t end, Partial& sums) {
    RowReader<T> x(c);
    SoftReader<T> target(c);
    Map<T> map = map_of(c);
    for (int64_t row = begin; row < end; ++row) {
      if (c.p.soft) {
        soft_forward(c, x, target, map, row, sums);
        continue;
      }
      int64_t y = c.label(row);
      if (y < 0) {
        c.emit_ignored(row);
        continue;
      }
      x.seek(row);
      T scale = norm ? norm_scale<T>(c, row_norm(x, c.p.classes)) : 1;
      double u_label = static_cast<double>(*x.mapped(map, y, 1)) * scale;
      OnlineSum<T> online(static_cast<T>(u_label), kWide, norm ? Moment::of_x : Moment::none, scale);
      do over_others(x, map, y, [&](const T* u, int64_t, int64_t n) { online.block(u, n); });
      while (!online.done());
      RowWeights<T> w = c.weights(row, y);
      SoftmaxRow<typename Lanes<T>::V> r = softmax_row<T>(online.m, online.sum, u_label, w.w);
      if (smooth) {
        double rest = r.a[0] > 0 ? __builtin_log(online.sum) + r.nll_miss[0] : (u_label - online.m) + r.nll[0];
        double spread = 0;
        over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
          spread += block_spread(x.mapped(map, j, n), c.weight ? c.weight + j : nullptr, n, online.m, static_cast<T>(rest));
        });
        r.spread = splat<typename Lanes<T>::V>(static_cast<T>(spread));
      }
      auto result = softmax_formula<T>(c.p.loss, c.k, r);
      c.emit(row, w, result.loss[0], result.extra[0], sums);
      if (!c.stats) continue;
      c.stat(0, row) = online.m;
      c.stat(1, row) = static_cast<T>(online.sum);
      if (c.p.loss == id_cross_entropy) c.stat(2, row) = 0;  // soft targets alone have a mass of their own
      if (norm) {
        c.stat(2, row) = scale;
        c.stat(3, row) = online.sum == 0 ? 0 : static_cast<T>(online.moment / online.sum);
      }
    }
  });
}

// out = slope e^(late u - m) - pull w, the inner loop of every softmax gradient
template <class T>
void block_gradient(const T* u, int64_t n, T late, T m, T slope, T pull, const T* w, T* out) {
  typedef typename Lanes<T>::V V;
  if (pull == 0) {
    map_lanes(u, n, out, [&](V v, int64_t) { return slope * exp_below(v * late - m); });
    return;
  }
  map_lanes(u, n, out, [&](V v, int64_t i) {
    V q = w ? pull * beside(w, i, n) : splat<V>(pull);
    return slope * exp_below(v * late - m) - q;
  });
}

template <class T>
void softmax_backward(const Context<T>& c) {
  typedef typename Lanes<T>::V V;
  bool norm = c.p.loss == id_logit_norm;
  for_chunks(c.p, rows_per_chunk(c.p), nullptr, [&](int64_t begin, int64_t end, Partial&) {
    RowReader<T> x(c);
    RowGradient<T> grad(c);
    SoftReader<T> target(c);
    Map<T> map = map_of(c);
    alignas(64) T du[kBlock];
    T* slopes = map.cap > 0 ? du : nullptr;
    for (int64_t row = begin; row < end; ++row) {
      int64_t y = c.label(row);
      grad.seek(row);
      if (y < 0) {
        grad.fill(0);
        continue;
      }
      x.seek(row);
      RowWeights<T> w = c.weights(row, y);
      T up = c.upstream(row, w), m = c.stat(0, row), d = c.stat(1, row);
      T scale = norm ? c.stat(2, row) : 1;
      T slope, pull, label = 0, drag = 0;
      if (c.p.soft) {
        if (!c.counted(w, 1)) {  // a loss that is not above zero has no gradient of its own
          grad.fill(0);
          continue;
        }
        T lse = m + static_cast<T>(__builtin_log(d));
        slope = up * (c.k.main * c.stat(2, row) + 2 * c.k.own[3] * lse);
        pull = up * c.k.main;
        target.seek(row);
      } else {
        double u_label = static_cast<double>(*x.mapped(map, y, 1, slopes)) * scale;
        T du_label = slopes ? du[0] : map.scale * scale;
        auto result = softmax_formula<T>(c.p.loss, c.k, softmax_row<T>(m, d, u_label, w.w));
        if (!c.counted(w, result.loss[0] + result.extra[0])) {
          grad.fill(0);
          continue;
        }
        slope = up * result.slope[0], pull = up * result.pull[0], label = up * result.label[0] * du_label;
        double length = norm ? norm_of(c, scale) : 0;
        if (length > 0) {
          T x_label = *x.raw(y, 1);
          if (x_label == -infinity<T>()) x_label = 0;  // a masked class takes no part in the norm
          drag = static_cast<T>(slope * (c.stat(3, row) - x_label) * scale / (length * (length + c.p.scalars[1])));
          label -= drag * x_label;
        }
      }
      slope = d == 0 ? slope * 0 : slope / d;  // no other class: nothing to push, unless the row is NaN
      if (!slopes) slope *= map.scale * scale, pull *= map.scale;
      over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
        const T* u = x.mapped(map, j, n, slopes);
        T* out = grad.block(j);
        const T* weights = c.p.soft ? target.block(j, n) : (c.weight ? c.weight + j : nullptr);
        block_gradient(u, n, scale, m, slope, pull, weights, out);
        if (slopes) map_lanes(out, n, out, [&](V v, int64_t i) { return v * beside(du, i, n); });
        if (drag != 0) {
          const T* raw = x.raw(j, n);
          map_lanes(raw, n, out, [&](V v, int64_t i) { return beside(out, i, n) - where(v == -infinity<T>(), V{}, drag * v); });
        }
        grad.done(j, n);
      });
      if (!c.p.soft) grad.put(y, label);
    }
  });
}

// ---- entropy ----

// For a row that one class dominates: sums without the largest entry, whose 1 would swallow the rest.
template <class T>
void rest_of_block(const T* u, int64_t n, T m, double& rest, double& moment) {
  typedef typename Lanes<T>::V V;
  V s{}, sm{}, ties{};
  over_lanes(u, n, -infinity<T>(), [&](V v, int64_t, int) {
    V d = v - m, e = exp_below(d);
    s += where(v < m, e, V{});
    sm += where(v == -infinity<T>(), V{}, e * d);
    ties += where(v == m, splat<V>(1), V{});
  });
  rest += sum_of(s) + sum_of(ties);
  moment += sum_of(sm);
}

template <class T>
void entropy_forward(const Context<T>& c, Partial& total) {
  typedef typename Lanes<T>::V V;
  for_chunks(c.p, rows_per_chunk(c.p), &total, [&](int64_t begin, int64_t end, Partial& sums) {
    RowReader<T> x(c);
    for (int64_t row = begin; row < end; ++row) {
      if (c.label(row) < 0) {
        c.emit_ignored(row);
        continue;
      }
      x.seek(row);
      OnlineSum<T> online(*x.raw(0, 1), kTight, Moment::about_m);
      do over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) { online.block(x.raw(j, n), n); });
      while (!online.done());
      double d = online.sum, log_d = __builtin_log(d), mu = online.moment / d;
      if (d < kDominated) {
        double rest = -1, moment = 0;  // the largest entry itself is one of the ties
        over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) { rest_of_block(x.raw(j, n), n, online.m, rest, moment); });
        log_d = __builtin_log1p(rest), mu = moment / (1 + rest);
      }
      EntropyResult<V> result = entropy_formula<T>(c.p.loss, c.k, EntropyRow<V>{splat<V>(static_cast<T>(log_d - mu))});
      RowWeights<T> w = c.weights(row, 0);
      w.mass = result.mass[0];
      if (w.mass != 0) c.emit(row, w, result.loss[0], 0, sums);
      else c.emit_ignored(row);
      if (!c.stats) continue;
      c.stat(0, row) = online.m;
      c.stat(1, row) = static_cast<T>(d);
      c.stat(2, row) = static_cast<T>(mu);
      c.stat(3, row) = result.slope[0];
    }
  });
}

template <class T>
void entropy_backward(const Context<T>& c) {
  typedef typename Lanes<T>::V V;
  for_chunks(c.p, rows_per_chunk(c.p), nullptr, [&](int64_t begin, int64_t end, Partial&) {
    RowReader<T> x(c);
    RowGradient<T> grad(c);
    for (int64_t row = begin; row < end; ++row) {
      grad.seek(row);
      T slope = c.label(row) < 0 ? 0 : c.stat(3, row);
      if (slope == 0) {  // filtered or masked: not even read
        grad.fill(0);
        continue;
      }
      x.seek(row);
      T m = c.stat(0, row), d = c.stat(1, row), mu = c.stat(2, row);
      T factor = -slope * c.upstream(row, c.weights(row, 0)) / d;
      if (d == 0) factor = static_cast<T>(__builtin_nan(""));  // every class masked
      over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
        map_lanes(x.raw(j, n), n, grad.block(j), [&](V v, int64_t) {
          V g = v - m;
          return factor * where(v == -infinity<T>(), V{}, exp_below(g) * (g - mu));
        });
        grad.done(j, n);
      });
    }
  });
}

// ---- margin ----

enum Power { linear, squared, root, general };

// h(raw) and its slope h'(raw) for lanes with raw > 0
template <class T>
struct Errors {
  T margin, power_, delta, start;  // start: the slope below delta
  Power kind;

  explicit Errors(const Context<T>& c) : margin(c.k.own[0]), power_(c.k.own[1]), delta(0), start(0) {
    kind = power_ == 1 ? linear : power_ == 2 ? squared : power_ == T(0.5) ? root : general;
    if (power_ < 1) delta = c.k.own[2];
    if (delta > 0) start = static_cast<T>(__builtin_pow(delta, power_ - 1.0));
  }
  template <Power P, class V>
  PYL_INLINE V value(V raw) const {
    V positive = where(raw > 0, raw, V{});
    if constexpr (P == linear) return positive;
    if constexpr (P == squared) return positive * positive;
    V e = P == root ? square_root(positive) : where(raw > 0, power(positive, power_), V{});
    return where(positive < delta, start * positive, e);
  }
  template <Power P, class V>
  PYL_INLINE V slope(V raw) const {  // raw > 0
    if constexpr (P == linear) return splat<V>(1);
    if constexpr (P == squared) return 2 * raw;
    V s = P == root ? T(0.5) / square_root(raw) : power_ * power(raw, power_ - 1);
    return where(raw < delta, splat<V>(start), s);
  }
};
// Calls f(a constant of the power's kind).
template <Power P>
struct Constant {
  static constexpr Power value = P;
};
template <class F>
PYL_INLINE void with_power(Power kind, F f) {
  switch (kind) {
    case linear:
      return f(Constant<linear>{});
    case squared:
      return f(Constant<squared>{});
    case root:
      return f(Constant<root>{});
    case general:
      return f(Constant<general>{});
  }
}

// (x - x_y) + mu, where a masked class is never an error
template <class V>
PYL_INLINE V raw_error(V x, Scalar<V> x_label, V mu) {
  return where(x == -infinity<Scalar<V>>(), x, (x - x_label) + mu);
}

// The smallest T that is not below `mean`: e >= it exactly when e >= mean.
template <class T>
PYL_INLINE T not_below(double mean) {
  T t = static_cast<T>(mean);
  if (static_cast<double>(t) >= mean || mean != mean) return t;
  if constexpr (sizeof(T) == 4) return __builtin_nextafterf(t, __builtin_inff());
  return t;
}

template <class T>
struct MarginSums {
  double errors = 0, slopes = 0;
  int64_t count = 0;
  T max = 0;
  bool nan = false;
};

template <class T, Power P>
void block_errors(const Errors<T>& h, const T* x, int64_t n, T x_label, T mu, const T* shift, MarginSums<T>& sums) {
  typedef typename Lanes<T>::V V;
  V s[4] = {}, m[4] = {};
  Int<V> nan[4] = {};
  over_lanes(x, n, -infinity<T>(), [&](V v, int64_t i, int k) {
    V raw = raw_error(v, x_label, shift ? beside(shift, i, n) : splat<V>(mu));
    V e = h.template value<P>(raw);
    s[k] += e;
    m[k] = larger(e, m[k]);
    nan[k] |= raw != raw;
  });
  sums.errors += sum_of((s[0] + s[1]) + (s[2] + s[3]));
  sums.max = larger(max_of(larger(larger(m[0], m[1]), larger(m[2], m[3]))), sums.max);
  sums.nan |= any((nan[0] | nan[1]) | (nan[2] | nan[3]));
}

template <class T, Power P>
void block_select(const Errors<T>& h, const T* x, int64_t n, T x_label, T mu, const T* shift, T t, MarginSums<T>& sums) {
  typedef typename Lanes<T>::V V;
  V s[4] = {}, d[4] = {};
  Int<V> count[4] = {}, nan[4] = {};
  over_lanes(x, n, -infinity<T>(), [&](V v, int64_t i, int k) {
    V raw = raw_error(v, x_label, shift ? beside(shift, i, n) : splat<V>(mu));
    V e = h.template value<P>(raw);
    Int<V> kept = e >= t;
    s[k] += where(kept, e, V{});
    if constexpr (P != linear) d[k] += where(kept, h.template slope<P>(raw), V{});
    count[k] -= kept;
    nan[k] |= raw != raw;
  });
  sums.errors += sum_of((s[0] + s[1]) + (s[2] + s[3]));
  int64_t kept = static_cast<int64_t>(sum_of(__builtin_convertvector((count[0] + count[1]) + (count[2] + count[3]), V)));
  sums.count += kept;
  sums.slopes += P == linear ? static_cast<double>(kept) : sum_of((d[0] + d[1]) + (d[2] + d[3]));
  sums.nan |= any((nan[0] | nan[1]) | (nan[2] | nan[3]));
}

// The smallest threshold: every positive error.
template <class T>
constexpr T above_nothing() {
  return Lanes<T>::smallest;
}

template <class T>
void margin_forward(const Context<T>& c, Partial& total) {
  typedef typename Lanes<T>::V V;
  Errors<T> h(c);
  bool of_label = c.k.own[3] != 0, threshold = c.k.own[4] != 0;
  Map<T> plain{1, 0, nullptr};
  for_chunks(c.p, rows_per_chunk(c.p), &total, [&](int64_t begin, int64_t end, Partial& partial) {
    RowReader<T> x(c);
    for (int64_t row = begin; row < end; ++row) {
      int64_t y = c.label(row);
      if (y < 0) {
        c.emit_ignored(row);
        continue;
      }
      x.seek(row);
      T x_label = *x.raw(y, 1), t = above_nothing<T>(), mu = of_label && c.shift ? c.shift[y] : h.margin;
      const T* shift = of_label ? nullptr : c.shift;
      MarginSums<T> kept;
      bool none = false;
      with_power(h.kind, [&](auto power) {
        if (threshold) {
          MarginSums<T> all;
          over_others(x, plain, y, [&](const T* v, int64_t j, int64_t n) {
            block_errors<T, power.value>(h, v, n, x_label, mu, shift ? shift + j : nullptr, all);
          });
          kept.nan = all.nan;
          none = all.max == 0;
          T mean = not_below<T>(all.errors / static_cast<double>(c.p.classes));
          t = mean < all.max ? mean : all.max;  // rounding may lift the mean over every error
        }
        if (none) return;
        over_others(x, plain, y, [&](const T* v, int64_t j, int64_t n) {
          block_select<T, power.value>(h, v, n, x_label, mu, shift ? shift + j : nullptr, t, kept);
        });
      });
      none = none || kept.count == 0;
      // A row with a NaN, or with every class masked, has no margin to speak of.
      bool nan = kept.nan || x_label != x_label || (none && x_label == -infinity<T>());
      T bad = nan ? static_cast<T>(__builtin_nan("")) : 0;
      RowWeights<T> w = c.weights(row, y);
      MarginRow<V> r{splat<V>(static_cast<T>(kept.errors) + bad), splat<V>(static_cast<T>(kept.count)), splat<V>(w.w)};
      auto result = margin_formula<T>(c.p.loss, c.k, r);
      c.emit(row, w, result.loss[0], 0, partial);
      if (!c.stats) continue;
      c.stat(0, row) = t;
      c.stat(1, row) = none ? bad : result.factor[0] + bad;
      c.stat(2, row) = static_cast<T>(kept.slopes);
    }
  });
}

template <class T>
void margin_backward(const Context<T>& c) {
  typedef typename Lanes<T>::V V;
  Errors<T> h(c);
  bool of_label = c.k.own[3] != 0;
  for_chunks(c.p, rows_per_chunk(c.p), nullptr, [&](int64_t begin, int64_t end, Partial&) {
    RowReader<T> x(c);
    RowGradient<T> grad(c);
    for (int64_t row = begin; row < end; ++row) {
      int64_t y = c.label(row);
      grad.seek(row);
      RowWeights<T> w = y < 0 ? RowWeights<T>{0, 0, 0} : c.weights(row, y);
      T factor = y < 0 ? 0 : c.stat(1, row);
      if (factor == 0 || factor != factor || !c.counted(w, factor)) {  // nothing to push, or nothing to say
        grad.fill(factor != factor ? factor : 0);
        continue;
      }
      x.seek(row);
      T x_label = *x.raw(y, 1), t = c.stat(0, row), mu = of_label && c.shift ? c.shift[y] : h.margin;
      const T* shift = of_label ? nullptr : c.shift;
      factor *= c.upstream(row, w);
      with_power(h.kind, [&](auto power) {
        over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
          map_lanes(x.raw(j, n), n, grad.block(j), [&](V v, int64_t i) {
            V raw = raw_error(v, x_label, shift ? beside(shift + j, i, n) : splat<V>(mu));
            V e = h.template value<power.value>(raw);
            return where(e >= t, factor * h.template slope<power.value>(raw), V{});
          });
          grad.done(j, n);
        });
      });
      grad.put(y, -factor * c.stat(2, row));
    }
  });
}

}  // namespace PYL_ISA

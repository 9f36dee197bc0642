// The softmax family by rows: one pass for the sum of exponentials, one for the gradient.
#pragma once
#include "cpu/rowwise.h"

namespace PYL_ISA {

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

}  // namespace PYL_ISA

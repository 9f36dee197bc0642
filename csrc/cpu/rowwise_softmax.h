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
// Sums below it are of rows that one class dominates.
constexpr double kDominated = 1.01;

// A second sum beside that of e^(u - m): none, of e^(u - m) (u - m), or of e^(u - m) x.
enum class Moment { none, about_m, of_x };

// sum of e^(late (u - m)) with m the largest u, in one pass over the blocks of a row: m rises as the blocks come.
template <class T>
struct OnlineSum {
  typedef typename Lanes<T>::V V;
  Moment kind;
  T late;  // multiplies differences of logits: normed rows' u = late x may be large, their differences not
  T m = -infinity<T>();
  double sum = 0, moment = 0;                               // of e^(u - m), and the second sum
  T centre() const { return m == -infinity<T>() ? 0 : m; }  // what exponentials are relative to

  explicit OnlineSum(Moment kind, T late = 1) : kind(kind), late(late) {}

  // Adds a block of the row. `e`, if given, takes its exponentials; they are relative to the m that is returned.
  T block(const T* x, int64_t n, T* e) {
    raise(largest(x, n));
    return below(x, n, e);
  }
  // The same with m known to be as large.
  T below(const T* x, int64_t n, T* e) {
    T base = centre();
    if (kind != Moment::none) e ? add<true>(x, n, base, e) : add<false>(x, n, base, e);
    else e ? add_plain<true>(x, n, base, e) : add_plain<false>(x, n, base, e);
    return base;
  }
  T largest(const T* x, int64_t n) const {
    V top[4];
    for (V& t : top) t = splat<V>(-infinity<T>());
    over_lanes(x, n, -infinity<T>(), [&](V v, int64_t, int k) { top[k] = larger(v, top[k]); });
    return max_of(larger(larger(top[0], top[1]), larger(top[2], top[3])));
  }
  void raise(T top) {
    if (!(top > m)) return;
    if (sum != 0) {
      double step = (static_cast<double>(m) - top) * late, shrink = __builtin_exp(step);
      if (kind == Moment::about_m) moment += step * sum;
      sum *= shrink, moment *= shrink;
    }
    m = top;
  }
  template <bool Keep>
  void add_plain(const T* x, int64_t n, T base, T* out) {
    V s[4] = {};
    over_lanes(x, n, -infinity<T>(), [&](V v, int64_t i, int k) {
      fetch(x + kBlock + i);
      V e = exp_below(v - base);
      s[k] += e;
      if (Keep) store(out + i, e);
    });
    sum += sum_of((s[0] + s[1]) + (s[2] + s[3]));
  }
  template <bool Keep>
  void add(const T* x, int64_t n, T base, T* out) {
    V s[4] = {}, sm[4] = {};
    bool of_x = kind == Moment::of_x;
    over_lanes(x, n, -infinity<T>(), [&](V v, int64_t i, int k) {
      fetch(x + kBlock + i);
      V d = (v - base) * late, e = exp_below(d);
      s[k] += e;
      sm[k] += where(v == -infinity<T>(), V{}, e * (of_x ? v : d));  // a masked class counts nothing
      if (Keep) store(out + i, e);
    });
    sum += sum_of((s[0] + s[1]) + (s[2] + s[3]));
    moment += sum_of((sm[0] + sm[1]) + (sm[2] + sm[3]));
  }
};

// One thread's copy of a row's exponentials, from which the gradient is written while the row is hot. Each block is relative to
// an m of its own.
template <class T>
struct Exponentials {
  Scratch<T> e, base;
  explicit Exponentials(const Context<T>& c) : Exponentials(c.p.classes, c.ahead()) {}
  Exponentials(int64_t classes, bool wanted) : e(wanted ? classes + Lanes<T>::W : 1), base(classes / kBlock + 1) {}
  T* block(int64_t j) const { return e.data + j; }
  void set_base(int64_t j, T m) const { base.data[j / kBlock] = m; }
  // e^(base - m) of the block: what turns its exponentials into those relative to m
  T correction(int64_t j, T m) const {
    T b = base.data[j / kBlock];
    return b == m ? 1 : static_cast<T>(__builtin_exp(static_cast<double>(b) - m));
  }
};

// A normed row's scale, in double.
template <class T>
using RowScale = RowNorm<T, double>;
// Not inlined: a compiler that fuses its products one way in forward and another in backward would give two gradients.
template <class T>
__attribute__((noinline)) RowScale<T> row_scale(const Context<T>& c, T others, T x_label, T mean_x) {
  return norm_formula<T, double>(c.p.loss, c.p.numbers, others, x_label, mean_x, 1);
}

// For normed rows: |x| of a row and its largest logit, without the label's.
template <class T>
struct OthersNorm {
  T norm = 0, top = -infinity<T>();

  OthersNorm() = default;
  OthersNorm(RowReader<T>& x, int64_t y) {
    typedef typename Lanes<T>::V V;
    double squares = 0;
    over_others(x, Map<T>{1, 0, nullptr}, y, [&](const T* block, int64_t, int64_t n) {
      V s[4] = {}, m[4];
      for (V& v : m) v = splat<V>(-infinity<T>());
      over_lanes(block, n, -infinity<T>(), [&](V v, int64_t i, int k) {
        fetch(block + kBlock + i);
        s[k] += where(v == -infinity<T>(), V{}, v * v);
        m[k] = larger(v, m[k]);
      });
      squares += sum_of((s[0] + s[1]) + (s[2] + s[3]));
      top = larger(max_of(larger(larger(m[0], m[1]), larger(m[2], m[3]))), top);
    });
    if (!(squares > 1e-30 && squares < 1e38)) {  // float32 squares overflow or vanish: again, in double
      squares = 0;
      over_blocks(0, x.c.p.classes, [&](int64_t j, int64_t n) {
        const T* v = x.raw(j, n);
        for (int64_t i = 0; i < n; ++i)
          if (v[i] != -infinity<T>() && j + i != y) squares += static_cast<double>(v[i]) * v[i];
      });
    }
    norm = static_cast<T>(__builtin_sqrt(squares));
  }
};

// The formula's view of one row, from the statistics that backward has too.
template <class T>
SoftmaxRow<typename Lanes<T>::V> softmax_row(double m, T d, double u_label, T w) {
  typedef typename Lanes<T>::V V;
  double log_d = __builtin_log(d), lse = m + log_d, a = (m - u_label) + log_d;  // of the others: their sum relative to it is 1
  if (u_label == __builtin_inf()) a = __builtin_nan("");                        // as the softmax of +inf
  return {splat<V>(static_cast<T>(a)), splat<V>(1), splat<V>(w), splat<V>(static_cast<T>(u_label)),
          splat<V>(static_cast<T>(lse))};
}

// Class probabilities of a row as weights q_j = w_j (hit t_j + each).
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
    T hit = c.softmax.hit, each = c.softmax.each;
    for (int64_t i = 0; i < n; ++i) {
      T q = hit * buffer[i] + each;
      buffer[i] = c.weight ? q * c.weight[j + i] : q;
    }
    return buffer;
  }
};

// What a row's gradient is made of: dL/du_j = slope e^(scale (u_j - m)) - pull w_j, `label` at the label, less drag x_j (normed
// rows).
template <class T>
struct SoftmaxGradient {
  T slope = 0, pull = 0, label = 0, drag = 0, m = 0, scale = 1;
  bool counts = true;
};

// From the statistics that forward saves: with labels m and d are those of the other classes.
template <class T>
SoftmaxResult<typename Lanes<T>::V> formula_of(const Context<T>& c, const RowWeights<T>& w, double m, T d, double u_label) {
  return softmax_formula(c.facts.softmax, c.numbers, c.k, softmax_row<T>(m, d, u_label, w.w));
}
// The same with class probabilities as the target; d is the sum over all classes.
template <class T>
SoftResult<typename Lanes<T>::V> soft_formula_of(const Context<T>& c, T m, T d, T mass) {
  typedef typename Lanes<T>::V V;
  T lse = m + static_cast<T>(__builtin_log(d));
  return soft_formula(c.facts.softmax, c.numbers, c.k, SoftRow<V>{splat<V>(lse), splat<V>(mass)});
}
template <class T>
SoftmaxGradient<T> gradient_of(T up, T m, T d, const SoftmaxResult<typename Lanes<T>::V>& result, T du_label,
                               const RowScale<T>& norm) {
  SoftmaxGradient<T> g;
  g.counts = !(d < 0);
  g.m = m, g.scale = norm.scale;
  g.slope = up * result.slope[0], g.pull = up * result.pull[0];
  g.label = static_cast<T>(up * result.label[0] * du_label * norm.share);
  g.drag = static_cast<T>(g.slope * norm.drag);
  g.slope = d == 0 ? g.slope * 0 : g.slope / d;  // no other class: nothing to push, unless the row is NaN
  return g;
}
template <class T>
SoftmaxGradient<T> soft_gradient_of(const Context<T>& c, T up, T m, T d, T mass) {
  auto result = soft_formula_of(c, m, d, mass);
  SoftmaxGradient<T> g;
  g.counts = !(d < 0);
  g.m = m, g.pull = up * result.pull[0];
  g.slope = up * result.slope[0] / d;
  return g;
}

// A softmax row: reader, map and the buffers that go with it.
template <class T>
struct SoftmaxRows {
  typedef typename Lanes<T>::V V;
  const Context<T>& c;
  RowReader<T> x;
  SoftReader<T> target;
  RowGradient<T> grad;
  Map<T> map;
  Exponentials<T> kept;
  bool norm;
  alignas(64) T du[kBlock];

  explicit SoftmaxRows(const Context<T>& c)
      : c(c), x(c, c.facts.normed), target(c), grad(c), map(softmax_map(c)), kept(c), norm(c.facts.normed) {}

  // u at the label, and du/dx there
  double at_label(int64_t y, T scale, T& slope) {
    bool capped = map.cap > 0;
    double u = static_cast<double>(*x.mapped(map, y, 1, capped ? du : nullptr)) * scale;
    slope = capped ? du[0] : map.scale * scale;
    return u;
  }
  // Writes the gradient of the row that x is at, from the exponentials that forward kept or from the logits.
  void write(int64_t row, int64_t y, SoftmaxGradient<T> g) {
    grad.seek(row);
    if (!g.counts) {
      grad.fill(0);
      return;
    }
    bool capped = map.cap > 0, labels = !c.p.soft;
    if (!capped) g.slope *= map.scale * g.scale, g.pull *= map.scale;
    over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
      const T* weights = c.p.soft ? target.block(j, n) : (c.weight ? c.weight + j : nullptr);
      const T *u = c.ahead() && !capped && !norm ? nullptr : x.mapped(map, j, n, capped ? du : nullptr), *e = kept.block(j);
      T slope = c.ahead() ? g.slope * kept.correction(j, g.m) : g.slope;
      auto fresh = [&](V v) { return exp_below(v - g.m); };
      auto same = [](V v) { return v; };
      auto dragged = [&](V push, V v) { return push - where(v == -infinity<T>(), V{}, g.drag * v); };  // masked: no part in it
      auto weigh = [&](V push, int64_t i) { return push - (weights ? g.pull * beside(weights, i, n) : splat<V>(g.pull)); };
      if (capped) {
        auto turned = [&](V v, int64_t i) { return weigh(slope * v, i) * beside(du, i, n); };
        if (c.ahead()) grad.map(j, e, n, turned);
        else grad.map(j, u, n, [&](V v, int64_t i) { return turned(fresh(v), i); });
      } else if (norm) {
        if (c.ahead()) grad.map(j, e, n, [&](V v, int64_t i) { return dragged(slope * v, beside(u, i, n)); });
        else grad.map(j, u, n, [&](V v, int64_t) { return dragged(slope * exp_below((v - g.m) * g.scale), v); });
      } else {
        if (c.ahead()) push(j, e, n, slope, g.pull, same, weigh);
        else push(j, u, n, slope, g.pull, fresh, weigh);
      }
    });
    if (labels) grad.put(y, g.label);
  }
  // The inner loop of most softmax gradients
  template <class E, class F>
  PYL_INLINE void push(int64_t j, const T* p, int64_t n, T slope, T pull, E e, F weigh) {
    if (pull == 0) grad.map(j, p, n, [&](V v, int64_t) { return slope * e(v); });
    else grad.map(j, p, n, [&](V v, int64_t i) { return weigh(slope * e(v), i); });
  }
};

template <class T>
void soft_forward(SoftmaxRows<T>& rows, int64_t row, Partial& sums) {
  const Context<T>& c = rows.c;
  rows.target.seek(row);
  OnlineSum<T> online(Moment::none);
  over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
    rows.kept.set_base(j, online.block(rows.x.mapped(rows.map, j, n), n, c.ahead() ? rows.kept.block(j) : nullptr));
  });
  double log_d = __builtin_log(online.sum), mass = 0, loss = 0;
  over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
    const T *u = rows.x.mapped(rows.map, j, n), *q = rows.target.block(j, n);
    loss += block_spread(u, q, n, online.m, static_cast<T>(log_d));
    for (int64_t i = 0; i < n; ++i) mass += q[i];
  });
  RowWeights<T> w = c.weights(row, 0);
  T d = static_cast<T>(online.sum), total = static_cast<T>(loss);
  T extra = soft_formula_of(c, online.m, d, static_cast<T>(mass)).extra[0];
  c.emit(row, w, total, extra, sums);
  if (!c.stats) return;
  c.stat(0, row) = online.centre();
  c.stat(1, row) = c.counted(w, total + extra) ? d : kLeftOut;
  c.stat(2, row) = static_cast<T>(mass);
  if (c.ahead()) rows.write(row, 0, soft_gradient_of(c, c.upstream(row, w), online.centre(), d, static_cast<T>(mass)));
}

template <class T>
void softmax_forward(const Context<T>& c, Partial& total) {
  bool norm = c.facts.normed, smooth = c.softmax.smooth;
  auto make = [&] { return SoftmaxRows<T>(c); };
  for_chunks(c.p, rows_per_chunk(c.p), &total, make, [&](SoftmaxRows<T>& rows, int64_t begin, int64_t end, Partial& sums) {
    RowReader<T>& x = rows.x;
    for (int64_t row = begin; row < end; ++row) {
      x.seek(row);
      if (c.p.soft) {
        soft_forward(rows, row, sums);
        continue;
      }
      int64_t y = c.label(row);
      if (y < 0) {
        c.emit_ignored(row);
        if (c.ahead()) rows.grad.seek(row), rows.grad.fill(0);
        continue;
      }
      T scale = 1, du_label, others = 0;
      OthersNorm<T> found;
      if (norm) {
        found = OthersNorm<T>(x, y);
        others = found.norm, scale = row_scale<T>(c, others, *x.raw(y, 1), 0).scale;
      }
      double u_label = rows.at_label(y, scale, du_label);
      OnlineSum<T> online(norm ? Moment::of_x : Moment::none, scale);
      if (norm) online.raise(found.top);
      over_others(x, rows.map, y, [&](const T* u, int64_t j, int64_t n) {
        T* e = c.ahead() ? rows.kept.block(j) : nullptr;
        if (x.top_known) online.raise(x.top);
        rows.kept.set_base(j, norm || x.top_known ? online.below(u, n, e) : online.block(u, n, e));
      });
      RowWeights<T> w = c.weights(row, y);
      T d = static_cast<T>(online.sum);
      SoftmaxRow<typename Lanes<T>::V> r = softmax_row<T>(static_cast<double>(online.centre()) * scale, d, u_label, w.w);
      if (smooth) {
        T base = online.centre();  // the label may be the only class
        double rest = (r.s[0] > 0 ? __builtin_log(online.sum) : u_label - base) + r.log_total()[0];
        double spread = 0;
        over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
          spread += block_spread(x.mapped(rows.map, j, n), c.weight ? c.weight + j : nullptr, n, base, static_cast<T>(rest));
        });
        r.spread = splat<typename Lanes<T>::V>(static_cast<T>(spread));
      }
      auto result = softmax_formula(c.facts.softmax, c.numbers, c.k, r);
      c.emit(row, w, result.loss[0], result.extra[0], sums);
      if (!c.stats) continue;
      T mean_x = norm && online.sum != 0 ? static_cast<T>(online.moment / online.sum) : 0;
      c.stat(0, row) = online.centre();
      c.stat(1, row) = c.counted(w, result.loss[0] + result.extra[0]) ? d : kLeftOut;
      if (norm) c.stat(2, row) = others, c.stat(3, row) = mean_x;
      if (!c.ahead()) continue;
      RowScale<T> scaled = norm ? row_scale<T>(c, others, *x.raw(y, 1), mean_x) : RowScale<T>();
      rows.write(row, y, gradient_of(c.upstream(row, w), online.centre(), d, result, du_label, scaled));
    }
  });
}

template <class T>
void softmax_backward(const Context<T>& c) {
  bool norm = c.facts.normed;
  auto make = [&] { return SoftmaxRows<T>(c); };
  for_chunks(c.p, rows_per_chunk(c.p), nullptr, make, [&](SoftmaxRows<T>& rows, int64_t begin, int64_t end, Partial&) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t y = c.label(row);
      if (y < 0) {
        rows.grad.seek(row), rows.grad.fill(0);
        continue;
      }
      rows.x.seek(row);
      RowWeights<T> w = c.weights(row, y);
      T up = c.upstream(row, w), m = c.stat(0, row), d = c.stat(1, row);
      if (c.p.soft) {
        rows.target.seek(row);
        rows.write(row, y, soft_gradient_of(c, up, m, d, c.stat(2, row)));
        continue;
      }
      RowScale<T> scaled = norm ? row_scale<T>(c, c.stat(2, row), *rows.x.raw(y, 1), c.stat(3, row)) : RowScale<T>();
      T du_label;
      double u_label = rows.at_label(y, scaled.scale, du_label);
      auto result = formula_of(c, w, static_cast<double>(m) * scaled.scale, d, u_label);
      rows.write(row, y, gradient_of(up, m, d, result, du_label, scaled));
    }
  });
}

}  // namespace PYL_ISA

// The entropy family by rows.
#pragma once
#include "cpu/rowwise_softmax.h"

namespace PYL_ISA {

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

// What an entropy row's gradient is made of: dL/dx_j = factor e^(x_j - m) ((x_j - m) - mu)
template <class T>
struct EntropyGradient {
  T m, mu, factor;
};

template <class T>
struct EntropyRows {
  typedef typename Lanes<T>::V V;
  const Context<T>& c;
  RowReader<T> x;
  RowGradient<T> grad;
  Exponentials<T> kept;
  explicit EntropyRows(const Context<T>& c) : c(c), x(c), grad(c), kept(c) {}

  EntropyGradient<T> gradient_of(int64_t row, T m, T d, T mu, T slope) const {
    T factor = -slope * c.upstream(row, c.weights(row, 0)) / d;
    return {m, mu, d == 0 ? static_cast<T>(__builtin_nan("")) : factor};  // d = 0: every class masked
  }
  void write(int64_t row, const EntropyGradient<T>& g) {
    grad.seek(row);
    over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
      const T* e = kept.block(j);
      T factor = c.ahead() ? g.factor * kept.correction(j, g.m) : g.factor;
      bool ahead = c.ahead();
      grad.map(j, x.raw(j, n), n, [&](V v, int64_t i) {
        V d = v - g.m, value = ahead ? beside(e, i, n) : exp_below(d);
        return factor * where(v == -infinity<T>(), V{}, value * (d - g.mu));
      });
    });
  }
};

template <class T>
void entropy_forward(const Context<T>& c, Partial& total) {
  typedef typename Lanes<T>::V V;
  auto make = [&] { return EntropyRows<T>(c); };
  for_chunks(c.p, rows_per_chunk(c.p), &total, make, [&](EntropyRows<T>& rows, int64_t begin, int64_t end, Partial& sums) {
    RowReader<T>& x = rows.x;
    for (int64_t row = begin; row < end; ++row) {
      if (c.label(row) < 0) {
        c.emit_ignored(row);
        if (c.ahead()) rows.grad.seek(row), rows.grad.fill(0);
        continue;
      }
      x.seek(row);
      OnlineSum<T> online(Moment::about_m);
      over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
        rows.kept.set_base(j, online.block(x.raw(j, n), n, c.ahead() ? rows.kept.block(j) : nullptr));
      });
      double d = online.sum, log_d = __builtin_log(d), mu = online.moment / d;
      if (d < kDominated) {
        double rest = -1, moment = 0;  // the largest entry itself is one of the ties
        over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) { rest_of_block(x.raw(j, n), n, online.m, rest, moment); });
        log_d = __builtin_log1p(rest), mu = moment / (1 + rest);
      }
      EntropyResult<V> result = entropy_formula(c.p.loss, c.numbers, c.k, EntropyRow<V>{splat<V>(static_cast<T>(log_d - mu))});
      RowWeights<T> w = c.weights(row, 0);
      w.mass = result.mass[0];
      if (w.mass != 0) c.emit(row, w, result.loss[0], 0, sums);
      else c.emit_ignored(row);
      if (!c.stats) continue;
      T m = online.centre(), slope = c.counted(w, result.loss[0]) ? result.slope[0] : 0;
      c.stat(0, row) = m;
      c.stat(1, row) = static_cast<T>(d);
      c.stat(2, row) = static_cast<T>(mu);
      c.stat(3, row) = slope;
      if (c.ahead()) rows.write(row, rows.gradient_of(row, m, static_cast<T>(d), static_cast<T>(mu), slope));
    }
  });
}

template <class T>
void entropy_backward(const Context<T>& c) {
  auto make = [&] { return EntropyRows<T>(c); };
  for_chunks(c.p, rows_per_chunk(c.p), nullptr, make, [&](EntropyRows<T>& rows, int64_t begin, int64_t end, Partial&) {
    for (int64_t row = begin; row < end; ++row) {
      T slope = c.label(row) < 0 ? 0 : c.stat(3, row);
      if (slope == 0) {  // filtered or masked: not even read
        rows.grad.seek(row), rows.grad.fill(0);
        continue;
      }
      rows.x.seek(row);
      rows.write(row, rows.gradient_of(row, c.stat(0, row), c.stat(1, row), c.stat(2, row), slope));
    }
  });
}

}  // namespace PYL_ISA

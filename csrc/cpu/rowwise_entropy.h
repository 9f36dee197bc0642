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

}  // namespace PYL_ISA

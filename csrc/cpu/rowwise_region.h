// The region family by rows.
#pragma once
#include "cpu/class_sums.h"
#include "cpu/rowwise_softmax.h"

namespace PYL_ISA {

template <class T>
struct RegionRows {
  typedef typename Lanes<T>::V V;
  const Context<T>& c;
  bool ce, mapped, smooth;  // cross-entropy too? of other logits than Dice's? with smoothing?
  SoftmaxRows<T> rows;      // with cross-entropy's map
  Map<T> as_it_is{1, 0, nullptr};
  Exponentials<T> kept;

  explicit RegionRows(const Context<T>& c)
      : c(c), ce(c.beside()), mapped(ce && c.mapped()), smooth(ce && c.softmax.smooth), rows(c), kept(c.p.classes, true) {}
  // Each piece has sums of its own: few pieces, little memory.
  static int64_t piece_rows(int64_t classes) { return 65536 / classes < 512 ? 512 : 65536 / classes; }

  // m and d of the other classes; `e`, if given, takes their exponentials
  OnlineSum<T> sum_of_others(const Map<T>& map, int64_t y, Exponentials<T>* e) {
    OnlineSum<T> online(Moment::none);
    over_others(rows.x, map, y, [&](const T* u, int64_t j, int64_t n) {
      T base = online.block(u, n, e ? e->block(j) : nullptr);
      if (e) e->set_base(j, base);
    });
    return online;
  }
  double logit(int64_t y) { return static_cast<double>(*rows.x.raw(y, 1)); }
  // p_y and 1 - p_y
  static void odds(double m, double d, double u_label, T& hit, T& miss) {
    SoftmaxRow<V> one = softmax_row<T>(m, d, u_label, 1);
    hit = one.hit()[0], miss = one.miss()[0];
  }

  void sums(int64_t begin, int64_t end, const ClassSums& into, Partial* partial) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t y = c.label(row);
      if (y < 0) {
        for (int i = 0; partial && c.stats && i < c.saved_numbers; ++i) c.stat(i, row) = 0;
        continue;
      }
      rows.x.seek(row);
      RowWeights<T> w = c.weights(row, y);
      double u_label = logit(y);
      OnlineSum<T> online = sum_of_others(as_it_is, y, &kept);
      T hit, miss;
      odds(online.centre(), online.sum, u_label, hit, miss);
      into.add_label(y, static_cast<double>(w.s) * hit, static_cast<double>(w.s) * miss);
      double share = online.sum == 0 ? miss * 0.0 : static_cast<double>(w.s) * miss / online.sum;
      over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
        T each = static_cast<T>(share * kept.correction(j, online.centre()));
        const T* e = kept.block(j);
        double* stray = into.stray + j;
        for (int64_t i = 0; i < n; ++i) stray[i] += each * e[i];
      });
      if (!partial) continue;
      if (c.stats) c.stat(0, row) = online.centre(), c.stat(1, row) = static_cast<T>(online.sum);
      if (!ce) continue;
      if (mapped) {
        online = sum_of_others(rows.map, y, nullptr);
        T du;
        u_label = rows.at_label(y, 1, du);
        if (c.stats) c.stat(2, row) = online.centre(), c.stat(3, row) = static_cast<T>(online.sum);
      }
      emit(row, w, online, u_label, *partial);
    }
  }
  void emit(int64_t row, const RowWeights<T>& w, const OnlineSum<T>& online, double u_label, Partial& partial) {
    SoftmaxRow<V> one = softmax_row<T>(online.centre(), static_cast<T>(online.sum), u_label, w.w);
    if (smooth) {
      T base = online.centre();
      double spread = 0, log_d = __builtin_log(online.sum);
      double rest = (one.s[0] > 0 ? log_d : u_label - base) + one.log_total()[0];
      over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
        const T* u = rows.x.mapped(rows.map, j, n);
        spread += block_spread(u, c.weight ? c.weight + j : nullptr, n, base, static_cast<T>(rest));
      });
      one.spread = splat<V>(static_cast<T>(spread));
    }
    auto result = softmax_formula(c.facts.softmax, c.numbers, c.k, one);
    c.emit(row, w, result.loss[0], result.extra[0], partial);
  }

  void find_mass(int64_t begin, int64_t end, uint8_t* found) {
    for (int64_t row = begin; row < end; ++row) {
      if (c.label(row) < 0) continue;
      rows.x.seek(row);
      OnlineSum<T> online(Moment::none);
      over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) { online.block(rows.x.raw(j, n), n, nullptr); });
      T log_d = static_cast<T>(__builtin_log(online.sum));
      over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
        const T* u = rows.x.raw(j, n);
        for (int64_t i = 0; i < n; ++i)
          if ((u[i] - online.m) - log_d > T(kNoMass)) mark(found + j + i);
      });
    }
  }

  void gradient(int64_t begin, int64_t end, const ClassFactors<T>& k) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t y = c.label(row);
      rows.grad.seek(row);
      if (y < 0) {
        rows.grad.fill(0);
        continue;
      }
      rows.x.seek(row);
      write(row, y, k);
    }
  }
  // As in RegionTiles, everything is relative to the largest class.
  void write(int64_t row, int64_t y, const ClassFactors<T>& k) {
    RowWeights<T> w = c.weights(row, y);
    T m = c.stat(0, row), d = c.stat(1, row), hit, miss;
    double u_label = logit(y);
    odds(m, d, u_label, hit, miss);
    int64_t first = y;  // the largest class
    if (hit < miss)
      over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
        const T* u = rows.x.raw(j, n);
        for (int64_t i = 0; i < n; ++i) first = u[i] == m && j + i != y ? j + i : first;
      });
    T top = k.push[first], top_rest = k.rest[first], push_label = (k.push[y] - top) + (k.rest[y] - top_rest);
    auto push = [&](int64_t j, int64_t i, int64_t n) {
      return (beside(k.push + j, i, n) - top) + (beside(k.rest + j, i, n) - top_rest);
    };
    double sum = 0;
    over_others(rows.x, as_it_is, y, [&](const T* u, int64_t j, int64_t n) {
      V s[4] = {};
      T* e = kept.block(j);
      over_lanes(u, n, -infinity<T>(), [&](V v, int64_t i, int a) {
        V one = exp_below(v - m);
        if (i + Lanes<T>::W <= n) store(e + i, one);
        else store_some(e + i, n - i, one);
        s[a] += one * push(j, i, n);
      });
      sum += sum_of((s[0] + s[1]) + (s[2] + s[3]));
    });
    T others = d == 0 ? miss * 0 : miss / d;  // of every exponential
    T mean = static_cast<T>(others * sum) + hit * push_label, gain = w.s * others;
    T offset = gain * (k.pull[y] * hit - mean), label = w.s * hit * (push_label - mean - k.pull[y] * miss);
    SoftmaxGradient<T> g;
    T du_label = 1;
    if (ce) {
      T up = c.upstream(row, w);
      if (mapped) m = c.stat(2, row), d = c.stat(3, row), u_label = rows.at_label(y, 1, du_label);
      g = gradient_of(up, m, d, formula_of(c, w, m, d, u_label), du_label, RowScale<T>());
      label += g.label;
      if (!mapped) offset += g.slope;  // the same exponentials
    }
    bool capped = mapped && rows.map.cap > 0;
    if (!capped) g.slope *= rows.map.scale, g.pull *= rows.map.scale;
    over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
      T* out = rows.grad.block(j);
      const T* u = mapped ? rows.x.mapped(rows.map, j, n, capped ? rows.du : nullptr) : nullptr;
      map_lanes(kept.block(j), n, out, [&](V e, int64_t i) { return e * (gain * push(j, i, n) + offset); });
      if (mapped || smooth)
        write_lanes(out, n, [&](int64_t i) {
          V v = mapped ? g.slope * exp_below(beside(u, i, n) - m) : V{};
          if (smooth) v -= c.weight ? g.pull * beside(c.weight + j, i, n) : splat<V>(g.pull);
          return beside(out, i, n) + (capped ? v * beside(rows.du, i, n) : v);
        });
      rows.grad.done(j, n);
    });
    rows.grad.put(y, label);
  }
};

}  // namespace PYL_ISA

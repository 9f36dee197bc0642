// The entropy family by vectors of rows.
#pragma once
#include "cpu/pixelwise_softmax.h"

namespace PYL_ISA {

template <class T>
struct TileEntropyGradient {
  typedef typename Lanes<T>::V V;
  alignas(64) T m[kTileRows], mu[kTileRows], factor[kTileRows], on[kTileRows];

  PYL_INLINE void set(const Tile<T>& t, int64_t r, V base, V d, V mean, V slope) {
    V f = -slope * t.upstream(r) / d;
    store(m + r, base);
    store(mu + r, mean);
    store(factor + r, where(d == 0, splat<V>(static_cast<T>(__builtin_nan(""))), f));  // d = 0: every class masked
    store(on + r, where(slope != 0, load(t.live + r), V{}));
  }
  void write(const Tile<T>& t) const {
    bool ahead = t.c.ahead();
    t.write([&](int64_t j, int64_t r) {
      V u = t.u(j, r), d = u - load(m + r), e = ahead ? t.e(j, r) : exp_below(d);
      V g = load(factor + r) * where(u == -infinity<T>(), V{}, e * (d - load(mu + r)));
      return where(load(on + r) != 0, g, V{});
    });
  }
};

template <class T>
void pixels_entropy_forward(const Context<T>& c, Partial& total) {
  typedef typename Lanes<T>::V V;
  over_tiles(c, true, &total, [&](Tile<T>& t) {
    t.read();
    TileEntropyGradient<T> g;
    for (int64_t r = 0; r < t.padded; r += Lanes<T>::W) {
      t.fetch_next(r);
      LaneSums<V> s = lane_sums<Moment::about_m, true>(t, r, splat<V>(1));
      V mu = s.moment / s.d, log_d = log_sum(s.d);
      Int<V> dominated = s.d < static_cast<T>(kDominated);
      if (any(dominated)) {     // sums without the largest entry, whose 1 would swallow the rest
        V ties = splat<V>(-1);  // the largest entry itself is one of them
        V rest = sum_over<V>(c.p.classes, [&](int64_t j) {
          V u = t.u(j, r);
          ties += where(u == s.m, splat<V>(1), V{});
          return where(u < s.m, exp_below(u - s.m), V{});
        });
        rest = where(dominated, rest + ties, V{});
        log_d = where(dominated, log1p(rest), log_d);
        mu = where(dominated, s.moment / (rest + 1), mu);
      }
      EntropyResult<V> result = entropy_formula(c.p.loss, c.numbers, c.k, EntropyRow<V>{log_d - mu});
      store(t.live + r, where(result.mass != 0, load(t.live + r), V{}));
      t.emit(r, result.loss, V{});
      if (c.stats)
        t.save(0, r, s.m), t.save(1, r, s.d), t.save(2, r, mu),
            t.save(3, r, where(t.counted(r, result.loss), result.slope, V{}));
      if (c.ahead()) g.set(t, r, s.m, s.d, mu, result.slope);
    }
    if (c.ahead()) g.write(t);
  });
}

template <class T>
void pixels_entropy_backward(const Context<T>& c) {
  over_tiles(c, false, nullptr, [&](Tile<T>& t) {
    t.read();
    TileEntropyGradient<T> g;
    for (int64_t r = 0; r < t.padded; r += Lanes<T>::W) g.set(t, r, t.saved(0, r), t.saved(1, r), t.saved(2, r), t.saved(3, r));
    g.write(t);
  });
}

}  // namespace PYL_ISA

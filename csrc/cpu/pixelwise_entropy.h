// The entropy family by tiles of rows.
#pragma once
#include "cpu/pixelwise_softmax.h"

namespace PYL_ISA {

template <class T>
void pixels_entropy_forward(const Context<T>& c, Partial& total) {
  typedef typename Lanes<T>::V V;
  constexpr int W = Lanes<T>::W;
  int64_t width = Tile<T>::rows_for(c.p.classes);
  for_chunks(c.p, width * 16, &total, [&](int64_t chunk, int64_t chunk_end, Partial& sums) {
    Tile<T> t(c);
    TileStatistics<T> s(kTight, Moment::about_m);
    alignas(64) T rest[kTileRows], moment[kTileRows];
    for (int64_t begin = chunk; begin < chunk_end; begin += width) {
      t.seek(begin, begin + width < chunk_end ? begin + width : chunk_end);
      t.load_raw(0);
      s.guess(t, false);
      auto each_block = [&](auto f) {
        for (int64_t block = 0; block < c.p.classes; block += t.classes) {
          if (!t.whole()) t.load_raw(block);
          for (int64_t r = 0; r < width; r += W) f(r);
        }
      };
      s.reset(width);
      do each_block([&](int64_t r) { s.block(t, r); });
      while (!s.done(t));
      bool dominated = false;
      for (int64_t r = 0; r < width; r += W) {
        dominated |= any((load(t.live + r) != 0) & (load(s.sum + r) < static_cast<T>(kDominated)));
        store(rest + r, splat<V>(-1));  // the largest entry itself is one of the ties
        store(moment + r, V{});
      }
      if (dominated)  // sums without the largest entry, whose 1 would swallow the rest
        each_block([&](int64_t r) {
          V m = load(s.m + r), ties{};
          store(moment + r, load(moment + r) + sum_over<V>(t.count, [&](int64_t j) {
                              V u = load(t.at(j, r)), d = u - m;
                              ties += where(u == m, splat<V>(1), V{});
                              return where(u == -infinity<T>(), V{}, exp_below(d) * d);
                            }));
          V low = sum_over<V>(t.count, [&](int64_t j) {
            V u = load(t.at(j, r));
            return where(u < m, exp_below(u - m), V{});
          });
          store(rest + r, (load(rest + r) + ties) + low);
        });
      for (int64_t r = 0; r < width; r += W) {
        V m = load(s.m + r), d = load(s.sum + r), mu = load(s.moment + r) / d, log_d = log(d);
        if (dominated) {
          V e = load(rest + r);
          Int<V> few = d < static_cast<T>(kDominated);
          log_d = where(few, log1p(where(few, e, V{})), log_d);
          mu = where(few, load(moment + r) / (e + 1), mu);
        }
        EntropyResult<V> result = entropy_formula<T>(c.p.loss, c.k, EntropyRow<V>{log_d - mu});
        Int<V> kept = result.mass != 0;
        store(t.live + r, where(kept, load(t.live + r), V{}));
        t.emit(r, result.loss, V{});
        if (!c.stats) continue;
        t.save(0, r, m);
        t.save(1, r, d);
        t.save(2, r, mu);
        t.save(3, r, result.slope);
      }
      t.flush(sums);
    }
  });
}

template <class T>
void pixels_entropy_backward(const Context<T>& c) {
  typedef typename Lanes<T>::V V;
  int64_t width = Tile<T>::rows_for(c.p.classes);
  for_chunks(c.p, width * 16, nullptr, [&](int64_t chunk, int64_t chunk_end, Partial&) {
    Tile<T> t(c);
    for (int64_t begin = chunk; begin < chunk_end; begin += width) {
      t.seek(begin, begin + width < chunk_end ? begin + width : chunk_end);
      for (int64_t block = 0; block < c.p.classes; block += t.classes) {
        t.load_raw(block);
        t.write_gradient(
            [&](int64_t r) {
              V m = t.saved(0, r), d = t.saved(1, r), mu = t.saved(2, r), slope = t.saved(3, r);
              V factor = -slope * t.upstream(r) / d;
              factor = where(d == 0, splat<V>(static_cast<T>(__builtin_nan(""))), factor);  // every class masked
              Int<V> on = (load(t.live + r) != 0) & (slope != 0);
              return [=, &t](int64_t j) {
                V u = load(t.at(j, r)), g = u - m;
                g = factor * where(u == -infinity<T>(), V{}, exp_below(g) * (g - mu));
                return where(on, g, V{});
              };
            },
            nullptr);
      }
    }
  });
}

}  // namespace PYL_ISA

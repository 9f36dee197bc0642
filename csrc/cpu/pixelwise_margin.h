// The margin family by tiles of rows.
#pragma once
#include "cpu/pixelwise.h"
#include "cpu/rowwise_margin.h"

namespace PYL_ISA {

template <class T>
struct TileErrors {
  typedef typename Lanes<T>::V V;
  Tile<T>& t;
  Errors<T> h;
  bool of_label;
  const T* shift;

  explicit TileErrors(Tile<T>& t) : t(t), h(t.c), of_label(t.c.k.own[3] != 0), shift(of_label ? nullptr : t.c.shift) {}
  V margin(int64_t r) const {
    if (!of_label || !t.c.shift) return splat<V>(h.margin);
    return t.gather(r, [&](int64_t i) { return t.y[i] >= 0 ? t.c.shift[t.y[i]] : T(0); });
  }
  // Raw error of class j of the block; the labels' own slots hold -inf.
  PYL_INLINE V raw(int64_t j, int64_t r, V x_label, V mu) const {
    V x = load(t.at(j, r));
    V m = shift ? splat<V>(shift[t.first + j]) : mu;
    return where(x == -infinity<T>(), x, (x - x_label) + m);
  }
  // Runs f(r) over the lanes of every block, labels lifted.
  template <class F>
  void each_block(F f) {
    for (int64_t block = 0; block < t.c.p.classes; block += t.classes) {
      if (!t.loaded()) {
        t.load_raw(block);
        t.lift_labels();
      }
      for (int64_t r = 0; r < t.width; r += Lanes<T>::W) f(r);
    }
  }
  // The labels of all blocks; leaves a whole tile loaded.
  void find_labels() {
    each_block([](int64_t) {});
  }
};

template <class T>
void pixels_margin_forward(const Context<T>& c, Partial& total) {
  typedef typename Lanes<T>::V V;
  constexpr int W = Lanes<T>::W;
  bool threshold = c.k.own[4] != 0;
  int64_t width = Tile<T>::rows_for(c.p.classes);
  for_chunks(c.p, width * 16, &total, [&](int64_t chunk, int64_t chunk_end, Partial& partial) {
    Tile<T> t(c);
    TileErrors<T> errors(t);
    alignas(64) T sum[kTileRows], max[kTileRows], cut[kTileRows], count[kTileRows], slopes[kTileRows], nan[kTileRows];
    for (int64_t begin = chunk; begin < chunk_end; begin += width) {
      t.seek(begin, begin + width < chunk_end ? begin + width : chunk_end);
      errors.find_labels();
      for (int64_t r = 0; r < width; ++r) sum[r] = max[r] = count[r] = slopes[r] = nan[r] = 0, cut[r] = above_nothing<T>();
      with_power(errors.h.kind, [&](auto power) {
        if (threshold) {
          errors.each_block([&](int64_t r) {
            V x_label = load(t.u_label + r), mu = errors.margin(r), m = load(max + r);
            store(sum + r, load(sum + r) + sum_over<V>(t.count, [&](int64_t j) {
                             V e = errors.h.template value<power.value>(errors.raw(j, r, x_label, mu));
                             m = larger(e, m);
                             return e;
                           }));
            store(max + r, m);
          });
          for (int64_t r = 0; r < width; r += W) {
            V mean = load(sum + r) / c.k.classes, m = load(max + r);
            // Rounding may lift the mean over every error; no error at all keeps nothing.
            store(cut + r, where(m > 0, where(mean < m, mean, m), splat<V>(above_nothing<T>())));
            store(sum + r, V{});
          }
        }
        errors.each_block([&](int64_t r) {
          V x_label = load(t.u_label + r), mu = errors.margin(r), tr = load(cut + r);
          V kept_count = load(count + r), bad = load(nan + r);
          auto kept_error = [&](int64_t j) {
            V raw = errors.raw(j, r, x_label, mu), e = errors.h.template value<power.value>(raw);
            Int<V> kept = e >= tr;
            kept_count += where(kept, splat<V>(1), V{});
            bad += where(raw == raw, V{}, splat<V>(1));
            return where(kept, e, V{});
          };
          auto kept_slope = [&](int64_t j) {
            V raw = errors.raw(j, r, x_label, mu);
            return where(errors.h.template value<power.value>(raw) >= tr, errors.h.template slope<power.value>(raw), V{});
          };
          store(sum + r, load(sum + r) + sum_over<V>(t.count, kept_error));
          if constexpr (power.value != linear) store(slopes + r, load(slopes + r) + sum_over<V>(t.count, kept_slope));
          else store(slopes + r, kept_count);
          store(count + r, kept_count);
          store(nan + r, bad);
        });
      });
      for (int64_t r = 0; r < width; r += W) {
        V x_label = load(t.u_label + r), k = load(count + r), w = load(t.w + r);
        Int<V> none = k == 0;
        // A row with a NaN, or with every class masked, has no margin to speak of.
        Int<V> bad = (load(nan + r) != 0) | (x_label != x_label) | (none & (x_label == -infinity<T>()));
        V poison = where(bad, splat<V>(static_cast<T>(__builtin_nan(""))), V{});
        MarginResult<V> result = margin_formula<T>(c.p.loss, c.k, MarginRow<V>{load(sum + r) + poison, k, w});
        t.emit(r, result.loss, V{});
        if (!c.stats) continue;
        t.save(0, r, load(cut + r));
        t.save(1, r, where(none, poison, result.factor + poison));
        t.save(2, r, load(slopes + r));
      }
      t.flush(partial);
    }
  });
}

template <class T>
void pixels_margin_backward(const Context<T>& c) {
  typedef typename Lanes<T>::V V;
  constexpr int W = Lanes<T>::W;
  int64_t width = Tile<T>::rows_for(c.p.classes);
  for_chunks(c.p, width * 16, nullptr, [&](int64_t chunk, int64_t chunk_end, Partial&) {
    Tile<T> t(c);
    TileErrors<T> errors(t);
    alignas(64) T factor[kTileRows], label[kTileRows];
    for (int64_t begin = chunk; begin < chunk_end; begin += width) {
      t.seek(begin, begin + width < chunk_end ? begin + width : chunk_end);
      errors.find_labels();
      for (int64_t r = 0; r < width; r += W) {
        V f = t.saved(1, r);
        V up = where(t.counted(r, f), f * t.upstream(r), V{});  // not counted or ignored: exactly 0
        store(factor + r, where(f == 0, V{}, up));
        store(label + r, where(up == 0, V{}, -up * t.saved(2, r)));
      }
      for (int64_t block = 0; block < c.p.classes; block += t.classes) {
        if (!t.loaded()) {
          t.load_raw(block);
          t.lift_labels();
        }
        with_power(errors.h.kind, [&](auto power) {
          t.write_gradient(
              [&](int64_t r) {
                V x_label = load(t.u_label + r), mu = errors.margin(r), tr = t.saved(0, r), f = load(factor + r);
                Int<V> bad = f != f;
                return [=, &errors](int64_t j) {
                  V raw = errors.raw(j, r, x_label, mu), e = errors.h.template value<power.value>(raw);
                  V g = where(e >= tr, f * errors.h.template slope<power.value>(raw), V{});
                  if constexpr (power.value != linear) g = where(f == 0, V{}, g);
                  return where(bad, f, g);
                };
              },
              label);
        });
      }
    }
  });
}

}  // namespace PYL_ISA

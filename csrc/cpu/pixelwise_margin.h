// The margin family by vectors of rows.
#pragma once
#include "cpu/pixelwise.h"
#include "cpu/rowwise_margin.h"

namespace PYL_ISA {

// The raw errors of a vector of rows.
template <class T>
struct LaneErrors {
  typedef typename Lanes<T>::V V;
  const Tile<T>& t;
  int64_t r;
  V x_label, mu;
  const T* shift;

  LaneErrors(const Tile<T>& t, int64_t r, const MarginView<T>& view)
      : t(t), r(r), x_label(t.u_label(r)), mu(splat<V>(view.margin)) {
    const T* margins = t.c.shift;
    shift = view.of_label ? nullptr : margins;
    if (view.of_label && margins) mu = t.gather(r, [&](int64_t, int64_t y) { return margins[y]; });
  }
  // Puts the raw errors of the other classes where the logits were: -inf at the label and at masked classes.
  void store_raw() const {
    T* x = t.tile.data + r;
    Int<V> labels = t.labels(r);
    for (int64_t j = 0; j < t.c.p.classes; ++j, x += t.stride) {
      V raw = raw_of(load(x), x_label, shift ? splat<V>(shift[j]) : mu);
      store(x, where(labels == static_cast<typename Lanes<T>::IntScalar>(j), splat<V>(-infinity<T>()), raw));
    }
  }
  static PYL_INLINE V raw_of(V x, V x_label, V mu) { return where(x == -infinity<T>(), x, (x - x_label) + mu); }
};

// The bits of a vector of rows: W of them for each class.
template <class T>
uint8_t* lane_bits(const Tile<T>& t, int64_t r) {
  constexpr int W = Lanes<T>::W;
  return t.c.bits() + (t.begin + r) / W * ((t.c.p.classes * W + 7) / 8);
}

template <class F, class E, class T>
void pixels_margin_forward(F, const E& h, const Context<T>& c, Partial& total) {
  typedef typename Lanes<T>::V V;
  constexpr int W = Lanes<T>::W;
  MarginView<T> view = F::view(own_of<F>(c.numbers));
  bool keep = c.stats && E::flat;
  int64_t classes = c.p.classes;
  auto vector_of_rows = [&](Tile<T>& t, int64_t r) {
    t.fetch_next(r);
    LaneErrors<T> errors(t, r, view);
    errors.store_raw();
    V cut = splat<V>(above_nothing<T>()), slopes{};
    const T* raws = t.tile.data + r;
    int64_t stride = t.stride;
    if (view.threshold) {
      V max{};
      V sum = sum_over<V>(classes, [&](int64_t j) {
        V e = h.value(load(raws + j * stride));
        max = larger(e, max);
        return e;
      });
      V mean = sum / c.k.classes;
      // Rounding may lift the mean over every error; no error at all keeps nothing.
      cut = where(max > 0, where(mean < max, mean, max), cut);
    }
    uint8_t* bits = keep ? lane_bits(t, r) : nullptr;
    Int<V> nan{}, kept_count{};
    V sum = sum_over<V>(classes, [&](int64_t j) {
      V raw = load(raws + j * stride), e = h.value(raw);
      Int<V> kept = e >= cut;
      kept_count -= kept;
      nan |= raw != raw;
      if (bits) put_bits<T>(bits, j * W, bits_of<T>(kept));
      return where(kept, e, V{});
    });
    V count = __builtin_convertvector(kept_count, V);
    if constexpr (E::flat) slopes = count;
    else
      slopes = sum_over<V>(classes, [&](int64_t j) {
        V raw = load(raws + j * stride);
        return where(h.value(raw) >= cut, h.slope(raw), V{});
      });
    Int<V> none = count == 0;
    // A row with a NaN, or with every class masked, has no margin to speak of.
    Int<V> bad = nan | (errors.x_label != errors.x_label) | (none & (errors.x_label == -infinity<T>()));
    V poison = where(bad, splat<V>(static_cast<T>(__builtin_nan(""))), V{});
    MarginResult<V> result = F::row(own_of<F>(c.numbers), c.k, MarginRow<V>{sum + poison, count, load(t.w + r)});
    t.emit(r, result.loss, V{});
    if (c.stats) t.save(0, r, cut), t.save(1, r, where(none, poison, result.factor + poison)), t.save(2, r, slopes);
  };
  over_tiles(c, false, &total, [&](Tile<T>& t) {
    t.read();
    for (int64_t r = 0; r < t.padded; r += W) vector_of_rows(t, r);
  });
}
template <class T>
void pixels_margin_forward(const Context<T>& c, Partial& total) {
  with_errors(c, [&](auto formula, const auto& h) { pixels_margin_forward(formula, h, c, total); });
}

template <class F, class E, class T>
void pixels_margin_backward(F, const E& h, const Context<T>& c) {
  typedef typename Lanes<T>::V V;
  constexpr int W = Lanes<T>::W;
  MarginView<T> view = F::view(own_of<F>(c.numbers));
  over_tiles(c, false, nullptr, [&](Tile<T>& t) {
    if (!E::flat) t.read();  // flat errors have their bits
    alignas(64) T factor[kTileRows], label[kTileRows];
    for (int64_t r = 0; r < t.padded; r += W) {
      V f = t.saved(1, r);
      V up = where(t.counted(r, f), f * t.upstream(r), V{});  // not counted or ignored: exactly 0
      store(factor + r, where(f == 0, V{}, up));
      store(label + r, where(up == 0, V{}, where(f == f, -up * t.saved(2, r), up)));
    }
    auto or_nan = [&](int64_t r, V v) { return where(load(factor + r) != load(factor + r), load(factor + r), v); };
    if constexpr (E::flat) {
      const uint8_t* bits = lane_bits(t, 0);
      int64_t step = lane_bits(t, W) - bits;
      t.write(label, [&](int64_t j, int64_t r) {
        return or_nan(r, where(lanes_of<T>(get_bits<T>(bits + r / W * step, j * W)), load(factor + r), V{}));
      });
    } else {
      alignas(64) T x_label[kTileRows], mu[kTileRows];
      const T* shift = nullptr;
      for (int64_t r = 0; r < t.padded; r += W) {
        LaneErrors<T> errors(t, r, view);
        store(x_label + r, errors.x_label);
        store(mu + r, errors.mu);
        shift = errors.shift;
      }
      t.write(label, [&](int64_t j, int64_t r) {
        V raw = LaneErrors<T>::raw_of(t.u(j, r), load(x_label + r), shift ? splat<V>(shift[j]) : load(mu + r));
        V e = h.value(raw), f = load(factor + r);
        return or_nan(r, where((e >= t.saved(0, r)) & (f != 0), f * h.slope(raw), V{}));
      });
    }
  });
}
template <class T>
void pixels_margin_backward(const Context<T>& c) {
  with_errors(c, [&](auto formula, const auto& h) { pixels_margin_backward(formula, h, c); });
}

}  // namespace PYL_ISA

// The region family by vectors of rows.
#pragma once
#include "cpu/class_sums.h"
#include "cpu/pixelwise_softmax.h"

namespace PYL_ISA {

template <class T>
struct RegionTiles {
  typedef typename Lanes<T>::V V;
  static constexpr int W = Lanes<T>::W;
  const Context<T>& c;
  bool ce, mapped, smooth;  // cross-entropy too? of other logits than Dice's? with smoothing?
  bool all_live = true;     // of the tile
  Tile<T> t;
  TileGradient<T> ce_gradient;
  // dL/dx_j = e_j (gain (push_j - top) + offset), `label` at the label; top_rest goes with top as rest_j with push_j
  alignas(64) T gain[kTileRows], top[kTileRows], top_rest[kTileRows], offset[kTileRows], label[kTileRows];

  explicit RegionTiles(const Context<T>& c)
      : c(c),
        ce(c.beside()),
        mapped(ce && c.mapped()),
        smooth(ce && c.softmax.smooth),
        t(c, mapped || smooth),
        ce_gradient(c) {}
  static int64_t piece_rows(int64_t classes) { return Tile<T>::chunk_rows(classes); }

  // The logits as they are, 0 in rows that do not count: NaN there must not reach a sum.
  void read() {
    t.read_raw();
    all_live = true;
    for (int64_t r = 0; r < t.padded; r += W) {
      Int<V> on = load(t.live + r) != 0;
      T* x = t.tile.data + r;
      if (!any(~on)) continue;
      all_live = false;
      for (int64_t j = 0; j < c.p.classes; ++j, x += t.stride) store(x, where(on, load(x), V{}));
    }
  }
  SoftmaxRow<V> row(int64_t r, V m, V d, V u_label) const { return lane_row(m, d, u_label, splat<V>(1), load(t.w + r)); }
  void emit(int64_t r, V m, V d, V u_label) {
    SoftmaxRow<V> one = row(r, m, d, u_label);
    if (smooth) one.spread = lane_spread(t, r, m, one.log_total());
    SoftmaxResult<V> result = softmax_formula(c.facts.softmax, c.numbers, c.k, one);
    t.emit(r, result.loss, result.extra);
  }

  void sums(int64_t begin, int64_t end, const ClassSums& into, Partial* partial) {
    bool save = partial && c.stats;
    T* e = t.exponentials;
    int64_t stride = t.stride;
    t.each(begin, end, partial, [&] {
      read();
      for (int64_t r = 0; r < t.padded; r += W) {
        t.fetch_next(r);
        LaneSums<V> s = lane_sums<Moment::none, false, true>(t, r, splat<V>(1));
        V e_label = where(load(t.live + r) != 0, exp_below(s.x_label - s.m), V{});
        V scale = where(load(t.live + r) != 0, load(t.sample + r) / (s.d + e_label), V{});
        V hit = e_label * scale, miss = s.d * scale;
        store(gain + r, scale);
        for (int i = 0; i < W; ++i) {
          int64_t y = t.y[r + i];
          if (y < 0) continue;
          into.add_label(y, hit[i], miss[i]);
          e[y * stride + r + i] = 0;
        }
        if (save) t.save(0, r, s.m), t.save(1, r, s.d);
        if (ce && !mapped && partial) emit(r, s.m, s.d, s.x_label);
      }
      for (int64_t j = 0; j < c.p.classes; ++j) into.stray[j] += weighted_sum(e + j * stride);
      if (!mapped || !partial) return;
      t.apply_map();
      for (int64_t r = 0; r < t.padded; r += W) {
        LaneSums<V> s = lane_sums<Moment::none, false, false>(t, r, splat<V>(1));
        emit(r, s.m, s.d, s.x_label);
        if (save) t.save(2, r, s.m), t.save(3, r, s.d);
      }
    });
  }
  // sum of gain e over the rows of the tile, in short runs
  PYL_INLINE double weighted_sum(const T* e) const {
    V s[4] = {};
    int64_t r = 0;
    for (; r + 4 * W <= t.padded; r += 4 * W)
      for (int k = 0; k < 4; ++k) s[k] += load(gain + r + k * W) * load(e + r + k * W);
    for (; r < t.padded; r += W) s[0] += load(gain + r) * load(e + r);
    return sum_of((s[0] + s[1]) + (s[2] + s[3]));
  }

  void find_mass(int64_t begin, int64_t end, uint8_t* found) {
    t.each(begin, end, nullptr, [&] {
      read();
      for (int64_t r = 0; r < t.padded; r += W) {
        t.fetch_next(r);
        LaneSums<V> s = lane_sums<Moment::none, true, false>(t, r, splat<V>(1));
        V log_d = log_sum(s.d);
        for (int64_t j = 0; j < c.p.classes; ++j)
          if (any((load(t.live + r) != 0) & ((t.u(j, r) - s.m) - log_d > T(kNoMass)))) mark(found + j);
      }
    });
  }

  void gradient(int64_t begin, int64_t end, const ClassFactors<T>& k) {
    t.each(begin, end, nullptr, [&] {
      read();
      for (int64_t r = 0; r < t.padded; r += W) {
        t.fetch_next(r);
        V m = t.saved(0, r), d = t.saved(1, r), u_label = t.u_label(r);
        set(r, m, d, u_label, k);
        if (ce && !mapped) set_ce(r, m, d, u_label);
      }
      if (mapped) t.apply_map();
      for (int64_t r = 0; mapped && r < t.padded; r += W) set_ce(r, t.saved(2, r), t.saved(3, r), t.u_label(r));
      write(k);
    });
  }
  // Everything is relative to the largest class: with it all but certain, neither its own push nor its 1 drown the rest.
  PYL_INLINE void set(int64_t r, V m, V others, V u_label, const ClassFactors<T>& k) {
    V at_top{}, at_rest{}, one = splat<V>(1);
    const T *x = t.tile.data + r, *pushes = k.push, *rests = k.rest;
    T* kept = t.exponentials + r;
    int64_t classes = c.p.classes, stride = t.stride;
    for (int64_t j = 0; j < classes; ++j) {
      Int<V> is_top = load(x + j * stride) == m;
      at_top = where(is_top, splat<V>(pushes[j]), at_top), at_rest = where(is_top, splat<V>(rests[j]), at_rest);
    }
    V e_label = exp_below(u_label - m), inverse = one / (others + e_label), hit = e_label * inverse, miss = others * inverse;
    V mean = inverse * sum_over<V>(classes, [&](int64_t j) {
               V e = exp_below(load(x + j * stride) - m);
               store(kept + j * stride, e);
               return e * ((pushes[j] - at_top) + (rests[j] - at_rest));
             });
    V push = t.gather(r, [&](int64_t, int64_t y) { return k.push[y]; }) - at_top;
    V rest = t.gather(r, [&](int64_t, int64_t y) { return k.rest[y]; }) - at_rest;
    V pull = t.gather(r, [&](int64_t, int64_t y) { return k.pull[y]; });
    V scale = load(t.sample + r) * inverse;
    store(gain + r, scale);
    store(top + r, at_top), store(top_rest + r, at_rest);
    store(offset + r, scale * (pull * hit - mean));
    store(label + r, where(load(t.live + r) != 0, e_label * scale * ((push + rest) - mean - pull * miss), V{}));
  }
  PYL_INLINE void set_ce(int64_t r, V m, V d, V u_label) {
    ce_gradient.set(t, r, softmax_formula(c.facts.softmax, c.numbers, c.k, row(r, m, d, u_label)), m, d, LaneScale<T>());
    store(label + r, load(label + r) + load(ce_gradient.label + r));
    if (!mapped) store(offset + r, load(offset + r) + load(ce_gradient.slope + r));  // the same exponentials
  }
  void write(const ClassFactors<T>& k) {
    auto both = [&](int64_t j, int64_t r) { return t.e(j, r) * weight(k.push, k.rest, j, r); };
    auto rest = [&](int64_t j, int64_t r) {  // of cross-entropy
      V v{};
      if (mapped) v = load(ce_gradient.slope + r) * exp_below(t.u(j, r) - load(ce_gradient.m + r));
      if (smooth) v -= load(ce_gradient.pull + r) * (c.weight ? c.weight[j] : T(1));
      return t.map.cap > 0 ? v * t.du(j, r) : v;
    };
    if (!mapped && !smooth && all_live) write_plain(k.push, k.rest);
    else
      t.write(label, [&](int64_t j, int64_t r) {
        V v = mapped || smooth ? both(j, r) + rest(j, r) : both(j, r);
        return where(load(t.live + r) != 0, v, V{});
      });
  }
  void write_plain(const T* pushes, const T* rests) const {
    const T* e = t.exponentials;
    int64_t stride = t.stride;
    t.write(label, [&](int64_t j, int64_t r) { return load(e + j * stride + r) * weight(pushes, rests, j, r); });
  }
  PYL_INLINE V weight(const T* pushes, const T* rests, int64_t j, int64_t r) const {
    V push = (pushes[j] - load(top + r)) + (rests[j] - load(top_rest + r));
    return load(gain + r) * push + load(offset + r);
  }
};

}  // namespace PYL_ISA

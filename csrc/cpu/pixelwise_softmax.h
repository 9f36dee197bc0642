// The softmax family by vectors of rows.
#pragma once
#include "cpu/pixelwise.h"
#include "cpu/rowwise_softmax.h"

namespace PYL_ISA {

// m, d and the second sum of OnlineSum, for a vector of rows, and the logits of their labels
template <class V>
struct LaneSums {
  V m, d, moment, x_label;
};

// All: over all classes, not only those beside the label. Exponentials are kept where the gradient is written ahead.
template <Moment kind, bool All, bool Keep, class T>
LaneSums<typename Lanes<T>::V> lane_sums(const Tile<T>& t, int64_t r, typename Lanes<T>::V late) {
  typedef typename Lanes<T>::V V;
  int64_t classes = t.c.p.classes, stride = t.stride;
  const T* x = t.tile.data + r;  // copies: the compiler must not look them up after every store
  T* kept = t.exponentials + r;
  Int<V> labels = t.labels(r);
  // The largest of all classes will do: with a label more than 80 above the others, their share is nothing in any case.
  V m = splat<V>(-infinity<T>()), moment{};
  for (int64_t j = 0; j < classes; ++j) m = larger(load(x + j * stride), m);
  m = where(m == -infinity<T>(), V{}, m);
  auto is_label = [&](int64_t j) { return labels == static_cast<typename Lanes<T>::IntScalar>(j); };
  auto unless_label = [&](int64_t j, V v) { return All ? v : where(is_label(j), V{}, v); };
  V x_label{};
  V d = sum_over<V>(classes, [&](int64_t j) {
    V u = load(x + j * stride), e = exp_below(kind == Moment::none ? u - m : (u - m) * late);
    if constexpr (!All) x_label = where(is_label(j), u, x_label);  // cheaper than to gather them
    if constexpr (Keep) store(kept + j * stride, e);
    return unless_label(j, e);
  });
  if (kind != Moment::none)
    moment = sum_over<V>(classes, [&](int64_t j) {
      V v = load(x + j * stride), u = (v - m) * late, e = Keep ? load(kept + j * stride) : exp_below(u);
      return unless_label(j, where(v == -infinity<T>(), V{}, e * (kind == Moment::of_x ? v : u)));
    });
  return {m, d, moment, x_label};
}
template <Moment kind, bool All, class T>
LaneSums<typename Lanes<T>::V> lane_sums(const Tile<T>& t, int64_t r, typename Lanes<T>::V late) {
  return t.c.ahead() ? lane_sums<kind, All, true>(t, r, late) : lane_sums<kind, All, false>(t, r, late);
}

// |x| of every row without the label's, for normed rows, masked classes left out; in double, where squares neither overflow nor
// lose digits.
template <class T>
PYL_INLINE typename Lanes<T>::V lane_others_norm(const Tile<T>& t, int64_t r) {
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::Wide Doubles;
  Doubles squares{};
  Int<V> labels = t.labels(r);
  for (int64_t j = 0; j < t.c.p.classes; ++j) {
    V x = t.u(j, r);
    Int<V> left_out = (x == -infinity<T>()) | (labels == static_cast<typename Lanes<T>::IntScalar>(j));
    Doubles wide = __builtin_convertvector(where(left_out, V{}, x), Doubles);
    squares += wide * wide;
  }
  V norm;
  for (int i = 0; i < Lanes<T>::W; ++i) norm[i] = static_cast<T>(__builtin_sqrt(squares[i]));
  return norm;
}
// RowScale of a vector of rows.
template <class T>
struct LaneScale {
  typedef typename Lanes<T>::V V;
  V scale = splat<V>(1), share = splat<V>(1), drag = {};

  LaneScale() = default;
  LaneScale(const Context<T>& c, V others, V x_label, V mean_x) {
    for (int i = 0; i < Lanes<T>::W; ++i) {
      RowScale<T> one = row_scale<T>(c, others[i], x_label[i], mean_x[i]);
      scale[i] = one.scale, share[i] = static_cast<T>(one.share), drag[i] = static_cast<T>(one.drag);
    }
  }
};

template <class V>
PYL_INLINE SoftmaxRow<V> lane_row(V m, V d, V x_label, V late, V w) {
  // The rounding of m - x goes to d: a loss may be e^a. Where it is no small correction, a is too large for that.
  V s = m - x_label, back = s - m, lost = ((m - (s - back)) - (x_label + back)) * late;
  return {s * late, d + where(absolute(lost) < 1, d * lost, V{}), w, x_label * late, m * late};
}

// sum_j q_j (lse - u_j) with lse = m + rest, as block_spread.
template <class T>
PYL_INLINE typename Lanes<T>::V lane_spread(const Tile<T>& t, int64_t r, typename Lanes<T>::V m, typename Lanes<T>::V rest) {
  typedef typename Lanes<T>::V V;
  const Context<T>& c = t.c;
  return sum_over<V>(c.p.classes, [&](int64_t j) {
    V d = (m - t.u(j, r)) + rest, q = c.p.soft ? t.soft(j, r) : splat<V>(c.weight ? c.weight[j] : T(1));
    return where(q == 0, V{}, q * d);
  });
}

// SoftmaxGradient of all rows of a tile.
template <class T>
struct TileGradient {
  typedef typename Lanes<T>::V V;
  const Context<T>& c;
  alignas(64) T slope[kTileRows], pull[kTileRows], label[kTileRows], drag[kTileRows], m[kTileRows], scale[kTileRows];
  alignas(64) T on[kTileRows];
  bool all_on = true;

  explicit TileGradient(const Context<T>& c) : c(c) {}

  PYL_INLINE void set(const Tile<T>& t, int64_t r, const SoftmaxResult<V>& result, V base, V d, const LaneScale<T>& norm) {
    bool capped = t.map.cap > 0;
    V up = t.upstream(r), du = t.map.scale * norm.scale, gain = up * result.slope, at_label = up * result.label * norm.share;
    if (capped) du = t.gather(r, [&](int64_t i, int64_t y) { return t.slopes.data[y * t.stride + i]; });
    at_label *= du;
    store(drag + r, gain * norm.drag);
    gain = where(d == 0, gain * 0, gain / d);  // no other class: nothing to push, unless the row is NaN
    Int<V> counts = t.live_unless(r, d < 0);
    store(label + r, where(counts, at_label, V{}));
    set(t, r, gain * (capped ? splat<V>(1) : norm.scale * t.map.scale), up * result.pull, base, norm.scale, counts);
  }
  PYL_INLINE void set_soft(const Tile<T>& t, int64_t r, V base, V d, V mass) {
    SoftResult<V> result = soft_formula(c.facts.softmax, c.numbers, c.k, SoftRow<V>{base + log_sum(d), mass});
    V up = t.upstream(r), gain = up * result.slope / d;
    if (t.map.cap == 0) gain *= t.map.scale;
    set(t, r, gain, up * result.pull, base, splat<V>(1), t.live_unless(r, d < 0));
  }
  PYL_INLINE void set(const Tile<T>& t, int64_t r, V gain, V weight_pull, V base, V late, Int<V> counts) {
    store(slope + r, gain);
    store(pull + r, t.map.cap > 0 ? weight_pull : weight_pull * t.map.scale);
    store(m + r, base);
    store(scale + r, late);
    store(on + r, where(counts, splat<V>(1), V{}));
    all_on &= !any(~counts);
  }

  void write(const Tile<T>& t) {
    bool weights = c.p.soft || c.softmax.smooth, norm = c.facts.normed;
    bool capped = t.map.cap > 0, plain = !weights && !norm && !capped;
    auto rest = [&](int64_t j, int64_t r, V v) {  // all that most losses do not have
      if (weights) v -= load(pull + r) * (c.p.soft ? t.soft(j, r) : splat<V>(c.weight ? c.weight[j] : T(1)));
      if (capped) v *= t.du(j, r);
      if (norm) {
        V x = t.u(j, r);
        v -= where(x == -infinity<T>(), V{}, load(drag + r) * x);
      }
      return where(load(on + r) != 0, v, V{});
    };
    const T* e = t.exponentials;
    int64_t stride = t.stride;
    auto kept = [&](int64_t j, int64_t r) { return load(slope + r) * load(e + j * stride + r); };
    auto fresh = [&](int64_t j, int64_t r) {
      V d = t.u(j, r) - load(m + r);
      return load(slope + r) * exp_below(norm ? d * load(scale + r) : d);
    };
    auto any = [&](int64_t j, int64_t r) { return rest(j, r, c.ahead() ? kept(j, r) : fresh(j, r)); };
    if (c.p.soft) t.write(any);
    else if (c.ahead() && plain && all_on) t.write(label, kept);
    else if (c.ahead()) t.write(label, [&](int64_t j, int64_t r) { return rest(j, r, kept(j, r)); });
    else if (plain && all_on) t.write(label, fresh);
    else t.write(label, [&](int64_t j, int64_t r) { return rest(j, r, fresh(j, r)); });
  }
};

template <class T>
void pixels_softmax_forward(const Context<T>& c, Partial& total) {
  typedef typename Lanes<T>::V V;
  bool norm = c.facts.normed, smooth = c.softmax.smooth, ahead = c.ahead();
  over_tiles(c, norm || smooth || c.p.soft, &total, [&](Tile<T>& t) {
    t.read();
    if (c.p.soft) t.read_soft();
    TileGradient<T> g(c);
    auto soft = [&](int64_t r) {
      LaneSums<V> s = lane_sums<Moment::none, true>(t, r, splat<V>(1));
      V log_d = log_sum(s.d), mass = sum_over<V>(c.p.classes, [&](int64_t j) { return t.soft(j, r); });
      SoftResult<V> result = soft_formula(c.facts.softmax, c.numbers, c.k, SoftRow<V>{s.m + log_d, mass});
      V loss = lane_spread(t, r, s.m, log_d);
      t.emit(r, loss, result.extra);
      if (c.stats) t.save(0, r, s.m), t.save_sum(1, r, s.d, loss + result.extra), t.save(2, r, mass);
      if (ahead) g.set_soft(t, r, s.m, s.d, mass);
    };
    auto labelled = [&](int64_t r) {
      V others = norm ? lane_others_norm(t, r) : V{};
      V late = norm ? LaneScale<T>(c, others, t.u_label(r), V{}).scale : splat<V>(1);
      LaneSums<V> s = norm ? lane_sums<Moment::of_x, false>(t, r, late) : lane_sums<Moment::none, false>(t, r, late);
      V x_label = s.x_label;
      SoftmaxRow<V> row = lane_row(s.m, s.d, x_label, late, load(t.w + r));
      if (smooth) row.spread = lane_spread(t, r, s.m, row.log_total());
      SoftmaxResult<V> result = softmax_formula(c.facts.softmax, c.numbers, c.k, row);
      t.emit(r, result.loss, result.extra);
      V mean_x = norm ? where(s.d == 0, V{}, s.moment / s.d) : V{};
      if (c.stats) {
        t.save(0, r, s.m), t.save_sum(1, r, s.d, result.loss + result.extra);
        if (norm) t.save(2, r, others), t.save(3, r, mean_x);
      }
      if (ahead) g.set(t, r, result, s.m, s.d, norm ? LaneScale<T>(c, others, x_label, mean_x) : LaneScale<T>());
    };
    for (int64_t r = 0; r < t.padded; r += Lanes<T>::W) {
      t.fetch_next(r);
      c.p.soft ? soft(r) : labelled(r);
    }
    if (ahead) g.write(t);
  });
}

template <class T>
void pixels_softmax_backward(const Context<T>& c) {
  typedef typename Lanes<T>::V V;
  bool norm = c.facts.normed;
  over_tiles(c, false, nullptr, [&](Tile<T>& t) {
    t.read();
    if (c.p.soft) t.read_soft();
    TileGradient<T> g(c);
    for (int64_t r = 0; r < t.padded; r += Lanes<T>::W) {
      t.fetch_next(r);
      V m = t.saved(0, r), d = t.saved(1, r);
      if (c.p.soft) {
        g.set_soft(t, r, m, d, t.saved(2, r));
        continue;
      }
      V x_label = t.u_label(r);
      LaneScale<T> scaled = norm ? LaneScale<T>(c, t.saved(2, r), x_label, t.saved(3, r)) : LaneScale<T>();
      SoftmaxRow<V> row = lane_row(m, d, x_label, scaled.scale, load(t.w + r));
      g.set(t, r, softmax_formula(c.facts.softmax, c.numbers, c.k, row), m, d, scaled);
    }
    g.write(t);
  });
}

}  // namespace PYL_ISA

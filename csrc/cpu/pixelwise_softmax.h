// The softmax family by tiles of rows.
#pragma once
#include "cpu/pixelwise.h"
#include "cpu/rowwise_softmax.h"

namespace PYL_ISA {

template <class T>
struct TileStatistics {
  typedef typename Lanes<T>::V V;
  // m, sum, moment and top as in OnlineSum, for every row; spread and mass for smoothing and soft targets
  Slack slack;
  Moment kind;
  alignas(64) T m[kTileRows], sum[kTileRows], moment[kTileRows], top[kTileRows], settled[kTileRows];
  bool any_settled = false;
  alignas(64) T spread[kTileRows], mass[kTileRows], rest[kTileRows];

  TileStatistics(Slack slack, Moment kind) : slack(slack), kind(kind) {}
  void reset(int64_t width) {
    for (int64_t r = 0; r < width; ++r) sum[r] = moment[r] = settled[r] = 0, top[r] = -infinity<T>();
    any_settled = false;
  }
  // Each row's m starts from its label's logit, or from its first logit where there is no finite label.
  void guess(Tile<T>& t, bool labels) {
    for (int64_t r = 0; r < t.width; r += Lanes<T>::W) {
      V by = load(t.late + r), u = load(t.u_label + r) * by, v = load(t.at(0, r)) * by;
      V g = labels ? where(u - u == 0, u, v) : v;
      store(m + r, where(g - g == 0, g, V{}));
    }
  }
  // Adds the block that `t` holds, rows r..
  void block(Tile<T>& t, int64_t r) {
    V base = load(m + r), total = load(sum + r), total_moment = load(moment + r), largest = load(top + r),
      by = load(t.late + r);
    V part, part_moment{};
    auto pass = [&] {
      part = sum_over<V>(t.count, [&](int64_t j) {
        V u = load(t.at(j, r));
        largest = larger(u * by, largest);
        return exp_below(u * by - base);
      });
      if (kind != Moment::none)
        part_moment = sum_over<V>(t.count, [&](int64_t j) {
          V u = load(t.at(j, r)), d = u * by - base;
          return where(u == -infinity<T>(), V{}, exp_below(d) * (kind == Moment::of_x ? u : d));
        });
    };
    pass();
    Int<V> low = largest > base + static_cast<T>(slack.above);
    if (any(low)) {
      recentre(where(low, largest, base), base, total, total_moment);
      pass();
    }
    total += part, total_moment += part_moment;
    if (any_settled) {  // a second round for other rows of the tile
      Int<V> keep = load(settled + r) != 0;
      base = where(keep, load(m + r), base), largest = where(keep, load(top + r), largest);
      total = where(keep, load(sum + r), total), total_moment = where(keep, load(moment + r), total_moment);
    }
    store(m + r, base);
    store(sum + r, total);
    store(moment + r, total_moment);
    store(top + r, largest);
  }
  void recentre(V better, V& base, V& total, V& total_moment) const {
    V step = base - better, shrink = exp_below(step);
    if (kind == Moment::about_m) total_moment += where(total == 0, V{}, step * total);
    total *= shrink, total_moment *= shrink;
    base = better;
  }
  // Ends a round. False when some m was so far above that digits were lost: those rows start again from here, and the others
  // keep what they have, so that no row depends on its neighbours.
  bool done(const Tile<T>& t) {
    bool again = false;
    for (int64_t r = 0; r < t.width; r += Lanes<T>::W) {
      V base = load(m + r), largest = load(top + r), total = load(sum + r), total_moment = load(moment + r);
      Int<V> usable = (load(t.live + r) != 0) & (largest != -infinity<T>()) & (total == total);
      Int<V> high = usable & (largest < base - static_cast<T>(slack.below));
      recentre(where(usable & ~high, largest, base), base, total, total_moment);
      again |= any(high);
      store(m + r, where(high, largest, base));
      store(sum + r, where(high, V{}, total));
      store(moment + r, where(high, V{}, total_moment));
      store(settled + r, where(high, V{}, splat<V>(1)));
    }
    any_settled = again;
    return !again;
  }
};

// The scale of every row from its norm, masked classes left out; in double, where squares neither overflow nor lose digits.
template <class T>
void set_norm_scale(Tile<T>& t) {
  double squares[kTileRows] = {};
  for (int64_t block = 0; block < t.c.p.classes; block += t.classes) {
    if (!t.loaded()) t.load_raw(block);
    for (int64_t j = 0; j < t.count; ++j)
      for (int64_t r = 0; r < t.width; ++r) {
        double x = *t.at(j, r);
        squares[r] += x == -__builtin_inf() ? 0 : x * x;
      }
  }
  for (int64_t r = 0; r < t.width; ++r) t.late[r] = norm_scale<T>(t.c, __builtin_sqrt(squares[r]));
}

template <class T>
PYL_INLINE SoftmaxRow<typename Lanes<T>::V> tile_row(const Tile<T>& t, int64_t r, typename Lanes<T>::V m,
                                                     typename Lanes<T>::V d) {
  typedef typename Lanes<T>::V V;
  V x = load(t.u_label + r), by = load(t.late + r), u = x * by, log_d = log(d), a = (m - x * by) + log_d;
  a = where(u == infinity<T>(), splat<V>(static_cast<T>(__builtin_nan(""))), a);  // as the softmax of +inf
  SoftmaxRow<V> row = odds(a, load(t.w + r));
  row.lse = where(a > 0, (m + log_d) + row.nll_miss, u + row.nll);
  return row;
}

// sum_j q_j (lse - u_j) of every row, as block_spread; for soft targets q's own sum too.
template <class T>
void tile_spread(Tile<T>& t, TileStatistics<T>& s) {
  typedef typename Lanes<T>::V V;
  constexpr int W = Lanes<T>::W;
  const Context<T>& c = t.c;
  for (int64_t r = 0; r < t.width; r += W) {
    V m = load(s.m + r), log_d = log(load(s.sum + r)), u = load(t.u_label + r), rest = log_d;
    if (!c.p.soft) {
      SoftmaxRow<V> row = tile_row(t, r, m, load(s.sum + r));
      rest = where(row.a > 0, log_d + row.nll_miss, (u - m) + row.nll);
    }
    V w = t.gather(r, [&](int64_t i) { return c.weight && t.y[i] >= 0 ? c.weight[t.y[i]] : T(1); });
    store(s.rest + r, rest);
    store(s.spread + r, c.p.soft ? V{} : where(w == 0, V{}, w * ((m - u) + rest)));  // the label, which is not in the tile
    store(s.mass + r, V{});
  }
  for (int64_t block = 0; block < c.p.classes; block += t.classes) {
    if (!t.loaded()) {
      t.load_raw(block), t.apply_map();
      if (!c.p.soft) t.lift_labels();
    }
    if (c.p.soft) t.load_soft();
    for (int64_t r = 0; r < t.width; r += W) {
      V m = load(s.m + r), rest = load(s.rest + r);
      V y = t.gather(r, [&](int64_t i) { return static_cast<T>(t.y[i] - t.first); });
      store(s.spread + r, load(s.spread + r) + sum_over<V>(t.count, [&](int64_t j) {
                            V d = (m - load(t.at(j, r))) + rest;
                            if (c.p.soft) {
                              V q = load(t.soft.data + j * t.width + r);
                              return where(q == 0, V{}, q * d);
                            }
                            T w = c.weight ? c.weight[t.first + j] : 1;
                            return w == 0 ? V{} : where(y == static_cast<T>(j), V{}, w * d);
                          }));
      if (c.p.soft)
        store(s.mass + r,
              load(s.mass + r) + sum_over<V>(t.count, [&](int64_t j) { return load(t.soft.data + j * t.width + r); }));
    }
  }
}

template <class T>
void pixels_softmax_forward(const Context<T>& c, Partial& total) {
  typedef typename Lanes<T>::V V;
  constexpr int W = Lanes<T>::W;
  bool norm = c.p.loss == id_logit_norm, smooth = c.p.loss == id_cross_entropy && (c.k.own[0] > 0 || c.p.soft);
  int64_t width = Tile<T>::rows_for(c.p.classes);
  for_chunks(c.p, width * 16, &total, [&](int64_t chunk, int64_t chunk_end, Partial& sums) {
    Tile<T> t(c);
    TileStatistics<T> s(kWide, norm ? Moment::of_x : Moment::none);
    for (int64_t begin = chunk; begin < chunk_end; begin += width) {
      t.seek(begin, begin + width < chunk_end ? begin + width : chunk_end);
      if (norm) set_norm_scale(t);
      bool started = false, ready = false;
      if (!t.whole() && !c.p.soft) {  // the labels come first: each may lie in any block
        for (int64_t block = 0; block < c.p.classes; block += t.classes) t.load_raw(block), t.apply_map(), t.lift_labels();
        t.load_raw(0), t.apply_map(), s.guess(t, true);
        started = true, t.count = 0;
      }
      s.reset(width);
      do {
        for (int64_t block = 0; block < c.p.classes; block += t.classes) {
          if (!ready || !t.whole()) {
            if (!t.loaded()) t.load_raw(block);
            t.apply_map();
            if (!c.p.soft) t.lift_labels();
            ready = true;
          }
          if (!started) s.guess(t, !c.p.soft), started = true;
          for (int64_t r = 0; r < width; r += W) s.block(t, r);
        }
      } while (!s.done(t));
      if (smooth) tile_spread(t, s);
      for (int64_t r = 0; r < width; r += W) {
        V m = load(s.m + r), d = load(s.sum + r);
        if (c.p.soft) {
          V lse = m + log(d), extra = c.k.own[3] > 0 ? c.k.own[3] * lse * lse : V{};
          t.emit(r, load(s.spread + r), extra);
        } else {
          SoftmaxRow<V> row = tile_row(t, r, m, d);
          if (smooth) row.spread = load(s.spread + r);
          SoftmaxResult<V> result = softmax_formula<T>(c.p.loss, c.k, row);
          t.emit(r, result.loss, result.extra);
        }
        if (!c.stats) continue;
        t.save(0, r, m);
        t.save(1, r, d);
        if (c.p.loss == id_cross_entropy) t.save(2, r, c.p.soft ? load(s.mass + r) : V{});
        if (norm) {
          t.save(2, r, load(t.late + r));
          t.save(3, r, where(d == 0, V{}, load(s.moment + r) / d));
        }
      }
      t.flush(sums);
    }
  });
}

template <class T>
void pixels_softmax_backward(const Context<T>& c) {
  typedef typename Lanes<T>::V V;
  constexpr int W = Lanes<T>::W;
  bool norm = c.p.loss == id_logit_norm;
  int64_t width = Tile<T>::rows_for(c.p.classes);
  for_chunks(c.p, width * 16, nullptr, [&](int64_t chunk, int64_t chunk_end, Partial&) {
    Tile<T> t(c);
    alignas(64) T slope[kTileRows], pull[kTileRows], label[kTileRows], drag[kTileRows], base[kTileRows], on[kTileRows];
    for (int64_t begin = chunk; begin < chunk_end; begin += width) {
      t.seek(begin, begin + width < chunk_end ? begin + width : chunk_end);
      for (int64_t r = 0; norm && r < width; r += W) store(t.late + r, t.saved(2, r));
      // The labels' numbers come first: with several blocks a label may lie in any of them.
      if (!c.p.soft) {
        for (int64_t block = 0; block < c.p.classes; block += t.classes) {
          t.load_raw(block);
          t.apply_map();
          t.lift_labels();
        }
      }
      for (int64_t r = 0; r < width; r += W) {
        V m = t.saved(0, r), d = t.saved(1, r), up = t.upstream(r), s = load(t.late + r);
        V gain, weight_pull = up, at_label{}, norm_drag{}, live = load(t.live + r);
        if (c.p.soft) {
          live = where(t.counted(r, splat<V>(1)), live, V{});  // a loss that is not above zero has no gradient of its own
          gain = up * (c.k.main * t.saved(2, r) + 2 * c.k.own[3] * (m + log(d)));
          weight_pull = up * c.k.main;
        } else {
          SoftmaxResult<V> result = softmax_formula<T>(c.p.loss, c.k, tile_row(t, r, m, d));
          live = where(t.counted(r, result.loss + result.extra), live, V{});
          gain = up * result.slope, weight_pull = up * result.pull;
          at_label = up * result.label * load(t.du_label + r);
          if (norm) {
            V n = t.gather(r, [&](int64_t i) { return norm_of(c, t.late[i]); }), x = load(t.u_label + r);
            x = where(x == -infinity<T>(), V{}, x);
            norm_drag = where(n > 0, gain * (t.saved(3, r) - x) * s / (n * (n + c.k.own[1])), V{});
            at_label -= norm_drag * x;
          }
        }
        gain = where(d == 0, gain * 0, gain / d);  // no other class: nothing to push, unless the row is NaN
        store(slope + r, gain);
        store(pull + r, weight_pull);
        store(label + r, where(live != 0, at_label, V{}));
        store(drag + r, norm_drag);
        store(base + r, m);
        store(on + r, live);
      }
      bool weights = c.p.soft || (c.p.loss == id_cross_entropy && c.k.own[0] > 0);
      for (int64_t block = 0; block < c.p.classes; block += t.classes) {
        if (!t.loaded()) {
          t.load_raw(block);
          t.apply_map();
        }
        if (c.p.soft) t.load_soft();
        auto push = [&](int64_t r) {  // slope e^(u - m), which is all there is to most losses
          V m = load(base + r), gain = load(slope + r), s = load(t.late + r);
          if (t.map.cap == 0) gain *= s * t.map.scale;
          Int<V> live = load(on + r) != 0;
          return [=, &t](int64_t j) { return where(live, gain * exp_below(load(t.at(j, r)) * s - m), V{}); };
        };
        auto push_and_pull = [&](int64_t r) {
          V p = load(pull + r), d = load(drag + r);
          if (t.map.cap == 0) p *= t.map.scale;
          Int<V> live = load(on + r) != 0;
          auto pushed = push(r);
          return [=, &t, &c](int64_t j) {
            V u = load(t.at(j, r)), g = pushed(j);
            if (weights)
              g -= p * (c.p.soft ? load(t.soft.data + j * t.width + r) : splat<V>(c.weight ? c.weight[t.first + j] : T(1)));
            if (t.map.cap > 0) g *= load(t.slopes.data + j * t.width + r);
            if (norm) g -= where(u == -infinity<T>(), V{}, d * u);
            return where(live, g, V{});
          };
        };
        const T* labels = c.p.soft ? nullptr : label;
        if (weights || norm || t.map.cap > 0) t.write_gradient(push_and_pull, labels);
        else t.write_gradient(push, labels);
      }
    }
  });
}

}  // namespace PYL_ISA

// Driver for short rows and for (N, C, *): lanes run across rows, the loop runs over classes.
// A tile of rows is copied, converted and transposed if need be, to [class][row] in the cache; every pass then works on the
// tile. When all classes do not fit, the tile is a block of classes and statistics go on from block to block.
#pragma once
#include "cpu/rowwise.h"

namespace PYL_ISA {

constexpr int64_t kTileRows = 256;
constexpr int64_t kTileNumbers = 32768;

// Where the rows of a tile lie: evenly spaced, or each at a place of its own when a tile spans several runs of memory.
struct Places {
  bool regular;
  int64_t base, step, at[kTileRows];

  void find(const Layout& l, int64_t begin, int64_t rows) {
    int64_t inner = l.dims ? l.size[l.dims - 1] : 1;
    regular = begin % inner + rows <= inner;
    base = l.offset(begin);
    step = l.dims ? l.stride[l.dims - 1] : 1;
    if (!regular)
      for (int64_t r = 0; r < rows; ++r) at[r] = l.offset(begin + r);
  }
};

// Rows [begin, begin + rows) of the problem: where they lie, their labels and weights, and a tile of their logits.
template <class T>
struct Tile {
  typedef typename Lanes<T>::V V;
  const Context<T>& c;
  Map<T> map;
  int64_t width;    // rows of a tile, a multiple of the lanes
  int64_t classes;  // classes of a block
  Scratch<T> tile, slopes, soft;
  int64_t begin = 0, rows = 0, first = 0, count = 0;  // classes [first, first + count) are loaded
  Places x_at, grad_at, soft_at;
  int64_t y[kTileRows];
  alignas(64) T live[kTileRows], u_label[kTileRows], du_label[kTileRows];
  alignas(64) T late[kTileRows];  // LogitNorm's scale of each row, see OnlineSum; 1 elsewhere
  alignas(64) T w[kTileRows], mass[kTileRows], sample[kTileRows];
  V sum, sum_mass, sum_extra, sum_sample;  // of the rows emitted since the last flush

  static int64_t rows_for(int64_t classes) {
    int64_t n = kTileNumbers / classes / 16 * 16;
    return n < 32 ? 32 : (n > kTileRows ? kTileRows : n);
  }
  explicit Tile(const Context<T>& c)
      : c(c),
        map(map_of(c)),
        width(rows_for(c.p.classes)),
        classes(c.p.classes * width <= kTileNumbers ? c.p.classes : kTileNumbers / width),
        tile(classes * width),
        slopes(map.cap > 0 ? classes * width : 1),
        soft(c.p.soft ? classes * width : 1) {}

  void seek(int64_t begin_, int64_t end) {
    begin = begin_, rows = end - begin_;
    read_labels();
    bool weighted = c.weight || c.factor || c.sample;
    for (int64_t r = 0; r < width; ++r) {
      live[r] = w[r] = mass[r] = sample[r] = y[r] >= 0;
      late[r] = 1, u_label[r] = 0, du_label[r] = 0;
    }
    for (int64_t r = 0; weighted && r < rows; ++r) {
      if (y[r] < 0) continue;
      RowWeights<T> mine = c.weights(begin + r, y[r]);
      w[r] = mine.w, mass[r] = mine.mass, sample[r] = mine.s;
    }
    x_at.find(c.p.x_layout, begin, rows);
    if (c.p.soft) soft_at.find(c.p.soft_layout, begin, rows);
    if (c.p.grad) grad_at.find(c.p.grad_layout, begin, rows);
    first = count = 0;
    sum = sum_mass = sum_extra = sum_sample = V{};
  }
  // y: the label of each row, -1 where there is none that counts.
  void read_labels() {
    for (int64_t r = rows; r < width; ++r) y[r] = -1;
    if (!c.p.y) {
      for (int64_t r = 0; r < rows; ++r) y[r] = 0;
      return;
    }
    switch (c.p.y_type) {
      case Index::u8:
        return read_labels(static_cast<const uint8_t*>(c.p.y) + begin);
      case Index::i16:
        return read_labels(static_cast<const int16_t*>(c.p.y) + begin);
      case Index::i32:
        return read_labels(static_cast<const int32_t*>(c.p.y) + begin);
      case Index::i64:
        return read_labels(static_cast<const int64_t*>(c.p.y) + begin);
    }
  }
  template <class I>
  void read_labels(const I* labels) {
    for (int64_t r = 0; r < rows; ++r) y[r] = labels[r] == c.p.ignore_index ? -1 : static_cast<int64_t>(labels[r]);
  }
  void load_block(Dtype dtype, const void* base, const Layout& l, const Places& at, T* out) const {
    int64_t bytes = dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2;
    for (int64_t j = 0; j < count; ++j, out += width) {
      int64_t shift = (first + j) * l.class_stride;
      if (at.regular) {
        load_as(dtype, base, at.base + shift, at.step, rows, out);
        // The same class of the next tile: the processor cannot follow as many streams as there are classes.
        const char* next = static_cast<const char*>(base) + (at.base + shift + rows * at.step) * bytes;
        if (at.step == 1)
          for (int64_t b = 0; b < rows * bytes; b += 64) __builtin_prefetch(next + b, 0, 2);
      } else {
        for (int64_t r = 0; r < rows; ++r) load_as(dtype, base, at.at[r] + shift, 1, 1, out + r);
      }
      for (int64_t r = rows; r < width; ++r) out[r] = 0;
    }
  }

  // Loads a block of raw logits; a tile that holds all classes is loaded once.
  void load_raw(int64_t j) {
    first = j;
    count = c.p.classes - j < classes ? c.p.classes - j : classes;
    load_block(c.p.dtype, c.p.x, c.p.x_layout, x_at, tile.data);
  }
  // u = scale softcap(x) + shift, in place.
  void apply_map() {
    if (map.scale == 1 && map.cap == 0 && !map.shift) return;
    for (int64_t j = 0; j < count; ++j)
      for (int64_t r = 0; r < width; r += Lanes<T>::W) {
        V x = load(at(j, r)), u = x, du;
        if (map.cap > 0) {
          V t = tanh(x / map.cap, du);
          Int<V> masked = x == -infinity<T>();  // stays masked
          u = where(masked, x, map.cap * t);
          du = where(masked, splat<V>(1), du) * map.scale;
          store(slopes.data + j * width + r, du);
        }
        u *= map.scale;
        store(at(j, r), map.shift ? u + map.shift[first + j] : u);
      }
  }
  T* at(int64_t j, int64_t r) { return tile.data + j * width + r; }

  // Takes the labels' numbers out of the tile, so that the loops below see the other classes only.
  void lift_labels() {
    for (int64_t r = 0; r < rows; ++r) {
      if (y[r] < first || y[r] >= first + count) continue;
      T* u = at(y[r] - first, r);
      u_label[r] = *u;
      du_label[r] = map.cap > 0 ? slopes.data[u - tile.data] : map.scale * late[r];
      *u = -infinity<T>();
    }
  }
  void load_soft() {
    load_block(c.p.soft_dtype, c.p.soft, c.p.soft_layout, soft_at, soft.data);
    T eps = c.k.own[0], each = eps / c.k.classes;
    for (int64_t j = 0; j < count; ++j) {
      T w = c.weight ? c.weight[first + j] : 1;
      for (int64_t r = 0; r < width; ++r) soft.data[j * width + r] = w * ((1 - eps) * soft.data[j * width + r] + each);
    }
  }
  // The gradient's own memory for class j of the block, or null when it must go through the tile.
  T* gradient(int64_t j) const {
    bool same = c.p.dtype == (sizeof(T) == 4 ? Dtype::f32 : Dtype::f64);
    if (!same || !grad_at.regular || grad_at.step != 1) return nullptr;
    return static_cast<T*>(c.p.grad) + grad_at.base + (first + j) * c.p.grad_layout.class_stride;
  }
  PYL_INLINE void put(T* out, int64_t j, int64_t r, V v) {
    if (!out) store(at(j, r), v);
    else if (r + Lanes<T>::W <= rows) store(out + r, v);
    else if (r < rows) store_some(out + r, rows - r, v);
  }
  // Ends a block: the labels' own derivatives, and whatever is still in the tile.
  void finish_gradient(const T* label) {
    for (int64_t r = 0; label && r < rows; ++r) {
      if (y[r] < first || y[r] >= first + count) continue;
      T* out = gradient(y[r] - first);
      *(out ? out + r : at(y[r] - first, r)) = label[r];
    }
    if (count == 0 || gradient(0)) return;
    const Layout& l = c.p.grad_layout;
    const T* in = tile.data;
    for (int64_t j = 0; j < count; ++j, in += width) {
      int64_t shift = (first + j) * l.class_stride;
      if (grad_at.regular) store_as(c.p.dtype, in, rows, c.p.grad, grad_at.base + shift, grad_at.step);
      else
        for (int64_t r = 0; r < rows; ++r) store_as(c.p.dtype, in + r, 1, c.p.grad, grad_at.at[r] + shift, 1);
    }
  }
  bool whole() const { return classes == c.p.classes; }
  bool loaded() const { return whole() && count > 0; }

  template <class F>
  V gather(int64_t r, F f) const {
    V v{};
    for (int i = 0; i < Lanes<T>::W; ++i) v[i] = f(r + i);
    return v;
  }
  // Rows r.. of an array over all rows of the problem, 0 past the tile's end.
  V rows_of(const T* p, int64_t r) const { return r < rows ? beside(p + begin, r, rows) : V{}; }
  void rows_to(T* p, int64_t r, V v) const {
    if (r + Lanes<T>::W <= rows) store(p + begin + r, v);
    else if (r < rows) store_some(p + begin + r, rows - r, v);
  }
  V saved(int i, int64_t r) const { return rows_of(c.stats + i * c.p.rows, r); }
  void save(int i, int64_t r, V v) const { rows_to(c.stats + i * c.p.rows, r, where(load(live + r) != 0, v, V{})); }

  V upstream(int64_t r) const {
    V g = c.p.reduction == Reduction::none ? rows_of(static_cast<const T*>(c.p.grad_out), r) : splat<V>(static_cast<T>(c.base));
    return where(load(live + r) != 0, g * load(sample + r), V{});
  }
  // Lanes whose row the reduction counts.
  Int<V> counted(int64_t r, V loss) const {
    Int<V> on = load(live + r) != 0;
    return c.p.reduction == Reduction::above_zero ? on & ~(load(sample + r) * loss <= 0) : on;
  }
  void emit(int64_t r, V loss, V extra) {
    Int<V> on = counted(r, loss + extra);
    V s = load(sample + r);
    if (c.p.reduction == Reduction::none) return rows_to(c.out, r, where(on, s * (loss + extra), V{}));
    sum += where(on, s * loss, V{});
    sum_extra += where(on, s * extra, V{});
    sum_mass += where(on, s * load(mass + r), V{});
    sum_sample += where(on, s, V{});
  }
  void flush(Partial& sums) const { sums.add({sum_of(sum), sum_of(sum_mass), sum_of(sum_extra), sum_of(sum_sample)}); }
};

// Sums over the classes of a tile in short runs: fewer roundings than one long chain.
template <class V, class F>
PYL_INLINE V sum_over(int64_t count, F f) {
  V total{};
  for (int64_t j = 0; j < count;) {
    V run{};
    for (int64_t end = j + 32 < count ? j + 32 : count; j < end; ++j) run += f(j);
    total += run;
  }
  return total;
}

// ---- softmax ----

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
        for (int64_t r = 0; r < width; r += W) {
          V m = load(base + r), gain = load(slope + r), p = load(pull + r), s = load(t.late + r), d = load(drag + r);
          Int<V> live = load(on + r) != 0;
          if (t.map.cap == 0) gain *= s * t.map.scale, p *= t.map.scale;
          for (int64_t j = 0; j < t.count; ++j) {
            T* out = t.gradient(j);
            V u = load(t.at(j, r)), g = gain * exp_below(u * s - m);
            if (weights) {
              V q = c.p.soft ? load(t.soft.data + j * width + r) : splat<V>(c.weight ? c.weight[t.first + j] : T(1));
              g -= p * q;
            }
            if (t.map.cap > 0) g *= load(t.slopes.data + j * width + r);
            if (norm) g -= where(u == -infinity<T>(), V{}, d * u);
            t.put(out, j, r, where(live, g, V{}));
          }
        }
        t.finish_gradient(c.p.soft ? nullptr : label);
      }
    }
  });
}

// ---- entropy ----

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
  constexpr int W = Lanes<T>::W;
  int64_t width = Tile<T>::rows_for(c.p.classes);
  for_chunks(c.p, width * 16, nullptr, [&](int64_t chunk, int64_t chunk_end, Partial&) {
    Tile<T> t(c);
    for (int64_t begin = chunk; begin < chunk_end; begin += width) {
      t.seek(begin, begin + width < chunk_end ? begin + width : chunk_end);
      for (int64_t block = 0; block < c.p.classes; block += t.classes) {
        t.load_raw(block);
        for (int64_t r = 0; r < width; r += W) {
          V m = t.saved(0, r), d = t.saved(1, r), mu = t.saved(2, r), slope = t.saved(3, r);
          V factor = -slope * t.upstream(r) / d;
          factor = where(d == 0, splat<V>(static_cast<T>(__builtin_nan(""))), factor);  // every class masked
          Int<V> on = (load(t.live + r) != 0) & (slope != 0);
          for (int64_t j = 0; j < t.count; ++j) {
            T* out = t.gradient(j);
            V u = load(t.at(j, r)), g = u - m;
            g = factor * where(u == -infinity<T>(), V{}, exp_below(g) * (g - mu));
            t.put(out, j, r, where(on, g, V{}));
          }
        }
        t.finish_gradient(nullptr);
      }
    }
  });
}

// ---- margin ----

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
          for (int64_t r = 0; r < width; r += W) {
            V x_label = load(t.u_label + r), mu = errors.margin(r), tr = t.saved(0, r), f = load(factor + r);
            Int<V> bad = f != f;
            for (int64_t j = 0; j < t.count; ++j) {
              T* out = t.gradient(j);
              V raw = errors.raw(j, r, x_label, mu), e = errors.h.template value<power.value>(raw);
              V g = where(e >= tr, f * errors.h.template slope<power.value>(raw), V{});
              if constexpr (power.value != linear) g = where(f == 0, V{}, g);
              t.put(out, j, r, where(bad, f, g));
            }
          }
        });
        t.finish_gradient(label);
      }
    }
  });
}

}  // namespace PYL_ISA

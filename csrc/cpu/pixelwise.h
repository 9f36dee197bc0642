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
  // The gradient's own memory for the block, or null when it must go through the tile.
  T* gradient() const {
    bool same = c.as_it_is();
    if (!same || !grad_at.regular || grad_at.step != 1) return nullptr;
    return static_cast<T*>(c.p.grad) + grad_at.base + first * c.p.grad_layout.class_stride;
  }
  // Writes the gradient of the block: rows_from(r)(j) is that of class j for the rows r.., `label` that of each row's label.
  // Two vectors of rows at a time: whole cache lines go out.
  template <class F>
  void write_gradient(F rows_from, const T* label) {
    constexpr int W = Lanes<T>::W;
    T* out = gradient();
    int64_t stride = out ? c.p.grad_layout.class_stride : width, r = 0;
    for (; out && r + 2 * W <= rows; r += 2 * W) {
      auto left = rows_from(r), right = rows_from(r + W);
      T* p = out + r;
      for (int64_t j = 0; j < count; ++j, p += stride) {
        V a = left(j), b = right(j);
        store(p, a);
        store(p + W, b);
      }
    }
    for (; r < width; r += W) {
      auto here = rows_from(r);
      for (int64_t j = 0; j < count; ++j) {
        V v = here(j);
        if (!out) store(at(j, r), v);
        else if (r + W <= rows) store(out + j * stride + r, v);
        else if (r < rows) store_some(out + j * stride + r, rows - r, v);
      }
    }
    T* base = out ? out : tile.data;
    for (int64_t i = 0; label && i < rows; ++i)
      if (y[i] >= first && y[i] < first + count) base[(y[i] - first) * stride + i] = label[i];
    if (!out) store_tile();
  }
  void store_tile() const {
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

}  // namespace PYL_ISA

// Driver for short rows and for (N, C, *): lanes run across rows, the loop runs over classes.
// A tile is a run of rows, copied (converted, mapped) to [class][row] in the cache. Memory is read and written one class of a
// tile after the other: planes of a power of two share cache sets, so that walking across the classes in memory would throw
// lines out before their neighbours are used. All other passes work on the tile.
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

// Rows [begin, begin + rows) of the problem: where they lie, their labels and weights, their logits and gradient.
template <class T>
struct Tile {
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::I I;
  static constexpr int W = Lanes<T>::W;
  const Context<T>& c;
  Map<T> map;
  int64_t width, stride;  // rows of a tile, a multiple of the lanes; from class to class, not a divisor of a page
  Scratch<T> tile, kept, slopes, soft_;  // [class][row]: logits; exponentials; du/dx under a softcap; targets
  T* exponentials;                       // kept, or the tile itself when no pass needs the logits after them
  int64_t begin = 0, rows = 0, padded = 0, classes_a_vector = 0;  // the last: to fetch
  T* grad_first;
  int64_t grad_stride;  // from class to class
  bool grad_in_place;
  Places x_at, grad_at, soft_at;
  alignas(64) typename Lanes<T>::IntScalar y[kTileRows];  // -1 where there is no label that counts
  alignas(64) T live[kTileRows], w[kTileRows], mass[kTileRows], sample[kTileRows];
  V sum, sum_mass, sum_extra, sum_sample;  // of the rows emitted since the last flush

  static int64_t rows_for(int64_t classes) {
    int64_t n = kTileNumbers / classes / 16 * 16;
    return n < 16 ? 16 : (n > kTileRows ? kTileRows : n);
  }
  static int64_t chunk_rows(int64_t classes) { return rows_for(classes) * 16; }

  Tile(const Context<T>& c, bool logits_stay)
      : c(c),
        map(c.facts.family == Family::select ? Map<T>{1, 0, nullptr} : softmax_map(c)),  // ranks are those of the logits
        width(rows_for(c.p.classes)),
        stride(width + 16),
        tile(c.p.classes * stride),
        kept(logits_stay ? c.p.classes * stride : 1),
        slopes(map.cap > 0 ? c.p.classes * stride : 1),
        soft_(c.p.soft ? c.p.classes * stride : 1),
        exponentials(logits_stay ? kept.data : tile.data) {}

  // Calls f() on every tile of [first, last).
  template <class F>
  void each(int64_t first, int64_t last, Partial* sums, F f) {
    for (int64_t at = first; at < last; at += width) {
      seek(at, at + width < last ? at + width : last);
      f();
      if (grad_first && !grad_in_place) store_gradient();
      if (sums) sums->add({sum_of(sum), sum_of(sum_mass), sum_of(sum_extra), sum_of(sum_sample), -1});
    }
  }
  void seek(int64_t from, int64_t to) {
    begin = from, rows = to - from, padded = (rows + W - 1) / W * W;
    classes_a_vector = (c.p.classes * W + padded - 1) / padded;
    for (int64_t r = 0; r < padded; ++r) y[r] = r < rows ? 0 : -1;
    if (c.p.y)
      with_labels(c.p, [&](auto labels) {
        for (int64_t r = 0; r < rows; ++r) {
          auto label = labels[begin + r];
          y[r] = label == c.p.ignore_index ? -1 : static_cast<typename Lanes<T>::IntScalar>(label);
        }
        for (int64_t r = 0; r < rows; r += 64 / sizeof *labels) fetch(labels + begin + rows + r);  // of the next tile
      });
    for (int64_t r = 0; r < padded; ++r) live[r] = w[r] = mass[r] = sample[r] = y[r] >= 0;
    if (c.weight || c.factor || c.sample)
      for (int64_t r = 0; r < rows; ++r) {
        if (y[r] < 0) continue;
        RowWeights<T> mine = c.weights(begin + r, y[r]);
        w[r] = mine.w, mass[r] = mine.mass, sample[r] = mine.s;
      }
    sum = sum_mass = sum_extra = sum_sample = V{};
    grad_first = nullptr;
    if (!c.p.grad) return;
    grad_at.find(c.p.grad_layout, begin, rows);
    grad_in_place = usable(grad_at);
    grad_first = grad_in_place ? static_cast<T*>(c.p.grad) + grad_at.base : tile.data;
    grad_stride = grad_in_place ? c.p.grad_layout.class_stride : stride;
  }
  bool usable(const Places& at) const { return c.as_it_is() && at.regular && at.step == 1 && rows % W == 0; }

  // Makes the (mapped) logits of the tile available to u().
  void read() {
    read_raw();
    if (!map.identity()) apply_map();
  }
  void read_raw() {
    x_at.find(c.p.x_layout, begin, rows);
    copy(c.p.dtype, c.p.x, c.p.x_layout, x_at, tile.data);
  }
  void copy(Dtype dtype, const void* base, const Layout& l, const Places& at, T* out) const {
    for (int64_t j = 0; j < c.p.classes; ++j, out += stride) {
      int64_t shift = j * l.class_stride;
      if (at.regular) {
        load_as(dtype, base, at.base + shift, at.step, rows, out);
      } else {
        for (int64_t r = 0; r < rows; ++r) load_as(dtype, base, at.at[r] + shift, 1, 1, out + r);
      }
      for (int64_t r = rows; r < padded; ++r) out[r] = 0;
    }
  }
  // Fetches a part of the next tile while this one is computed on. Called for every vector of rows.
  PYL_INLINE void fetch_next(int64_t r) const {
    if (!x_at.regular || x_at.step != 1) return;
    int64_t bytes = c.p.dtype == Dtype::f64 ? 8 : c.p.dtype == Dtype::f32 ? 4 : 2, first = r / W * classes_a_vector;
    int64_t last = first + classes_a_vector < c.p.classes ? first + classes_a_vector : c.p.classes;
    const char* next = static_cast<const char*>(c.p.x) + (x_at.base + rows) * bytes;
    for (int64_t j = first; j < last; ++j)
      for (int64_t b = 0; b < rows * bytes; b += 64) fetch(next + j * c.p.x_layout.class_stride * bytes + b);
  }
  // u = scale softcap(x) + shift, in place.
  void apply_map() {
    for (int64_t j = 0; j < c.p.classes; ++j)
      for (int64_t r = 0; r < padded; r += W) {
        T* at = tile.data + j * stride + r;
        V du, u = map.unshifted(load(at), du);
        if (map.cap > 0) store(slopes.data + j * stride + r, du);
        store(at, map.shift ? u + map.shift[j] : u);
      }
  }
  // The targets' weights q_j = w_j (hit t_j + each), available to soft().
  void read_soft() {
    soft_at.find(c.p.soft_layout, begin, rows);
    copy(c.p.soft_dtype, c.p.soft, c.p.soft_layout, soft_at, soft_.data);
    T hit = c.softmax.hit, each = c.softmax.each;
    for (int64_t j = 0; j < c.p.classes; ++j) {
      T w = c.weight ? c.weight[j] : 1;
      for (int64_t r = 0; r < padded; ++r) soft_.data[j * stride + r] = w * (hit * soft_.data[j * stride + r] + each);
    }
  }
  void store_gradient() const {
    const Layout& l = c.p.grad_layout;
    const T* in = tile.data;
    for (int64_t j = 0; j < c.p.classes; ++j, in += stride) {
      int64_t shift = j * l.class_stride;
      if (grad_at.regular) store_as(c.p.dtype, in, rows, c.p.grad, grad_at.base + shift, grad_at.step, c.streams());
      else
        for (int64_t r = 0; r < rows; ++r) store_as(c.p.dtype, in + r, 1, c.p.grad, grad_at.at[r] + shift, 1);
    }
  }

  // The numbers of class j for the rows r.. of the tile
  PYL_INLINE V u(int64_t j, int64_t r) const { return load(tile.data + j * stride + r); }
  PYL_INLINE V e(int64_t j, int64_t r) const { return load(exponentials + j * stride + r); }
  PYL_INLINE I labels(int64_t r) const {
    I v;
    __builtin_memcpy(&v, y + r, sizeof v);
    return v;
  }
  PYL_INLINE V du(int64_t j, int64_t r) const { return load(slopes.data + j * stride + r); }
  PYL_INLINE V soft(int64_t j, int64_t r) const { return load(soft_.data + j * stride + r); }
  // f(i, label) of the rows r.. that have a label, 0 elsewhere
  template <class F>
  PYL_INLINE V gather(int64_t r, F f) const {
    V v;
    for (int i = 0; i < W; ++i) v[i] = f(r + i, y[r + i] < 0 ? 0 : y[r + i]);
    return where(load(live + r) != 0, v, V{});
  }
  V u_label(int64_t r) const {
    return gather(r, [&](int64_t i, int64_t label) { return tile.data[label * stride + i]; });
  }
  // Writes f(j, r), the gradient of class j for the rows r..; `label` holds what goes to the labels.
  template <class F>
  PYL_INLINE void write(F f) const {
    T* out = grad_first;
    int64_t classes = c.p.classes, end = padded, step = grad_stride;
    bool past = grad_in_place && c.streams() && is_aligned(out) && step % W == 0;
    for (int64_t j = 0; j < classes; ++j, out += step) {
      if (past)
        for (int64_t r = 0; r < end; r += W) stream(out + r, f(j, r));
      else
        for (int64_t r = 0; r < end; r += W) store(out + r, f(j, r));
    }
  }
  template <class F>
  PYL_INLINE void write(const T* label, F f) const {
    write([&](int64_t j, int64_t r) {
      return where(labels(r) == static_cast<typename Lanes<T>::IntScalar>(j), load(label + r), f(j, r));
    });
  }

  // Rows r.. of an array over all rows of the problem, 0 past the tile's end.
  V rows_of(const T* p, int64_t r) const { return beside(p + begin, r, rows); }
  void rows_to(T* p, int64_t r, V v) const {
    if (r + W <= rows) store(p + begin + r, v);
    else store_some(p + begin + r, rows - r, v);
  }
  V saved(int i, int64_t r) const { return rows_of(c.stats + i * c.p.rows, r); }
  void save(int i, int64_t r, V v) const { rows_to(c.stats + i * c.p.rows, r, where(load(live + r) != 0, v, V{})); }

  // The sum of a row's exponentials; with the row's loss, it also says whether the row counts.
  void save_sum(int i, int64_t r, V sum, V loss) const { save(i, r, where(counted(r, loss), sum, splat<V>(T(kLeftOut)))); }

  V upstream(int64_t r) const {
    V g = c.p.reduction == Reduction::none ? rows_of(static_cast<const T*>(c.p.grad_out), r) : splat<V>(static_cast<T>(c.base));
    return where(load(live + r) != 0, g * load(sample + r), V{});
  }
  I live_unless(int64_t r, I left_out) const { return (load(live + r) != 0) & ~left_out; }
  // Lanes whose row the reduction counts.
  I counted(int64_t r, V loss) const {
    I on = load(live + r) != 0;
    return c.p.reduction == Reduction::above_zero ? on & ~(load(sample + r) * loss <= 0) : on;
  }
  void emit(int64_t r, V loss, V extra) {
    I on = counted(r, loss + extra);
    V s = load(sample + r);
    if (c.p.reduction == Reduction::none) return rows_to(c.out, r, where(on, weighted(s, loss + extra), V{}));
    sum += where(on, weighted(s, loss), V{});
    sum_extra += where(on, weighted(s, extra), V{});
    sum_mass += where(on, s * load(mass + r), V{});
    sum_sample += where(on, s, V{});
  }
};

// Calls f(tile) on every tile of the problem, in chunks on all threads.
template <class T, class F>
void over_tiles(const Context<T>& c, bool logits_stay, Partial* total, F f) {
  auto make = [&] { return Tile<T>(c, logits_stay); };
  for_chunks(c.p, Tile<T>::chunk_rows(c.p.classes), total, make, [&](Tile<T>& t, int64_t begin, int64_t end, Partial& sums) {
    t.each(begin, end, total ? &sums : nullptr, [&] { f(t); });
  });
}

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

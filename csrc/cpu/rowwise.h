// Driver for rows of many classes: lanes run across the classes of one row.
// A row is read in blocks that stay in the first-level cache between the passes over them; float32 and float64 rows that need
// no map are read in place. The label's own logit is put to -inf for the loops, so that "the other classes" needs no mask.
#pragma once
#include "cpu/driver.h"

namespace PYL_ISA {

constexpr int64_t kBlock = 2048;

// Calls f(vector, index, accumulator number) over n numbers; lanes past the end hold `fill`. Four accumulators hide latency.
template <class T, class F>
PYL_INLINE void over_lanes(const T* p, int64_t n, T fill, F f) {
  constexpr int W = Lanes<T>::W;
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    f(load(p + i), i, 0);
    f(load(p + i + W), i + W, 1);
    f(load(p + i + 2 * W), i + 2 * W, 2);
    f(load(p + i + 3 * W), i + 3 * W, 3);
  }
  for (; i + W <= n; i += W) f(load(p + i), i, 0);
  if (i < n) f(load_some(p + i, n - i, fill), i, 1);
}
// Numbers i.. of a (C) vector beside a block of n.
template <class T>
PYL_INLINE typename Lanes<T>::V beside(const T* p, int64_t i, int64_t n) {
  return i + Lanes<T>::W <= n ? load(p + i) : load_some(p + i, n - i, T(0));
}

// Writes f(index) to n numbers, past the caches if `past`.
template <class T, class F>
PYL_INLINE void write_lanes(T* out, int64_t n, F f, bool past = false) {
  constexpr int W = Lanes<T>::W;
  int64_t i = 0;
  if (past && is_aligned(out))
    for (; i + W <= n; i += W) stream(out + i, f(i));
  for (; i + W <= n; i += W) store(out + i, f(i));
  if (i < n) store_some(out + i, n - i, f(i));
}
// Writes f(vector, index) of n numbers.
template <class T, class F>
PYL_INLINE void map_lanes(const T* p, int64_t n, T* out, F f, bool past = false) {
  write_lanes(out, n, [&](int64_t i) { return f(beside(p, i, n), i); }, past);
}
// memcpy of a row's length starts slowly: a quarter of HEM at 1000 classes.
template <class T>
PYL_INLINE void copy_lanes(const T* p, int64_t n, T* out) {
  map_lanes(p, n, out, [](typename Lanes<T>::V v, int64_t) { return v; });
}
// u = scale softcap(x) + shift
template <class T>
struct Map {
  T scale, cap;
  const T* shift;
  bool identity() const { return scale == 1 && cap == 0 && !shift; }

  // u before the shift; `du` takes du/dx.
  template <class V>
  PYL_INLINE V unshifted(V x, V& du) const {
    du = splat<V>(scale);
    if (cap == 0) return x * scale;
    V t = tanh(x / cap, du);
    Int<V> masked = x == -infinity<T>();  // stays masked
    du = where(masked, splat<V>(1), du) * scale;
    return where(masked, x, cap * t) * scale;
  }
  // In place on classes j.. ; `slope`, if given, takes du/dx.
  void apply(T* x, int64_t j, int64_t n, T* slope) const {
    typedef typename Lanes<T>::V V;
    map_lanes(x, n, x, [&](V v, int64_t i) {
      V du, u = unshifted(v, du);
      if (slope) {
        if (i + Lanes<T>::W <= n) store(slope + i, du);
        else store_some(slope + i, n - i, du);
      }
      return shift ? u + beside(shift + j, i, n) : u;
    });
  }
};
// Of the softmax formula that the loss is, or that is beside it.
template <class T>
Map<T> softmax_map(const Context<T>& c) {
  return {c.softmax.scale, c.softmax.cap, c.softmax.shifted ? c.shift : nullptr};
}

// One row's logits, block by block.
template <class T>
struct RowReader {
  const Context<T>& c;
  int64_t at, ready;    // where the row lies; classes of it that are converted
  int64_t others = -1;  // first class of the block that the buffer holds without the label
  bool in_place, keeps, top_known = false;
  T top;           // of the last block, where its conversion saw it
  Scratch<T> row;  // converted, for drivers that walk along it more than once
  alignas(64) T buffer[kBlock];

  explicit RowReader(const Context<T>& c, bool again = false)
      : c(c),
        in_place(c.p.x_layout.class_stride == 1 && c.as_it_is()),
        keeps(again && !in_place),
        row(keeps ? c.p.classes + Lanes<T>::W : 1) {}
  void seek(int64_t r) { at = c.p.x_layout.offset(r), ready = 0, others = -1; }
  const T* raw(int64_t j, int64_t n) {
    int64_t stride = c.p.x_layout.class_stride;
    if (in_place) return static_cast<const T*>(c.p.x) + at + j;
    bool next = keeps && j == ready && n > 1;  // one number is a look at the label
    if (keeps && j + n <= ready) return row.data + j;
    T* out = next ? row.data + j : buffer;
    if (!next) others = -1;
    top_known = false;
    if constexpr (sizeof(T) == 4) {
      if (c.p.dtype == Dtype::bf16 && stride == 1 && n % Lanes<T>::W == 0) {
        top = load_with_top<BF16>(static_cast<const uint16_t*>(c.p.x) + at + j, n, out);
        top_known = true;
      }
    }
    if (!top_known) load_as(c.p.dtype, c.p.x, at + j * stride, stride, n, out);
    if (next) ready += n;
    return out;
  }
  const T* mapped(const Map<T>& map, int64_t j, int64_t n, T* slope = nullptr) {
    const T* x = raw(j, n);
    if (map.identity()) return x;
    top_known = false, others = -1;
    if (x != buffer) copy_lanes(x, n, buffer);
    map.apply(buffer, j, n, slope);
    return buffer;
  }
  // The block that the label is in with -inf in its place; a second pass over a plain row finds it as the first left it.
  const T* without_label(const Map<T>& map, int64_t j, int64_t n, int64_t y) {
    if (others != j || !map.identity()) {
      const T* u = mapped(map, j, n);
      if (u != buffer) copy_lanes(u, n, buffer);
      buffer[y - j] = -infinity<T>();
      others = j;
    }
    top_known = false;
    return buffer;
  }
};

// Calls f(first class, count) on the blocks of [begin, end).
template <class F>
PYL_INLINE void over_blocks(int64_t begin, int64_t end, F f) {
  for (int64_t j = begin; j < end; j += kBlock) f(j, end - j < kBlock ? end - j : kBlock);
}
// Calls f(numbers, first class, count) on the blocks of the seeked row, with -inf in the place of class y.
template <class T, class F>
PYL_INLINE void over_others(RowReader<T>& x, const Map<T>& map, int64_t y, F f) {
  over_blocks(0, x.c.p.classes, [&](int64_t j, int64_t n) {
    bool here = y >= j && y < j + n;
    f(here ? x.without_label(map, j, n, y) : x.mapped(map, j, n), j, n);
  });
}

template <class T>
struct RowGradient {
  const Context<T>& c;
  int64_t at = 0;
  bool in_place, streams, past;  // is it written past the caches: by `done`, by who writes to a block
  alignas(64) T buffer[kBlock];

  explicit RowGradient(const Context<T>& c)
      : c(c),
        in_place(c.p.grad_layout.class_stride == 1 && c.as_it_is()),
        streams(c.p.grad_layout.class_stride == 1 && c.streams()),
        past(in_place && streams) {}
  void seek(int64_t row) { at = c.p.grad_layout.offset(row); }
  T* block(int64_t j) { return in_place ? static_cast<T*>(c.p.grad) + at + j : buffer; }
  void done(int64_t j, int64_t n) {
    int64_t stride = c.p.grad_layout.class_stride;
    if (!in_place) store_as(c.p.dtype, buffer, n, c.p.grad, at + j * stride, stride, streams);
  }
  // Writes f(vector, index) of n numbers to the classes j.. ; float32 numbers go to bfloat16 without a stop in a buffer.
  template <class F>
  PYL_INLINE void map(int64_t j, const T* p, int64_t n, F f) {
    if constexpr (sizeof(T) == 4) {
      uint16_t* out = static_cast<uint16_t*>(c.p.grad) + at + j;
      if (c.p.dtype == Dtype::bf16 && streams && is_aligned(out) && n % (2 * Lanes<T>::W) == 0) {
        constexpr int W = Lanes<T>::W;
        for (int64_t i = 0; i < n; i += 2 * W)
          stream(out + i, both(BF16::halves(f(load(p + i), i)), BF16::halves(f(load(p + i + W), i + W))));
        return;
      }
    }
    map_lanes(p, n, block(j), f, past);
    done(j, n);
  }
  // Writes `value` to the classes whose bit is set, 0 to the others.
  void choose(const uint8_t* bits, T value) {
    typedef typename Lanes<T>::V V;
    bool halves = c.p.dtype == Dtype::bf16 || c.p.dtype == Dtype::f16;
    if (sizeof(T) == 4 && halves && c.p.grad_layout.class_stride == 1) {
      vf x = splat<vf>(static_cast<float>(value));
      vh half = c.p.dtype == Dtype::bf16 ? BF16::halves(x) : F16::halves(x);
      return store_chosen(bits, c.p.classes, half[0], static_cast<uint16_t*>(c.p.grad) + at, streams);
    }
    over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
      auto chosen = [&](int64_t i) { return where(lanes_of<T>(get_bits<T>(bits + j / 8, i)), splat<V>(value), V{}); };
      write_lanes(block(j), n, chosen, past);
      done(j, n);
    });
  }
  void fill(T value) {
    over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
      T* out = block(j);
      for (int64_t i = 0; i < n; ++i) out[i] = value;
      done(j, n);
    });
  }
  void put(int64_t j, T value) {
    *block(j) = value;
    done(j, 1);
  }
};

inline int64_t rows_per_chunk(const Problem& p) {
  int64_t n = 65536 / p.classes;
  return n < 1 ? 1 : n;
}

}  // namespace PYL_ISA

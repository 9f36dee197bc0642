// The margin family by rows: errors and their mean, then the kept ones; the gradient in one pass.
#pragma once
#include "cpu/rowwise.h"

namespace PYL_ISA {

// (x - x_y) + mu, where a masked class is never an error
template <class V>
PYL_INLINE V raw_error(V x, Scalar<V> x_label, V mu) {
  return where(x == -infinity<Scalar<V>>(), x, (x - x_label) + mu);
}

// The smallest T that is not below `mean`: e >= it exactly when e >= mean.
template <class T>
PYL_INLINE T not_below(double mean) {
  T t = static_cast<T>(mean);
  if (static_cast<double>(t) >= mean || mean != mean) return t;
  if constexpr (sizeof(T) == 4) return __builtin_nextafterf(t, __builtin_inff());
  return t;
}

template <class T>
struct MarginSums {
  double errors = 0, slopes = 0;
  int64_t count = 0;
  T max = 0;
  bool nan = false;
};

template <class T, class E>
void block_errors(const E& h, const T* x, int64_t n, T x_label, T mu, const T* shift, MarginSums<T>& sums) {
  typedef typename Lanes<T>::V V;
  V s[4] = {}, m[4] = {};
  Int<V> nan[4] = {};
  over_lanes(x, n, -infinity<T>(), [&](V v, int64_t i, int k) {
    V raw = raw_error(v, x_label, shift ? beside(shift, i, n) : splat<V>(mu));
    V e = h.value(raw);
    s[k] += e;
    m[k] = larger(e, m[k]);
    nan[k] |= raw != raw;
  });
  sums.errors += sum_of((s[0] + s[1]) + (s[2] + s[3]));
  sums.max = larger(max_of(larger(larger(m[0], m[1]), larger(m[2], m[3]))), sums.max);
  sums.nan |= any((nan[0] | nan[1]) | (nan[2] | nan[3]));
}

// `bits`, if given, takes which classes are kept. The row `next` numbers on is fetched meanwhile.
template <class T, class E>
void block_select(const E& h, const T* x, int64_t n, T x_label, T mu, const T* shift, T t, MarginSums<T>& sums, uint8_t* bits,
                  int64_t next) {
  typedef typename Lanes<T>::V V;
  V s[4] = {}, d[4] = {};
  Int<V> count[4] = {}, nan[4] = {};
  over_lanes(x, n, -infinity<T>(), [&](V v, int64_t i, int k) {
    fetch(x + next + i);
    V raw = raw_error(v, x_label, shift ? beside(shift, i, n) : splat<V>(mu));
    V e = h.value(raw);
    Int<V> kept = e >= t;
    s[k] += where(kept, e, V{});
    if constexpr (!E::flat) d[k] += where(kept, h.slope(raw), V{});
    count[k] -= kept;
    nan[k] |= raw != raw;
    if (bits) put_bits<T>(bits, i, bits_of<T>(kept));
  });
  sums.errors += sum_of((s[0] + s[1]) + (s[2] + s[3]));
  int64_t kept = static_cast<int64_t>(sum_of(__builtin_convertvector((count[0] + count[1]) + (count[2] + count[3]), V)));
  sums.count += kept;
  sums.slopes += E::flat ? static_cast<double>(kept) : sum_of((d[0] + d[1]) + (d[2] + d[3]));
  sums.nan |= any((nan[0] | nan[1]) | (nan[2] | nan[3]));
}

// The smallest threshold: every positive error.
template <class T>
constexpr T above_nothing() {
  return Lanes<T>::smallest;
}

// Bytes of a row's bits, one a class: with them the gradient of flat errors needs no second look at the logits. Rows start at
// whole bytes, and vectors of 16 lanes write two.
inline int64_t bytes_of_bits(int64_t classes) { return (classes + 15) / 16 * 2; }

// Calls f(the formula, its errors) of the loss.
template <class T, class F>
void with_errors(const Context<T>& c, F f) {
  visit_margin<void>(c.p.loss, [&](auto formula) {
    formula.with_errors(own_of<decltype(formula)>(c.numbers), [&](const auto& h) { f(formula, h); });
  });
}

template <class F, class E, class T>
void margin_forward(F, const E& h, const Context<T>& c, Partial& total) {
  typedef typename Lanes<T>::V V;
  MarginView<T> view = F::view(own_of<F>(c.numbers));
  Map<T> plain{1, 0, nullptr};
  bool keep = c.stats && E::flat;
  auto make = [&] { return RowReader<T>(c, view.threshold); };
  for_chunks(c.p, rows_per_chunk(c.p), &total, make, [&](RowReader<T>& x, int64_t begin, int64_t end, Partial& partial) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t y = c.label(row);
      if (y < 0) {
        c.emit_ignored(row);
        continue;
      }
      x.seek(row);
      T x_label = *x.raw(y, 1), t = above_nothing<T>(), mu = view.of_label && c.shift ? c.shift[y] : view.margin;
      const T* shift = view.of_label ? nullptr : c.shift;
      uint8_t* bits = keep ? c.bits() + row * bytes_of_bits(c.p.classes) : nullptr;
      MarginSums<T> kept;
      bool none = false;
      if (view.threshold) {
        MarginSums<T> all;
        over_others(x, plain, y, [&](const T* v, int64_t j, int64_t n) {
          block_errors(h, v, n, x_label, mu, shift ? shift + j : nullptr, all);
        });
        kept.nan = all.nan;
        none = all.max == 0;
        T mean = not_below<T>(all.errors / static_cast<double>(c.p.classes));
        t = mean < all.max ? mean : all.max;  // rounding may lift the mean over every error
      }
      if (!none)
        over_others(x, plain, y, [&](const T* v, int64_t j, int64_t n) {
          block_select(h, v, n, x_label, mu, shift ? shift + j : nullptr, t, kept, bits ? bits + j / 8 : nullptr, c.p.classes);
        });
      none = none || kept.count == 0;
      // A row with a NaN, or with every class masked, has no margin to speak of.
      bool nan = kept.nan || x_label != x_label || (none && x_label == -infinity<T>());
      T bad = nan ? static_cast<T>(__builtin_nan("")) : 0;
      RowWeights<T> w = c.weights(row, y);
      MarginRow<V> r{splat<V>(static_cast<T>(kept.errors) + bad), splat<V>(static_cast<T>(kept.count)), splat<V>(w.w)};
      MarginResult<V> result = F::row(own_of<F>(c.numbers), c.k, r);
      c.emit(row, w, result.loss[0], 0, partial);
      if (!c.stats) continue;
      c.stat(0, row) = t;
      c.stat(1, row) = none ? bad : result.factor[0] + bad;
      c.stat(2, row) = static_cast<T>(kept.slopes);
    }
  });
}

template <class T>
void margin_forward(const Context<T>& c, Partial& total) {
  with_errors(c, [&](auto formula, const auto& h) { margin_forward(formula, h, c, total); });
}

template <class F, class E, class T>
void margin_backward(F, const E& h, const Context<T>& c) {
  typedef typename Lanes<T>::V V;
  MarginView<T> view = F::view(own_of<F>(c.numbers));
  struct Rows {
    RowReader<T> x;
    RowGradient<T> grad;
  };
  auto make = [&] { return Rows{RowReader<T>(c), RowGradient<T>(c)}; };
  for_chunks(c.p, rows_per_chunk(c.p), nullptr, make, [&](Rows& rows, int64_t begin, int64_t end, Partial&) {
    RowReader<T>& x = rows.x;
    RowGradient<T>& grad = rows.grad;
    for (int64_t row = begin; row < end; ++row) {
      int64_t y = c.label(row);
      grad.seek(row);
      RowWeights<T> w = y < 0 ? RowWeights<T>{0, 0, 0} : c.weights(row, y);
      T factor = y < 0 ? 0 : c.stat(1, row);
      if (factor == 0 || factor != factor || !c.counted(w, factor)) {  // nothing to push, or nothing to say
        grad.fill(factor != factor ? factor : 0);
        continue;
      }
      factor *= c.upstream(row, w);
      if (E::flat) {
        const uint8_t* bits = c.bits() + row * bytes_of_bits(c.p.classes);
        grad.choose(bits, factor);
        grad.put(y, -factor * c.stat(2, row));
        continue;
      }
      x.seek(row);
      T x_label = *x.raw(y, 1), t = c.stat(0, row), mu = view.of_label && c.shift ? c.shift[y] : view.margin;
      const T* shift = view.of_label ? nullptr : c.shift;
      over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
        grad.map(j, x.raw(j, n), n, [&](V v, int64_t i) {
          V raw = raw_error(v, x_label, shift ? beside(shift + j, i, n) : splat<V>(mu));
          V e = h.value(raw);
          return where(e >= t, factor * h.slope(raw), V{});
        });
      });
      grad.put(y, -factor * c.stat(2, row));
    }
  });
}
template <class T>
void margin_backward(const Context<T>& c) {
  with_errors(c, [&](auto formula, const auto& h) { margin_backward(formula, h, c); });
}

}  // namespace PYL_ISA

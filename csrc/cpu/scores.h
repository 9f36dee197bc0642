// Confidence scores, by rows and by vectors of rows. With m the largest logit and rest = sum of e^(x_j - m) over the others:
//   msp = 1 / (1 + rest)      neg_entropy = sum p_j (x_j - m) - log(1 + rest)      energy = m + T log(1 + rest at T)
//   gen = -sum exp(gamma (log p + log(1 - p))),      log(1 - p) = log rest - log(1 + rest) for the largest class.
// What stands beside the largest class is summed by itself: its 1 would swallow the rest, and gamma magnifies that.
#pragma once
#include "cpu/pixelwise_softmax.h"

namespace PYL_ISA {

// Below, float32 exponentials relative to the largest logit lose digits: the rest is summed again, relative to its own largest.
template <class T>
constexpr T faint() {
  return sizeof(T) == 4 ? T(1e-30) : T(1e-300);
}

// What a row, or a vector of rows, is scored from.
template <class V>
struct ScoreSums {
  V m, rest, rest_hot, moment, log_rest;  // rest_hot: at the energy's temperature; moment: of (x - m) in rest
};

template <class V>
struct ScoreRow {
  V msp, energy, neg_entropy, gen_top;
  V log_all;  // log(1 + rest)
};

template <class V>
PYL_INLINE ScoreRow<V> score(const Scores& k, const ScoreSums<V>& s) {
  typedef Scalar<V> T;
  V one = splat<V>(1), nan = splat<V>(static_cast<T>(__builtin_nan(""))), log_all = log1p(s.rest);
  T t = static_cast<T>(k.temperature), gamma = static_cast<T>(k.gamma);
  Int<V> none = (s.m == infinity<T>()) | (s.m == -infinity<T>());  // no probabilities
  V energy = s.m + (k.temperature == 1 ? log_all : t * log1p(s.rest_hot));
  V entropy = s.moment / (one + s.rest) - log_all, top = exp(gamma * ((s.log_rest - log_all) - log_all));
  top = where(s.log_rest == -infinity<T>(), V{}, top);
  return {where(none, nan, one / (one + s.rest)), where(none, s.m, energy), where(none, nan, entropy), where(none, nan, top),
          log_all};
}
// A class beside the largest, at x - m
template <class V>
PYL_INLINE V gen_term(Scalar<V> gamma, V x, V log_all) {
  V logp = x - log_all;
  return exp(gamma * (logp + log1p(-exp_below(logp))));
}

// The largest numbers seen, smallest of them first: a heap of any size.
template <class T>
struct Largest {
  int64_t most, size = 0;
  Scratch<T> kept;
  explicit Largest(int64_t most) : most(most), kept(most + Lanes<T>::W) {}
  T lowest() const { return size < most ? -infinity<T>() : kept.data[0]; }

  PYL_INLINE void offer(T x) {
    if (size == most) {
      if (x > kept.data[0]) sink(x);
      return;
    }
    int64_t at = size++;
    for (; at > 0 && kept.data[(at - 1) / 2] > x; at = (at - 1) / 2) kept.data[at] = kept.data[(at - 1) / 2];
    kept.data[at] = x;
  }
  void sink(T x) {
    int64_t at = 0;
    for (int64_t child = 1; child < size; child = 2 * at + 1) {
      if (child + 1 < size && kept.data[child + 1] < kept.data[child]) ++child;
      if (kept.data[child] >= x) break;
      kept.data[at] = kept.data[child];
      at = child;
    }
    kept.data[at] = x;
  }
};

template <class T>
struct ScoreOutputs {
  T *msp, *mls, *energy, *gen, *neg_entropy;
  explicit ScoreOutputs(const Scores& k)
      : msp(static_cast<T*>(k.msp)),
        mls(static_cast<T*>(k.mls)),
        energy(static_cast<T*>(k.energy)),
        gen(static_cast<T*>(k.gen)),
        neg_entropy(static_cast<T*>(k.neg_entropy)) {}
};

// ---- rows ----

template <class T>
struct ScoreRows {
  typedef typename Lanes<T>::V V;
  const Context<T>& c;
  const Scores& k;
  int64_t classes;
  bool in_place;
  Scratch<T> copy;
  Largest<T> largest;
  const T* x = nullptr;
  int64_t top = 0;

  ScoreRows(const Context<T>& c, const Scores& k)
      : c(c),
        k(k),
        classes(c.p.classes),
        in_place(c.p.x_layout.class_stride == 1 && c.as_it_is()),
        copy(in_place ? 1 : classes),
        largest(k.most < classes ? k.most - 1 : 1) {}

  void seek(int64_t row) {
    int64_t at = c.p.x_layout.offset(row), stride = c.p.x_layout.class_stride;
    if (in_place) {
      x = static_cast<const T*>(c.p.x) + at;
      return;
    }
    load_as(c.p.dtype, c.p.x, at, stride, classes, copy.data);
    x = copy.data;
  }
  // The largest logit, and the first place of it; a NaN is larger than any.
  T find_top() {
    V best[4], odd{};
    for (V& b : best) b = splat<V>(-infinity<T>());
    over_lanes(x, classes, -infinity<T>(), [&](V v, int64_t, int a) {
      best[a] = larger(v, best[a]);
      odd = where(v == v, odd, splat<V>(1));
    });
    T m = max_of(larger(larger(best[0], best[1]), larger(best[2], best[3])));
    bool nan = any(odd != 0);
    for (top = 0; top < classes - 1 && (nan ? x[top] == x[top] : x[top] != m); ++top) {
    }
    return nan ? static_cast<T>(__builtin_nan("")) : m;
  }
  // Calls f(numbers, count) on runs of the row without its largest class.
  template <class F>
  PYL_INLINE void beside_top(F f) const {
    over_blocks(0, top, [&](int64_t j, int64_t n) { f(x + j, n); });
    over_blocks(top + 1, classes, [&](int64_t j, int64_t n) { f(x + j, n); });
  }
  // sum of f over the same
  template <class F>
  PYL_INLINE double sum(F f) const {
    double total = 0;
    beside_top([&](const T* p, int64_t n) {
      V s[4] = {};
      over_lanes(p, n, -infinity<T>(), [&](V v, int64_t, int a) { s[a] += f(v); });
      total += sum_of((s[0] + s[1]) + (s[2] + s[3]));
    });
    return total;
  }

  void run(int64_t row) {
    ScoreOutputs<T> out(k);
    seek(row);
    T m = find_top(), base = m == -infinity<T>() ? 0 : m, cool = static_cast<T>(1 / k.temperature);
    double moment = 0, rest = 0;
    beside_top([&](const T* p, int64_t n) {
      V s[4] = {}, sm[4] = {};
      over_lanes(p, n, -infinity<T>(), [&](V v, int64_t, int a) {
        V d = v - base, e = exp_below(d);
        s[a] += e;
        sm[a] += where(v == -infinity<T>(), V{}, e * d);
      });
      rest += sum_of((s[0] + s[1]) + (s[2] + s[3]));
      moment += sum_of((sm[0] + sm[1]) + (sm[2] + sm[3]));
    });
    double hot = rest;
    if (k.temperature != 1) hot = sum([&](V v) { return exp_below((v - base) * cool); });
    double log_rest = __builtin_log(rest);
    if (rest < faint<T>()) {
      V best = splat<V>(-infinity<T>());
      beside_top(
          [&](const T* p, int64_t n) { over_lanes(p, n, -infinity<T>(), [&](V v, int64_t, int) { best = larger(v, best); }); });
      T second = max_of(best);
      log_rest = second == -infinity<T>()
                     ? -__builtin_inf()
                     : (static_cast<double>(second) - base) + __builtin_log(sum([&](V v) { return exp_below(v - second); }));
    }
    auto all = [](double v) { return splat<V>(static_cast<T>(v)); };
    ScoreRow<V> r = score(k, ScoreSums<V>{all(m), all(rest), all(hot), all(moment), all(log_rest)});
    out.msp[row] = r.msp[0], out.mls[row] = m, out.energy[row] = r.energy[0], out.neg_entropy[row] = r.neg_entropy[0];
    out.gen[row] = static_cast<T>(0 - (r.gen_top[0] + gen_of_others(base, r.log_all)));
    k.prediction[row] = top;
  }
  double gen_of_others(T base, V log_all) {
    T gamma = static_cast<T>(k.gamma);
    auto term = [&](V v) { return where(v == -infinity<T>(), V{}, gen_term(gamma, v - base, log_all)); };
    if (k.most >= classes) return sum(term);
    if (k.most == 1) return 0;
    largest.size = 0;
    beside_top([&](const T* p, int64_t n) {
      over_lanes(p, n, -infinity<T>(), [&](V v, int64_t i, int) {
        if (!any(v > largest.lowest())) return;
        for (int64_t lane = 0; lane < Lanes<T>::W && i + lane < n; ++lane)
          if (v[lane] > largest.lowest()) largest.offer(v[lane]);
      });
    });
    double total = 0;
    over_lanes(largest.kept.data, largest.size, -infinity<T>(), [&](V v, int64_t, int) { total += sum_of(term(v)); });
    return total;
  }
};

template <class T>
void rows_scores(const Context<T>& c, const Scores& k) {
  auto make = [&] { return ScoreRows<T>(c, k); };
  for_chunks(c.p, rows_per_chunk(c.p), nullptr, make, [&](ScoreRows<T>& rows, int64_t begin, int64_t end, Partial&) {
    for (int64_t row = begin; row < end; ++row) rows.run(row);
  });
}

// ---- vectors of rows ----

template <class T>
struct ScoreTiles {
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::I I;
  static constexpr int W = Lanes<T>::W;
  const Scores& k;
  Tile<T> t;
  Largest<T> largest;
  int64_t classes;

  ScoreTiles(const Context<T>& c, const Scores& k)
      : k(k), t(c, true), largest(k.most < c.p.classes ? k.most - 1 : 1), classes(c.p.classes) {}

  // sum over the classes beside each row's largest
  template <class F>
  PYL_INLINE V sum(int64_t r, I top, F f) const {
    return sum_over<V>(
        classes, [&](int64_t j) { return where(top == static_cast<typename Lanes<T>::IntScalar>(j), V{}, f(t.u(j, r), j)); });
  }
  void run(int64_t r) {
    ScoreOutputs<T> out(k);
    V m = splat<V>(-infinity<T>()), nan = splat<V>(static_cast<T>(__builtin_nan("")));
    I top{}, odd{};
    for (int64_t j = 0; j < classes; ++j) {
      V u = t.u(j, r);
      I more = (u > m) & ~odd, first = ~(u == u) & ~odd;  // a NaN is larger than any
      m = where(more, u, m);
      top = where(more | first, I{} + static_cast<typename Lanes<T>::IntScalar>(j), top);
      odd |= first;
    }
    m = where(odd, nan, m);
    V base = where(m == -infinity<T>(), V{}, m);
    V rest = sum(r, top, [&](V u, int64_t j) {
      V e = exp_below(u - base);
      store(t.exponentials + j * t.stride + r, e);
      return e;
    });
    V moment = sum(r, top, [&](V u, int64_t j) { return where(u == -infinity<T>(), V{}, t.e(j, r) * (u - base)); });
    V hot = rest, log_rest = log(rest);
    T cool = static_cast<T>(1 / k.temperature);
    if (k.temperature != 1) hot = sum(r, top, [&](V u, int64_t) { return exp_below((u - base) * cool); });
    if (any(rest < faint<T>())) {
      V second = splat<V>(-infinity<T>());
      for (int64_t j = 0; j < classes; ++j)
        second = where(top == static_cast<typename Lanes<T>::IntScalar>(j), second, larger(t.u(j, r), second));
      V from = where(second == -infinity<T>(), V{}, second);
      V close = (second - base) + log(sum(r, top, [&](V u, int64_t) { return exp_below(u - from); }));
      log_rest = where(rest < faint<T>(), where(second == -infinity<T>(), second, close), log_rest);
    }
    ScoreRow<V> s = score(k, ScoreSums<V>{m, rest, hot, moment, log_rest});
    t.rows_to(out.msp, r, s.msp);
    t.rows_to(out.mls, r, m);
    t.rows_to(out.energy, r, s.energy);
    t.rows_to(out.neg_entropy, r, s.neg_entropy);
    t.rows_to(out.gen, r, V{} - (s.gen_top + gen_of_others(r, top, base, s.log_all)));
    for (int64_t i = r; i < r + W && i < t.rows; ++i) k.prediction[t.begin + i] = top[i - r];
  }
  V gen_of_others(int64_t r, I top, V base, V log_all) {
    T gamma = static_cast<T>(k.gamma);
    auto term = [&](V u, V from, V all) { return where(u == -infinity<T>(), V{}, gen_term(gamma, u - from, all)); };
    if (k.most >= classes) return sum(r, top, [&](V u, int64_t) { return term(u, base, log_all); });
    V total{};
    for (int lane = 0; k.most > 1 && lane < W; ++lane) {
      largest.size = 0;
      for (int64_t j = 0; j < classes; ++j)
        if (j != top[lane]) largest.offer(t.tile.data[j * t.stride + r + lane]);
      double one = 0;
      over_lanes(largest.kept.data, largest.size, -infinity<T>(),
                 [&](V u, int64_t, int) { one += sum_of(term(u, splat<V>(base[lane]), splat<V>(log_all[lane]))); });
      total[lane] = static_cast<T>(one);
    }
    return total;
  }
};

template <class T>
void pixels_scores(const Context<T>& c, const Scores& k) {
  auto make = [&] { return ScoreTiles<T>(c, k); };
  for_chunks(c.p, Tile<T>::chunk_rows(c.p.classes), nullptr, make,
             [&](ScoreTiles<T>& tiles, int64_t begin, int64_t end, Partial&) {
               tiles.t.each(begin, end, nullptr, [&] {
                 tiles.t.read();
                 for (int64_t r = 0; r < tiles.t.padded; r += Lanes<T>::W) tiles.t.fetch_next(r), tiles.run(r);
               });
             });
}

}  // namespace PYL_ISA

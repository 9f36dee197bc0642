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

// Where the scores go, null for those not asked for; and what they are made of.
template <class T>
struct ScoreOutputs {
  T *msp, *mls, *energy, *gen, *neg_entropy;
  bool hot, cold;  // a sum of exponentials at the energy's own temperature; at temperature 1
  explicit ScoreOutputs(const Scores& k)
      : msp(static_cast<T*>(k.msp)),
        mls(static_cast<T*>(k.mls)),
        energy(static_cast<T*>(k.energy)),
        gen(static_cast<T*>(k.gen)),
        neg_entropy(static_cast<T*>(k.neg_entropy)),
        hot(energy && k.temperature != 1),
        cold(msp || gen || neg_entropy || (energy && !hot)) {}
};

// What a row, or a vector of rows, is scored from.
template <class V>
struct ScoreSums {
  V m, rest{}, rest_hot{}, moment{}, log_rest{};  // rest_hot: at the energy's temperature; moment: of (x - m) in rest
};

// Calls put(where to, scores) for what is asked for; others(log(1 + rest)) is gen's sum over the classes beside the largest.
template <class V, class F, class P>
PYL_INLINE void score(const Scores& k, const ScoreOutputs<Scalar<V>>& out, const ScoreSums<V>& s, F others, P put) {
  typedef Scalar<V> T;
  V one = splat<V>(1), nan = splat<V>(static_cast<T>(__builtin_nan(""))), log_all = log1p_above(s.rest);
  T t = static_cast<T>(k.temperature), gamma = static_cast<T>(k.gamma);
  Int<V> none = (s.m == infinity<T>()) | (s.m == -infinity<T>());  // no probabilities
  if (out.mls) put(out.mls, s.m);
  if (out.msp) put(out.msp, where(none, nan, one / (one + s.rest)));
  if (out.energy) put(out.energy, where(none, s.m, s.m + (out.hot ? t * log1p_above(s.rest_hot) : log_all)));
  if (out.neg_entropy) put(out.neg_entropy, where(none, nan, s.moment / (one + s.rest) - log_all));
  if (!out.gen) return;
  V top = exp_below(gamma * ((s.log_rest - log_all) - log_all));
  put(out.gen, where(none, nan, V{} - (top + others(log_all))));
}
// A class beside the largest, at x - m; 0 at -inf
template <class V>
PYL_INLINE V gen_term(Scalar<V> gamma, V x, V log_all) {
  V logp = x - log_all;
  return exp_below(gamma * (logp + log1p_above(-exp_below(logp))));
}

// ---- the largest of many numbers ----

// The bits of numbers as integers in the order of the numbers; and back, by the same steps.
template <class V>
PYL_INLINE Int<V> ordered(Int<V> bits) {
  typedef Lanes<Scalar<V>> L;
  return bits ^ (Int<V>)((typename L::U)(bits >> (8 * sizeof(Scalar<V>) - 1)) >> 1);
}
// A bar in every lane with `most` numbers above it; where equal numbers forbid that, the most-th largest, with fewer above it.
// `top` is at least the largest, above(bar) counts. It halves what is between two bars' bits: at most 32 counts (64 for
// doubles), whatever the numbers.
template <class V, class F>
PYL_INLINE V bar_below(V top, int64_t most, F above) {
  Int<V> low = ordered<V>((Int<V>)splat<V>(-infinity<Scalar<V>>())) - 1, high = ordered<V>((Int<V>)top);
  for (;;) {
    Int<V> middle = (low & high) + ((low ^ high) >> 1), open = middle != low;
    if (!any(open)) return (V)ordered<V>(high);
    Int<V> count = above((V)ordered<V>(middle)), wanted = Int<V>{} + static_cast<typename Lanes<Scalar<V>>::IntScalar>(most);
    low = where(count >= wanted, middle, low);
    high = where(open & (count <= wanted), middle, high);
  }
}

// The first of n numbers that is(vector) holds for, or n.
template <class T, class F>
PYL_INLINE int64_t first_of(const T* p, int64_t n, F is) {
  for (int64_t i = 0; i < n; i += Lanes<T>::W) {
    int bits = bits_of<T>(is(beside(p, i, n)));
    if (bits) return i + __builtin_ctz(bits) < n ? i + __builtin_ctz(bits) : n;
  }
  return n;
}

// The `most` largest of a row: a list of what may be among them, cut to them whenever it is long.
template <class T>
struct Largest {
  typedef typename Lanes<T>::V V;
  int64_t most, room, size = 0;
  T top, bar;  // the largest of the row; no other number up to this one matters
  Scratch<T> kept;
  Largest(int64_t most, int64_t classes)
      : most(most), room(2 * most < classes ? 2 * most : classes), kept(room + kBlock + Lanes<T>::W) {}

  void begin(T largest) { size = 0, top = largest, bar = -infinity<T>(); }
  // A block of the row
  void offer(const T* p, int64_t n) {
    if (size == 0 && n > most) return keep(p, n);
    gather(p, n);
    if (size > room) cut();
  }
  void cut() {
    if (size > most) keep(kept.data, size);
  }
  // The `most` largest of n > most numbers; in place where they are the list itself.
  void keep(const T* p, int64_t n) {
    bar = bar_below(splat<V>(top), most, [&](V b) { return count_above(p, n, b); })[0];
    size = 0;
    gather(p, n);
    while (size < most) kept.data[size++] = bar;
  }
  void gather(const T* p, int64_t n) {
    over_lanes(p, n, -infinity<T>(), [&](V v, int64_t, int) {
      int bits = bits_of<T>(v > bar);
      if (bits) size += put_lanes(kept.data + size, v, bits);
    });
  }
  // in every lane
  static Int<V> count_above(const T* p, int64_t n, V bar) {
    Int<V> count[4] = {}, all{};
    over_lanes(p, n, -infinity<T>(), [&](V v, int64_t, int a) { count[a] -= v > bar; });
    count[0] = (count[0] + count[1]) + (count[2] + count[3]);
    for (int i = 0; i < Lanes<T>::W; ++i) all += count[0][i];
    return all;
  }
};

// ---- rows ----

template <class T>
struct ScoreRows {
  typedef typename Lanes<T>::V V;
  const Context<T>& c;
  const Scores& k;
  ScoreOutputs<T> out;
  int64_t classes;
  bool in_place;
  Scratch<T> copy;
  Largest<T> largest;
  const T* x = nullptr;
  int64_t top = 0;

  ScoreRows(const Context<T>& c, const Scores& k)
      : c(c),
        k(k),
        out(k),
        classes(c.p.classes),
        in_place(c.p.x_layout.class_stride == 1 && c.as_it_is()),
        copy(in_place ? 1 : classes),
        largest(k.most, classes) {}

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
    top = nan ? first_of(x, classes, [](V v) { return v != v; }) : first_of(x, classes, [&](V v) { return v == m; });
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
  double sum_with_moment(T base, double& moment) const {
    double rest = 0;
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
    return rest;
  }

  void run(int64_t row) {
    seek(row);
    T m = find_top(), base = m == -infinity<T>() ? 0 : m, cool = static_cast<T>(1 / k.temperature);
    if (k.prediction) k.prediction[row] = top;
    auto all = [](double v) { return splat<V>(static_cast<T>(v)); };
    ScoreSums<V> s{all(m)};
    double moment = 0, rest = 0;
    if (out.neg_entropy) rest = sum_with_moment(base, moment);
    else if (out.cold) rest = sum([&](V v) { return exp_below(v - base); });
    s.rest = all(rest), s.moment = all(moment);
    if (out.hot) s.rest_hot = all(sum([&](V v) { return exp_below((v - base) * cool); }));
    if (out.gen) s.log_rest = rest < faint<T>() ? all(log_of_faint(base)) : log(s.rest);
    auto others = [&](V log_all) { return all(gen_of_others(log_all)); };
    score(k, out, s, others, [&](T* to, V v) { to[row] = v[0]; });
  }
  double log_of_faint(T base) const {
    V best = splat<V>(-infinity<T>());
    beside_top(
        [&](const T* p, int64_t n) { over_lanes(p, n, -infinity<T>(), [&](V v, int64_t, int) { best = larger(v, best); }); });
    T second = max_of(best);
    if (second == -infinity<T>()) return second;
    return (static_cast<double>(second) - base) + __builtin_log(sum([&](V v) { return exp_below(v - second); }));
  }
  double gen_of_others(V log_all) {
    T m = x[top], gamma = static_cast<T>(k.gamma);
    if (k.most == 1 || !(m - m == 0)) return 0;  // gen is NaN where there are no probabilities
    auto term = [&](V v) { return gen_term(gamma, v - m, log_all); };
    if (k.most >= classes) return sum(term);
    largest.begin(m);
    over_blocks(0, classes, [&](int64_t j, int64_t n) { largest.offer(x + j, n); });
    largest.cut();
    T* kept = largest.kept.data;
    kept[first_of(kept, largest.size, [&](V v) { return v == m; })] = -infinity<T>();
    double total = 0;
    over_lanes(kept, largest.size, -infinity<T>(), [&](V v, int64_t, int) { total += sum_of(term(v)); });
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
  ScoreOutputs<T> out;
  Tile<T> t;
  int64_t classes;

  ScoreTiles(const Context<T>& c, const Scores& k) : k(k), out(k), t(c, true), classes(c.p.classes) {}

  // sum over the classes beside each row's largest
  template <class F>
  PYL_INLINE V sum(int64_t r, I top, F f) const {
    return sum_over<V>(
        classes, [&](int64_t j) { return where(top == static_cast<typename Lanes<T>::IntScalar>(j), V{}, f(t.u(j, r), j)); });
  }
  void run(int64_t r) {
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
    for (int64_t i = r; k.prediction && i < r + W && i < t.rows; ++i) k.prediction[t.begin + i] = top[i - r];
    V base = where(m == -infinity<T>(), V{}, m);
    T cool = static_cast<T>(1 / k.temperature);
    ScoreSums<V> s{m};
    if (out.cold)
      s.rest = sum(r, top, [&](V u, int64_t j) {
        V e = exp_below(u - base);
        if (out.neg_entropy) store(t.exponentials + j * t.stride + r, e);
        return e;
      });
    if (out.neg_entropy)
      s.moment = sum(r, top, [&](V u, int64_t j) { return where(u == -infinity<T>(), V{}, t.e(j, r) * (u - base)); });
    if (out.hot) s.rest_hot = sum(r, top, [&](V u, int64_t) { return exp_below((u - base) * cool); });
    if (out.gen) {
      // From here on, the largest class is none.
      for (int lane = 0; lane < W; ++lane) t.tile.data[top[lane] * t.stride + r + lane] = -infinity<T>();
      s.log_rest = log(s.rest);
      if (any(s.rest < faint<T>())) s.log_rest = where(s.rest < faint<T>(), log_of_faint(r, base), s.log_rest);
    }
    score(k, out, s, [&](V log_all) { return gen_of_others(r, base, log_all); }, [&](T* to, V v) { t.rows_to(to, r, v); });
  }
  V log_of_faint(int64_t r, V base) const {
    V second = splat<V>(-infinity<T>());
    for (int64_t j = 0; j < classes; ++j) second = larger(t.u(j, r), second);
    V from = where(second == -infinity<T>(), V{}, second);
    V sum = sum_over<V>(classes, [&](int64_t j) { return exp_below(t.u(j, r) - from); });
    return where(second == -infinity<T>(), second, (second - base) + log(sum));
  }
  V gen_of_others(int64_t r, V base, V log_all) const {
    T gamma = static_cast<T>(k.gamma);
    auto term = [&](V u) { return gen_term(gamma, u - base, log_all); };
    if (k.most >= classes) return sum_over<V>(classes, [&](int64_t j) { return term(t.u(j, r)); });
    if (k.most == 1) return V{};
    V bar = bar_below(base, k.most - 1, [&](V b) {
      I count{};
      for (int64_t j = 0; j < classes; ++j) count -= t.u(j, r) > b;
      return count;
    });
    I equal = I{} + static_cast<typename Lanes<T>::IntScalar>(k.most - 1);  // to the bar, that are still to count
    V above = sum_over<V>(classes, [&](int64_t j) {
      V u = t.u(j, r);
      equal += u > bar;
      return where(u > bar, term(u), V{});
    });
    return above + __builtin_convertvector(equal, V) * term(bar);
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

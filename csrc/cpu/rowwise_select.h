// The select family by rows: one pass over the logits ranks the largest and sums the exponentials, block by block; the
// selected classes are few, and what concerns them alone is computed in double.
#pragma once
#include "cpu/rowwise_softmax.h"

namespace PYL_ISA {

// The largest numbers of a row with their classes, in order; equal ones in the order of their classes. Places that no number
// has taken hold -inf and class -1.
template <class T>
struct Ranking {
  typedef typename Lanes<T>::V V;
  int size;
  T value[kMostSelected];
  int32_t index[kMostSelected];

  explicit Ranking(int size) : size(size) {}
  void clear() {
    for (int i = 0; i < size; ++i) value[i] = -infinity<T>(), index[i] = -1;
  }
  // Enters the classes j.. of a row; most of them fail against the last place, four vectors at a time.
  void block(const T* x, int64_t j, int64_t n) {
    constexpr int W = Lanes<T>::W;
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
      V v[4];
      for (int k = 0; k < 4; ++k) v[k] = load(x + i + k * W);
      if (!some(larger(larger(v[0], v[1]), larger(v[2], v[3])) > value[size - 1])) continue;
      for (int k = 0; k < 4; ++k)
        for (unsigned bits = bits_of<T>(v[k] > value[size - 1]); bits; bits &= bits - 1) {
          int64_t at = i + k * W + __builtin_ctz(bits);
          enter(x[at], j + at);
        }
    }
    for (; i < n; ++i) enter(x[i], j + i);
  }
  void enter(T v, int64_t j) {
    if (!(v > value[size - 1])) return;
    int place = 0, end = size - 1;
    while (place < end) {  // the first place with a smaller number
      int middle = (place + end) / 2;
      if (value[middle] < v) end = middle;
      else place = middle + 1;
    }
    __builtin_memmove(value + place + 1, value + place, (size - 1 - place) * sizeof(T));
    __builtin_memmove(index + place + 1, index + place, (size - 1 - place) * sizeof index[0]);
    value[place] = v, index[place] = static_cast<int32_t>(j);
  }
  static PYL_INLINE bool some(typename Lanes<T>::I mask) {
#if defined(__AVX2__)
    return bits_of<T>(mask) != 0;
#else
    return any(mask);
#endif
  }
};

// What a row gives to a loss, in double. Sums leave out the 1 of the largest entry, which would swallow the rest in rows that
// one class dominates.
struct RowSums {
  double m, more;  // sum of e^(x - m) = 1 + more
  double second;   // entropy: mu = sum p (x - m); variance: sum of e^(2 (x - m)) = 1 + second

  double d() const { return 1 + more; }
  double uncertainty(Uncertainty kind) const {
    if (kind == Uncertainty::entropy) return __builtin_log1p(more) - second;
    return (more * (2 + more) - second) / (d() * d());
  }
  // What the uncertainty's derivative is relative to: mu, or the sum of p^2.
  double mean(Uncertainty kind) const { return kind == Uncertainty::entropy ? second : (1 + second) / (d() * d()); }
};

// The sums of a row whose maximum rises as its blocks come.
template <class T>
struct RunningSums {
  typedef typename Lanes<T>::V V;
  Uncertainty kind;
  T m = -infinity<T>();
  double ties = 0, rest = 0, second = 0;  // entries equal to m; sum over the others; the second sum

  explicit RunningSums(Uncertainty kind) : kind(kind) {}
  T centre() const { return m == -infinity<T>() ? 0 : m; }

  // Adds a block of the row, whose largest number so far is `top`. As OnlineSum::block.
  T block(const T* x, int64_t n, T top, T* e) {
    raise(top);
    switch (kind) {
      case Uncertainty::none:
        e ? add<Uncertainty::none, true>(x, n, e) : add<Uncertainty::none, false>(x, n, e);
        break;
      case Uncertainty::entropy:
        e ? add<Uncertainty::entropy, true>(x, n, e) : add<Uncertainty::entropy, false>(x, n, e);
        break;
      case Uncertainty::variance:
        e ? add<Uncertainty::variance, true>(x, n, e) : add<Uncertainty::variance, false>(x, n, e);
        break;
    }
    return centre();
  }
  // Where the order alone counts: only a NaN is looked for.
  void look(const T* x, int64_t n, T top) {
    Int<V> nan{};
    over_lanes(x, n, T(0), [&](V v, int64_t, int) { nan |= v != v; });
    if (any(nan)) rest = __builtin_nan("");
    m = top, ties = 1;
  }
  void raise(T top) {
    if (!(top > m)) return;
    double all = ties + rest;
    if (all != 0) {
      double step = static_cast<double>(m) - top, shrink = __builtin_exp(step);
      rest = all * shrink;
      if (kind == Uncertainty::entropy) second = (second + step * all) * shrink;
      if (kind == Uncertainty::variance) second = (ties + second) * shrink * shrink;
    }
    m = top, ties = 0;
  }
  template <Uncertainty Kind, bool Keep>
  void add(const T* x, int64_t n, T* out) {
    V s[4] = {}, s2[4] = {};
    Int<V> count[4] = {};
    T base = centre();
    over_lanes(x, n, -infinity<T>(), [&](V v, int64_t i, int k) {
      fetch(x + kBlock + i);
      V d = v - base, e = exp_below(d);
      Int<V> tie = v == base;
      V beside_ties = where(tie, V{}, e);
      s[k] += beside_ties;
      count[k] -= tie;
      if (Kind == Uncertainty::entropy) s2[k] += where(v == -infinity<T>(), V{}, e * d);
      if (Kind == Uncertainty::variance) s2[k] += beside_ties * beside_ties;
      if (Keep) store(out + i, e);
    });
    rest += sum_of((s[0] + s[1]) + (s[2] + s[3]));
    second += sum_of((s2[0] + s2[1]) + (s2[2] + s2[3]));
    Int<V> counts = (count[0] + count[1]) + (count[2] + count[3]);
    for (int i = 0; i < Lanes<T>::W; ++i) ties += static_cast<double>(counts[i]);
  }
  RowSums finish() const {
    double nan = __builtin_nan(""), more = ties - 1 + rest;
    if (!(m > -infinity<T>() && m < infinity<T>()) || more != more) return {nan, nan, nan};  // no softmax
    return {m, more, kind == Uncertainty::entropy ? second / (1 + more) : ties - 1 + second};
  }
};

// A class as a saved number: its bits, whatever number they spell.
template <class T>
T class_to_number(int64_t j) {
  typename Lanes<T>::IntScalar bits = static_cast<typename Lanes<T>::IntScalar>(j);
  T number;
  __builtin_memcpy(&number, &bits, sizeof number);
  return number;
}
template <class T>
int64_t number_to_class(const T& number) {
  typename Lanes<T>::IntScalar bits;
  __builtin_memcpy(&bits, &number, sizeof bits);
  return bits;
}
constexpr int64_t kNotCounted = -2;  // in the place of the first class of a row that has no gradient

// Numbers that a row saves. A loss that tilts has its sums, with which its formula is evaluated again; another one the classes
// around the selected ones.
enum SelectSaved {
  kMore,
  kSecond,
  kShares,
  kLastClass,
  kSideTop,  // of the softmax formula beside the loss: m and d
  kSideSum,
  kFirstClass = kSecond,
  kClassBefore = kShares
};

// What all rows of a call share.
template <class T>
struct SelectCall {
  const Context<T>& c;
  Batch<double> k;
  Selection plan;
  bool ce;         // is there a cross-entropy, or another softmax formula, beside it?
  T side_weight;   // what that is multiplied with
  Map<T> map;      // of its logits
  double phi = 0;  // the batch's, once known
  double batch_slope = 0;

  explicit SelectCall(const Context<T>& c)
      : c(c),
        k{static_cast<double>(c.p.classes), static_cast<double>(c.p.classes), 1},
        plan(selection_of(c.p.loss, c.p.numbers, k.classes)),
        ce(c.facts.beside),
        side_weight(static_cast<T>(c.parts.side)),
        map(softmax_map(c)) {}
  bool shared() const { return map.identity(); }  // one set of exponentials serves the cross-entropy too
  // How p_j (x_j - m - mean) or p_j (p_j - mean) enters the gradient, by dL/dphi.
  double tilt(double slope) const { return slope * plan.phi_scale * (plan.kind == Uncertainty::variance ? -2 : -1); }
  template <class V>
  SelectResult<V> formula(const SelectRow<V>& r) const {
    return select_formula(c.p.loss, c.p.numbers, k, r);
  }
  SelectResult<vd> formula(double total, double own, double top, double p_top, double row_phi) const {
    return formula(SelectRow<vd>{splat<vd>(total), splat<vd>(own), splat<vd>(top), splat<vd>(p_top), splat<vd>(row_phi)});
  }
  // What is saved of the sum of shares of the classes beyond the first rank, and the sum from it: 1 - t must keep its digits in
  // rows that the selected classes dominate.
  double to_save(const RowSums& r, double beyond) const { return plan.mass ? r.more / r.d() - beyond : beyond; }
  double saved_shares(const RowSums& r, double saved) const { return plan.mass ? 1 - saved : shares(r, saved); }
  double shares(const RowSums& r, double beyond) const {
    if (plan.first > 0) return beyond;
    return beyond + selected_class(c.p.loss, c.p.numbers, splat<vd>(1 / r.d()), splat<vd>(r.m)).share[0];
  }
  double phi_of(const RowSums& r) const { return plan.phi_scale * r.uncertainty(plan.kind); }
};

// The cross-entropy of a row: m and d are its OnlineSum's, with labels those of the other classes.
template <class T>
struct CrossEntropyRow {
  double m = 0, d = 0, u_label = 0;
  T mass = 0, du_label = 1, loss = 0, extra = 0;
};

// What a row's gradient is made of: SelectResult times the upstream gradient, tilt for slope, and the cross-entropy's part.
template <class T>
struct SelectGradient {
  RowSums r;
  double mean, top, each, pull, tilt;
  int64_t first;  // the class of the first rank
  SoftmaxGradient<T> ce;
  int64_t y = -1;
};

template <class T>
struct SelectRows {
  typedef typename Lanes<T>::V V;
  const SelectCall<T>& call;
  const Context<T>& c;
  RowReader<T> x;
  SoftReader<T> target;
  RowGradient<T> grad;
  Exponentials<T> kept, kept_u;
  Ranking<T> rank;
  int picked_from, picked_to;  // the selected classes in `rank`
  alignas(64) T du[kBlock];

  explicit SelectRows(const SelectCall<T>& call)
      : call(call),
        c(call.c),
        x(c),
        target(c),
        grad(c),
        kept(c.p.classes, c.ahead() && call.plan.dense),
        kept_u(c.p.classes, c.ahead() && call.ce && !call.shared()),
        rank(call.plan.size()) {}

  // One pass over the logits: ranks and sums, and those of the cross-entropy's u if it has its own.
  RowSums read(int64_t row, int64_t y, CrossEntropyRow<T>& ce) {
    x.seek(row);
    rank.clear();
    RunningSums<T> sums(call.plan.kind);
    OnlineSum<T> online(Moment::none);
    bool own_u = call.ce && !call.shared();
    over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
      const T* v = x.raw(j, n);
      rank.block(v, j, n);
      if (call.plan.softmax) kept.set_base(j, sums.block(v, n, rank.value[0], keeps() ? kept.block(j) : nullptr));
      else sums.look(v, n, rank.value[0]);
      if (!own_u) return;
      x.mapped(call.map, j, n);
      if (!c.p.soft && y >= j && y < j + n) x.buffer[y - j] = -infinity<T>();
      kept_u.set_base(j, online.block(x.buffer, n, c.ahead() ? kept_u.block(j) : nullptr));
    });
    RowSums r = sums.finish();
    picked_from = call.plan.first, picked_to = call.plan.last + 1;
    while (picked_to > picked_from && rank.index[picked_to - 1] < 0) --picked_to;
    if (!call.ce) return r;
    if (own_u) ce.m = online.centre(), ce.d = online.sum;
    else share(r, y, ce);
    return r;
  }
  bool keeps() const { return c.ahead() && call.plan.dense; }

  // The cross-entropy's sums from those of the row itself.
  void share(const RowSums& r, int64_t y, CrossEntropyRow<T>& ce) {
    ce.m = r.m, ce.d = r.d();
    if (c.p.soft) return;
    double u = *x.raw(y, 1);
    ce.d = u == r.m ? r.more : ce.d - __builtin_exp(u - r.m);  // at least 1 is left, or nothing was taken
  }
  void at_label(int64_t y, CrossEntropyRow<T>& ce) {
    bool capped = call.map.cap > 0;
    ce.u_label = *x.mapped(call.map, y, 1, capped ? du : nullptr);
    ce.du_label = capped ? du[0] : call.map.scale;
  }
  void cross_entropy_loss(const RowWeights<T>& w, CrossEntropyRow<T>& ce) {
    double log_d = __builtin_log(ce.d);
    if (c.p.soft) {
      double loss = 0, mass = 0;
      over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
        const T *u = x.mapped(call.map, j, n), *q = target.block(j, n);
        loss += block_spread(u, q, n, static_cast<T>(ce.m), static_cast<T>(log_d));
        mass += mass_of(q, n);
      });
      ce.mass = static_cast<T>(mass);
      weigh(ce, static_cast<T>(loss), soft_formula_of(c, static_cast<T>(ce.m), static_cast<T>(ce.d), ce.mass).extra[0]);
      return;
    }
    SoftmaxRow<V> r = softmax_row<T>(ce.m, ce.d, ce.u_label, w.w);
    if (c.softmax.smooth) {
      double spread = 0, rest = (r.s[0] > 0 ? log_d : ce.u_label - ce.m) + r.log_total()[0];
      over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
        const T* weights = c.weight ? c.weight + j : nullptr;
        spread += block_spread(x.mapped(call.map, j, n), weights, n, static_cast<T>(ce.m), static_cast<T>(rest));
      });
      r.spread = splat<V>(static_cast<T>(spread));
    }
    auto result = softmax_formula(c.facts.softmax, c.numbers, c.k, r);
    weigh(ce, result.loss[0], result.extra[0]);
  }
  void weigh(CrossEntropyRow<T>& ce, T loss, T extra) const {
    ce.loss = call.side_weight * loss, ce.extra = call.side_weight * extra;
  }
  static double mass_of(const T* q, int64_t n) {
    double mass = 0;
    for (int64_t i = 0; i < n; ++i) mass += q[i];
    return mass;
  }
  // As far as backward needs it.
  CrossEntropyRow<T> saved_cross_entropy(int64_t row, int64_t y) {
    CrossEntropyRow<T> ce;
    ce.m = c.stat(kSideTop, row), ce.d = c.stat(kSideSum, row);
    if (c.p.soft) {
      target.seek(row);
      double mass = 0;
      over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) { mass += mass_of(target.block(j, n), n); });
      ce.mass = static_cast<T>(mass);
    } else {
      x.seek(row);
      at_label(y, ce);
    }
    return ce;
  }
  SoftmaxGradient<T> cross_entropy_gradient(const RowWeights<T>& w, T up, const CrossEntropyRow<T>& ce) const {
    T m = static_cast<T>(ce.m), d = static_cast<T>(ce.d);
    up *= call.side_weight;
    if (c.p.soft) return soft_gradient_of(c, up, m, d, ce.mass);
    return gradient_of(up, m, d, formula_of(c, w, m, d, ce.u_label), ce.du_label, RowScale<T>());
  }

  // The sums of shares and own derivatives over the selected classes beyond the first rank, which lie in the lanes.
  void selected_sums(const RowSums& r, double& beyond, double& own) const {
    constexpr int W = Lanes<double>::W;
    beyond = own = 0;
    for (int i = picked_from + (call.plan.first == 0); i < picked_to; i += W) {
      int n = picked_to - i < W ? picked_to - i : W;
      vd v = splat<vd>(-__builtin_inf());
      for (int k = 0; k < n; ++k) v[k] = rank.value[i + k];
      SelectedClass<vd> s = selected_class(c.p.loss, c.p.numbers, exp_below(v - r.m) / r.d(), v);
      for (int k = 0; k < n; ++k) beyond += s.share[k], own += s.own[k];
    }
  }

  SelectGradient<T> gradient(const RowSums& r, const SelectResult<vd>& result, double up, int64_t first) const {
    double slope = call.plan.batch ? call.batch_slope : up * result.slope[0];
    return {r, r.mean(call.plan.kind), up * result.top[0], up * result.each[0], up * result.pull[0], call.tilt(slope), first,
            {}};
  }
  // The gradient of a single class, without the cross-entropy.
  double at_class(const SelectGradient<T>& g, double v, bool selected) const {
    double p = __builtin_exp(v - g.r.m) / g.r.d(), value = 0;
    if (p > 0) value = p * (g.pull + g.tilt * ((call.plan.kind == Uncertainty::variance ? p : v - g.r.m) - g.mean));
    return selected ? value + own_part(g, p, v) : value;
  }
  double own_part(const SelectGradient<T>& g, double p, double v) const {
    return g.each * selected_class(c.p.loss, c.p.numbers, splat<vd>(p), splat<vd>(v)).own[0];
  }
  void zero(int64_t row) {
    grad.seek(row);
    grad.fill(0);
  }

  // Writes the gradient of the row that x is at.
  void write(int64_t row, const SelectGradient<T>& g) {
    grad.seek(row);
    double all = g.r.more + g.top + g.each + g.pull + g.tilt;
    if (all != all) return grad.fill(static_cast<T>(all));
    if (call.plan.dense) over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) { dense_block(g, j, n); });
    else sparse(g);
  }
  void sparse(const SelectGradient<T>& g) {
    grad.fill(0);
    if (g.top != 0) grad.put(g.first, static_cast<T>(g.top));
    over_picked(0, c.p.classes, [&](int64_t at, T v) { grad.put(at, static_cast<T>(own_part(g, 0, v))); });
  }
  template <class F>
  PYL_INLINE void over_picked(int64_t j, int64_t n, F f) const {
    for (int i = picked_from; i < picked_to; ++i)
      if (rank.index[i] >= j && rank.index[i] < j + n) f(rank.index[i], rank.value[i]);
  }
  void dense_block(const SelectGradient<T>& g, int64_t j, int64_t n) {
    T* out = grad.block(j);
    bool ahead = c.ahead(), shared = call.ce && call.shared(), past = grad.past && !call.ce;
    const T *v = ahead && g.tilt == 0 && !(g.y >= j && g.y < j + n) ? nullptr : x.raw(j, n), *e = kept.block(j);
    T m = static_cast<T>(g.r.m), correction = ahead ? kept.correction(j, m) : 1, scale = static_cast<T>(correction / g.r.d());
    T pull = static_cast<T>(g.pull), tilt = static_cast<T>(g.tilt), mean = static_cast<T>(g.mean);
    T ce = shared ? g.ce.slope * correction : 0;
    T v_label = g.y >= j && g.y < j + n ? v[g.y - j] : 0;
    auto each = [&](auto f) {  // f(exponential, logit)
      if (ahead && v) map_lanes(e, n, out, [&](V value, int64_t i) { return f(value, beside(v, i, n)); }, past);
      else if (ahead) map_lanes(e, n, out, [&](V value, int64_t) { return f(value, value); }, past);
      else map_lanes(v, n, out, [&](V value, int64_t) { return f(exp_below(value - m), value); }, past);
    };
    if (tilt == 0) {
      T factor = scale * pull + ce;
      each([&](V value, V) { return factor * value; });
    } else if (call.plan.kind == Uncertainty::variance) {
      each([&](V value, V) {
        V p = scale * value;
        return p * (pull + tilt * (p - mean)) + ce * value;
      });
    } else {
      each([&](V value, V logit) {
        V d = where(logit == -infinity<T>(), V{}, logit - m);
        return value * (scale * (pull + tilt * (d - mean)) + ce);
      });
    }
    if (call.ce) add_cross_entropy(g, j, n, out);
    if (g.top != 0 && g.first >= j && g.first < j + n) out[g.first - j] = static_cast<T>(at_class(g, g.r.m, false) + g.top);
    if (g.y >= j && g.y < j + n) out[g.y - j] = static_cast<T>(g.ce.label + at_class(g, v_label, false));
    over_picked(j, n, [&](int64_t at, T value) {
      T* place = out + (at - j);
      if (call.ce) *place += static_cast<T>(own_part(g, __builtin_exp(value - g.r.m) / g.r.d(), value));
      else *place = static_cast<T>(at_class(g, value, true));
    });
    grad.done(j, n);
  }
  // What the loop over the row's own exponentials has not got of the cross-entropy.
  void add_cross_entropy(const SelectGradient<T>& g, int64_t j, int64_t n, T* out) {
    const T* weights = c.p.soft ? target.block(j, n) : (c.weight ? c.weight + j : nullptr);
    if (call.shared()) {
      if (g.ce.pull == 0) return;
      T each = g.ce.pull;
      map_lanes(out, n, out, [&](V v, int64_t i) { return v - each * (weights ? beside(weights, i, n) : splat<V>(1)); });
      return;
    }
    bool ahead = c.ahead(), capped = call.map.cap > 0;
    T slope = g.ce.slope * (ahead ? kept_u.correction(j, g.ce.m) : 1), m = g.ce.m;
    const T* u = ahead && !capped ? nullptr : x.mapped(call.map, j, n, capped ? du : nullptr);
    map_lanes(out, n, out, [&](V v, int64_t i) {
      V e = ahead ? beside(kept_u.block(j), i, n) : exp_below(beside(u, i, n) - m);
      V value = slope * e - (g.ce.pull == 0 ? V{} : g.ce.pull * (weights ? beside(weights, i, n) : splat<V>(1)));
      return v + value * (capped ? beside(du, i, n) : splat<V>(call.map.scale));
    });
  }

  // Finds the classes again that forward selected: those that rank after class `after` and not after class `last`. Returns
  // the largest of their logits.
  T find_picked(int64_t after, int64_t last) {
    constexpr int W = Lanes<T>::W;
    picked_from = picked_to = 0;
    T most = -infinity<T>();
    if (last < 0) return most;
    T high = after < 0 ? infinity<T>() : *x.raw(after, 1), low = *x.raw(last, 1);
    over_blocks(0, c.p.classes, [&](int64_t j, int64_t n) {
      const T* v = x.raw(j, n);
      auto try_one = [&](int64_t i) {
        bool in = v[i] > low || (v[i] == low && j + i <= last), before = v[i] > high || (v[i] == high && j + i <= after);
        if (!in || before || picked_to == rank.size) return;
        rank.value[picked_to] = v[i], rank.index[picked_to++] = static_cast<int32_t>(j + i);
        most = larger(v[i], most);
      };
      int64_t i = 0;
      for (; i + W <= n; i += W)
        if (Ranking<T>::some(load(v + i) >= low))
          for (int64_t k = i; k < i + W; ++k) try_one(k);
      for (; i < n; ++i) try_one(i);
    });
    return most;
  }
};

// Emits the rows of a batch once its phi is known.
template <class T>
void emit_batch(SelectCall<T>& call, const Partial& phis, const T* held, Partial& total) {
  const Context<T>& c = call.c;
  call.phi = phis.mass > 0 ? phis.sum / phis.mass : 0;
  int64_t n = c.p.rows;
  for_chunks(
      c.p, 8192, 1, &total, [] { return 0; },
      [&](int, int64_t begin, int64_t end, Partial& sums) {
        for (int64_t row = begin; row < end; ++row) {
          int64_t y = c.label(row);
          if (y < 0) continue;
          RowWeights<T> w = c.weights(row, call.ce ? y : 0);
          T loss = static_cast<T>(call.formula(held[row], 0, 0, 0, call.phi).loss[0]);
          T ce = call.ce ? held[2 * n + row] : 0, extra = call.ce ? held[3 * n + row] + loss : 0;
          if (call.ce) c.emit(row, w, ce, extra, sums);
          else c.emit(row, w, loss, 0, sums);
          if (c.stats && call.ce && !c.counted(w, ce + extra)) c.stat(kSideSum, row) = kLeftOut;
        }
      });
}

template <class T>
void select_forward(const Context<T>& c, Partial& total) {
  SelectCall<T> call(c);
  const Selection& plan = call.plan;
  // With a phi of the batch, losses wait for it: sum of shares, phi, and the cross-entropy of each row.
  Scratch<T> held(plan.batch ? 4 * c.p.rows : 1);
  auto hold = [&](int i, int64_t row) -> T& { return held.data[i * c.p.rows + row]; };
  Partial phis;
  auto make = [&] { return SelectRows<T>(call); };
  auto one_row = [&](SelectRows<T>& rows, int64_t row, Partial& sums) {
    int64_t y = c.label(row);
    if (y < 0) {
      c.emit_ignored(row);
      if (c.ahead()) rows.zero(row);
      return;
    }
    CrossEntropyRow<T> ce;
    RowWeights<T> w = c.weights(row, call.ce ? y : 0);
    if (c.p.soft) rows.target.seek(row);
    RowSums r = rows.read(row, y, ce);
    if (call.ce) {
      if (!c.p.soft) rows.at_label(y, ce);
      rows.cross_entropy_loss(w, ce);
    }
    double beyond, own, phi = plan.kind == Uncertainty::none ? 0 : call.phi_of(r);
    rows.selected_sums(r, beyond, own);
    double shares = call.shares(r, beyond);
    if (c.stats) {
      int before = plan.first - 1;
      bool some = plan.last > before && rows.picked_to > 0;
      c.stat(kMore, row) = static_cast<T>(r.more);
      c.stat(kLastClass, row) = class_to_number<T>(some ? rows.rank.index[rows.picked_to - 1] : -1);
      if (plan.tilts) {
        c.stat(kSecond, row) = static_cast<T>(r.second), c.stat(kShares, row) = static_cast<T>(call.to_save(r, beyond));
      } else {
        c.stat(kFirstClass, row) = class_to_number<T>(rows.rank.index[0]);
        c.stat(kClassBefore, row) = class_to_number<T>(some && before >= 0 ? rows.rank.index[before] : -1);
      }
      if (call.ce) c.stat(kSideTop, row) = static_cast<T>(ce.m), c.stat(kSideSum, row) = static_cast<T>(ce.d);
    }
    if (plan.batch) {
      hold(0, row) = static_cast<T>(shares), hold(1, row) = static_cast<T>(phi);
      hold(2, row) = ce.loss, hold(3, row) = ce.extra;
      sums.add({phi, 1, 0, 0, -1});
      return;
    }
    SelectResult<vd> result = call.formula(shares, own, r.m, 1 / r.d(), phi);
    if (result.mass[0] == 0) {  // filtered out
      c.emit_ignored(row);
      if (c.stats) c.stat(kFirstClass, row) = class_to_number<T>(kNotCounted);
      return;
    }
    T loss = static_cast<T>(result.loss[0]);
    if (call.ce) c.emit(row, w, ce.loss, ce.extra + loss, sums);
    else c.emit(row, w, loss, 0, sums);
    if (c.stats && !plan.tilts && !c.counted(w, loss)) c.stat(kFirstClass, row) = class_to_number<T>(kNotCounted);
    if (c.stats && call.ce && !c.counted(w, ce.loss + (ce.extra + loss))) c.stat(kSideSum, row) = kLeftOut;
    if (!c.ahead()) return;
    T up = c.upstream(row, w);
    SelectGradient<T> g = rows.gradient(r, result, up, rows.rank.index[0]);
    if (call.ce) {
      g.ce = rows.cross_entropy_gradient(w, up, ce);
      if (!c.p.soft) g.y = y;
    }
    rows.write(row, g);
  };
  for_chunks(c.p, rows_per_chunk(c.p), plan.batch ? &phis : &total, make,
             [&](SelectRows<T>& rows, int64_t begin, int64_t end, Partial& sums) {
               for (int64_t row = begin; row < end; ++row) one_row(rows, row, sums);
             });
  if (plan.batch) emit_batch(call, phis, held.data, total);
}

// What forward saved of a row of a loss that tilts. The largest logit is not: it is one of the selected, which backward finds
// again.
template <class T>
RowSums saved_sums(const Context<T>& c, int64_t row) {
  return {0, c.stat(kMore, row), c.stat(kSecond, row)};
}

// Has a row of a loss that tilts a gradient of its own?
template <class T>
bool saved_as_counted(const SelectCall<T>& call, int64_t row, const RowWeights<T>& w, const SelectResult<vd>& result) {
  return call.ce ? !(call.c.stat(kSideSum, row) < 0) : call.c.counted(w, static_cast<T>(result.loss[0]));
}

// The batch's phi, and the derivative of the whole loss with respect to that of one row. Only statistics are read.
template <class T>
void begin_batch(SelectCall<T>& call) {
  const Context<T>& c = call.c;
  Partial phis, slopes;
  for_chunks(
      c.p, 8192, 1, &phis, [] { return 0; },
      [&](int, int64_t begin, int64_t end, Partial& sums) {
        for (int64_t row = begin; row < end; ++row)
          if (c.label(row) >= 0) sums.sum += call.phi_of(saved_sums(c, row)), sums.mass += 1;
      });
  call.phi = phis.mass > 0 ? phis.sum / phis.mass : 0;
  for_chunks(
      c.p, 8192, 1, &slopes, [] { return 0; },
      [&](int, int64_t begin, int64_t end, Partial& sums) {
        for (int64_t row = begin; row < end; ++row) {
          int64_t y = c.label(row);
          if (y < 0) continue;
          RowWeights<T> w = c.weights(row, call.ce ? y : 0);
          SelectResult<vd> result =
              call.formula(call.saved_shares(saved_sums(c, row), c.stat(kShares, row)), 0, 0, 0, call.phi);
          if (saved_as_counted(call, row, w, result)) sums.sum += static_cast<double>(c.upstream(row, w)) * result.slope[0];
        }
      });
  call.batch_slope = phis.mass > 0 ? slopes.sum / phis.mass : 0;
}

template <class T>
void select_backward(const Context<T>& c) {
  SelectCall<T> call(c);
  const Selection& plan = call.plan;
  if (plan.batch) begin_batch(call);
  auto make = [&] { return SelectRows<T>(call); };
  auto one_row = [&](SelectRows<T>& rows, int64_t row) {
    int64_t y = c.label(row);
    int64_t first = plan.tilts ? 0 : number_to_class(c.stat(kFirstClass, row));
    if (y < 0 || first == kNotCounted) return rows.zero(row);
    RowWeights<T> w = c.weights(row, call.ce ? y : 0);
    T up = c.upstream(row, w);
    rows.x.seek(row);
    int64_t last = number_to_class(c.stat(kLastClass, row));
    SelectGradient<T> g;
    if (!plan.tilts) {
      rows.find_picked(number_to_class(c.stat(kClassBefore, row)), last);
      RowSums r{first < 0 ? __builtin_nan("") : *rows.x.raw(first, 1), c.stat(kMore, row), 0};
      double beyond, own;
      rows.selected_sums(r, beyond, own);
      // Rows that the filter dropped are not here.
      g = rows.gradient(r, call.formula(beyond, own, r.m, 1 / r.d(), -__builtin_inf()), up, first);
    } else {
      RowSums r = saved_sums(c, row);
      r.m = rows.find_picked(-1, last);
      CrossEntropyRow<T> ce;
      if (call.ce) ce = rows.saved_cross_entropy(row, y);
      double phi = plan.batch ? call.phi : call.phi_of(r);
      SelectResult<vd> result = call.formula(call.saved_shares(r, c.stat(kShares, row)), 0, 0, 0, phi);
      bool counts = saved_as_counted(call, row, w, result);
      if (!counts && !plan.batch) return rows.zero(row);
      if (!counts) ce.d = 1;  // a sum again; its part of the gradient is 0
      g = rows.gradient(r, result, counts ? up : 0, first);
      if (call.ce) {
        g.ce = rows.cross_entropy_gradient(w, counts ? up : 0, ce);
        if (!c.p.soft) g.y = y;
      }
    }
    rows.write(row, g);
  };
  for_chunks(c.p, rows_per_chunk(c.p), nullptr, make, [&](SelectRows<T>& rows, int64_t begin, int64_t end, Partial&) {
    for (int64_t row = begin; row < end; ++row) one_row(rows, row);
  });
}

}  // namespace PYL_ISA

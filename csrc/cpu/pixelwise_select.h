// The select family by vectors of rows.
#pragma once
#include "cpu/pixelwise_softmax.h"
#include "cpu/rowwise_select.h"

namespace PYL_ISA {

// Ranking, for a vector of rows.
template <class T>
struct LaneRanking {
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::I I;
  int size;
  V value[kMostSelected];
  I index[kMostSelected];

  LaneRanking(const Tile<T>& t, int64_t r, int size) : size(size) {
    for (int i = 0; i < size; ++i) value[i] = splat<V>(-infinity<T>()), index[i] = I{} - 1;
    for (int64_t j = 0; j < t.c.p.classes; ++j) enter(t.u(j, r), j);
  }
  PYL_INLINE void enter(V v, int64_t j) {
    if (!Ranking<T>::some(v > value[size - 1])) return;
    I own = I{} + static_cast<typename Lanes<T>::IntScalar>(j), here = v > value[size - 1];
    // Classes come in order: place i is empty before class i.
    int place = j < size - 1 ? static_cast<int>(j) : size - 1;
    if (place < size - 1) here = v > value[place];
    for (; place > 0; --place) {
      I above = v > value[place - 1];
      value[place] = where(above, value[place - 1], where(here, v, value[place]));
      index[place] = where(above, index[place - 1], where(here, own, index[place]));
      here = above;
    }
    value[0] = where(here, v, value[0]);
    index[0] = where(here, own, index[0]);
  }
};

// Is class j the label of the rows r..?
template <class T>
PYL_INLINE typename Lanes<T>::I at_label(const Tile<T>& t, int64_t j, int64_t r) {
  return t.labels(r) == static_cast<typename Lanes<T>::IntScalar>(j);
}

// RowSums, for a vector of rows.
template <class V>
struct LaneRowSums {
  V m, more, second;
  PYL_INLINE V d() const { return more + 1; }
  PYL_INLINE V uncertainty(Uncertainty kind) const {
    if (kind == Uncertainty::entropy) return log1p(more) - second;
    return (more * (more + 2) - second) / (d() * d());
  }
  PYL_INLINE V mean(Uncertainty kind) const { return kind == Uncertainty::entropy ? second : (second + 1) / (d() * d()); }
};

template <Uncertainty Kind, class T>
LaneRowSums<typename Lanes<T>::V> lane_row_sums(const Tile<T>& t, int64_t r, typename Lanes<T>::V m, bool keep) {
  typedef typename Lanes<T>::V V;
  Int<V> ties{}, bad = ~((m > -infinity<T>()) & (m < infinity<T>()));
  V second{}, run{}, base = where(bad, V{}, m);
  V rest = sum_over<V>(t.c.p.classes, [&](int64_t j) {
    if (j % 32 == 0) second += run, run = V{};
    V v = t.u(j, r), d = v - base, e = exp_below(d);
    Int<V> tie = v == base;
    V beside_ties = where(tie, V{}, e);
    ties -= tie;
    if (Kind == Uncertainty::entropy) run += where(v == -infinity<T>(), V{}, e * d);
    if (Kind == Uncertainty::variance) run += beside_ties * beside_ties;
    if (keep) store(t.exponentials + j * t.stride + r, e);
    return beside_ties;
  });
  second += run;
  V copies = __builtin_convertvector(ties - 1, V), more = copies + rest, nan = splat<V>(static_cast<T>(__builtin_nan("")));
  bad |= more != more;
  second = Kind == Uncertainty::entropy ? second / (more + 1) : copies + second;
  return {where(bad, nan, m), where(bad, nan, more), where(bad, nan, second)};
}
template <class T>
LaneRowSums<typename Lanes<T>::V> lane_row_sums(const SelectCall<T>& call, const Tile<T>& t, int64_t r,
                                                typename Lanes<T>::V m) {
  typedef typename Lanes<T>::V V;
  bool keep = call.c.ahead() && call.plan.dense;
  if (!call.plan.softmax) {  // the order alone counts: only what has no softmax is looked for
    Int<V> bad = ~((m > -infinity<T>()) & (m < infinity<T>()));
    for (int64_t j = 0; j < call.c.p.classes; ++j) bad |= t.u(j, r) != t.u(j, r);
    V poison = where(bad, splat<V>(static_cast<T>(__builtin_nan(""))), V{});
    return {m + poison, poison, poison};
  }
  switch (call.plan.kind) {
    case Uncertainty::entropy:
      return lane_row_sums<Uncertainty::entropy>(t, r, m, keep);
    case Uncertainty::variance:
      return lane_row_sums<Uncertainty::variance>(t, r, m, keep);
    default:
      return lane_row_sums<Uncertainty::none>(t, r, m, keep);
  }
}

// A vector of T as vectors of doubles.
template <class T>
struct InDouble {
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::Wide Wide;
  static constexpr int parts = sizeof(Wide) / sizeof(vd);
  vd part[parts];

  InDouble() = default;
  explicit PYL_INLINE InDouble(V v) {
    Wide wide = __builtin_convertvector(v, Wide);
    __builtin_memcpy(part, &wide, sizeof part);
  }
  PYL_INLINE V narrow() const {
    Wide wide;
    __builtin_memcpy(&wide, part, sizeof part);
    return __builtin_convertvector(wide, V);
  }
};

// The row formula for a vector of rows. The first rank's own share is added here to the sum `beyond` it, see
// SelectCall::shares.
template <class T>
struct LaneResult {
  typedef typename Lanes<T>::V V;
  static constexpr int parts = InDouble<T>::parts;
  LaneRowSums<vd> row[parts];
  InDouble<T> loss, mass, top, each, pull, slope;

  LaneResult(const SelectCall<T>& call, const LaneRowSums<V>& sums, const InDouble<T>& beyond, V own, V phi) {
    InDouble<T> m(sums.m), more(sums.more), second(sums.second), owns(own), phis(phi);
    for (int i = 0; i < parts; ++i) {
      row[i] = {m.part[i], more.part[i], second.part[i]};
      vd p = 1 / row[i].d(), total = beyond.part[i];
      if (call.plan.first == 0) total += selected_class(call.c.p.loss, call.c.p.numbers, p, m.part[i]).share;
      SelectResult<vd> result = call.formula(SelectRow<vd>{total, owns.part[i], m.part[i], p, phis.part[i]});
      loss.part[i] = result.loss, mass.part[i] = result.mass, top.part[i] = result.top;
      each.part[i] = result.each, pull.part[i] = result.pull, slope.part[i] = result.slope;
    }
  }
};

// The cross-entropy of a vector of rows; the tile holds the logits, which the map here turns into u.
template <class T>
struct LaneCrossEntropy {
  typedef typename Lanes<T>::V V;
  const SelectCall<T>& call;
  const Tile<T>& t;
  V m, d, mass, u_label, du_label, loss, extra, slope, pull, label;

  LaneCrossEntropy(const SelectCall<T>& call, const Tile<T>& t) : call(call), t(t), m{}, d{}, mass{}, loss{}, extra{} {}

  PYL_INLINE V u(int64_t j, int64_t r, V& du) const {
    V u = call.map.unshifted(t.u(j, r), du);
    return call.map.shift ? u + call.map.shift[j] : u;
  }
  PYL_INLINE V u(int64_t j, int64_t r) const {
    V du;
    return u(j, r, du);
  }
  void find_label(int64_t r) {
    const T* shift = call.map.shift;
    u_label = call.map.unshifted(t.u_label(r), du_label);
    if (shift) u_label += t.gather(r, [&](int64_t, int64_t y) { return shift[y]; });
  }
  // m and d, from the sums of the row itself where u is x.
  void sums(int64_t r, const LaneRowSums<V>& row) {
    const Problem& p = call.c.p;
    if (call.shared()) {
      m = row.m, d = row.d();
      if (!p.soft) d = where(u_label == m, row.more, d - exp_below(u_label - m));
      return;
    }
    m = splat<V>(-infinity<T>());
    for (int64_t j = 0; j < p.classes; ++j) m = larger(u(j, r), m);
    m = where(m == -infinity<T>(), V{}, m);
    d = sum_over<V>(p.classes, [&](int64_t j) {
      V e = exp_below(u(j, r) - m);
      return p.soft ? e : where(at_label(t, j, r), V{}, e);
    });
  }
  // Loss and, for an upstream gradient of 1, what the gradient is made of.
  void finish(int64_t r, bool forward) {
    const Context<T>& c = call.c;
    auto spread = [&](V rest) {
      return sum_over<V>(c.p.classes, [&](int64_t j) {
        V each = (m - u(j, r)) + rest, q = c.p.soft ? t.soft(j, r) : splat<V>(c.weight ? c.weight[j] : T(1));
        return where(q == 0, V{}, q * each);
      });
    };
    T by = call.side_weight;
    if (c.p.soft) {
      V log_d = log_sum(d);
      mass = sum_over<V>(c.p.classes, [&](int64_t j) { return t.soft(j, r); });
      SoftResult<V> result = soft_formula(c.facts.softmax, c.numbers, c.k, SoftRow<V>{m + log_d, mass});
      if (forward) loss = by * spread(log_d), extra = by * result.extra;
      slope = by * (result.slope / d), pull = by * result.pull, label = V{};
      return;
    }
    SoftmaxRow<V> row = lane_row(m, d, u_label, splat<V>(1), load(t.w + r));
    if (forward && c.softmax.smooth) row.spread = spread(row.log_total());
    SoftmaxResult<V> result = softmax_formula(c.facts.softmax, c.numbers, c.k, row);
    loss = by * result.loss, extra = by * result.extra;
    slope = by * where(d == 0, result.slope * 0, result.slope / d), pull = by * result.pull;
    label = by * (result.label * du_label);
  }
};

// SelectGradient of all rows of a tile.
template <class T>
struct TileSelectGradient {
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::I I;
  typedef typename Lanes<T>::IntScalar Int_;
  const SelectCall<T>& call;
  alignas(64) T m[kTileRows], scale[kTileRows], mean[kTileRows], top[kTileRows], each[kTileRows], pull[kTileRows];
  alignas(64) T tilt[kTileRows], high[kTileRows], low[kTileRows], on[kTileRows], poison[kTileRows];
  // The same numbers for selected classes, where p meets sums that may be nearly p.
  struct Exact {
    vd scale, mean, each, pull, tilt;
  } exact[kTileRows / Lanes<double>::W];
  alignas(64) T ce_m[kTileRows], ce_slope[kTileRows], ce_pull[kTileRows], ce_label[kTileRows];
  alignas(64) Int_ first[kTileRows], after[kTileRows], last[kTileRows];

  explicit TileSelectGradient(const SelectCall<T>& call) : call(call) {}

  static PYL_INLINE I ints(const Int_* p) {
    I v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  static PYL_INLINE void put(Int_* p, I v) { __builtin_memcpy(p, &v, sizeof v); }

  void set(int64_t r, const LaneRowSums<V>& row, const LaneResult<T>& result, V up, V rows_on, I first_class) {
    InDouble<T> up_exact(up), gain, one_scale, one_mean, one_pull, one_each;
    Exact* e = exact + r / Lanes<double>::W;
    for (int i = 0; i < LaneResult<T>::parts; ++i) {
      vd u = up_exact.part[i], slope = call.plan.batch ? splat<vd>(call.batch_slope) : u * result.slope.part[i];
      e[i] = {1 / result.row[i].d(), result.row[i].mean(call.plan.kind), u * result.each.part[i], u * result.pull.part[i],
              slope * call.tilt(1)};
      one_scale.part[i] = e[i].scale, one_mean.part[i] = e[i].mean, one_each.part[i] = e[i].each;
      one_pull.part[i] = e[i].pull, gain.part[i] = e[i].tilt;
    }
    V tops = up * result.top.narrow(), all = row.more + tops + one_each.narrow() + one_pull.narrow() + gain.narrow();
    store(m + r, row.m), store(scale + r, one_scale.narrow()), store(mean + r, one_mean.narrow()), store(top + r, tops);
    store(each + r, one_each.narrow()), store(pull + r, one_pull.narrow()), store(tilt + r, gain.narrow());
    store(on + r, rows_on), store(poison + r, where(all != all, all, V{}));
    put(first + r, first_class);
  }
  // The gradient of selected classes with the exponentials e and logits x, in double.
  PYL_INLINE V at_selected(int64_t r, V e, V x) const {
    InDouble<T> es(e), ds(x - load(m + r)), xs(x), g;
    const Exact* k = exact + r / Lanes<double>::W;
    for (int i = 0; i < InDouble<T>::parts; ++i) {
      vd p = es.part[i] * k[i].scale, of = call.plan.kind == Uncertainty::variance ? p : ds.part[i];
      of = where(ds.part[i] == -infinity<double>(), vd{}, of);
      g.part[i] = p * (k[i].pull + k[i].tilt * (of - k[i].mean)) +
                  k[i].each * selected_class(call.c.p.loss, call.c.p.numbers, p, xs.part[i]).own;
    }
    return g.narrow();
  }
  // The classes that rank after (h, a) and not after (l, b) are selected.
  void set_range(int64_t r, V h, I a, V l, I b) {
    store(high + r, h), store(low + r, l);
    put(after + r, a), put(last + r, b);
  }
  PYL_INLINE I selected(int64_t j, int64_t r, V x) const {
    I own = I{} + static_cast<Int_>(j);
    I in = (x > load(low + r)) | ((x == load(low + r)) & (own <= ints(last + r)));
    I before = (x > load(high + r)) | ((x == load(high + r)) & (own <= ints(after + r)));
    return in & ~before;
  }
  void set_cross_entropy(int64_t r, const LaneCrossEntropy<T>& ce, V up) {
    store(ce_m + r, ce.m), store(ce_slope + r, up * ce.slope), store(ce_pull + r, up * ce.pull);
    store(ce_label + r, up * ce.label);
  }

  void write(const Tile<T>& t) const {
    const Selection& plan = call.plan;
    const Context<T>& c = call.c;
    bool ahead = c.ahead(), some = plan.last >= plan.first;
    bool pulls = call.ce && (c.p.soft || c.softmax.smooth);  // a weight that is not asked for may be NaN
    LaneCrossEntropy<T> ce(call, t);
    t.write([&](int64_t j, int64_t r) {
      V g = load(poison + r), x = plan.dense || some ? t.u(j, r) : V{}, e{}, p{};
      if (plan.dense) {
        V d = where(x == -infinity<T>(), V{}, x - load(m + r));
        e = ahead ? t.e(j, r) : exp_below(x - load(m + r)), p = e * load(scale + r);
        if (plan.kind == Uncertainty::variance) g += p * (load(pull + r) + load(tilt + r) * (p - load(mean + r)));
        else g += p * (load(pull + r) + load(tilt + r) * (d - load(mean + r)));
      }
      I own = I{} + static_cast<Int_>(j);
      if (some) {
        I in = selected(j, r, x);
        if (Ranking<T>::some(in)) {
          if (plan.first == 0) g = where(in, load(poison + r) + at_selected(r, e, x), g);
          else g += where(in, load(each + r) * selected_class(c.p.loss, c.numbers, p, x).own, V{});
        }
      }
      if (plan.pulls_top) g += where(own == ints(first + r), load(top + r), V{});
      if (call.ce) {
        V du = splat<V>(1), value = load(ce_slope + r) * e;
        if (!call.shared()) value = load(ce_slope + r) * exp_below(ce.u(j, r, du) - load(ce_m + r));
        if (pulls) value -= load(ce_pull + r) * (c.p.soft ? t.soft(j, r) : splat<V>(c.weight ? c.weight[j] : T(1)));
        value *= du;
        g += c.p.soft ? value : where(at_label(t, j, r), load(ce_label + r), value);
      }
      return where(load(on + r) != 0, g, V{});
    });
  }
};

template <class T>
void pixels_select_forward(const Context<T>& c, Partial& total) {
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::I I;
  SelectCall<T> call(c);
  const Selection& plan = call.plan;
  Scratch<T> held(plan.batch ? 4 * c.p.rows : 1);  // as select_forward
  Partial phis;
  auto to_save = [&](const LaneRowSums<V>& row, InDouble<T> beyond) {  // as SelectCall::to_save
    InDouble<T> more(row.more);
    for (int i = 0; plan.mass && i < InDouble<T>::parts; ++i)
      beyond.part[i] = more.part[i] / (more.part[i] + 1) - beyond.part[i];
    return beyond;
  };
  I not_counted = I{} + static_cast<typename Lanes<T>::IntScalar>(kNotCounted);
  auto vector_of_rows = [&](Tile<T>& t, int64_t r, TileSelectGradient<T>& g) {
    LaneRanking<T> rank(t, r, plan.size());
    LaneRowSums<V> row = lane_row_sums(call, t, r, rank.value[0]);
    InDouble<T> beyond(V{});
    V own{}, phi = plan.kind == Uncertainty::none ? V{} : static_cast<T>(plan.phi_scale) * row.uncertainty(plan.kind);
    int picked = plan.last < rank.size ? plan.last : rank.size - 1;
    if (plan.first == 0) {
      InDouble<T> more(row.more);
      for (int i = 1; i <= picked; ++i) {
        InDouble<T> e(exp_below(rank.value[i] - row.m)), x(rank.value[i]);
        for (int k = 0; k < InDouble<T>::parts; ++k)
          beyond.part[k] += selected_class(c.p.loss, c.p.numbers, e.part[k] / (more.part[k] + 1), x.part[k]).share;
      }
    } else {
      for (int i = plan.first; i <= picked; ++i) {
        V p = plan.softmax ? exp_below(rank.value[i] - row.m) / row.d() : V{};
        SelectedClass<V> s = selected_class(c.p.loss, c.numbers, p, rank.value[i]);
        InDouble<T> share(s.share);
        for (int k = 0; k < InDouble<T>::parts; ++k) beyond.part[k] += share.part[k];
        own += s.own;
      }
    }
    LaneCrossEntropy<T> ce(call, t);
    if (call.ce) {
      if (!c.p.soft) ce.find_label(r);
      ce.sums(r, row);
      ce.finish(r, true);
    }
    I none = I{} - 1, after = none, last = none;
    V high = splat<V>(infinity<T>()), low = high;
    if (plan.first > 0 && plan.last >= plan.first) after = rank.index[plan.first - 1], high = rank.value[plan.first - 1];
    if (plan.last >= plan.first) {  // the last that a number has taken; none, where even the one before the first is empty
      for (int i = plan.first > 0 ? plan.first - 1 : 0; i <= plan.last; ++i) {
        I taken = rank.index[i] >= 0;
        last = where(taken, rank.index[i], last), low = where(taken, rank.value[i], low);
      }
    }
    if (c.stats) {
      t.save(kMore, r, row.more), t.save(kLastClass, r, (V)last);
      if (plan.tilts) t.save(kSecond, r, row.second), t.save(kShares, r, to_save(row, beyond).narrow());
      else t.save(kClassBefore, r, (V)after);
      if (call.ce) t.save(kSideTop, r, ce.m), t.save(kSideSum, r, ce.d);
    }
    if (plan.batch) {
      int64_t n = c.p.rows;
      V p = 1 / row.d(), first = plan.first == 0 ? selected_class(c.p.loss, c.numbers, p, row.m).share : V{};
      t.rows_to(held.data, r, beyond.narrow() + first), t.rows_to(held.data + n, r, phi);
      t.rows_to(held.data + 2 * n, r, ce.loss), t.rows_to(held.data + 3 * n, r, ce.extra);
      t.sum += where(load(t.live + r) != 0, phi, V{}), t.sum_mass += load(t.live + r);
      if (c.p.reduction == Reduction::none) t.rows_to(c.out, r, V{});
      return;
    }
    LaneResult<T> result(call, row, beyond, own, phi);
    store(t.live + r, where(result.mass.narrow() != 0, load(t.live + r), V{}));
    V value = result.loss.narrow(), loss = call.ce ? ce.loss : value, extra = call.ce ? ce.extra + value : V{};
    t.emit(r, loss, extra);
    I counts = t.counted(r, loss + extra);
    if (c.stats && call.ce) t.save_sum(kSideSum, r, ce.d, loss + extra);
    if (c.stats && !plan.tilts) t.rows_to(c.stats + kFirstClass * c.p.rows, r, (V)where(counts, rank.index[0], not_counted));
    if (!c.ahead()) return;
    V up = t.upstream(r);
    g.set(r, row, result, up, where(counts, splat<V>(1), V{}), rank.index[0]);
    g.set_range(r, high, after, low, last);
    if (call.ce) g.set_cross_entropy(r, ce, up);
  };
  over_tiles(c, plan.dense, plan.batch ? &phis : &total, [&](Tile<T>& t) {
    t.read();
    if (c.p.soft) t.read_soft();
    TileSelectGradient<T> g(call);
    for (int64_t r = 0; r < t.padded; r += Lanes<T>::W) {
      t.fetch_next(r);
      vector_of_rows(t, r, g);
    }
    if (c.ahead()) g.write(t);
  });
  if (plan.batch) emit_batch(call, phis, held.data, total);
}

template <class T>
void pixels_select_backward(const Context<T>& c) {
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::I I;
  SelectCall<T> call(c);
  const Selection& plan = call.plan;
  if (plan.batch) begin_batch(call);
  bool logits = plan.dense || plan.last >= plan.first;
  over_tiles(c, false, nullptr, [&](Tile<T>& t) {
    if (logits) t.read();
    if (c.p.soft) t.read_soft();
    TileSelectGradient<T> g(call);
    auto logit_of = [&](int64_t r, I at, T without) {  // of the classes `at` of the rows r..
      V v;
      for (int i = 0; i < Lanes<T>::W; ++i) v[i] = at[i] < 0 || !logits ? without : t.tile.data[at[i] * t.stride + r + i];
      return v;
    };
    for (int64_t r = 0; r < t.padded; r += Lanes<T>::W) {
      if (logits) t.fetch_next(r);
      V up = t.upstream(r), live = load(t.live + r), zero{};
      I last = (I)t.saved(kLastClass, r), after = plan.tilts ? I{} - 1 : (I)t.saved(kClassBefore, r);
      g.set_range(r, logit_of(r, after, infinity<T>()), after, logit_of(r, last, infinity<T>()), last);
      if (!plan.tilts) {
        I first = (I)t.saved(kFirstClass, r);
        V on = where(first == static_cast<typename Lanes<T>::IntScalar>(kNotCounted), zero, live);
        LaneRowSums<V> row{logit_of(r, where(on != 0, first, I{} - 1), T(0)), t.saved(kMore, r), zero};
        // Rows that the filter dropped are off.
        V own = sum_over<V>(plan.dense ? c.p.classes : 0, [&](int64_t j) {
          V x = t.u(j, r);
          I selected = g.selected(j, r, x);
          if (!Ranking<T>::some(selected)) return V{};
          return where(selected, selected_class(c.p.loss, c.numbers, exp_below(x - row.m) / row.d(), x).own, V{});
        });
        LaneResult<T> result(call, row, InDouble<T>(zero), own, splat<V>(-infinity<T>()));
        g.set(r, row, result, up, on, first);
      } else {
        V m = splat<V>(-infinity<T>());
        for (int64_t j = 0; j < c.p.classes; ++j) m = larger(t.u(j, r), m);
        LaneRowSums<V> row{m, t.saved(kMore, r), t.saved(kSecond, r)};
        V phi = plan.batch ? splat<V>(static_cast<T>(call.phi)) : static_cast<T>(plan.phi_scale) * row.uncertainty(plan.kind);
        InDouble<T> saved(t.saved(kShares, r)), more(row.more);
        for (int i = 0; plan.mass && i < InDouble<T>::parts; ++i)
          saved.part[i] = more.part[i] / (more.part[i] + 1) - saved.part[i];  // what is saved is the rest
        LaneResult<T> result(call, row, saved, zero, phi);
        LaneCrossEntropy<T> ce(call, t);
        I counts = t.counted(r, result.loss.narrow());
        if (call.ce) {
          counts = t.live_unless(r, t.saved(kSideSum, r) < 0);
          ce.m = t.saved(kSideTop, r), ce.d = where(counts, t.saved(kSideSum, r), splat<V>(1));
          if (!c.p.soft) ce.find_label(r);
          ce.finish(r, false);
        }
        up = where(counts, up, zero);
        g.set(r, row, result, up, plan.batch ? live : where(counts, live, zero), I{} - 1);
        if (call.ce) g.set_cross_entropy(r, ce, up);
      }
    }
    g.write(t);
  });
}

}  // namespace PYL_ISA

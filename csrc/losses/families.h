// The contracts between formulas and drivers. A formula is the maths of one row; V is a number or a vector of rows.
//
// softmax: u_j = scale softcap(x_j) + shift_j. With d = sum_{j != y} e^(u_j - m) and the log odds against the label
// a = m - u_y + log d nothing cancels: p_y = sigmoid(-a), 1 - p_y = sigmoid(a).
//   The formula turns SoftmaxRow into a loss and two partial derivatives; the driver writes
//     dL/du_j = slope exp(u_j - lse_{k != y}(u)) - pull w_j   (j != y),      dL/du_y = label.
//
// margin: raw_j = (x_j - x_y) + mu_j, e_j = h(raw_j) for j != y, threshold t = mean_j e_j (a constant for the gradient).
//   The formula turns MarginRow into a loss and the factor of each kept slope; the driver writes
//     dL/dx_j = factor h'(raw_j)   (j kept),      dL/dx_y = -(sum of the others).
//
// entropy: no label. With m = max x, d = sum e^(x - m), mu = sum p_j (x_j - m): H = log(d) - mu.
//   The formula turns H into a loss, whether the row counts, and dL/dH; the driver writes
//     dL/dx_j = -slope p_j ((x_j - m) - mu).
//
// select: no label. Classes ranked by descending x, the lowest class first among equals; ranks first ... last are selected.
//   Each selected class gives a share s_j and its own derivative (s_j as a function of p_j: own_j = s'(p_j) p_j), their sum t
//   has dt/dx_k = own_k [k selected] - p_k sum own. phi = phi_scale times the entropy or 1 - sum p^2, of the row or its mean.
//   The formula turns SelectRow into a loss, whether the row counts, and the partials below; with dphi/dx the driver writes
//     dL/dx_j = top [rank 0] + each own_j [selected] + pull p_j + slope dphi/dx_j,
//     dphi/dx_j = -phi_scale p_j ((x_j - m) - mu)   or   -2 phi_scale p_j (p_j - sum p^2).
//   Row formulas take numbers in double: a density with a large exponent magnifies the rounding of its logarithm.
//
// region: a loss of each class of an area (the batch, or one image), from sums over its rows with sample weights s:
//     hit_c = sum s [y = c] p_c,      missed_c = sum s [y = c] (1 - p_c),      stray_c = sum s [y != c] p_c.
//   Nothing cancels in them, be the rows right or wrong. The formula turns RegionClass into a loss and two coefficients; with
//   q_j = push_j - pull_j [j = y] the driver writes
//     dL/dx_j = s p_j (q_j - sum_c p_c q_c).
//
// Headers are included after the maths of their backend (exp, log1p, ... for V) inside its namespace.
#pragma once

namespace PYL_ISA {

// A formula's own numbers, by name: a struct of them, in the order of its Python `pack`. They lie in an array of T, which
// own_of looks at as this struct.
#define PYL_OWN(...)                      \
  template <class T>                      \
  struct __attribute__((may_alias)) Own { \
    T __VA_ARGS__;                        \
  };                                      \
  static constexpr OwnNames own_names{{#__VA_ARGS__}};

template <class F, class T>
PYL_INLINE const typename F::template Own<T>& own_of(const T* numbers) {
  static_assert(sizeof(typename F::template Own<char>) <= kMostOwn, "a call holds no more own numbers");
  return *reinterpret_cast<const typename F::template Own<T>*>(numbers);
}

// What a formula knows about the call.
template <class T>
struct Batch {
  T classes;     // C
  T weight_sum;  // sum of the class weights, or C
  T main;        // backward: factor of everything but the z-term, whose divisor differs
};

// What a formula does not say is as its family says.
struct Parts {
  double main = 1, side = 0;  // what a loss and the softmax formula beside it are multiplied with
};
template <Family its_family, bool has_labels>
struct Formula {
  static constexpr Family family = its_family;
  static constexpr bool labels = has_labels, soft_targets = false, normed = false, beside = false;
  template <class O>
  static Parts parts(const O&) {
    return {};
  }
};

// softmax: what a call asks of its driver.
template <class T>
struct SoftmaxView {
  T scale = 1, cap = 0;         // u = scale softcap(x) + shift; 0: no cap
  bool shifted = false;         // is a class's shift a part of u?
  T hit = 1, each = 0;          // class probabilities t become targets w (hit t + each)
  bool smooth = false;          // is `spread` asked for, and `pull` not 0?
  bool second_divisor = false;  // has `extra` a gradient?
};
struct SoftmaxFormula : Formula<Family::softmax, true> {
  template <class O, class T>
  static SoftmaxView<T> view(const O&, T) {
    return {};
  }
};

// A row of the softmax family. All that it gives comes from one exp and one log; what a formula does not ask for is not
// computed. A driver picks m freely, as long as the exponentials of the label or of the others add up to 1 or more.
template <class V>
struct SoftmaxRow {
  V s;        // m - u_y
  V d;        // sum of e^(u - m) over the other classes
  V w;        // class weight (and factor) of the label, 1 when absent
  V u_label;  // the label's own u
  V m;
  V spread = {};  // sum_j w_j (lse - u_j), for smoothing

  // Relative to the larger of m and u_y: e^u of the label, of the others, and the logarithm of both together.
  PYL_INLINE V fade() const { return exp_below(-absolute(s)); }
  PYL_INLINE V own() const { return where(s < 0, splat<V>(1), fade()); }
  PYL_INLINE V others() const { return where(s < 0, d * fade(), d); }
  PYL_INLINE V log_total() const {
    return log1p_above(where(others() > own(), (others() - 1) + own(), (own() - 1) + others()));
  }

  PYL_INLINE V hit() const { return own() / (own() + others()); }                  // p_y
  PYL_INLINE V miss() const { return others() / (own() + others()); }              // 1 - p_y
  PYL_INLINE V nll() const { return where(s > 0, s, splat<V>(0)) + log_total(); }  // -log p_y
  PYL_INLINE V lse() const { return where(s > 0, m, u_label) + log_total(); }      // over all classes
  PYL_INLINE V odds() const { return exp(s) * d; }                                 // e^a
  PYL_INLINE V nll_miss() const { return log1p_above(own() / others()); }          // -log(1 - p_y)
};

template <class V>
struct SoftmaxResult {
  V loss;
  V extra;  // a term that is averaged without class weights
  V slope;  // coefficient of the softmax over the other classes
  V pull;   // coefficient of the class weights
  V label;  // derivative at the label
};

// With class probabilities as the target the driver sums q_j (lse - u_j); the formula gives the rest.
template <class V>
struct SoftRow {
  V lse;
  V mass;  // sum q
};
template <class V>
struct SoftResult {
  V extra;
  V slope;  // dL/du_j = slope p_j - pull q_j
  V pull;
};

// What a formula of normed rows (`normed`) makes of the length of a row: u = scale x.
template <class T, class Wide>
struct RowNorm {
  T scale = 1;
  Wide share = 1, drag = 0;  // share: what the norm leaves of the label's derivative; drag: of each x_j, per slope
};

// margin: what a call asks of its driver. Its Errors<T, how>, made of its own numbers, are h, as `value`, and h', as `slope`
// (raw > 0); `flat` where h' is 1: one bit a class is the gradient then. with_errors(own, f) calls f with errors whose `how` is
// known to the compiler; without it they look it up.
template <class T>
struct MarginView {
  T margin;        // mu of every class that has none of its own
  bool of_label;   // is mu the label's?
  bool threshold;  // else every error is kept
  bool flat;
};
struct MarginFormula : Formula<Family::margin, true> {};

template <class V>
struct MarginRow {
  V kept_sum;    // sum of kept errors
  V kept_count;  // how many classes were kept
  V w;
};

template <class V>
struct MarginResult {
  V loss;
  V factor;
};

struct EntropyView {
  bool filters;  // may a row be dropped for its entropy?
};
struct EntropyFormula : Formula<Family::entropy, false> {};

template <class V>
struct EntropyRow {
  V entropy;
};

template <class V>
struct EntropyResult {
  V loss;
  V mass;   // 0 for a row that is filtered out
  V slope;  // dL/dH
};

// What a loss of the select family asks of its driver.
enum class Uncertainty { none, entropy, variance };
struct Selection {
  int first = 0, last = 0;  // ranks
  Uncertainty kind = Uncertainty::none;
  bool softmax = true;   // is anything but the order of the logits needed?
  bool dense = true;     // has every class a gradient?
  bool batch = false;    // phi is the mean over the rows that count
  bool mass = false;     // shares are the probabilities themselves
  bool filters = false;  // may a row be dropped for its phi?
  bool tilts = false;  // is phi in the loss? Then `first` is 0, nothing pulls the top, and no row is dropped; else it is not 0
  bool pulls_top = false;
  double phi_scale = 1;  // phi per unit of entropy, or of 1 - sum p^2
  bool possible() const { return tilts ? first == 0 && !pulls_top && !filters : first > 0; }
  int size() const { return last < 0 ? 1 : last + 1; }
};

struct SelectFormula : Formula<Family::select, false> {};

template <class V>
struct SelectedClass {
  V share;
  V own;
};

template <class V>
struct SelectRow {
  V total;  // sum of the selected shares
  V own;    // and of their own derivatives
  V top;    // the largest logit
  V p_top;
  V phi;
};

template <class V>
struct SelectResult {
  V loss;
  V mass;   // 0 for a row that is filtered out
  V top;    // derivative at the first rank
  V each;   // dL/dt
  V pull;   // coefficient of p_j
  V slope;  // dL/dphi
};

// region: what a call asks of its driver.
enum class Absent { literal, zero, exclude };  // classes without a target: by the formula, loss 0, or not in the mean
struct RegionView {
  double smooth;
  bool by_image;  // is each image an area of its own?
  Absent absent;
};
struct RegionFormula : Formula<Family::region, true> {};

struct RegionClass {
  double hit, missed, stray;
  bool mass;  // has any row of the area a probability of the class that float64 can tell from 0?
  PYL_INLINE bool present() const { return !(hit + missed <= 0); }  // also when a row is NaN
};

struct RegionResult {
  double loss, push, pull;
};

// A loss or slope times a weight: what has none is 0, also where it is infinite; a NaN shows.
template <class V>
PYL_INLINE V weighted(V w, V value) {
  return where((w == 0) & (value == value), w * 0, w * value);
}
// Every loss that sees the row only through a: L = w f(a), with f(a) = value and f'(a) = slope.
template <class V>
PYL_INLINE SoftmaxResult<V> through_a(const SoftmaxRow<V>& r, V value, V slope) {
  V zero = splat<V>(0);
  V w_slope = weighted(r.w, slope);
  return {weighted(r.w, value), zero, w_slope, zero, -w_slope};
}

}  // namespace PYL_ISA

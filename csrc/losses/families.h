// The contracts between formulas and drivers. A formula is the maths of one row; V is a number or a vector of rows.
//
// softmax: u_j = scale softcap(x_j) + shift_j. With a = lse_{j != y}(u) - u_y nothing cancels: p_y = sigmoid(-a), 1 - p_y =
// sigmoid(a).
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
// Headers are included after the maths of their backend (exp, log1p, ... for V) inside its namespace.
#pragma once

namespace PYL_ISA {

// A loss's own numbers, in the order of its Python `pack`, and what the driver knows about the call.
template <class T>
struct Scalars {
  T own[kMaxScalars];
  T classes;     // C
  T weight_sum;  // sum of the class weights, or C
  T main;        // backward: factor of everything but the z-term, whose divisor differs
};

// A row of the softmax family. The five numbers of the odds come from one exp and one log, see odds().
template <class V>
struct SoftmaxRow {
  V a;          // log odds against the label
  V hit, miss;  // p_y and 1 - p_y
  V nll;        // -log p_y
  V nll_miss;   // -log(1 - p_y)
  V lse;        // over all classes
  V spread;     // sum_j w_j (lse - u_j), for smoothing
  V w;          // class weight (and factor) of the label, 1 when absent
};

template <class V>
PYL_INLINE SoftmaxRow<V> odds(V a, V w) {
  V zero = splat<V>(0), one = splat<V>(1);
  V e = exp_below(-absolute(a)), tail = log1p(e), inverse = 1 / (e + 1);
  auto against = a >= 0;
  return {a,
          where(against, e, one) * inverse,
          where(against, one, e) * inverse,
          where(a > 0, a, zero) + tail,
          where(a < 0, -a, zero) + tail,
          zero,
          one,
          w};
}

template <class V>
struct SoftmaxResult {
  V loss;
  V extra;  // a term that is averaged without class weights
  V slope;  // coefficient of the softmax over the other classes
  V pull;   // coefficient of the class weights
  V label;  // derivative at the label
};

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

// Every loss that sees the row only through a: L = w f(a), with f(a) = value and f'(a) = slope.
template <class V>
PYL_INLINE SoftmaxResult<V> through_a(const SoftmaxRow<V>& r, V value, V slope) {
  V zero = splat<V>(0);
  return {r.w * value, zero, r.w * slope, zero, -(r.w * slope)};
}

}  // namespace PYL_ISA

// High error margin and its ablations.
//   h(x) = x^power for x >= delta, delta^(power - 1) x below it (power < 1 only), 0 for x <= 0.
#pragma once

namespace PYL_ISA {

struct hem : MarginFormula {
  PYL_OWN(margin, power, delta, of_label, threshold, above_zero)
  enum Power { linear, squared, root, general, any };  // any: not known to the compiler

  template <class T>
  static PYL_INLINE Power power_of(const Own<T>& own) {
    return own.power == 1 ? linear : own.power == 2 ? squared : own.power == T(0.5) ? root : general;
  }
  template <class T>
  static MarginView<T> view(const Own<T>& own) {
    return {own.margin, own.of_label != 0, own.threshold != 0, power_of(own) == linear};
  }

  template <class T, Power P = any>
  struct Errors {
    static constexpr bool flat = P == linear;
    Power kind;
    T exponent, delta = 0, start = 0;  // start: the slope below delta

    explicit Errors(const Own<T>& own) : kind(power_of(own)), exponent(own.power) {
      if (exponent < 1) delta = own.delta;
      if (delta > 0) start = static_cast<T>(__builtin_pow(delta, exponent - 1.0));
    }
    PYL_INLINE bool is(Power one) const { return P == any ? kind == one : P == one; }
    template <class V>
    PYL_INLINE V value(V raw) const {
      V positive = where(raw > 0, raw, splat<V>(0));
      if (is(linear)) return positive;
      if (is(squared)) return positive * positive;
      V e = is(root) ? square_root(positive) : where(raw > 0, power(positive, exponent), splat<V>(0));
      return where(positive < delta, start * positive, e);
    }
    template <class V>
    PYL_INLINE V slope(V raw) const {  // raw > 0
      if (is(linear)) return splat<V>(1);
      if (is(squared)) return 2 * raw;
      V s = is(root) ? T(0.5) / square_root(raw) : exponent * power(raw, exponent - 1);
      return where(raw < delta, splat<V>(start), s);
    }
  };
  template <class T, class F>
  static PYL_INLINE void with_errors(const Own<T>& own, F f) {
    switch (power_of(own)) {
      case linear:
        return f(Errors<T, linear>(own));
      case squared:
        return f(Errors<T, squared>(own));
      case root:
        return f(Errors<T, root>(own));
      default:
        return f(Errors<T, general>(own));
    }
  }

  template <class T, class V>
  static PYL_INLINE MarginResult<V> row(const Own<T>& own, const Batch<T>& k, const MarginRow<V>& r) {
    V divisor = own.above_zero != 0 ? larger(r.kept_count, splat<V>(1)) : splat<V>(k.classes);
    return {weighted(r.w, r.kept_sum) / divisor, r.w / divisor};
  }
};

}  // namespace PYL_ISA

// Soft Dice of a class with I = hit and D = 2 hit + missed + stray, the sums of t p and of t + p:
//   L = 1 - (2 I + s) / (D + s) = (missed + stray) / (D + s),      dL/dp = (2 I + s) / (D + s)^2 - 2 t / (D + s).
#pragma once

namespace PYL_ISA {

struct dice : RegionFormula {
  PYL_OWN(smooth, by_image, absent)

  template <class T>
  static RegionView view(const Own<T>& own) {
    return {own.smooth, own.by_image != 0, static_cast<Absent>(static_cast<int>(own.absent))};
  }
  template <class T>
  static PYL_INLINE RegionResult of_class(const Own<T>& own, const RegionClass& c) {
    double both = 2 * c.hit + own.smooth, size = both + c.missed + c.stray;
    // An absent class has loss 1 without smoothing, whatever its mass: a constant, and no division by almost nothing.
    if (own.smooth == 0 && !c.present()) return {c.mass ? 1.0 : 0.0, 0, 0};
    if (size == 0) return {0, 0, 0};
    return {(c.missed + c.stray) / size, both / (size * size), 2 / size};
  }
};

}  // namespace PYL_ISA

// The region family's sums of an area, and what its rows' gradients are made of.
#pragma once
#include "cpu/driver.h"

namespace PYL_ISA {

// hit and missed of each class side by side, since a row adds to both at once; then stray.
struct ClassSums {
  typedef double Pair __attribute__((vector_size(16)));
  int64_t classes;
  Pair* label;
  double* stray;

  static int64_t size(int64_t classes) { return (3 * classes + 7) / 8 * 8; }  // in doubles: whole cache lines
  ClassSums(double* memory, int64_t classes)
      : classes(classes), label(reinterpret_cast<Pair*>(memory)), stray(memory + 2 * classes) {}

  RegionClass of(int64_t j) const { return {label[j][0], label[j][1], stray[j], stray[j] > 0}; }
  PYL_INLINE void add_label(int64_t j, double hit, double miss) const { label[j] += Pair{hit, miss}; }
  void clear() const {
    for (int64_t j = 0; j < classes; ++j) label[j] = Pair{}, stray[j] = 0;
  }
  void add(const ClassSums& other) const {
    for (int64_t j = 0; j < classes; ++j) label[j] += other.label[j], stray[j] += other.stray[j];
  }
};

// The logarithm of a probability that float64 cannot tell from 0.
constexpr double kNoMass = -745;
// Several threads may mark the same class.
inline void mark(uint8_t* found) { __atomic_store_n(found, uint8_t(1), __ATOMIC_RELAXED); }

// The derivatives push_j - pull_j [j = y] with respect to p_j, upstream gradient included. Only differences of push matter:
// where all have one sign they are taken relative to the one next to 0, which keeps most digits. Two likely classes with almost
// the same push have a gradient that is nothing but their difference: `rest` has what a push of type T leaves out.
template <class T>
struct ClassFactors {
  int64_t classes;
  Scratch<T> push_, rest_, pull_;
  T *push, *rest, *pull;
  explicit ClassFactors(int64_t classes)
      : classes(classes),
        push_(classes),
        rest_(classes),
        pull_(classes),
        push(push_.data),
        rest(rest_.data),
        pull(pull_.data) {}

  void set(const double* push_pull, double factor, const T* up) const {
    auto at = [&](int64_t j, int which) { return push_pull[2 * j + which] * (up ? factor * up[j] : factor); };
    double low = at(0, 0), high = low;
    for (int64_t j = 1; j < classes; ++j) low = at(j, 0) < low ? at(j, 0) : low, high = at(j, 0) > high ? at(j, 0) : high;
    double common = low > 0 ? low : high < 0 ? high : 0;
    for (int64_t j = 0; j < classes; ++j) {
      double own = at(j, 0) - common;
      push[j] = static_cast<T>(own), rest[j] = static_cast<T>(own - push[j]), pull[j] = static_cast<T>(at(j, 1));
    }
  }
};

}  // namespace PYL_ISA

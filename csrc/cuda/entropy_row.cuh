// The moments of a row's softmax, for the entropy and select families. Sums leave out the 1 of one largest entry, which would
// swallow the rest in rows that one class dominates.
#pragma once
#include "cuda/rows.cuh"

namespace PYL_ISA {

template <class T>
struct Moments {
  static constexpr int kNumbers = 5;
  T m = -infinity<T>();
  T ties = 0, rest = 0;      // entries equal to m; sum of e^(x - m) over the others
  T moment = 0, square = 0;  // sum of e^(x - m) (x - m); of e^(2 (x - m)) over the others

  PYL_DEVICE void raise(T top) {
    if (!(top > m)) return;
    T step = centre() - top, shrink = exp(step), all = ties + rest;
    if (m == -infinity<T>()) step = shrink = 0;
    rest = all * shrink, moment = (moment + step * all) * shrink, square = (ties + square) * shrink * shrink;
    m = top, ties = 0;
  }
  PYL_DEVICE T centre() const { return m == -infinity<T>() ? T(0) : m; }
  template <class Chunk>
  PYL_DEVICE void add(const Chunk& x) {
    T top = -infinity<T>();
#pragma unroll
    for (int i = 0; i < Chunk::kCount; ++i) top = larger(x.x[i], top);
    raise(top);
    T base = centre(), others = 0, with = 0, squares = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < Chunk::kCount; ++i) {
      T step = x.x[i] - base, e = exp(step);
      bool tie = x.x[i] == base;
      T beside = tie ? T(0) : e;
      equal += tie ? T(1) : T(0);
      others += beside, squares += beside * beside;
      with += x.x[i] == -infinity<T>() ? T(0) : e * step;
    }
    ties += equal, rest += others, moment += with, square += squares;
  }
  template <class G>
  PYL_DEVICE void merge(const G& g) {
    raise(max_of(g, m));
    T v[4] = {ties, rest, moment, square};
    add_up(g, v);
    ties = v[0], rest = v[1], moment = v[2], square = v[3];
  }
  PYL_DEVICE void leave(const Call<T>& c, T* parts, const Place& p) const {
    const T v[kNumbers] = {m, ties, rest, moment, square};
    for (int i = 0; i < kNumbers; ++i) part_number(c, parts, i, p.part, p.row) = v[i];
  }
  PYL_DEVICE void fetch(const Call<T>& c, T* parts, int part, int64_t row) {
    m = part_number(c, parts, 0, part, row), ties = part_number(c, parts, 1, part, row);
    rest = part_number(c, parts, 2, part, row), moment = part_number(c, parts, 3, part, row);
    square = part_number(c, parts, 4, part, row);
  }
  // sum of e^(x - m) = 1 + more; NaN for a row without a softmax
  PYL_DEVICE T more() const {
    bool finite = m > -infinity<T>() && m < infinity<T>();
    return finite ? (ties - 1) + rest : nan<T>();
  }
};

}  // namespace PYL_ISA

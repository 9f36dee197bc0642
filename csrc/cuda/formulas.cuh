// The formulas of csrc/losses by number: shared with the CPU, here for one number at a time. The loss is a run-time switch: a
// formula runs once a row, and a kernel for each would cost minutes of compiling.
#pragma once
#include "cpu/problem.h"
#include "cuda/maths.cuh"

namespace PYL_ISA {
using namespace pylosses;
}
#include "losses/all.h"

namespace PYL_ISA {

template <class T>
PYL_DEVICE EntropyResult<T> entropy_formula(int loss, const T* numbers, const Batch<T>& k, const EntropyRow<T>& r) {
  return visit_entropy<EntropyResult<T>>(loss, [&](auto f) { return f.row(own_of<decltype(f)>(numbers), k, r); });
}
PYL_DEVICE SelectResult<double> select_formula(int loss, const double* numbers, const Batch<double>& k,
                                               const SelectRow<double>& r) {
  return visit_select<SelectResult<double>>(loss, [&](auto f) { return f.row(own_of<decltype(f)>(numbers), k, r); });
}
PYL_DEVICE RegionResult region_formula(int loss, const double* numbers, const RegionClass& one) {
  return visit_region<RegionResult>(loss, [&](auto f) { return f.of_class(own_of<decltype(f)>(numbers), one); });
}

}  // namespace PYL_ISA

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

#define PYL_ID(name, saved, ahead) id_##name,
enum LossId { PYL_LOSSES(PYL_ID) kLosses };
#undef PYL_ID

#define PYL_FORMULA(name, saved, ahead) \
  case id_##name:                       \
    return name::row(k, r);
template <class T>
PYL_DEVICE SoftmaxResult<T> softmax_formula(int loss, const Scalars<T>& k, const SoftmaxRow<T>& r) {
  switch (loss) { PYL_SOFTMAX_LOSSES(PYL_FORMULA) }
  return {};
}
template <class T>
PYL_DEVICE MarginResult<T> margin_formula(int loss, const Scalars<T>& k, const MarginRow<T>& r) {
  switch (loss) { PYL_MARGIN_LOSSES(PYL_FORMULA) }
  return {};
}
template <class T>
PYL_DEVICE EntropyResult<T> entropy_formula(int loss, const Scalars<T>& k, const EntropyRow<T>& r) {
  switch (loss) { PYL_ENTROPY_LOSSES(PYL_FORMULA) }
  return {};
}
template <class T>
PYL_DEVICE SelectResult<T> select_formula(int loss, const Scalars<T>& k, const SelectRow<T>& r) {
  switch (loss) { PYL_SELECT_LOSSES(PYL_FORMULA) }
  return {};
}
#undef PYL_FORMULA

#define PYL_SELECTED(name, saved, ahead) \
  case id_##name:                        \
    return name::selected(k, p, x);
template <class T>
PYL_DEVICE SelectedClass<T> selected_class(int loss, const Scalars<T>& k, T p, T x) {
  switch (loss) { PYL_SELECT_LOSSES(PYL_SELECTED) }
  return {};
}
#undef PYL_SELECTED

#define PYL_SELECTION(name, saved, ahead) \
  case id_##name:                         \
    return name::selection(k);
inline Selection selection_of(int loss, const Scalars<double>& k) {
  switch (loss) { PYL_SELECT_LOSSES(PYL_SELECTION) }
  return {};
}
#undef PYL_SELECTION

inline Family family_of(int loss) {
#define PYL_CASE(name, saved, ahead) case id_##name:
  switch (loss) {
    PYL_MARGIN_LOSSES(PYL_CASE) return Family::margin;
    PYL_ENTROPY_LOSSES(PYL_CASE) return Family::entropy;
    PYL_REGION_LOSSES(PYL_CASE) return Family::region;
    PYL_SELECT_LOSSES(PYL_CASE) return Family::select;
  }
#undef PYL_CASE
  return Family::softmax;
}
// Does a loss have cross-entropy's numbers, own = (smoothing, temperature, softcap, z-loss, ...)?
inline bool has_cross_entropy(int loss) {
  return loss == id_cross_entropy || loss == id_dice_ce || loss == id_cross_entropy_adr;
}
inline bool label_free(int loss) { return family_of(loss) == Family::entropy || loss == id_tta || loss == id_adr; }

}  // namespace PYL_ISA

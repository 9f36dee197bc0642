#include "cpu/scores.h"

namespace PYL_ISA {

template <class T>
static void scores_as(const Problem& p, const Scores& k) {
  Context<T> c(p);
  across_rows(p) ? pixels_scores(c, k) : rows_scores(c, k);
}

void scores(const Problem& p, const Scores& k) { p.dtype == Dtype::f64 ? scores_as<double>(p, k) : scores_as<float>(p, k); }

}  // namespace PYL_ISA

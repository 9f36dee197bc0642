// What bindings.cpp calls, once per instruction set (PYL_ISA names the namespace). No std templates in what is compiled so: an
// inline function built with wide vectors must never be merged with its narrow twin.
#include "cpu/driver.h"

namespace PYL_ISA {

template <class T>
static int64_t forward_as(const Problem& p) {
  Context<T> c(p);
  Partial total, labels = look_at_labels(c);
  if (labels.bad >= 0) return labels.bad;
  if (c.ahead()) c.begin_ahead(labels);
  switch (c.facts.family) { PYL_FAMILIES(PYL_FORWARD) }
  if (c.facts.family != Family::region) c.finish(total);  // which reduces classes, not rows
  if (c.ahead()) c.keep_divisors(labels);                 // a second backward divides by what this one did
  return -1;
}
template <class T>
static void backward_as(const Problem& p) {
  Context<T> c(p);
  c.begin_backward();
  switch (c.facts.family) { PYL_FAMILIES(PYL_BACKWARD) }
}

static int64_t forward(const Problem& p) { return p.dtype == Dtype::f64 ? forward_as<double>(p) : forward_as<float>(p); }
static void backward(const Problem& p) { p.dtype == Dtype::f64 ? backward_as<double>(p) : backward_as<float>(p); }
void scores(const Problem& p, const Scores& k);

// What forward saves: two divisors of the mean, the numbers of every row, and what the drivers of a family save besides.
template <class T>
static Sizes sizes_as(int loss, const double* given, bool soft, bool shift) {
  const Facts& facts = kFacts[loss];
  T numbers[kMostOwn];
  for (int i = 0; i < kMostOwn; ++i) numbers[i] = static_cast<T>(given[i]);
  SoftmaxView<T> softmax = softmax_view(facts, numbers, T(2));
  Sizes s;
  s.fixed = 2 * sizeof(T);
  s.a_row = row_numbers(facts, softmax, soft, shift) * static_cast<int>(sizeof(T));
  s.ahead = known_early(loss, given);
  s.weight_sum = softmax.smooth, s.second_divisor = has_second_divisor(facts, softmax);
  if (facts.family == Family::margin && margin_view(loss, numbers).flat) {
    // A bit a class: pairs of bytes for each row, or W bits a class for each vector of W = 2 to 16 rows, in whole bytes.
    s.fixed += 2, s.a_row += 2, s.a_class = 2, s.a_logit = 1;
  }
  if (facts.family == Family::select && !selection_of(loss, given, 2).possible()) s.fixed = -1;
  if (facts.family == Family::region) {  // how many areas count, and two coefficients of every area and class
    bool by_image = region_view(loss, given).by_image;
    s.fixed += sizeof(double), s.a_class = 2 * sizeof(double);
    s.shape = by_image ? LossShape::classes_of_images : LossShape::classes;
    s.area_rows = kLargeArea;
  }
  return s;
}
static Sizes sizes(int loss, Dtype dtype, const double* numbers, bool soft, bool shift) {
  return dtype == Dtype::f64 ? sizes_as<double>(loss, numbers, soft, shift) : sizes_as<float>(loss, numbers, soft, shift);
}

extern const Kernels kernels;
const Kernels kernels{kFacts, sizes, forward, backward, scores};

}  // namespace PYL_ISA

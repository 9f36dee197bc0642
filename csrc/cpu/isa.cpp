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
  Family family = family_of(p.loss);
  switch (family) { PYL_FAMILIES(PYL_FORWARD) }
  if (family != Family::region) c.finish(total);  // which reduces classes, not rows
  if (c.ahead()) c.keep_divisors(labels);         // a second backward divides by what this one did
  return -1;
}
template <class T>
static void backward_as(const Problem& p) {
  Context<T> c(p);
  c.begin_backward();
  switch (family_of(p.loss)) { PYL_FAMILIES(PYL_BACKWARD) }
}

static int64_t forward(const Problem& p) { return p.dtype == Dtype::f64 ? forward_as<double>(p) : forward_as<float>(p); }
static void backward(const Problem& p) { p.dtype == Dtype::f64 ? backward_as<double>(p) : backward_as<float>(p); }
void scores(const Problem& p, const Scores& k);

extern const Kernels kernels;
const Kernels kernels{forward, backward, scores};

}  // namespace PYL_ISA

// The drivers, compiled once per instruction set (PYL_ISA names the namespace). No std templates here: an inline function built
// with wide vectors must never be merged with its narrow twin.
#include "cpu/rowwise_softmax.h"
#include "cpu/rowwise_entropy.h"
#include "cpu/rowwise_margin.h"
#include "cpu/rowwise_select.h"
#include "cpu/pixelwise_softmax.h"
#include "cpu/pixelwise_entropy.h"
#include "cpu/pixelwise_margin.h"
#include "cpu/pixelwise_select.h"
#include "cpu/region.h"
#include "cpu/scores.h"

namespace PYL_ISA {

// Lanes across rows pay off when a row is short, or when neighbouring rows are closer in memory than neighbouring classes.
inline bool across_rows(const Problem& p) {
  const Layout& l = p.x_layout;
  int64_t row_stride = l.dims ? l.stride[l.dims - 1] : p.classes;
  return p.classes < 32 || row_stride < l.class_stride;
}

template <class T>
int64_t forward_as(const Problem& p) {
  Context<T> c(p);
  Partial total, labels = look_at_labels(c);
  if (labels.bad >= 0) return labels.bad;
  if (c.ahead()) c.begin_ahead(labels);
  bool pixels = across_rows(p);
  switch (family_of(p.loss)) {
    case Family::softmax:
      pixels ? pixels_softmax_forward(c, total) : softmax_forward(c, total);
      break;
    case Family::margin:
      pixels ? pixels_margin_forward(c, total) : margin_forward(c, total);
      break;
    case Family::entropy:
      pixels ? pixels_entropy_forward(c, total) : entropy_forward(c, total);
      break;
    case Family::region:  // it reduces classes, not rows
      pixels ? region_forward<RegionTiles<T>>(c) : region_forward<RegionRows<T>>(c);
      return -1;
    case Family::select:
      pixels ? pixels_select_forward(c, total) : select_forward(c, total);
      break;
  }
  c.finish(total);
  return -1;
}
template <class T>
void backward_as(const Problem& p) {
  Context<T> c(p);
  c.begin_backward();
  bool pixels = across_rows(p);
  switch (family_of(p.loss)) {
    case Family::softmax:
      pixels ? pixels_softmax_backward(c) : softmax_backward(c);
      break;
    case Family::margin:
      pixels ? pixels_margin_backward(c) : margin_backward(c);
      break;
    case Family::entropy:
      pixels ? pixels_entropy_backward(c) : entropy_backward(c);
      break;
    case Family::region:
      pixels ? region_backward<RegionTiles<T>>(c) : region_backward<RegionRows<T>>(c);
      break;
    case Family::select:
      pixels ? pixels_select_backward(c) : select_backward(c);
      break;
  }
}

template <class T>
void scores_as(const Problem& p, const Scores& k) {
  Context<T> c(p);
  across_rows(p) ? pixels_scores(c, k) : rows_scores(c, k);
}

static int64_t forward(const Problem& p) { return p.dtype == Dtype::f64 ? forward_as<double>(p) : forward_as<float>(p); }
static void backward(const Problem& p) { p.dtype == Dtype::f64 ? backward_as<double>(p) : backward_as<float>(p); }
static void scores(const Problem& p, const Scores& k) {
  p.dtype == Dtype::f64 ? scores_as<double>(p, k) : scores_as<float>(p, k);
}

extern const Kernels kernels;
const Kernels kernels{forward, backward, scores};

}  // namespace PYL_ISA

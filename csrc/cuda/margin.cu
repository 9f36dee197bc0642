#include "cuda/margin.cuh"

namespace PYL_ISA {
void margin_forward(Run& run, const Request& r) { PYL_BY_DTYPE(forward_margin, run, r) }
void margin_backward(Run& run, const Request& r) { PYL_BY_DTYPE(backward_margin, run, r) }
}  // namespace PYL_ISA

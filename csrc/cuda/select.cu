#include "cuda/select.cuh"

namespace PYL_ISA {
void select_forward(Run& run, const Request& r) { PYL_BY_DTYPE(forward_select, run, r) }
void select_backward(Run& run, const Request& r) { PYL_BY_DTYPE(backward_select, run, r) }
}  // namespace PYL_ISA

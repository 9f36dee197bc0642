#include "cuda/softmax.cuh"

namespace PYL_ISA {
void softmax_forward(Run& run, const Request& r) { PYL_BY_DTYPE(forward_softmax, run, r) }
void softmax_backward(Run& run, const Request& r) { PYL_BY_DTYPE(backward_softmax, run, r) }
}  // namespace PYL_ISA

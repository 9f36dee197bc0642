#include "cuda/entropy.cuh"

namespace PYL_ISA {
void entropy_forward(Run& run, const Request& r) { PYL_BY_DTYPE(forward_entropy, run, r) }
void entropy_backward(Run& run, const Request& r) { PYL_BY_DTYPE(backward_entropy, run, r) }
}  // namespace PYL_ISA

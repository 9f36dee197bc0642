#include "cuda/region.cuh"

namespace PYL_ISA {
void region_forward(Run& run, const Request& r) { PYL_BY_DTYPE(forward_region, run, r) }
void region_backward(Run& run, const Request& r) { PYL_BY_DTYPE(backward_region, run, r) }
}  // namespace PYL_ISA

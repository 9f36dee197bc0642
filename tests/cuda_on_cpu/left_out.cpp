// Families that a build leaves out, to be quick: the real functions, where they are linked, go before these.
#include <stdexcept>

#include "cuda/call.h"

namespace PYL_ISA {

#define LEFT_OUT(family)                                                                                            \
  __attribute__((weak)) void family##_forward(Run&, const Request&) { throw std::logic_error("not in the build"); } \
  __attribute__((weak)) void family##_backward(Run&, const Request&) { throw std::logic_error("not in the build"); }
PYL_FAMILIES(LEFT_OUT)

}  // namespace PYL_ISA

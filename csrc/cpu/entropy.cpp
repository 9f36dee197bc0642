#include "cpu/rowwise_entropy.h"
#include "cpu/pixelwise_entropy.h"

PYL_DEFINE_FAMILY(entropy)

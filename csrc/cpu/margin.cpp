#include "cpu/rowwise_margin.h"
#include "cpu/pixelwise_margin.h"

PYL_DEFINE_FAMILY(margin)

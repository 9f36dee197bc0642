#include "cpu/rowwise_softmax.h"
#include "cpu/pixelwise_softmax.h"

PYL_DEFINE_FAMILY(softmax)

#include "cpu/rowwise_select.h"
#include "cpu/pixelwise_select.h"

PYL_DEFINE_FAMILY(select)

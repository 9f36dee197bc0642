#include "cpu/region.h"

PYL_DEFINE_FAMILY(region)

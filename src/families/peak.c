/* Measurements of the machine. */
#include "interface/peak.h"
#include "kernels.h"

#include "peak.inc.h"

FAMILY(peak) = {
    .fma_rounds = fma_rounds,
    .read_bytes = read_bytes,
};

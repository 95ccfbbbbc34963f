/* Measurements of the machine. */
#include "kernels.h"

#include "peak.inc.h"

FAMILY(peak) = {
    .fma_rounds = fma_rounds,
    .read_bytes = read_bytes,
};

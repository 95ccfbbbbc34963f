/* Weights of linear maps, packed into panels. */
#include "kernels.h"

#include "pack.inc.h"

FAMILY(pack) = {
    .pack_scratch_bytes = pack_scratch_bytes,
    .pack_run = pack_run,
};

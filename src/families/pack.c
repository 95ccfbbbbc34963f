/* Weights of linear maps, packed into panels. */
#include "interface/pack.h"
#include "kernels.h"

#include "pack.inc.h"

FAMILY(pack) = {
    .scratch_bytes = pack_scratch_bytes,
    .run = pack_run,
};

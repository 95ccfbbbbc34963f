/* Deformable attention, and its gradient. */
#include "interface/deformable.h"
#include "kernels.h"

#include "deformable.inc.h"

FAMILY(deformable) = {
    .scratch_bytes = deformable_scratch_bytes,
    .run = deformable_run,
    .grad_scratch_bytes = deformable_grad_scratch_bytes,
    .grad_run = deformable_grad_run,
};

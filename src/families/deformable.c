/* Deformable attention, and its gradient. */
#include "kernels.h"

#include "deformable.inc.h"

FAMILY(deformable) = {
    .deformable_scratch_bytes = deformable_scratch_bytes,
    .deformable_run = deformable_run,
    .deformable_grad_scratch_bytes = deformable_grad_scratch_bytes,
    .deformable_grad_run = deformable_grad_run,
};

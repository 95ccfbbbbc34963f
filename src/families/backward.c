/* The gradients of attention. */
#include "interface/backward.h"
#include "kernels.h"

#include "backward.inc.h"

FAMILY(backward) = {
    .plan = backward_plan,
    .sums = backward_sums,
    .begin = backward_begin,
    .run = backward_run,
    .end = backward_end,
};

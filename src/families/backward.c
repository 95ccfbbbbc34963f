/* The gradients of attention. */
#include "kernels.h"

#include "backward.inc.h"

FAMILY(backward) = {
    .backward_plan = backward_plan,
    .backward_sums = backward_sums,
    .backward_begin = backward_begin,
    .backward_run = backward_run,
    .backward_end = backward_end,
};

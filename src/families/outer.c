/* The gradients of linear maps' weights. */
#include "kernels.h"

#include "outer.inc.h"

FAMILY(outer) = {
    .outer_plan = outer_plan,
    .outer_run = outer_run,
};

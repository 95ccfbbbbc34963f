/* The gradients of linear maps' weights. */
#include "interface/outer.h"
#include "kernels.h"

#include "outer.inc.h"

FAMILY(outer) = {
    .plan = outer_plan,
    .run = outer_run,
};

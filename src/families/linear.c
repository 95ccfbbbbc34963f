/* Linear maps, as layers have them. */
#include "kernels.h"

#include "linear.inc.h"

FAMILY(linear) = {
    .linear_plan = linear_plan,
    .linear_run = linear_run,
    .linear_between = linear_between,
};

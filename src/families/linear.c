/* Linear maps, as layers have them. */
#include "interface/linear.h"
#include "kernels.h"

#include "linear.inc.h"

FAMILY(linear) = {
    .plan = linear_plan,
    .run = linear_run,
    .between = linear_between,
};

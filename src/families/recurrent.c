/* Linear attention, and its gradients. */
#include "kernels.h"

#include "recurrent.inc.h"
#include "recurrent_backward.inc.h"

FAMILY(recurrent) = {
    .recurrent_plan = recurrent_plan,
    .recurrent_run = recurrent_run,
    .recurrent_backward_plan = recurrent_backward_plan,
    .recurrent_backward_run = recurrent_backward_run,
};

/* Linear attention, and its gradients. */
#include "interface/recurrent.h"
#include "kernels.h"

#include "recurrent.inc.h"
#include "recurrent_backward.inc.h"

FAMILY(recurrent) = {
    .plan = recurrent_plan,
    .run = recurrent_run,
    .backward_plan = recurrent_backward_plan,
    .backward_run = recurrent_backward_run,
};

/* Attention with other normalisers and other scores, and its gradients. */
#include "kernels.h"

#include "rowwise.inc.h"
#include "rowwise_backward.inc.h"

FAMILY(rowwise) = {
    .rowwise_plan = rowwise_plan,
    .rowwise_run = rowwise_run,
    .rowwise_backward_plan = rowwise_backward_plan,
    .rowwise_backward_run = rowwise_backward_run,
};

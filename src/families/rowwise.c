/* Attention with other normalisers and other scores, and its gradients. */
#include "interface/rowwise.h"
#include "kernels.h"

#include "rowwise.inc.h"
#include "rowwise_backward.inc.h"

FAMILY(rowwise) = {
    .plan = rowwise_plan,
    .run = rowwise_run,
    .backward_plan = rowwise_backward_plan,
    .backward_run = rowwise_backward_run,
};

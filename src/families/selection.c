/* Which keys have the largest scores, and which vectors. */
#include "interface/selection.h"
#include "kernels.h"

#include "nearest.inc.h"
#include "selection.inc.h"

FAMILY(selection) = {
    .plan = selection_plan,
    .score = selection_score,
    .run = selection_run,
    .nearest_plan = nearest_plan,
    .nearest_run = nearest_run,
    .nearest_finish = nearest_finish,
};

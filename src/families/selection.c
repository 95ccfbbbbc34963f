/* Which keys have the largest scores, and which vectors. */
#include "kernels.h"

#include "nearest.inc.h"
#include "selection.inc.h"

FAMILY(selection) = {
    .selection_plan = selection_plan,
    .selection_score = selection_score,
    .selection_run = selection_run,
    .nearest_plan = nearest_plan,
    .nearest_run = nearest_run,
    .nearest_finish = nearest_finish,
};

/* Which keys have the largest scores. */
#include "kernels.h"

#include "selection.inc.h"

FAMILY(selection) = {
    .selection_plan = selection_plan,
    .selection_score = selection_score,
    .selection_run = selection_run,
};

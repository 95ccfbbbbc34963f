/* Attention: which keys a row attends, what is done to their scores, and what comes of them. */
#include "interface/attention.h"
#include "kernels.h"

#include "tasks.inc.h"
#include "disentangled.inc.h"

FAMILY(attention) = {
    .plan = attention_plan,
    .run = attention_run,
    .splits = attention_splits,
    .run_split = attention_run_split,
    .merge = attention_merge,
    .disentangled_tasks = disentangled_tasks,
    .disentangled_scratch_bytes = disentangled_scratch_bytes,
    .disentangled_run = disentangled_run,
};

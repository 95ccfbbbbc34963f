/* The tile kernel of attention, with products of int8. Other kernels of a call are those of the family `attention`. */
#include "interface/attention.h"
#include "kernels.h"

#define FORM_OF(a) OF_BYTES
#include "tasks.inc.h"

FAMILY(integers) = {
    .plan = attention_plan,
    .run = attention_run,
    .splits = attention_splits,
    .run_split = attention_run_split,
    .merge = attention_merge,
};

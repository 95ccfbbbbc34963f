/* Norms, softmax and activations, row by row, and their gradients; and what else goes over rows once. */
#include "interface/rows.h"
#include "kernels.h"

#include "rows.inc.h"
#include "rows_grad.inc.h"
#include "logits.inc.h"
#include "dropout.inc.h"
#include "scatter.inc.h"
#include "rope.inc.h"
#include "optimizer.inc.h"

FAMILY(rows) = {
    .scratch_bytes = rows_scratch_bytes,
    .run = rows_run,
    .grad_scratch_bytes = rows_grad_scratch_bytes,
    .grad_run = rows_grad_run,
    .grad_add = rows_grad_add,
    .logits_run = logits_run,
    .dropout_run = dropout_run,
    .scatter_scratch_bytes = scatter_scratch_bytes,
    .scatter_run = scatter_run,
    .rope_run = rope_run,
    .update_run = update_run,
};

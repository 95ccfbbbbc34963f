/* The kernels of one instruction set and one lane type: a table of contents, and the table that is exported.
 *
 * Compiled for every line of isa.inc, with its flags and -DFA_ISA_NAME=<isa>, once with float lanes and once, with
 * -DFA_LANE_F64, with double lanes. Everything is static but that table. A file uses only what stands above it here.
 * Its head says which files it requires (and with them what those require), which parameters must be literals, and
 * which names it exports: all that other files use.
 *
 * One name means one thing in all files of attention:
 *
 *     a           the arguments of the call            plan     how the call is cut into tasks
 *     rows        the query rows of a task or tile     r, id    a row's number among them; its query and head
 *     mods        modifiers of scores                  kind     what a block of keys is to a tile (block_kind)
 *     tile        rows with their state                scratch  a thread's memory
 *     block, run  a block of keys; some keys of it     part     a result over some of the keys
 *     s, probs    scores; probabilities                add      what is added to scores
 *     b h i j d   batch, head, query, key, dimension   j0, n    the first key of a block; how many there are
 *     u           a vector of a tile's row             p        the product that a micro-kernel computes
 *     nv          how many; a literal: 1 for at most LANES rows, or NV
 *     dot         a literal: 1 where products are of bfloat16 pairs, only if V_BF16_DOT */
#include "fastattn.h"

#include "simd.h"
#include "basics.inc.h"
#include "convert.inc.h"
#include "tile.inc.h"
#include "softmax.inc.h"

/* Attention: which keys a row attends, what is done to their scores, and what comes of them. */
#include "ranges.inc.h"
#include "masks.inc.h"
#include "modifiers.inc.h"
#include "sigmoid.inc.h"
#include "statistics.inc.h"
#include "partial.inc.h"
#include "scales.inc.h"
#include "nonfinite.inc.h"
#include "operands.inc.h"
#include "attention.inc.h"
#include "decode.inc.h"
#include "tasks.inc.h"

/* Layers. */
#include "activation.inc.h"
#include "linear_pass.inc.h"
#include "linear_input.inc.h"
#include "linear.inc.h"
#include "pack.inc.h"
#include "rows.inc.h"
#include "rope.inc.h"

/* Linear attention. */
#include "recurrent_task.inc.h"
#include "recurrent_decay.inc.h"
#include "recurrent_chunk.inc.h"
#include "recurrent_step.inc.h"
#include "recurrent.inc.h"

/* Attention with other normalisers and other scores. */
#include "additive.inc.h"
#include "normalisers.inc.h"
#include "talking.inc.h"
#include "rowwise.inc.h"
#include "peak.inc.h"

#define TABLE_(isa, lane) fa_kernels_##isa##_##lane
#define TABLE(isa, lane) TABLE_(isa, lane)
const fa_kernels TABLE(FA_ISA_NAME, LANE_NAME) = {
    .plan = attention_plan,
    .run = attention_run,
    .splits = attention_splits,
    .run_split = attention_run_split,
    .merge = attention_merge,
    .linear_plan = linear_plan,
    .linear_run = linear_run,
    .pack_scratch_bytes = pack_scratch_bytes,
    .pack_run = pack_run,
    .rows_scratch_bytes = rows_scratch_bytes,
    .rows_run = rows_run,
    .rope_run = rope_run,
    .recurrent_plan = recurrent_plan,
    .recurrent_run = recurrent_run,
    .rowwise_plan = rowwise_plan,
    .rowwise_run = rowwise_run,
    .fma_rounds = fma_rounds,
    .read_bytes = read_bytes,
};

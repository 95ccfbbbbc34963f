/* The kernels of one instruction set and one lane type: a table of contents, and the table that is exported.
 *
 * Compiled with the flags of a line of isa.inc and -DFA_ISA_NAME=<isa>: with -DFA_LANE_F64 for double lanes, and for
 * float lanes in three parts, -DFA_PART=<part>. A part's table has its kernels alone, and the compiler drops the rest.
 * Everything is static but that table. A file uses only what stands above it here. Its head says which files it requires
 * (and with them what those require), which parameters must be literals, and which names it exports: all that other
 * files use.
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

/* 1: kernels with dot products of bytes; 2: with those of bfloat16 pairs; 4: with neither; 7: all. */
#define FA_PART_bytes 1
#define FA_PART_pairs 2
#define FA_PART_plain 4
#define FA_PART_all 7
#define PART_(part) FA_PART_##part
#define PART(part) PART_(part)
#if PART(FA_PART) != FA_PART_all
#pragma GCC diagnostic ignored "-Wunused-function" /* of other parts */
#endif

#include "simd.h"
#include "basics.inc.h"
#include "convert.inc.h"
#include "tile.inc.h"
#include "softmax.inc.h"

/* Attention: which keys a row attends, what is done to their scores, and what comes of them. */
#include "ranges.inc.h"
#include "philox.inc.h"
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
#include "outer.inc.h"
#include "pack.inc.h"
#include "rows.inc.h"
#include "rows_grad.inc.h"
#include "logits.inc.h"
#include "dropout.inc.h"
#include "scatter.inc.h"
#include "rope.inc.h"
#include "optimizer.inc.h"

/* Linear attention. */
#include "recurrent_task.inc.h"
#include "recurrent_decay.inc.h"
#include "recurrent_chunk.inc.h"
#include "recurrent_step.inc.h"
#include "recurrent.inc.h"
#include "recurrent_gradients.inc.h"
#include "recurrent_reader.inc.h"
#include "recurrent_backward.inc.h"

/* Attention with other normalisers and other scores. */
#include "any_nv.inc.h"
#include "additive.inc.h"
#include "normalisers.inc.h"
#include "talking.inc.h"
#include "rowwise.inc.h"

/* The gradients of attention. */
#include "backward_weights.inc.h"
#include "backward_tile.inc.h"
#include "backward_block.inc.h"
#include "backward.inc.h"

/* The same with other normalisers and other scores. */
#include "row_gradients.inc.h"
#include "talking_backward.inc.h"
#include "rowwise_backward.inc.h"

/* Measurements of the machine. */
#include "peak.inc.h"

#define TABLE_(isa, lane, part) fa_kernels_##isa##_##lane##_##part
#define TABLE(isa, lane, part) TABLE_(isa, lane, part)
const fa_kernels TABLE(FA_ISA_NAME, LANE_NAME, FA_PART) = {
#if PART(FA_PART) & FA_PART_bytes
    .linear_plan = linear_plan,
    .linear_run = linear_run,
    .fma_rounds = fma_rounds,
#endif
#if PART(FA_PART) & FA_PART_pairs
    .plan = attention_plan,
    .run = attention_run,
    .splits = attention_splits,
    .run_split = attention_run_split,
    .merge = attention_merge,
    .outer_plan = outer_plan,
    .outer_run = outer_run,
    .backward_plan = backward_plan,
    .backward_sums = backward_sums,
    .backward_begin = backward_begin,
    .backward_run = backward_run,
    .backward_end = backward_end,
#endif
#if PART(FA_PART) & FA_PART_plain
    .pack_scratch_bytes = pack_scratch_bytes,
    .pack_run = pack_run,
    .rows_scratch_bytes = rows_scratch_bytes,
    .rows_run = rows_run,
    .rows_grad_scratch_bytes = rows_grad_scratch_bytes,
    .rows_grad_run = rows_grad_run,
    .rows_grad_add = rows_grad_add,
    .logits_run = logits_run,
    .dropout_run = dropout_run,
    .scatter_scratch_bytes = scatter_scratch_bytes,
    .scatter_run = scatter_run,
    .rope_run = rope_run,
    .update_run = update_run,
    .recurrent_plan = recurrent_plan,
    .recurrent_run = recurrent_run,
    .recurrent_backward_plan = recurrent_backward_plan,
    .recurrent_backward_run = recurrent_backward_run,
    .rowwise_plan = rowwise_plan,
    .rowwise_run = rowwise_run,
    .rowwise_backward_plan = rowwise_backward_plan,
    .rowwise_backward_run = rowwise_backward_run,
    .read_bytes = read_bytes,
#endif
};

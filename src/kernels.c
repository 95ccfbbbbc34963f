/* The kernels of one instruction set and one lane type: compiled for every line of isa.inc, with its flags and
 * -DFA_ISA_NAME=<isa>, once with float lanes and once, -DFA_LANE_F64, with double lanes. One text for all; everything
 * is static but the exported table. */
#include "fastattn.h"

#include "simd.h"

#include "convert.inc.h"
#include "tile.inc.h"

#include "softmax.inc.h"

#include "scores.inc.h"

#include "partial.inc.h"

#include "attention.inc.h"
#include "decode.inc.h"

#include "peak.inc.h"

/* Keys of a split: enough work to be worth a task (tens of microseconds), few enough to occupy many cores. */
#define SPLIT_K 512
_Static_assert(SPLIT_K % BLOCK_K == 0, "splits begin at block boundaries");

static void plan(const fa_attention_args *a, fa_plan *p)
{
    const int64_t rows = a->heads_q / a->heads_kv * a->len_q;
    const int64_t lane_size = sizeof(lane);
    tile_scratch tile;
    dot_scratch dot;
    p->kind = rows <= DOT_ROWS ? FA_DOT : FA_TILE;
    p->block_q = p->kind == FA_DOT ? DOT_ROWS : BLOCK_Q;
    p->block_k = BLOCK_K;
    p->bf16_dot = V_BF16_DOT && p->kind == FA_TILE && a->q.dtype == FA_BF16;
    p->split_k = rows <= p->block_q ? SPLIT_K : 0;
    p->n_splits = p->split_k && a->len_k ? (a->len_k + SPLIT_K - 1) / SPLIT_K : 1;
    p->n_tasks = a->batch * a->heads_kv * ((rows + p->block_q - 1) / p->block_q);
    p->partial_bytes = partial_lanes(p->block_q, a->head_dim_v) * lane_size;
    p->scratch_bytes = p->kind == FA_DOT ? dot_scratch_at(a, NULL, &dot) : tile_scratch_at(a, NULL, &tile);
    p->scratch_bytes += 2 * p->partial_bytes; /* run() keeps a state and the partial to be merged into it */
    p->flops = 2.0 * a->batch * a->heads_q * a->len_q * a->len_k * (a->head_dim + a->head_dim_v);
}

/* The partial of block t over keys [key_begin, key_end). */
static void attend(const fa_attention_args *a, const fa_plan *p, row_block *t, int64_t key_begin, int64_t key_end,
                   void *scratch, const partial *into)
{
    if (p->kind == FA_DOT) {
        dot_scratch w;
        dot_scratch_at(a, scratch, &w);
        t->begin = w.range;
        t->end = w.range + DOT_ROWS;
        dot_attend(a, t, key_begin, key_end, &w, into);
    } else {
        tile_scratch w;
        tile_scratch_at(a, scratch, &w);
        t->begin = w.range;
        t->end = w.range + BLOCK_Q;
        tile_attend(a, p, t, key_begin, key_end, &w, into);
    }
}

/* Row block `block` of the KV head. */
static row_block block_of(const fa_attention_args *a, const fa_plan *p, int64_t head, int64_t block)
{
    const int64_t group = a->heads_q / a->heads_kv, rows = group * a->len_q, row0 = block * p->block_q;
    return (row_block){
        .b = head / a->heads_kv,
        .h_kv = head % a->heads_kv,
        .group = group,
        .row0 = row0,
        .rows = rows - row0 < p->block_q ? rows - row0 : p->block_q,
    };
}

/* Adds the partial of `split` to the KV head's state; splits come in order, the first replaces, the last finishes. */
static void merge(const fa_attention_args *a, const fa_plan *p, int64_t head, int64_t split, void *state,
                  const void *split_partial)
{
    const row_block t = block_of(a, p, head, 0);
    const partial into = partial_at(state, p->block_q, a->head_dim_v);
    const partial from = partial_at((void *)split_partial, p->block_q, a->head_dim_v);
    if (split == 0) memcpy(state, split_partial, p->partial_bytes);
    else partial_merge(&into, &from, t.rows);
    if (split == p->n_splits - 1) partial_finish(a, &t, &into);
}

static void run_split(const fa_attention_args *a, const fa_plan *p, int64_t head, int64_t split, void *split_partial,
                      void *scratch)
{
    row_block t = block_of(a, p, head, 0);
    const int64_t begin = split * p->split_k, end = begin + p->split_k;
    const partial into = partial_at(split_partial, p->block_q, a->head_dim_v);
    attend(a, p, &t, begin, end < a->len_k ? end : a->len_k, scratch, &into);
}

/* The whole of a task. Within a KV head the last rows come first: under a causal mask they have the most keys. */
static void run(const fa_attention_args *a, const fa_plan *p, int64_t task, void *scratch)
{
    char *state = scratch, *next = state + p->partial_bytes, *rest = next + p->partial_bytes;
    if (p->split_k) {
        for (int64_t split = 0; split < p->n_splits; split++) {
            run_split(a, p, task, split, next, rest);
            merge(a, p, task, split, state, next);
        }
        return;
    }
    const int64_t blocks = p->n_tasks / (a->batch * a->heads_kv);
    row_block t = block_of(a, p, task / blocks, blocks - 1 - task % blocks);
    const partial into = partial_at(state, p->block_q, a->head_dim_v);
    attend(a, p, &t, 0, a->len_k, rest, &into);
    partial_finish(a, &t, &into);
}

#define TABLE_(isa, lane) fa_kernels_##isa##_##lane
#define TABLE(isa, lane) TABLE_(isa, lane)
#ifdef FA_LANE_F64
const fa_kernels TABLE(FA_ISA_NAME, f64) = {plan, run, run_split, merge, fma_rounds, read_bytes};
#else
const fa_kernels TABLE(FA_ISA_NAME, f32) = {plan, run, run_split, merge, fma_rounds, read_bytes};
#endif

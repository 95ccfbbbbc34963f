/* The gradients of attention with another normaliser, another score, or heads that mix. Twice, the second time with other
 * garbage in the memory; tasks in order, since they wait for one another. */
#ifndef ROWWISE_BACKWARD_H
#define ROWWISE_BACKWARD_H

#include "backward.h"
#include "rowwise.h"

enum { ROWWISE_BACKWARD_CASES = ROWWISE_KINDS * COUNT(shapes) * 2 }; /* each in two of the dtypes */
enum { DWEIGHT = N_SHARED, DPRE, DPOST };

static fa_rowwise_backward_args rowwise_backward_now[2]; /* the second one with twins */

static int run_rowwise_backward(const fa_kernels *kernels, int again, int wide)
{
    fa_rowwise_backward_args call = rowwise_backward_now[wide];
    const fa_attention_args *a = &call.forward.attention;
    fa_modifier_gradients *dmods = &call.dmods;
    fa_array *const each[] = {
        &call.dq, &call.dk, &call.dv, &call.dbias, &call.dbias_diagonals, &dmods->dalibi_slopes, &dmods->dsoftcap};
    double *data[N_SHARED + 3];
    fa_rowwise_backward_plan p;
    if (a->len_q == 0) return 1; /* there is nothing to run */
    FOR(n, n_results)
    {
        data[n] = (double *)results[n].got[again].data;
        if (results[n].there && n < COUNT(each)) *each[n] = results[n].got[again];
    }
    if (call.batch_shares || call.heads_share) call.dbias = for_all(a, call.dbias);
    call.dbias_diagonals.row = call.dbias_diagonals.col, call.dbias_diagonals.col = 0; /* its elements are rows */
    call.dweight = data[DWEIGHT], call.dpre = data[DPRE], call.dpost = data[DPOST];
    kernels->rowwise->backward_plan(&call, &p);
    char *scratch = allocate((size_t)p.scratch_bytes);
    call.turns = (int64_t *)allocate((size_t)p.n_turns * sizeof(int64_t));
    memset(call.turns, 0, (size_t)p.n_turns * sizeof(int64_t));
    if (again) memset(scratch, 0x55, (size_t)p.scratch_bytes);
    FOR(task, p.n_tasks) kernels->rowwise->backward_run(&call, &p, task, scratch);
    return p.scratch_bytes % 64 == 0;
}

static void make_rowwise_backward(int number)
{
    const int i = number / 2;
    const fa_dtype dtype = floats[2 * (number % 2) + i / ROWWISE_KINDS % 2], lane = lane_of(dtype);
    test_case c = {.number = number, .q = dtype, .kv = dtype};
    fa_rowwise_backward_args *call = rowwise_backward_now, *w = call + 1;
    fa_rowwise_args *r = &call->forward;
    fa_attention_args *a = &r->attention;
    seed = (uint64_t)number << 32 | 12;
    *call = (fa_rowwise_backward_args){.forward.kind = (fa_rowwise_kind)(i % ROWWISE_KINDS)};
    c.s = small_shape(i / ROWWISE_KINDS);
    c.s.batch = c.s.batch > 2 ? 2 : c.s.batch;
    if (r->kind == FA_TALKING_HEADS) c.s.len_q = c.s.len_q > 17 ? 17 : c.s.len_q; /* every head meets every other */
    c.options = (random_options() | (below(4) ? 0 : LISTS) | NO_LSE) & ~(SINKS | DROPOUT | NAN_KEYS | NAN_VALUES);
    c.out_layout = c.options & LAYOUT ? (int)below(8) : 0;
    rowwise_now.c = c;
    *a = new_inputs(&c);
    if (r->kind == FA_TOP_K) r->k_keys = below(3) ? 1 + below(8) : larger(1, a->len_k - below(3));
    if (r->kind == FA_ADDITIVE) r->weight = new_matrix(lane, a->heads_q, a->head_dim, -1, 1);
    if (r->kind == FA_TALKING_HEADS) {
        if (below(4)) r->pre = new_matrix(lane, a->heads_q, a->heads_q, -0.7, 1);
        if (below(4)) r->post = new_matrix(lane, a->heads_q, a->heads_q, -0.7, 1);
    }
    call->dout = new_floats(dtype, a->batch, a->heads_q, a->len_q, a->head_dim_v, c.out_layout);
    EACH(a->heads_q, a->len_q, a->head_dim_v) set(&call->dout, b, h, i, j, uniform(-1, 1));
    call->dq_factor = a->mods.scale;
    const int64_t heads = a->heads_q;
    const int shared = add_gradients(a, below(2) ? dtype : lane, lane, c.out_layout) && results[DBIAS].there;
    results[DK].zero = results[DV].zero = 1;
    call->batch_shares = shared && a->batch > 1, call->heads_share = shared && a->heads_kv > 1;
    add_result("dweight", r->weight != NULL, FA_F64, a->batch, heads, 1, a->head_dim, 0)->zero = 1;
    add_result("dpre", r->pre != NULL, FA_F64, a->batch, 1, heads, heads, 0)->zero = 1;
    add_result("dpost", r->post != NULL, FA_F64, a->batch, 1, heads, heads, 0)->zero = 1;
    *w = *call, w->dout = twin(w->dout), w->forward.attention = twin_of_attention(*a);
    w->forward.weight = twin_of_lanes(r->weight, lane);
    w->forward.pre = twin_of_lanes(r->pre, lane), w->forward.post = twin_of_lanes(r->post, lane);
    expect_results(run_rowwise_backward);
}

/* Rounding decides what sparse normalisers leave out: in single precision guards and sanitizers look alone. */
static const char *check_rowwise_backward(const fa_kernels *kernels)
{
    const int sparse = rowwise_backward_now->forward.kind <= FA_TOP_K && lane_of(rowwise_now.c.q) == FA_F32;
    return check_results(run_rowwise_backward, kernels, sparse ? INFINITY : 4000, 0);
}

FAMILY(rowwise_backward, ROWWISE_BACKWARD_CASES, make_rowwise_backward, rowwise_now.c.q, &rowwise_now.c);

#endif

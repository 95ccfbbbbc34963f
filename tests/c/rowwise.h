/* Attention with another normaliser, another score, or heads that mix. */
#ifndef ROWWISE_H
#define ROWWISE_H

#include "results.h"

enum { ROWWISE_KINDS = FA_TALKING_HEADS + 1, ROWWISE_CASES = ROWWISE_KINDS * COUNT(shapes) * COUNT(dtypes) };
enum { MOST_HEADS = 34 }; /* more than those that are mixed at a time */

static struct {
    test_case c;
    fa_rowwise_args args[2]; /* the second one with twins */
} rowwise_now;

/* The second time from the last task to the first, with other garbage in the scratch memory. */
static int run_rowwise(const fa_kernels *kernels, int again, int wide)
{
    fa_rowwise_args call = rowwise_now.args[wide];
    fa_rowwise_plan p;
    call.attention.out = results->got[again];
    kernels->rowwise->plan(&call, &p);
    char *scratch = allocate((size_t)p.scratch_bytes);
    if (again) memset(scratch, 0x55, (size_t)p.scratch_bytes);
    FOR(task, p.n_tasks) kernels->rowwise->run(&call, &p, again ? p.n_tasks - 1 - task : task, scratch);
    return p.scratch_bytes % 64 == 0;
}

static void make_rowwise(int number)
{
    const int i = number / COUNT(dtypes);
    test_case c = {.number = number, .q = dtypes[number % COUNT(dtypes)][0], .kv = dtypes[number % COUNT(dtypes)][1]};
    fa_rowwise_args *r = rowwise_now.args;
    fa_attention_args *a = &r->attention;
    seed = (uint64_t)number << 32 | 4;
    *r = (fa_rowwise_args){.kind = (fa_rowwise_kind)(i % ROWWISE_KINDS)};
    c.s = small_shape(i / ROWWISE_KINDS);
    c.s.batch = c.s.batch > 3 ? 3 : c.s.batch; /* a task is never more than one tile */
    c.options = (random_options() | (below(4) ? 0 : LISTS) | NO_LSE) & ~(SINKS | DROPOUT);
    c.out_layout = c.options & LAYOUT ? (int)below(8) : 0;
    if (r->kind == FA_TALKING_HEADS && c.s.len_k < 70 && below(3) == 0) c.s.heads_q = MOST_HEADS, c.s.heads_kv = 17;
    rowwise_now.c = c;
    *a = new_inputs(&c);
    const fa_dtype lane = lane_of(c.q);
    if (r->kind == FA_TOP_K) r->k_keys = below(3) ? 1 + below(8) : larger(1, a->len_k - below(3));
    if (r->kind == FA_ADDITIVE) {
        r->weight = new_matrix(lane, a->heads_q, a->head_dim, -1, 1);
        if (below(2)) EACH(a->heads_kv, a->len_k, a->head_dim) /* some too large for exponentials */
        if (i % 7 == 3) set(&a->k, b, h, i, j, get(&a->k, b, h, i, j) * 16);
    }
    if (r->kind == FA_TALKING_HEADS) {
        if (below(4)) r->pre = new_matrix(lane, a->heads_q, a->heads_q, -0.7, 1);
        if (below(4)) r->post = new_matrix(lane, a->heads_q, a->heads_q, -0.7, 1);
    }
    fa_rowwise_args *w = &rowwise_now.args[1];
    *w = *r, w->attention = twin_of_attention(*a), n_results = 0;
    w->weight = twin_of_lanes(r->weight, lane), w->pre = twin_of_lanes(r->pre, lane);
    w->post = twin_of_lanes(r->post, lane);
    add_result("out", 1, c.q, a->batch, a->heads_q, a->len_q, a->head_dim_v, c.out_layout)->first = c.out_layout;
    expect_results(run_rowwise);
}

CHECK(rowwise, run_rowwise, 4000)

FAMILY(rowwise, ROWWISE_CASES, make_rowwise, rowwise_now.c.q, &rowwise_now.c);

#endif

/* The gradients of attention. Every call runs twice and must give the same bits, the second time planned for more threads,
 * with heads in another order and other garbage in the memory. */
#ifndef BACKWARD_H
#define BACKWARD_H

#include "attention.h"

enum { BACKWARD_CASES = 3 * COUNT(shapes) * COUNT(floats) };
enum { DQ, DK, DV, DBIAS, DDIAGONALS, DSLOPES, DSOFTCAP, N_SHARED };

static struct {
    test_case c;
    fa_backward_args args[2]; /* the second one with twins */
} backward_now;

/* The gradients that all kinds of attention have; returns whether that of the bias is one for all heads. */
static int add_gradients(const fa_attention_args *a, fa_dtype q, fa_dtype kv, int layout)
{
    const fa_dtype lane = lane_of(a->q.dtype);
    const int bias = a->mods.bias.data != NULL, shared = bias && below(2);
    n_results = 0;
    add_result("dq", below(8) != 0, q, a->batch, a->heads_q, a->len_q, a->head_dim, layout);
    add_result("dk", below(8) != 0, kv, a->batch, a->heads_kv, a->len_k, a->head_dim, layout);
    add_result("dv", below(8) != 0, kv, a->batch, a->heads_kv, a->len_k, a->head_dim_v, layout);
    add_result("dbias", bias && below(4), lane, shared ? 1 : a->batch, shared ? 1 : a->heads_q, a->len_q, a->len_k, 0);
    add_result("dbias_diagonals", bias && below(2), lane, a->batch, a->heads_q, 1, a->len_q + a->len_k - 1, 0);
    add_result("dalibi_slopes", a->mods.alibi_slopes.data != NULL, FA_F64, a->batch, a->heads_q, 1, 1, 0);
    add_result("dsoftcap", a->mods.softcap != 0, FA_F64, a->batch, a->heads_q, 1, 1, 0);
    FOR(n, n_results) results[n].first = results[n].second, results[n].zero = n >= DBIAS;
    return shared;
}

/* Its array for all heads, of which there is one. */
static fa_array for_all(const fa_attention_args *a, fa_array x)
{
    int64_t *offsets = (int64_t *)allocate((size_t)a->batch * sizeof *offsets);
    memset(offsets, 0, (size_t)a->batch * sizeof *offsets);
    x.batch = offsets, x.head = 0;
    return x;
}

/* Runs all tasks; `again`, heads come in the opposite order where they may. */
static int run_backward(const fa_kernels *kernels, int again, int wide)
{
    fa_backward_args of_run = backward_now.args[wide], *call = &of_run;
    fa_modifier_gradients *dmods = &call->dmods;
    fa_array *const each[] = {
        &call->dq,        &call->dk,    &call->dv, &call->dbias, &call->dbias_diagonals, &dmods->dalibi_slopes,
        &dmods->dsoftcap, &call->dsinks};
    FOR(n, n_results) if (results[n].there) * each[n] = results[n].got[again];
    const fa_attention_args *a = &call->attention;
    const int64_t heads = a->batch * a->heads_q;
    if (call->bias_shared) call->dbias = for_all(a, call->dbias), call->bias_shared = heads > 1;
    const int in_order = call->bias_shared || call->dbias_diagonals.data != NULL; /* a head waits for the one before */
    fa_backward_plan p;
    if (a->len_q == 0) return 1; /* there is nothing to run */
    kernels->backward->plan(call, again ? 64 : 1, &p);
    char *scratch = allocate((size_t)p.scratch_bytes), *shared = allocate((size_t)p.shared_bytes);
    if (again) memset(scratch, 0x55, (size_t)p.scratch_bytes), memset(shared, 0x55, (size_t)p.shared_bytes);
    FOR(task, p.few ? p.n_tasks : 0)
    kernels->backward->sums(call, &p, again ? p.n_tasks - 1 - task : task, shared, scratch);
    FOR(task, heads) kernels->backward->begin(call, &p, again ? heads - 1 - task : task, shared, scratch);
    FOR(task, p.n_tasks)
    {
        const int64_t head = task % p.n_heads, turned = task - head + p.n_heads - 1 - head;
        kernels->backward->run(call, &p, again && !in_order ? turned : task, shared, scratch);
    }
    FOR(task, heads) kernels->backward->end(call, &p, again ? heads - 1 - task : task, shared);
    return p.scratch_bytes % 64 == 0 && p.shared_bytes % 64 == 0;
}

static void make_backward(int number)
{
    const int i = number / COUNT(floats);
    const fa_dtype dtype = floats[number % COUNT(floats)], lane = lane_of(dtype);
    test_case c = {.number = number, .q = dtype, .kv = dtype};
    fa_backward_args *call = backward_now.args;
    fa_attention_args *a = &call->attention;
    seed = (uint64_t)number << 32 | 11;
    c.s = small_shape(i % COUNT(shapes));
    c.s.batch = c.s.batch > 3 ? 3 : c.s.batch;
    c.options = (random_options() | (below(4) ? 0 : LISTS) | (below(6) ? 0 : SIGMOID)) & ~(NAN_KEYS | NAN_VALUES);
    if (c.options & SIGMOID) c.options &= ~(SINKS | DROPOUT);
    c.out_layout = c.options & LAYOUT ? (int)below(8) : 0;
    backward_now.c = c;
    *call = (fa_backward_args){.attention = new_inputs(&c)};
    call->dq_factor = a->mods.scale;
    call->dout = new_floats(dtype, a->batch, a->heads_q, a->len_q, a->head_dim_v, c.out_layout);
    a->out = new_floats(dtype, a->batch, a->heads_q, a->len_q, a->head_dim_v, c.out_layout);
    EACH(a->heads_q, a->len_q, a->head_dim_v) set(&call->dout, b, h, i, j, uniform(-1, 1));
    if (!a->sigmoid) a->lse = new_floats(lane, a->batch, a->heads_q, a->len_q, 1, c.out_layout);
    if (!a->sigmoid && below(2)) {
        call->dlse = new_floats(lane, a->batch, a->heads_q, a->len_q, 1, 0);
        EACH(a->heads_q, a->len_q, 1) set(&call->dlse, b, h, i, j, uniform(-1, 1));
    }
    attention_now.c = c, attention_now.args[1] = twin_of_attention(*a), n_results = 0;
    add_result("out", 1, dtype, a->batch, a->heads_q, a->len_q, a->head_dim_v, 0);
    add_result("lse", !a->sigmoid, lane, a->batch, a->heads_q, a->len_q, 1, 0);
    expect_results(run_attention);
    copy(&results[0].want, &a->out, a->batch, a->heads_q, a->len_q, a->head_dim_v);
    if (a->lse.data) copy(&results[1].want, &a->lse, a->batch, a->heads_q, a->len_q, 1);
    call->bias_shared = add_gradients(a, below(2) ? dtype : lane, below(2) ? dtype : lane, c.out_layout);
    add_result("dsinks", a->sinks.data != NULL, FA_F64, a->batch, a->heads_q, 1, 1, 0)->zero = 1;
    call->bias_shared &= results[DBIAS].there;
    backward_now.args[1] = *call, backward_now.args[1].attention = twin_of_attention(*a);
    twins((fa_array *const[]){&backward_now.args[1].dout, &backward_now.args[1].dlse}, 2);
    expect_results(run_backward);
}

static const char *check_backward(const fa_kernels *kernels)
{
    const int pairs = backward_now.c.q == FA_BF16 && kernels->linear->between() == FA_BF16;
    return check_results(run_backward, kernels, 4000, pairs ? 0x1p-5 : 0);
}

FAMILY(backward, BACKWARD_CASES, make_backward, backward_now.c.q, &backward_now.c);

#endif

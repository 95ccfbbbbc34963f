/* Tests of linear attention: every rule, in one call, and in two calls with the state carried from one to the other;
 * and its gradients. */
#ifndef RECURRENT_H
#define RECURRENT_H

#include "results.h"

/* Numbers of tokens near the ends of steps, of both kinds of chunks, and of their parts. Dimensions near the ends of
 * vectors, of panels and of the blocks of a row. */
static const int64_t recurrent_lens[] = {0, 1, 2, 4, 5, 15, 16, 17, 31, 32, 33, 40, 65, 97};
static const int64_t recurrent_dims[] = {1, 3, 8, 17, 33, 64, 129};
static const int64_t recurrent_dims_v[] = {1, 5, 16, 31, 33, 70, 130};

/* Numbers of states, and of heads of q, k, v. A head may serve several states, and several heads of q may read one. */
static const int64_t recurrent_heads[][4] = {{1, 1, 1, 1}, {2, 4, 2, 1}, {2, 2, 1, 2}, {3, 1, 3, 1}, {4, 2, 2, 4}};

/* Rules: without decay, with scalar ones, with vector ones; and the same three with the delta rule. */
enum { N_RULES = 6, RECURRENT_CASES = N_RULES * COUNT(recurrent_lens) * COUNT(dtypes) };

static fa_recurrent_args recurrent_now[2]; /* the second one with twins */
static fa_array skip_now;
static int normalised_now, recurrent_layout, recurrent_spoiled;

static int64_t out_heads(const fa_recurrent_args *a) { return larger(a->heads, a->heads_q); }

/* An input (batch, heads, length, cols) of random numbers from `low` to 1. */
static fa_array new_tokens(fa_dtype dtype, int64_t heads, int64_t length, int64_t cols, double low, int layout)
{
    const fa_recurrent_args *a = recurrent_now;
    const fa_array x = new_floats(dtype, a->batch, heads, length, cols, layout);
    EACH(heads, length, cols) set(&x, b, h, i, j, uniform(low, 1));
    return x;
}

/* log_decay: weak decays, strong ones, or some tokens that forget everything. */
static void new_decays(fa_recurrent_args *a)
{
    const int kind = (int)below(3), share = below(4) ? 0 : ONE_HEAD, gap = (int)below(8) & GAP;
    const int64_t cols = a->gated ? a->head_dim : 1;
    a->log_decay = new_tokens(lane_of(a->q.dtype), a->heads, a->len_k, cols, 0, share | gap | (gap ? ODD : 0));
    EACH(a->heads, a->len_k, cols)
    {
        const double x = kind && below(6) == 0 ? -500 * uniform(0, 1) : -uniform(0, kind ? 6 : 0.1);
        set(&a->log_decay, b, h, i, j, kind == 2 && below(6) == 0 ? -INFINITY : x);
    }
}

/* Makes keys as long as 1. With longer ones, the delta rule would subtract more than the state knows of a key. */
static void shorten_keys(fa_recurrent_args *a)
{
    EACH(a->heads_k, a->len_k, 1)
    {
        double squares = 0;
        FOR(d, a->head_dim) squares += get(&a->k, b, h, i, d) * get(&a->k, b, h, i, d);
        FOR(d, a->head_dim) set(&a->k, b, h, i, d, get(&a->k, b, h, i, d) / sqrt(squares));
        (void)j;
    }
}

/* Keys to erase by, in some calls: those to write by, with a gate from 0 to 1 for each dimension. */
static void new_erase(fa_recurrent_args *a)
{
    if (below(2)) return;
    a->erase = new_tokens(a->k.dtype, a->heads_k, a->len_k, a->head_dim, 0, (int)below(8));
    EACH(a->heads_k, a->len_k, a->head_dim)
    set(&a->erase, b, h, i, j, get(&a->erase, b, h, i, j) * get(&a->k, b, h, i, j));
}

/* Puts NaN in one place. It must show from its token on, and nowhere before. A decay is never NaN. */
static void spoil_tokens(fa_recurrent_args *a)
{
    const int64_t what = below(a->erase.data ? 5 : a->beta.data ? 4 : 3), length = what ? a->len_k : a->len_q;
    const fa_array *x[] = {&a->q, &a->k, &a->v, &a->beta, &a->erase};
    const int64_t cols[] = {a->head_dim, a->head_dim, a->head_dim_v, 1, a->head_dim};
    if (length && a->batch) set(x[what], a->batch - 1, 0, below(length), below(cols[what]), NAN);
}

static void draw_recurrent(int number)
{
    int i = number;
    fa_recurrent_args *a = recurrent_now;
    seed = (uint64_t)number << 32 | 5;
    const fa_dtype dtype = dtypes[i % COUNT(dtypes)][0], kv = dtypes[i % COUNT(dtypes)][1], lane = lane_of(dtype);
    i /= COUNT(dtypes);
    const int rule = i % N_RULES, delta = rule >= 3, decay = rule % 3;
    const int64_t *heads = PICK(recurrent_heads), low = below(3) ? -1 : 0;
    *a = (fa_recurrent_args){.batch = below(8) ? 1 + below(2) : 0,
                             .heads = heads[0],
                             .heads_q = heads[1],
                             .heads_k = heads[2],
                             .heads_v = heads[3],
                             .gated = decay == 2,
                             .eps = 1e-6};
    a->len_q = a->len_k = recurrent_lens[i / N_RULES];
    a->head_dim = PICK(recurrent_dims), a->head_dim_v = PICK(recurrent_dims_v);
    a->scale = 1 / sqrt((double)a->head_dim);
    a->causal = rule || below(3);
    if (!a->causal) a->len_q = PICK(recurrent_lens);
    normalised_now = !delta && low == 0; /* the divisor is a sum of positive terms */
    recurrent_layout = (int)below(8);
    a->q = new_tokens(dtype, a->heads_q, a->len_q, a->head_dim, (double)low, (int)below(8));
    a->k = new_tokens(kv, a->heads_k, a->len_k, a->head_dim, (double)low, (int)below(8));
    a->v = new_tokens(kv, a->heads_v, a->len_k, a->head_dim_v, -1, (int)below(8));
    if (decay) new_decays(a);
    if (delta) shorten_keys(a), new_erase(a);
    if (delta) a->beta = new_tokens(lane, a->heads, a->len_k, 1, 0, (below(4) ? 0 : ONE_HEAD) | (number % 3 ? 0 : ODD));
    if (!delta && a->causal && !normalised_now && below(2)) {
        a->strength = new_tokens(lane, a->heads, a->len_k, 1, -1, (int)below(8));
        skip_now = random_floats(lane, 1, a->heads, -1, 1);
        a->skip = skip_now.data;
    }
    if (below(2)) a->state = new_tokens(lane, a->heads, a->head_dim, a->head_dim_v, -1, recurrent_layout);
    if (a->state.data && normalised_now) a->norm = new_tokens(lane, a->heads, a->head_dim, 1, 0, 0);
    recurrent_spoiled = below(6) == 0;
    if (recurrent_spoiled) spoil_tokens(a);
    n_results = 0;
}

/* Once the inputs are complete. */
static void twin_recurrent(void)
{
    fa_recurrent_args *w = recurrent_now + 1;
    *w = recurrent_now[0];
    twins(
        (fa_array *const[]){&w->q, &w->k, &w->v, &w->log_decay, &w->beta, &w->erase, &w->strength, &w->state, &w->norm},
        9);
    if (w->skip) w->skip = twin(skip_now).data;
}

/* Runs all tasks of tokens [begin, end) of a call, or of all tokens if it is not causal. Returns whether the size of a
 * scratch keeps the next one aligned. */
static int run_tokens(const fa_kernels *kernels, fa_recurrent_args a, int64_t begin, int64_t end, int again)
{
    const int mark = n_mappings;
    fa_recurrent_plan p;
    fa_array *tokens[] = {&a.q, &a.k, &a.v, &a.out, &a.log_decay, &a.beta, &a.erase, &a.strength};
    FOR(i, COUNT(tokens))
    if (tokens[i]->data) tokens[i]->data += begin * tokens[i]->row;
    if (a.causal) a.len_q = a.len_k = end - begin;
    kernels->recurrent->plan(&a, again ? 64 : 1, &p);
    char *scratch = allocate((size_t)p.scratch_bytes);
    if (again) memset(scratch, 0x55, (size_t)p.scratch_bytes);
    FOR(task, p.n_tasks) kernels->recurrent->run(&a, &p, again ? p.n_tasks - 1 - task : task, scratch);
    release(mark);
    return p.scratch_bytes % 64 == 0;
}

/* The second time in other tasks, the last one first, and with the state in place: the bits stay. */
static int run_recurrent(const fa_kernels *kernels, int again, int wide)
{
    fa_recurrent_args a = recurrent_now[wide];
    a.out = results[0].got[again], a.state_out = results[1].got[again];
    if (normalised_now) a.norm_out = results[2].got[again];
    if (again && a.state.data) {
        copy(&a.state, &a.state_out, a.batch, a.heads, a.head_dim, a.head_dim_v);
        a.state = a.state_out;
    }
    return run_tokens(kernels, a, 0, a.len_k, again);
}

/* In two calls, with the state carried from one to the other. */
static int run_two_calls(const fa_kernels *kernels, int again, int wide)
{
    fa_recurrent_args a = recurrent_now[wide], b = a;
    const int64_t cut = a.len_k * 2 / 5;
    a.out = b.out = results[0].got[again], b.state = a.state_out = b.state_out = results[1].got[again];
    if (normalised_now) b.norm_out = results[2].got[again];
    if (normalised_now) b.norm = a.norm_out = new_floats(b.norm_out.dtype, a.batch, a.heads, a.head_dim, 1, 0);
    run_tokens(kernels, a, 0, cut, 0);
    return run_tokens(kernels, b, cut, a.len_k, 1);
}

static void make_recurrent(int number)
{
    draw_recurrent(number);
    const fa_recurrent_args *a = recurrent_now;
    const fa_dtype lane = lane_of(a->q.dtype);
    twin_recurrent();
    add_result("out", 1, a->q.dtype, a->batch, out_heads(a), a->len_q, a->head_dim_v, recurrent_layout);
    add_result("state", 1, lane, a->batch, a->heads, a->head_dim, a->head_dim_v, recurrent_layout);
    add_result("norm", normalised_now, lane, a->batch, a->heads, a->head_dim, 1, 0);
    expect_results(run_recurrent);
}

static const char *check_recurrent(const fa_kernels *kernels)
{
    const char *wrong = check_results(run_recurrent, kernels, 1000, 0);
    return wrong || !recurrent_now->causal ? wrong : check_results(run_two_calls, kernels, 1000, 0);
}

FAMILY(recurrent, RECURRENT_CASES, make_recurrent, recurrent_now->q.dtype, NULL);

/* The gradients. */
static fa_recurrent_backward_args recurrent_backward_now[2];

/* The second time the last task first. */
static int run_recurrent_backward(const fa_kernels *kernels, int again, int wide)
{
    fa_recurrent_backward_args x = recurrent_backward_now[wide];
    fa_array *const each[] = {&x.dq, &x.dk, &x.dv, &x.dlog_decay, &x.dbeta, &x.dstate, &x.dnorm, &x.derase};
    fa_recurrent_backward_plan p;
    FOR(i, n_results) if (results[i].there) * each[i] = results[i].got[again];
    kernels->recurrent->backward_plan(&x, &p);
    char *scratch = allocate((size_t)p.scratch_bytes);
    if (again) memset(scratch, 0x55, (size_t)p.scratch_bytes);
    FOR(task, p.n_tasks) kernels->recurrent->backward_run(&x, &p, again ? p.n_tasks - 1 - task : task, scratch);
    return p.scratch_bytes % 64 == 0;
}

static void make_recurrent_backward(int number)
{
    draw_recurrent(number);
    fa_recurrent_args *a = recurrent_now;
    fa_recurrent_backward_args *x = recurrent_backward_now, *w = x + 1;
    const fa_dtype lane = lane_of(a->q.dtype), of_keys = a->k.dtype == FA_I8 ? lane : a->k.dtype;
    const int64_t batch = a->batch, heads = a->heads, depth = a->head_dim, width = a->head_dim_v, n = a->len_k;
    static char flag;
    a->strength = (fa_array){0}, a->skip = NULL; /* of the forward pass alone */
    twin_recurrent();
    const int layout = (int)below(8);
    *x = (fa_recurrent_backward_args){.forward = *a, .dq_factor = a->scale};
    x->dout = new_tokens(a->q.dtype, out_heads(a), a->len_q, width, -1, (int)below(8));
    x->dstate_out = new_tokens(lane, heads, depth, width, -1, layout);
    if (normalised_now) x->forward.norm_out.data = &flag, x->dnorm_out = new_tokens(lane, heads, depth, 1, -1, 0);
    *w = *x, w->forward = recurrent_now[1], w->forward.norm_out = x->forward.norm_out;
    twins((fa_array *const[]){&w->dout, &w->dstate_out, &w->dnorm_out}, 3);
    add_result("dq", 1, a->q.dtype, batch, out_heads(a), a->len_q, depth, layout);
    add_result("dk", 1, of_keys, batch, heads, n, depth, layout);
    add_result("dv", 1, of_keys, batch, heads, n, width, layout);
    add_result("dlog_decay", a->log_decay.data != NULL, lane, batch, heads, n, a->gated ? depth : 1, 0);
    add_result("dbeta", a->beta.data != NULL, lane, batch, heads, n, 1, 0);
    add_result("dstate", 1, lane, batch, heads, depth, width, layout);
    add_result("dnorm", normalised_now, lane, batch, heads, depth, 1, 0);
    add_result("derase", a->erase.data != NULL, of_keys, batch, heads, n, depth, layout);
    expect_results(run_recurrent_backward);
}

/* Where NaN is about, sanitizers and guards look alone. */
static const char *check_recurrent_backward(const fa_kernels *kernels)
{
    return check_results(run_recurrent_backward, kernels, recurrent_spoiled ? INFINITY : 4000, 0);
}

FAMILY(recurrent_backward, RECURRENT_CASES, make_recurrent_backward, recurrent_now->q.dtype, NULL);

#endif

/* Tests of linear attention: every rule, in one call, and in two calls with the state carried from one to the other. */
#ifndef RECURRENT_H
#define RECURRENT_H

#include "family.h"
#include "recurrence.h"

/* Numbers of tokens near the ends of steps, of both kinds of chunks, and of their parts. Dimensions near the ends of
 * vectors, of panels and of the blocks of a row. */
static const int64_t recurrent_lens[] = {0, 1, 2, 4, 5, 15, 16, 17, 31, 32, 33, 40, 65, 97};
static const int64_t recurrent_dims[] = {1, 3, 8, 17, 33, 64, MOST_DIM};
static const int64_t recurrent_dims_v[] = {1, 5, 16, 31, 33, 70, 130};

/* Numbers of states, and of heads of q, k, v. A head may serve several states, and several heads of q may read one. */
static const int64_t recurrent_heads[][4] = {{1, 1, 1, 1}, {2, 4, 2, 1}, {2, 2, 1, 2}, {3, 1, 3, 1}, {4, 2, 2, 4}};

/* Rules: without decay, with scalar ones, with vector ones; and the same three with the delta rule. */
enum { N_RULES = 6, RECURRENT_CASES = N_RULES * COUNT(recurrent_lens) * COUNT(dtypes) };

static recurrent_case recurrent_now;
static int recurrent_layout, recurrent_spoiled;

#define PICK(list) (list)[below(COUNT(list))]

/* An input (batch, heads, length, cols) of random numbers from `low` to 1. */
static fa_array new_tokens(fa_dtype dtype, int64_t heads, int64_t length, int64_t cols, double low, int layout)
{
    const fa_recurrent_args *a = &recurrent_now.args;
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

static void make_recurrent(int number)
{
    int i = number;
    fa_recurrent_args *a = &recurrent_now.args;
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
    recurrent_now.normalised = !delta && low == 0; /* the divisor is a sum of positive terms */
    recurrent_layout = (int)below(8);
    a->q = new_tokens(dtype, a->heads_q, a->len_q, a->head_dim, (double)low, (int)below(8));
    a->k = new_tokens(kv, a->heads_k, a->len_k, a->head_dim, (double)low, (int)below(8));
    a->v = new_tokens(kv, a->heads_v, a->len_k, a->head_dim_v, -1, (int)below(8));
    if (decay) new_decays(a);
    if (delta) shorten_keys(a), new_erase(a);
    if (delta) a->beta = new_tokens(lane, a->heads, a->len_k, 1, 0, (below(4) ? 0 : ONE_HEAD) | (number % 3 ? 0 : ODD));
    if (!delta && a->causal && !recurrent_now.normalised && below(2)) {
        a->strength = new_tokens(lane, a->heads, a->len_k, 1, -1, (int)below(8));
        recurrent_now.skip = random_floats(lane, 1, a->heads, -1, 1);
        a->skip = recurrent_now.skip.data;
    }
    if (below(2)) a->state = new_tokens(lane, a->heads, a->head_dim, a->head_dim_v, -1, recurrent_layout);
    if (a->state.data && recurrent_now.normalised) a->norm = new_tokens(lane, a->heads, a->head_dim, 1, 0, 0);
    recurrent_spoiled = below(6) == 0;
    if (recurrent_spoiled) spoil_tokens(a);
    const int64_t rows = a->batch * a->heads * a->head_dim;
    recurrent_now.out = calloc((size_t)(a->batch * out_heads(a) * a->len_q * a->head_dim_v) + 1, sizeof(near));
    recurrent_now.state = calloc((size_t)(rows * a->head_dim_v) + 1, sizeof(near));
    recurrent_now.norm = calloc((size_t)rows + 1, sizeof(near));
    FOR(b, a->batch) FOR(h, a->heads) expect_state(&recurrent_now, b, h);
}

static void copy(const fa_array *from, const fa_array *to, int64_t batch, int64_t heads, int64_t rows, int64_t cols)
{
    FOR(b, batch) FOR(h, heads) FOR(i, rows) FOR(j, cols) set(to, b, h, i, j, get(from, b, h, i, j));
}

/* Runs all tasks of tokens [begin, end) of a call, or of all tokens if it is not causal. Returns whether the size of a
 * scratch keeps the next one aligned. */
static int run_recurrent(const fa_kernels *kernels, fa_recurrent_args a, int64_t begin, int64_t end, int again)
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

/* The call with new arrays for its results. With `in_place` it writes the state where it reads it. */
static fa_recurrent_args new_results(int in_place)
{
    fa_recurrent_args a = recurrent_now.args;
    const fa_dtype lane = lane_of(a.q.dtype);
    a.out = new_floats(a.q.dtype, a.batch, out_heads(&a), a.len_q, a.head_dim_v, recurrent_layout);
    a.state_out = new_floats(lane, a.batch, a.heads, a.head_dim, a.head_dim_v, recurrent_layout);
    if (recurrent_now.normalised) a.norm_out = new_floats(lane, a.batch, a.heads, a.head_dim, 1, 0);
    if (in_place && a.state.data) {
        copy(&a.state, &a.state_out, a.batch, a.heads, a.head_dim, a.head_dim_v);
        a.state = a.state_out;
    }
    return a;
}

/* Says what is wrong with results that were computed twice, or NULL. */
static const char *wrong_results(const fa_recurrent_args *a, const fa_recurrent_args *other)
{
    const near *out = recurrent_now.out, *state = recurrent_now.state, *norm = recurrent_now.norm;
    const char *wrong = NULL;
    EACH(out_heads(a), a->len_q, a->head_dim_v)
    if (!wrong) wrong = differs("out", &a->out, &other->out, b, h, i, j, *out++);
    EACH(a->heads, a->head_dim, a->head_dim_v)
    if (!wrong) wrong = differs("state", &a->state_out, &other->state_out, b, h, i, j, *state++);
    EACH(a->heads, a->norm_out.data ? a->head_dim : 0, 1)
    if (!wrong) wrong = differs("norm", &a->norm_out, &other->norm_out, b, h, i, j, *norm++);
    return wrong;
}

/* Computes twice, the second time in other tasks, the last one first, and with the state in place: the bits stay. Then
 * once more in two calls, with the state carried from one to the other. */
static const char *check_recurrent(int isa, const fa_kernels *kernels)
{
    fa_recurrent_args calls[3];
    const int64_t len = recurrent_now.args.len_k, cut = len * 2 / 5;
    int aligned = 1;
    (void)isa;
    FOR(n, 3) calls[n] = new_results(n > 0);
    FOR(again, 2) aligned &= run_recurrent(kernels, calls[again], 0, len, (int)again);
    if (!aligned) return UNALIGNED;
    const char *wrong = wrong_results(calls, calls + 1);
    if (wrong || !calls->causal) return wrong;
    fa_recurrent_args first = calls[2], second = calls[2];
    if (first.norm_out.data) second.norm = first.norm_out = new_results(0).norm_out;
    second.state = first.state_out;
    run_recurrent(kernels, first, 0, cut, 0);
    run_recurrent(kernels, second, cut, len, 1);
    wrong = wrong_results(calls + 2, calls + 2);
    const fa_recurrent_args *a = calls + 2;
    if (wrong || (only_rows(&a->out, a->batch, out_heads(a), a->len_q, a->head_dim_v) &&
                  only_rows(&a->state_out, a->batch, a->heads, a->head_dim, a->head_dim_v)))
        return wrong;
    return BETWEEN_ROWS;
}

static void describe_recurrent(void)
{
    const fa_recurrent_args *a = &recurrent_now.args;
    const char *decay = a->gated ? ", gated" : a->log_decay.data ? ", decay" : "";
    printf("dtypes %d, %d, batch %d, states %d, heads %d, %d, %d, ", a->q.dtype, a->k.dtype, (int)a->batch,
           (int)a->heads, (int)a->heads_q, (int)a->heads_k, (int)a->heads_v);
    printf("len %d x %d, head_dim %d, %d%s%s%s%s%s%s%s", (int)a->len_q, (int)a->len_k, (int)a->head_dim,
           (int)a->head_dim_v, decay, a->beta.data ? ", delta" : "", a->erase.data ? ", erase" : "",
           a->causal ? "" : ", not causal", a->state.data ? ", state" : "",
           recurrent_now.normalised ? ", normalised" : "", recurrent_spoiled ? ", NaN" : "");
}

static void drop_recurrent(void) { free(recurrent_now.out), free(recurrent_now.state), free(recurrent_now.norm); }

FAMILY(recurrent, RECURRENT_CASES, make_recurrent, recurrent_now.args.q.dtype, describe_recurrent, drop_recurrent);

#endif

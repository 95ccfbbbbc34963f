/* Tests of linear attention's gradient: every rule, against the recurrence backwards, token by token in double precision. */
#ifndef RECURRENT_BACKWARD_H
#define RECURRENT_BACKWARD_H

#include "recurrent.h"

enum { N_GRADIENTS = 8 };

/* The gradients: dq, dk, dv, dlog_decay, dbeta, dstate, dnorm, derase. */
typedef struct {
    fa_array dout, dstate, dnorm; /* those of the results */
    int64_t heads[N_GRADIENTS], rows[N_GRADIENTS], cols[N_GRADIENTS];
    near *want[N_GRADIENTS];
    int layout;
} gradient_case;

static gradient_case gradients_now;
static const char *const gradient_names[] = {"dq", "dk", "dv", "dlog_decay", "dbeta", "dstate", "dnorm", "derase"};

/* One state's gradients on their way from the last token to the first. */
typedef struct {
    double *s,
        *z; /* (len_k + 1, head_dim, head_dim_v), (len_k + 1, head_dim): before each token, and behind the last */
    double *ds, *dz; /* (head_dim, head_dim_v), (head_dim) */
} backwards;

static double decay_of(const fa_recurrent_args *a, int64_t b, int64_t h, int64_t t, int64_t d)
{
    return a->log_decay.data ? exp(get(&a->log_decay, b, h, t, a->gated ? d : 0)) : 1;
}

static double key_of(const fa_recurrent_args *a, int64_t b, int64_t h, int64_t t, int64_t d)
{
    return get(&a->k, b, h / (a->heads / a->heads_k), t, d);
}

static double erase_of(const fa_recurrent_args *a, int64_t b, int64_t h, int64_t t, int64_t d)
{
    return a->erase.data ? get(&a->erase, b, h / (a->heads / a->heads_k), t, d) : key_of(a, b, h, t, d);
}

/* The part of its value in column c that token t finds missing in the decayed state before it. */
static double missing(const fa_recurrent_args *a, const backwards *x, int64_t b, int64_t h, int64_t t, int64_t c)
{
    double r = get(&a->v, b, h / (a->heads / a->heads_v), t, c);
    FOR(d, a->beta.data ? a->head_dim : 0)
    r -= erase_of(a, b, h, t, d) * decay_of(a, b, h, t, d) * x->s[(t * a->head_dim + d) * a->head_dim_v + c];
    return r;
}

static near *wanted(int gradient, int64_t b, int64_t h, int64_t row, int64_t col)
{
    const gradient_case *g = &gradients_now;
    return g->want[gradient] + ((b * g->heads[gradient] + h) * g->rows[gradient] + row) * g->cols[gradient] + col;
}

/* Adds the gradients that the answers of token t give back to all heads of q that read state number `at`. */
static void answers_back(const fa_recurrent_args *a, backwards *x, int64_t b, int64_t h, int64_t t, int64_t at)
{
    const int64_t depth = a->head_dim, width = a->head_dim_v, group = a->heads_q > a->heads ? a->heads_q / a->heads : 1;
    const double *s = x->s + at * depth * width, *z = x->z + at * depth;
    FOR(g, group)
    {
        const int64_t from = group > 1 ? h * group + g : h / (a->heads / a->heads_q), to = h * group + g;
        double divisor = recurrent_now.normalised ? a->eps : 1, dsum = 0;
        FOR(d, recurrent_now.normalised ? depth : 0) divisor += a->scale * get(&a->q, b, from, t, d) * z[d];
        FOR(c, width)
        {
            const double dout = get(&gradients_now.dout, b, to, t, c) / divisor;
            double out = 0;
            FOR(d, depth) out += a->scale * get(&a->q, b, from, t, d) * s[d * width + c];
            if (recurrent_now.normalised) dsum -= dout * out / divisor;
            FOR(d, depth)
            {
                wanted(0, b, to, t, d)->value += a->scale * dout * s[d * width + c];
                x->ds[d * width + c] += a->scale * get(&a->q, b, from, t, d) * dout;
            }
        }
        FOR(d, depth)
        {
            wanted(0, b, to, t, d)->value += a->scale * dsum * z[d];
            x->dz[d] += a->scale * get(&a->q, b, from, t, d) * dsum;
        }
    }
}

/* Adds the gradients of token t; then ds and dz are those before it. */
static void token_back(const fa_recurrent_args *a, backwards *x, int64_t b, int64_t h, int64_t t)
{
    const int64_t depth = a->head_dim, width = a->head_dim_v;
    const double beta = a->beta.data ? get(&a->beta, b, h, t, 0) : 1;
    FOR(d, depth) wanted(1, b, h, t, d)->value = x->dz[d];
    FOR(c, width)
    {
        const double r = missing(a, x, b, h, t, c);
        double du = 0;
        FOR(d, depth) du += key_of(a, b, h, t, d) * x->ds[d * width + c];
        wanted(2, b, h, t, c)->value = beta * du;
        wanted(4, b, h, t, 0)->value += du * r;
        FOR(d, depth)
        {
            const double faded = decay_of(a, b, h, t, d) * x->s[(t * depth + d) * width + c];
            wanted(1, b, h, t, d)->value += x->ds[d * width + c] * beta * r;
            if (a->beta.data) wanted(a->erase.data ? 7 : 1, b, h, t, d)->value -= faded * beta * du;
            if (a->beta.data) x->ds[d * width + c] -= erase_of(a, b, h, t, d) * beta * du;
            wanted(3, b, h, t, a->gated ? d : 0)->value += x->ds[d * width + c] * faded;
        }
    }
    FOR(d, depth)
    {
        const double decay = decay_of(a, b, h, t, d);
        wanted(3, b, h, t, a->gated ? d : 0)->value += x->dz[d] * decay * x->z[t * depth + d];
        x->dz[d] *= decay;
        FOR(c, width) x->ds[d * width + c] *= decay;
    }
}

/* All gradients of state h of batch item b. */
static void expect_gradients(const fa_recurrent_args *a, int64_t b, int64_t h)
{
    const int64_t depth = a->head_dim, width = a->head_dim_v, size = depth * width, n = a->len_k;
    double *memory = calloc((size_t)((n + 2) * (size + depth)), sizeof *memory);
    backwards x = {memory, memory + (n + 1) * size, NULL, NULL};
    x.ds = x.z + (n + 1) * depth, x.dz = x.ds + size;
    FOR(d, depth)
    {
        if (a->norm.data) x.z[d] = get(&a->norm, b, h, d, 0);
        if (recurrent_now.normalised) x.dz[d] = get(&gradients_now.dnorm, b, h, d, 0);
        FOR(c, width)
        {
            if (a->state.data) x.s[d * width + c] = get(&a->state, b, h, d, c);
            x.ds[d * width + c] = get(&gradients_now.dstate, b, h, d, c);
        }
    }
    FOR(t, n)
    {
        FOR(c, width)
        {
            const double u = (a->beta.data ? get(&a->beta, b, h, t, 0) : 1) * missing(a, &x, b, h, t, c);
            FOR(d, depth)
            x.s[(t + 1) * size + d * width + c] = decay_of(a, b, h, t, d) * x.s[t * size + d * width + c] +
                                                  key_of(a, b, h, t, d) * u;
        }
        FOR(d, depth)
        x.z[(t + 1) * depth + d] = decay_of(a, b, h, t, d) * x.z[t * depth + d] + key_of(a, b, h, t, d);
    }
    FOR(t, a->causal ? 0 : a->len_q) answers_back(a, &x, b, h, t, n);
    for (int64_t t = n - 1; t >= 0; t--) {
        if (a->causal) answers_back(a, &x, b, h, t, t + 1);
        token_back(a, &x, b, h, t);
    }
    FOR(d, depth)
    {
        wanted(6, b, h, d, 0)->value = x.dz[d];
        FOR(c, width) wanted(5, b, h, d, c)->value = x.ds[d * width + c];
    }
    free(memory);
}

/* Errors: so many roundings of the largest gradient of each kind. Where NaN is about, sanitizers and guards look alone. */
static void bound_gradients(const fa_recurrent_args *a)
{
    /* A sum that nearly cancels and is divided by q z, as with one feature, is off by more. */
    const double rounding = (recurrent_now.normalised ? 64 : 8) * rounding_of(a, larger(a->len_q, a->len_k));
    FOR(gradient, N_GRADIENTS)
    {
        gradient_case *g = &gradients_now;
        const int64_t n = a->batch * g->heads[gradient] * g->rows[gradient] * g->cols[gradient];
        double most = 0.5;
        FOR(i, n) most = fmax(most, fabs(g->want[gradient][i].value));
        FOR(i, n) g->want[gradient][i].error = recurrent_spoiled ? INFINITY : rounding * most + flushed(a);
    }
}

static void make_recurrent_backward(int number)
{
    make_recurrent(number);
    recurrent_now.args.strength = (fa_array){0}, recurrent_now.args.skip = NULL; /* of the forward pass alone */
    const fa_recurrent_args *a = &recurrent_now.args;
    gradient_case *g = &gradients_now;
    const fa_dtype lane = lane_of(a->q.dtype);
    g->layout = (int)below(8);
    g->dout = new_tokens(a->q.dtype, out_heads(a), a->len_q, a->head_dim_v, -1, (int)below(8));
    g->dstate = new_tokens(lane, a->heads, a->head_dim, a->head_dim_v, -1, g->layout);
    g->dnorm = new_tokens(lane, a->heads, a->head_dim, 1, -1, 0);
    const int64_t rows[] = {a->len_q, a->len_k, a->len_k, a->len_k, a->len_k, a->head_dim, a->head_dim, a->len_k};
    const int64_t gates = a->gated ? a->head_dim : 1;
    const int64_t cols[] = {a->head_dim, a->head_dim, a->head_dim_v, gates, 1, a->head_dim_v, 1, a->head_dim};
    FOR(i, N_GRADIENTS)
    {
        g->heads[i] = i == 0 ? out_heads(a) : a->heads, g->rows[i] = rows[i], g->cols[i] = cols[i];
        g->want[i] = calloc((size_t)(a->batch * g->heads[i] * rows[i] * cols[i]) + 1, sizeof(near));
    }
    FOR(b, a->batch) FOR(h, a->heads) expect_gradients(a, b, h);
    bound_gradients(a);
}

static fa_array *gradient_of(fa_recurrent_backward_args *x, int gradient)
{
    fa_array *each[] = {&x->dq, &x->dk, &x->dv, &x->dlog_decay, &x->dbeta, &x->dstate, &x->dnorm, &x->derase};
    return each[gradient];
}

/* Computes all gradients, the second time the last task first, and some cases without those that are not always wanted. */
static const char *check_recurrent_backward(int isa, const fa_kernels *kernels)
{
    const gradient_case *g = &gradients_now;
    const fa_recurrent_args *a = &recurrent_now.args;
    const fa_dtype lane = lane_of(a->q.dtype), of_keys = a->k.dtype == FA_I8 ? lane : a->k.dtype;
    const fa_dtype types[] = {a->q.dtype, of_keys, of_keys, lane, lane, lane, lane, of_keys};
    fa_recurrent_backward_args calls[2];
    static char flag;
    (void)isa;
    FOR(again, 2)
    {
        fa_recurrent_backward_args *x = calls + again;
        fa_recurrent_backward_plan p;
        *x = (fa_recurrent_backward_args){
            .forward = *a, .dout = g->dout, .dstate_out = g->dstate, .dq_factor = a->scale};
        if (recurrent_now.normalised) x->forward.norm_out.data = &flag, x->dnorm_out = g->dnorm;
        FOR(i, N_GRADIENTS)
        {
            const int there = i < 3 || i == 5 ||
                              (i == 3   ? !!a->log_decay.data
                               : i == 4 ? !!a->beta.data
                               : i == 7 ? !!a->erase.data
                                        : recurrent_now.normalised);
            const int rows = i < 3 || i == 5 || i == 7 ? g->layout : 0;
            if (there)
                *gradient_of(x, (int)i) = new_floats(types[i], a->batch, g->heads[i], g->rows[i], g->cols[i], rows);
        }
        const int mark = n_mappings;
        kernels->recurrent->backward_plan(x, &p);
        if (p.scratch_bytes % 64) return UNALIGNED;
        char *scratch = allocate((size_t)p.scratch_bytes);
        if (again) memset(scratch, 0x55, (size_t)p.scratch_bytes);
        FOR(task, p.n_tasks) kernels->recurrent->backward_run(x, &p, again ? p.n_tasks - 1 - task : task, scratch);
        release(mark);
    }
    FOR(i, N_GRADIENTS)
    {
        const fa_array *x = gradient_of(calls, (int)i), *other = gradient_of(calls + 1, (int)i);
        const near *want = g->want[i];
        if (!x->data) continue;
        FOR(b, a->batch) FOR(h, g->heads[i]) FOR(row, g->rows[i]) FOR(col, g->cols[i])
        {
            const char *wrong = differs(gradient_names[i], x, other, b, h, row, col, stored(*want++, types[i]));
            if (wrong) return wrong;
        }
        if (!only_rows(x, a->batch, g->heads[i], g->rows[i], g->cols[i])) return BETWEEN_ROWS;
    }
    return NULL;
}

static void drop_recurrent_backward(void)
{
    FOR(i, N_GRADIENTS) free(gradients_now.want[i]);
    drop_recurrent();
}

FAMILY(recurrent_backward, RECURRENT_CASES, make_recurrent_backward, recurrent_now.args.q.dtype, describe_recurrent,
       drop_recurrent_backward);

#endif

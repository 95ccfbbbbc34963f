/* Linear attention with a carried state: the recurrence token by token, in double precision. */
#ifndef RECURRENCE_H
#define RECURRENCE_H

#include "cases.h"
#include "compare.h"

enum { MOST_DIM = 129 };

/* The inputs of a call, and what its results must be. */
typedef struct {
    fa_recurrent_args args;
    fa_array skip; /* (1, heads), lanes: what args.skip points to */
    int normalised;
    near *out;   /* (batch, out heads, len_q, head_dim_v) */
    near *state; /* (batch, heads, head_dim, head_dim_v) */
    near *norm;  /* (batch, heads, head_dim) */
} recurrent_case;

/* A state in double precision. Its errors are in proportion to its mass, the sum of the absolute values of all that was
 * added to it. */
typedef struct {
    double *s, *mass; /* (head_dim, head_dim_v) */
    /* The sum of the keys; the token's key, what it erases by, and its query. */
    double z[MOST_DIM], k[MOST_DIM], e[MOST_DIM], q[MOST_DIM];
} recurrence;

static int64_t out_heads(const fa_recurrent_args *a) { return larger(a->heads, a->heads_q); }

/* The relative error that all roundings up to token t may add up to. */
static double rounding_of(const fa_recurrent_args *a, int64_t t)
{
    return eps_of(lane_of(a->q.dtype)) * (4 + 2 * sqrt((double)(t + a->head_dim)));
}

/* The error of numbers that become too small: they are replaced by 0. */
static double flushed(const fa_recurrent_args *a) { return 1000 * (double)(a->head_dim + 1) * FLT_MIN; }

/* S_t = A_t S_{t-1} + k_t u_t^T */
static void one_token(const fa_recurrent_args *a, int64_t b, int64_t h, int64_t t, recurrence *r)
{
    const int64_t depth = a->head_dim, width = a->head_dim_v;
    const double beta = a->beta.data ? get(&a->beta, b, h, t, 0) : 0;
    FOR(d, depth)
    {
        const double decay = a->log_decay.data ? exp(get(&a->log_decay, b, h, t, a->gated ? d : 0)) : 1;
        r->k[d] = get(&a->k, b, h / (a->heads / a->heads_k), t, d);
        r->e[d] = a->erase.data ? get(&a->erase, b, h / (a->heads / a->heads_k), t, d) : r->k[d];
        r->z[d] = r->z[d] * decay + r->k[d];
        FOR(c, width) r->s[d * width + c] *= decay, r->mass[d * width + c] *= decay;
    }
    FOR(c, width)
    {
        double u = get(&a->v, b, h / (a->heads / a->heads_v), t, c);
        if (a->strength.data) u *= get(&a->strength, b, h, t, 0);
        FOR(d, a->beta.data ? depth : 0) u -= r->e[d] * r->s[d * width + c];
        if (a->beta.data) u *= beta;
        FOR(d, depth)
        {
            r->s[d * width + c] += r->k[d] * u;
            r->mass[d * width + c] += fabs(r->k[d] * u);
        }
    }
}

/* out_t = S_t^T q_t, of head `to` of out, which reads head `from` of q. The delta rule spreads an error over all
 * dimensions without making it larger. With the other rules an error stays in its dimension. */
static void one_answer(const recurrent_case *x, int64_t b, int64_t from, int64_t to, int64_t t, recurrence *r)
{
    const fa_recurrent_args *a = &x->args;
    const int64_t width = a->head_dim_v;
    const double rounding = rounding_of(a, a->causal ? t : a->len_k);
    near divisor = {a->eps, 0}, *out = x->out + ((b * out_heads(a) + to) * a->len_q + t) * width;
    FOR(d, a->head_dim)
    {
        r->q[d] = a->scale * get(&a->q, b, from, t, d);
        divisor.value += r->q[d] * r->z[d];
        divisor.error += rounding * fabs(r->q[d] * r->z[d]);
    }
    FOR(c, width)
    {
        near sum = {0, flushed(a)};
        double squares = 0, masses = 0;
        FOR(d, a->head_dim)
        {
            const double mass = r->mass[d * width + c];
            sum.value += r->q[d] * r->s[d * width + c];
            if (!a->beta.data) sum.error += rounding * fabs(r->q[d]) * mass;
            squares += r->q[d] * r->q[d];
            masses += mass * mass;
        }
        if (a->beta.data) sum.error += rounding * sqrt(squares * masses);
        if (a->skip) { /* of state `to / group` */
            const int64_t h = to / larger(1, a->heads_q / a->heads);
            const double skipped = get(&x->skip, 0, 0, 0, h) * get(&a->v, b, h / (a->heads / a->heads_v), t, c);
            sum.value += skipped, sum.error += eps_of(lane_of(a->q.dtype)) * fabs(skipped);
        }
        if (x->normalised) {
            sum.value /= divisor.value;
            sum.error = (sum.error + fabs(sum.value) * divisor.error) / fabs(divisor.value);
        }
        out[c] = stored(sum, a->q.dtype);
    }
}

static void all_answers(const recurrent_case *x, int64_t b, int64_t h, int64_t t, recurrence *r)
{
    const fa_recurrent_args *a = &x->args;
    const int64_t group = a->heads_q > a->heads ? a->heads_q / a->heads : 1;
    FOR(g, group) one_answer(x, b, group > 1 ? h * group + g : h / (a->heads / a->heads_q), h * group + g, t, r);
}

/* Computes all results of state h of batch item b. */
static void expect_state(const recurrent_case *x, int64_t b, int64_t h)
{
    const fa_recurrent_args *a = &x->args;
    const int64_t depth = a->head_dim, width = a->head_dim_v, row = (b * a->heads + h) * depth;
    const double rounding = rounding_of(a, a->len_k);
    const size_t size = (size_t)(depth * width);
    recurrence r = {calloc(size, sizeof(double)), calloc(size, sizeof(double)), {0}, {0}, {0}, {0}};
    FOR(d, depth)
    {
        if (a->norm.data) r.z[d] = get(&a->norm, b, h, d, 0);
        FOR(c, a->state.data ? width : 0)
        {
            r.s[d * width + c] = get(&a->state, b, h, d, c);
            r.mass[d * width + c] = fabs(r.s[d * width + c]);
        }
    }
    FOR(t, a->len_k)
    {
        one_token(a, b, h, t, &r);
        if (a->causal) all_answers(x, b, h, t, &r);
    }
    FOR(t, a->causal ? 0 : a->len_q) all_answers(x, b, h, t, &r);
    FOR(c, width)
    {
        double squares = 0;
        FOR(d, depth) /* NaN in a key spoils its row alone, where the token erases by another key */
        if (!isnan(r.mass[d * width + c])) squares += r.mass[d * width + c] * r.mass[d * width + c];
        FOR(d, depth)
        {
            const double mass = a->beta.data ? sqrt(squares) : r.mass[d * width + c];
            x->state[(row + d) * width + c] = (near){r.s[d * width + c], rounding * mass + flushed(a)};
        }
    }
    FOR(d, depth) x->norm[row + d] = (near){r.z[d], rounding * fabs(r.z[d]) + flushed(a)};
    free(r.s), free(r.mass);
}

#endif

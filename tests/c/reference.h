/* Attention by its definition, in double precision, and how far from it a result may lie. */
#ifndef REFERENCE_H
#define REFERENCE_H

#include "cases.h"

/* What an element must be, and how far from it it may lie; `blur`, the mean of |v|: where the kernel rounds
 * probabilities, to 8 bits, it moves by up to 2^-8 of that. */
typedef struct {
    double value, tolerance, blur;
} expected;

static double eps_of(fa_dtype dtype)
{
    return dtype == FA_F64 ? DBL_EPSILON : dtype == FA_F32 ? FLT_EPSILON : dtype == FA_F16 ? 0x1p-10 : 0x1p-7;
}

/* Row (b, h, i): head_dim_v elements of out, and its lse, from a row of q and the matrices k and v. A score may be off
 * by some units in the last place of the absolute sum of its terms (`size`), and to first order such errors reach the
 * result in proportion to the probabilities. */
static void expect_row(const fa_attention_args *a, int64_t b, int64_t h, int64_t i, const double *q, const double *k,
                       const double *v, double *score, double *size, expected *e)
{
    const int64_t depth = a->head_dim, width = a->head_dim_v;
    const double eps = eps_of(lane_of(a->q.dtype)), sink = a->sinks.data ? get(&a->sinks, b, h, 0, 0) : -INFINITY;
    double max = sink, error = 0;
    FOR(j, a->len_k)
    {
        double s = 0, terms = 0;
        size[j] = -1; /* not attended */
        if (!attends(a, b, h, i, j)) continue;
        FOR(d, depth)
        {
            s += q[d] * k[j * depth + d];
            terms += fabs(q[d] * k[j * depth + d]);
        }
        s *= a->scale;
        terms *= a->scale;
        if (a->softcap != 0) s = a->softcap * tanh(s / a->softcap);
        if (a->bias.data) {
            const double bias = get(&a->bias, b, h, i, j);
            s += bias;
            terms += bias < -1e30 ? 0 : fabs(bias); /* there all scores become the same, exactly */
        }
        if (a->alibi_slopes.data) {
            const double distance = fabs((double)(get_int(&a->q_position, b, 0, 0) + i - j));
            s -= get(&a->alibi_slopes, b, h, 0, 0) * distance;
            terms += get(&a->alibi_slopes, b, h, 0, 0) * distance;
        }
        score[j] = s;
        size[j] = terms;
        max = fmax(max, s);
    }
    double sum = max == -INFINITY ? 0 : exp(sink - max);
    FOR(j, a->len_k)
    {
        if (size[j] == -1) continue;
        const double p = exp(score[j] - max);
        sum += p;
        error += p * size[j];
        FOR(d, width)
        {
            const double value = v[j * width + d];
            e[d].value += p * value;
            e[d].blur += p * fabs(value);
            e[d].tolerance += p * fabs(value) * size[j];
        }
    }
    const double factor = sum == 0 ? 0 : 1 / sum, steps = 4 + sqrt((double)a->len_k); /* roundings of sums over keys */
    const double tiny = a->q.dtype == FA_F16 ? 0x1p-25 : eps == DBL_EPSILON ? DBL_MIN : FLT_MIN; /* below it exp is 0 */
    FOR(d, width)
    {
        e[d].value *= factor;
        e[d].blur *= factor;
        e[d].tolerance = eps * (2 * factor * (e[d].tolerance + fabs(e[d].value) * error) + steps * e[d].blur) +
                         eps_of(a->q.dtype) / 2 * fabs(e[d].value) + tiny;
    }
    e[width].value = sum == 0 ? -INFINITY : max + log(sum);
    e[width].tolerance = eps * (2 * factor * error + steps + fabs(e[width].value));
}

static double *doubles(const fa_attention_args *a, const fa_array *x, int64_t heads, int64_t rows, int64_t cols)
{
    double *all = calloc((size_t)(a->batch * heads * rows * cols + 1), sizeof *all), *next = all;
    EACH(heads, rows, cols) *next++ = get(x, b, h, i, j);
    return all;
}

/* For every row of the call, head_dim_v elements and the lse. */
static expected *expect(const fa_attention_args *a)
{
    const int64_t stride = a->head_dim_v + 1, group = a->heads_q / a->heads_kv;
    expected *all = calloc((size_t)(a->batch * a->heads_q * a->len_q * stride + 1), sizeof *all), *row = all;
    double *q = doubles(a, &a->q, a->heads_q, a->len_q, a->head_dim), *next = q;
    double *k = doubles(a, &a->k, a->heads_kv, a->len_k, a->head_dim);
    double *v = doubles(a, &a->v, a->heads_kv, a->len_k, a->head_dim_v);
    double *keys = calloc((size_t)(2 * a->len_k + 1), sizeof *keys);
    FOR(b, a->batch) FOR(h, a->heads_q) FOR(i, a->len_q)
    {
        const int64_t first = (b * a->heads_kv + h / group) * a->len_k; /* key */
        expect_row(a, b, h, i, next, k + first * a->head_dim, v + first * a->head_dim_v, keys, keys + a->len_k, row);
        next += a->head_dim;
        row += stride;
    }
    free(q), free(k), free(v), free(keys);
    return all;
}

#endif

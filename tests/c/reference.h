/* Attention by its definition, in double precision, and how far from it a result may lie. */
#ifndef REFERENCE_H
#define REFERENCE_H

#include "cases.h"
#include "compare.h"

/* An element as it must be, and how far off it may be. `blur` is the mean of |v|: if the kernel rounds probabilities to
 * 8 bits, the element may be off by another 2^-8 of that. */
typedef struct {
    double value, tolerance, blur;
} expected;

/* A score, and the sum of its terms' absolute values, of which the score may be off by some units in the last place. */
typedef struct {
    double value, size; /* size -1: not attended */
} score;

static score product_of(int64_t depth, const double *q, const double *k)
{
    score s = {0, 0};
    FOR(d, depth)
    {
        s.value += q[d] * k[d];
        s.size += fabs(q[d] * k[d]);
    }
    return s;
}

/* The score of key j in row (b, h, i) after all modifiers; `s` is the product. */
static score modified(const fa_attention_args *a, int64_t b, int64_t h, int64_t i, int64_t j, score s)
{
    if (!attends(a, b, h, i, j)) return (score){-INFINITY, -1};
    s.value *= a->mods.scale;
    s.size *= a->mods.scale;
    if (a->mods.softcap != 0) s.value = a->mods.softcap * tanh(s.value / a->mods.softcap);
    if (a->mods.bias.data) {
        const double bias = get(&a->mods.bias, b, h, i, j);
        s.value += bias;
        s.size += bias < -1e30 ? 0 : fabs(bias); /* there all scores become the same, exactly */
    }
    if (a->mods.alibi_slopes.data) {
        const double distance = fabs((double)(get_int(&a->mods.q_position, b, 0, 0) + i - j));
        s.value -= get(&a->mods.alibi_slopes, b, h, 0, 0) * distance;
        s.size += get(&a->mods.alibi_slopes, b, h, 0, 0) * distance;
    }
    return s;
}

/* The scores of row (b, h, i) from a row of q and the matrix k. */
static void score_row(const fa_attention_args *a, int64_t b, int64_t h, int64_t i, const double *q, const double *k,
                      score *s)
{
    FOR(j, a->len_k) s[j] = modified(a, b, h, i, j, product_of(a->head_dim, q, k + j * a->head_dim));
}

/* The softmax of a row: the maximum and the sum of exp(score - max), both with the sink, and the mean of the scores'
 * sizes, weighted with the probabilities: so, to first order, the errors of the scores reach the result. */
typedef struct {
    double max, sum, size;
} softmax_row;

static softmax_row softmax_of(const fa_attention_args *a, int64_t b, int64_t h, const score *s)
{
    const double sink = a->sinks.data ? get(&a->sinks, b, h, 0, 0) : -INFINITY;
    softmax_row r = {.max = sink};
    FOR(j, a->len_k) r.max = fmax(r.max, s[j].value);
    if (r.max == -INFINITY) r.max = 0;
    r.sum = exp(sink - r.max);
    FOR(j, a->len_k)
    {
        if (s[j].size == -1) continue;
        const double p = exp(s[j].value - r.max);
        r.sum += p;
        r.size += p * s[j].size;
    }
    if (r.sum != 0) r.size /= r.sum;
    return r;
}

/* How often a sum over the keys is rounded. */
static double steps_of(const fa_attention_args *a) { return 4 + sqrt((double)a->len_k); }

/* A probability below this, relative to the largest, is 0: v_exp_prob. */
static double cut_of(fa_dtype q) { return q == FA_F64 ? 0x1p-996 : 0x1p-100; }

/* The probability of a key that the row attends. */
static near probability(const fa_attention_args *a, const softmax_row *r, score s)
{
    const double p = r->sum == 0 ? 0 : exp(s.value - r->max) / r->sum, eps = eps_of(lane_of(a->q.dtype));
    return (near){p, p * eps * (2 * (s.size + r->size) + steps_of(a)) + cut_of(a->q.dtype)};
}

static near sigmoid_of(const fa_attention_args *a, score s)
{
    const double x = s.value + a->sigmoid_bias, p = 1 / (1 + exp(-x)), eps = eps_of(lane_of(a->q.dtype));
    return (near){p, p * eps * (2 * (1 - p) * (s.size + fabs(a->sigmoid_bias)) + steps_of(a)) + cut_of(a->q.dtype)};
}

/* Below it exp is 0. */
static double tiny_of(fa_dtype q) { return q == FA_F16 ? 0x1p-25 : q == FA_F64 ? DBL_MIN : FLT_MIN; }

/* out (head_dim_v) += p v (head_dim_v) */
static void weigh(const fa_attention_args *a, near p, const double *v, expected *out)
{
    FOR(d, a->head_dim_v)
    {
        out[d].value += p.value * v[d];
        out[d].tolerance += p.error * fabs(v[d]);
        out[d].blur += fabs(p.value * v[d]);
    }
}

/* Applies dropout to probability p of query i and key j: src/philox.inc.h says which words decide. */
static near dropped(const fa_attention_args *a, int64_t b, int64_t h, int64_t i, int64_t j, near p)
{
    const double share = 1 / (1 - a->dropout), eps = eps_of(lane_of(a->q.dtype));
    uint32_t c[4] = {(uint32_t)i, (uint32_t)(j / 64 * 16 + j % 16), (uint32_t)(b * a->heads_q + h), 0};
    uint32_t key[2] = {(uint32_t)a->seed, (uint32_t)(a->seed >> 32)};
    if (a->dropout == 0) return p;
    for (int round = 0; round < 10; round++, key[0] += 0x9e3779b9, key[1] += 0xbb67ae85) {
        const uint64_t p0 = (uint64_t)c[0] * 0xd2511f53, p1 = (uint64_t)c[2] * 0xcd9e8d57;
        c[0] = (uint32_t)(p1 >> 32) ^ c[1] ^ key[0], c[1] = (uint32_t)p1;
        c[2] = (uint32_t)(p0 >> 32) ^ c[3] ^ key[1], c[3] = (uint32_t)p0;
    }
    if (c[j / 16 % 4] < (uint32_t)(a->dropout * 0x1p32)) return (near){p.value * 0, 0}; /* NaN stays */
    return (near){p.value * share, p.error * share + 2 * eps * p.value * share};
}

/* The sum, rounded to q's dtype. */
static void round_out(const fa_attention_args *a, expected *out)
{
    FOR(d, a->head_dim_v) out[d].tolerance += eps_of(a->q.dtype) / 2 * fabs(out[d].value) + tiny_of(a->q.dtype);
}

/* Row (b, h, i): head_dim_v elements of out, and its lse. */
static void expect_row(const fa_attention_args *a, int64_t b, int64_t h, int64_t i, const score *s, const double *v,
                       expected *e)
{
    const int64_t width = a->head_dim_v;
    const softmax_row r = softmax_of(a, b, h, s);
    FOR(j, a->len_k)
    {
        if (s[j].size == -1) continue;
        const near p = a->sigmoid ? sigmoid_of(a, s[j]) : probability(a, &r, s[j]);
        weigh(a, dropped(a, b, h, i, j, p), v + j * width, e);
    }
    round_out(a, e);
    e[width].value = r.sum == 0 ? -INFINITY : r.max + log(r.sum);
    e[width].tolerance = eps_of(lane_of(a->q.dtype)) * (2 * r.size + steps_of(a) + fabs(e[width].value));
}

/* for each element (b, h, i, j) of an array of the call, as numbers */
static double *doubles(const fa_attention_args *a, const fa_array *x, int64_t heads, int64_t rows, int64_t cols)
{
    double *all = calloc((size_t)(a->batch * heads * rows * cols + 1), sizeof *all), *next = all;
    EACH(heads, rows, cols) *next++ = get(x, b, h, i, j);
    return all;
}

/* The operands of a call, row after row. */
typedef struct {
    double *q, *k, *v;
} operands;

/* Keys or values: int8 times its scale, rounded to lanes. */
static double *keys_as_doubles(const fa_attention_args *a, const fa_array *x, const fa_array *scale, int64_t cols)
{
    double *all = doubles(a, x, a->heads_kv, a->len_k, cols), *next = all;
    if (!scale->data) return all;
    EACH(a->heads_kv, a->len_k, cols)
    {
        *next *= get(scale, b, h, i, 0);
        if (scale->dtype == FA_F32) *next = (float)*next;
        next++;
    }
    return all;
}

static operands operands_of(const fa_attention_args *a)
{
    return (operands){doubles(a, &a->q, a->heads_q, a->len_q, a->head_dim),
                      keys_as_doubles(a, &a->k, &a->k_scale, a->head_dim),
                      keys_as_doubles(a, &a->v, &a->v_scale, a->head_dim_v)};
}

static void drop_operands(operands *x) { free(x->q), free(x->k), free(x->v); }

static const double *query_of(const fa_attention_args *a, const operands *x, int64_t b, int64_t h, int64_t i)
{
    return x->q + ((b * a->heads_q + h) * a->len_q + i) * a->head_dim;
}

/* The first key of head h of q, in rows of k and v. */
static int64_t first_key(const fa_attention_args *a, int64_t b, int64_t h)
{
    return (b * a->heads_kv + h / (a->heads_q / a->heads_kv)) * a->len_k;
}

/* For every row of the call, head_dim_v elements and the lse. */
static expected *expect(const fa_attention_args *a, const operands *x)
{
    const int64_t stride = a->head_dim_v + 1;
    expected *all = calloc((size_t)(a->batch * a->heads_q * a->len_q * stride + 1), sizeof *all), *row = all;
    score *s = calloc((size_t)a->len_k + 1, sizeof *s);
    FOR(b, a->batch) FOR(h, a->heads_q) FOR(i, a->len_q)
    {
        const int64_t first = first_key(a, b, h);
        score_row(a, b, h, i, query_of(a, x, b, h, i), x->k + first * a->head_dim, s);
        expect_row(a, b, h, i, s, x->v + first * a->head_dim_v, row);
        row += stride;
    }
    free(s);
    return all;
}

#endif

/* Statistics of rows and sums over rows, by their definitions. */
#ifndef STATISTICS_H
#define STATISTICS_H

#include "reference.h"

/* The i-th largest weight of a row. `exact`: no other score is so near that rounding may change the order. Equal scores
 * come in the order of their keys. */
typedef struct {
    int64_t key; /* -1: there are no more */
    int exact;
    near weight;
} expected_top;

/* Row after row; key_sums (batch, heads_q, len_k), mean_weights (batch, len_q, len_k), top (..., n_top). */
typedef struct {
    near *row_max, *entropy, *key_sums, *mean_weights;
    expected_top *top;
} expected_statistics;

static near *nears(int64_t n) { return calloc((size_t)n + 1, sizeof(near)); }

static void add(near *sum, near x)
{
    sum->value += x.value;
    sum->error += x.error;
}

/* The n_top best scores of a row. */
static void expect_top(const fa_attention_args *a, const softmax_row *r, const score *s, expected_top *top)
{
    const double eps = eps_of(lane_of(a->q.dtype));
    FOR(n, a->stats.n_top)
    {
        const expected_top *last = n ? top + n - 1 : NULL;
        int64_t best = -1;
        top[n] = (expected_top){-1, 1, {isnan(r->sum) ? NAN : 0, 0}};
        if (isnan(r->sum) || (last && last->key < 0)) continue;
        FOR(j, a->len_k)
        {
            if (s[j].size == -1) continue;
            const int behind = !last || s[j].value < s[last->key].value ||
                               (s[j].value == s[last->key].value && j > last->key);
            if (behind && (best < 0 || s[j].value > s[best].value)) best = j;
        }
        if (best < 0) continue;
        top[n].key = best;
        top[n].weight = probability(a, r, s[best]);
        FOR(j, a->len_k)
        {
            const double gap = fabs(s[j].value - s[best].value), margin = 4 * eps * (s[j].size + s[best].size + 1);
            if (s[j].size != -1 && gap != 0 && gap <= margin) top[n].exact = 0;
        }
    }
}

static expected_statistics expect_statistics(const fa_attention_args *a, const operands *x)
{
    const int64_t rows = a->batch * a->heads_q * a->len_q, keys = a->len_k;
    const double eps = eps_of(lane_of(a->q.dtype)), sums = eps * (2 + sqrt((double)(a->len_q * a->heads_q)));
    const double units = a->q.dtype == FA_F64 ? 4 : 2; /* this reference is itself computed in float64 */
    expected_statistics e = {nears(rows), nears(rows), nears(a->batch * a->heads_q * keys),
                             nears(a->batch * a->len_q * keys),
                             calloc((size_t)(rows * a->stats.n_top) + 1, sizeof *e.top)};
    score *s = calloc((size_t)keys + 1, sizeof *s);
    int64_t row = 0;
    FOR(b, a->batch) FOR(h, a->heads_q) FOR(i, a->len_q)
    {
        score_row(a, b, h, i, query_of(a, x, b, h, i), x->k + first_key(a, b, h) * a->head_dim, s);
        const softmax_row r = softmax_of(a, b, h, s);
        near max = {-INFINITY, 0}, entropy = {0, 0};
        FOR(j, keys)
        {
            if (s[j].size == -1) continue;
            const near p = probability(a, &r, s[j]), share = {p.value / (double)a->heads_q, p.error};
            const double log_p = p.value == 0 ? 0 : s[j].value - r.max - log(r.sum);
            max.value = fmax(max.value, s[j].value);
            max.error = fmax(max.error, eps * (units * s[j].size + fabs(s[j].value)));
            entropy.value -= p.value * log_p;
            entropy.error += p.error * (2 + fabs(log_p)) + 4 * eps * p.value * fabs(log_p);
            add(e.key_sums + (b * a->heads_q + h) * keys + j, p);
            add(e.mean_weights + (b * a->len_q + i) * keys + j, share);
        }
        entropy.error += entropy.value * eps * (2 * r.size + steps_of(a));
        if (isnan(r.sum)) max.value = entropy.value = NAN;
        e.row_max[row] = max;
        e.entropy[row] = entropy;
        expect_top(a, &r, s, e.top + row++ * a->stats.n_top);
    }
    FOR(i, a->batch * a->heads_q * keys) e.key_sums[i].error += sums * e.key_sums[i].value + FLT_MIN;
    FOR(i, a->batch * a->len_q * keys) e.mean_weights[i].error += sums * e.mean_weights[i].value + FLT_MIN;
    free(s);
    return e;
}

static void drop_statistics(expected_statistics *e)
{
    free(e->row_max), free(e->entropy), free(e->key_sums), free(e->mean_weights), free(e->top);
}

/* Memory for the statistics; those that kernels add to are 0. */
static void new_statistics(const test_case *c, fa_attention_args *a)
{
    const fa_dtype lane = lane_of(c->q);
    if (c->statistics & ROW_MAX) a->stats.row_max = new_floats(lane, a->batch, a->heads_q, a->len_q, 1, 0);
    if (c->statistics & ENTROPY) a->stats.entropy = new_floats(lane, a->batch, a->heads_q, a->len_q, 1, 0);
    if (c->statistics & TOP) {
        a->stats.top_weights = new_floats(lane, a->batch, a->heads_q, a->len_q, a->stats.n_top, 0);
        a->stats.top_keys = new_array(8, a->batch, a->heads_q, a->len_q, a->stats.n_top, 0);
    }
    if (c->statistics & KEY_SUMS) {
        a->stats.key_sums = new_floats(lane, a->batch, a->heads_q, a->len_k, 1, 0);
        EACH(a->heads_q, a->len_k, 1) set(&a->stats.key_sums, b, h, i, j, 0);
    }
    if (c->statistics & MEAN_WEIGHTS) {
        a->stats.mean_weights = new_floats(lane, a->batch, 1, a->len_q, a->len_k, 0);
        EACH(1, a->len_q, a->len_k) set(&a->stats.mean_weights, b, h, i, j, 0);
    }
    if (c->statistics & (KEY_SUMS | MEAN_WEIGHTS))
        a->stats.norm = new_floats(lane, a->batch, a->heads_q, a->len_q, 2, 0);
}

/* Checks the list of row (b, h, i). Where rounding may change the order, any key of that weight will do, but none
 * twice. */
static const char *wrong_top(const fa_attention_args calls[2], const operands *x, int64_t b, int64_t h, int64_t i,
                             const expected_top *top)
{
    const fa_attention_args *a = calls;
    const double *q = query_of(a, x, b, h, i), *k = x->k + first_key(a, b, h) * a->head_dim;
    FOR(n, a->stats.n_top)
    {
        int64_t keys[2];
        FOR(again, 2) memcpy(keys + again, at(&calls[again].stats.top_keys, b, h, i, n), sizeof keys[0]);
        const char *wrong = differs("top_weights", &a->stats.top_weights, &calls[1].stats.top_weights, b, h, i, n,
                                    top[n].weight);
        if (wrong) return wrong;
        if (keys[0] != keys[1]) return "another key in the list the second time";
        if (keys[0] == top[n].key) continue;
        if (top[n].exact || keys[0] < 0 || keys[0] >= a->len_k) return "a wrong key in the list";
        FOR(m, n)
        if (memcmp(at(&a->stats.top_keys, b, h, i, m), keys, sizeof keys[0]) == 0) return "a key twice in the list";
        const score got = modified(a, b, h, i, keys[0], product_of(a->head_dim, q, k + keys[0] * a->head_dim));
        const score want = modified(a, b, h, i, top[n].key, product_of(a->head_dim, q, k + top[n].key * a->head_dim));
        const double margin = 8 * eps_of(lane_of(a->q.dtype)) * (got.size + want.size + 1);
        if (got.size == -1 || fabs(got.value - want.value) > margin) return "a key in the list that weighs less";
    }
    return NULL;
}

/* Says what is wrong with a call's statistics, computed twice, or NULL. */
static const char *wrong_statistics(const fa_attention_args calls[2], const operands *x, const expected_statistics *e)
{
    const fa_attention_args *a = calls, *other = calls + 1;
    const char *wrong = NULL;
    int64_t row = 0, sum = 0, mean = 0;
    FOR(b, a->batch) FOR(h, a->heads_q) FOR(i, a->len_q)
    {
        const near max = e->row_max[row], entropy = e->entropy[row];
        if (!wrong && a->stats.row_max.data)
            wrong = differs("row_max", &a->stats.row_max, &other->stats.row_max, b, h, i, 0, max);
        if (!wrong && a->stats.entropy.data)
            wrong = differs("entropy", &a->stats.entropy, &other->stats.entropy, b, h, i, 0, entropy);
        if (!wrong && a->stats.n_top) wrong = wrong_top(calls, x, b, h, i, e->top + row * a->stats.n_top);
        row++;
    }
    if (a->stats.key_sums.data && !wrong) EACH(a->heads_q, a->len_k, 1)
    if (!wrong) wrong = differs("key_sums", &a->stats.key_sums, &other->stats.key_sums, b, h, i, j, e->key_sums[sum++]);
    if (a->stats.mean_weights.data && !wrong) EACH(1, a->len_q, a->len_k)
    if (!wrong)
        wrong = differs("mean_weights", &a->stats.mean_weights, &other->stats.mean_weights, b, h, i, j,
                        e->mean_weights[mean++]);
    return wrong;
}

#endif

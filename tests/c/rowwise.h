/* Attention with another normaliser, another score, or heads that mix. */
#ifndef ROWWISE_H
#define ROWWISE_H

#include "attention.h"
#include "normalisers.h"
#include "results.h"

enum { ROWWISE_KINDS = FA_TALKING_HEADS + 1, ROWWISE_CASES = ROWWISE_KINDS * COUNT(shapes) * COUNT(dtypes) };
enum { MOST_HEADS = 34 }; /* more than those that are mixed at a time */

static struct {
    test_case c;
    fa_rowwise_args args;
    operands x;
    expected *want;
} rowwise_now;

static double entry(const void *matrix, int64_t cols, int64_t i, int64_t j)
{
    const fa_dtype lane = lane_of(rowwise_now.c.q);
    const fa_array x = {.data = (char *)matrix,
                        .batch = (int64_t[]){0},
                        .row = cols * bytes_of(lane),
                        .col = bytes_of(lane),
                        .dtype = lane};
    return get(&x, 0, 0, i, j);
}

/* w . tanh(q + k); its terms are of the size that exponentials of q and k are off by. */
static score additive_product(const fa_rowwise_args *r, int64_t h, const double *q, const double *k)
{
    score s = {0, 0};
    FOR(d, r->attention.head_dim)
    {
        const double weight = entry(r->weight, r->attention.head_dim, h, d);
        s.value += weight * tanh(q[d] + k[d]);
        s.size += fabs(weight) * (4 + fabs(q[d]) + fabs(k[d]));
    }
    return s;
}

/* Every kind but talking heads: a row's results depend on its scores. */
static void expect_by_scores(const fa_rowwise_args *r, const operands *x, expected *want)
{
    const fa_attention_args *a = &r->attention;
    score *s = calloc((size_t)a->len_k + 1, sizeof *s);
    near *p = calloc((size_t)a->len_k + 1, sizeof *p);
    support *has = calloc((size_t)a->len_k + 1, sizeof *has);
    FOR(b, a->batch) FOR(h, a->heads_q) FOR(i, a->len_q)
    {
        const double *q = query_of(a, x, b, h, i), *k = x->k + first_key(a, b, h) * a->head_dim;
        if (r->kind != FA_ADDITIVE) score_row(a, b, h, i, q, k, s);
        FOR(j, r->kind == FA_ADDITIVE ? a->len_k : 0)
        s[j] = modified(a, b, h, i, j, additive_product(r, h, q, k + j * a->head_dim));
        int undefined = 0;
        FOR(j, a->len_k) undefined |= isnan(s[j].value);
        if (undefined) FOR(j, a->len_k)
            {
                has[j] = s[j].size == -1 ? SURELY_NOT : SURELY;
                p[j] = (near){NAN, 0};
            }
        else if (r->kind == FA_SPARSEMAX || r->kind == FA_ENTMAX15)
            sparse_probabilities(a, r->kind == FA_ENTMAX15, s, p, has);
        else best_probabilities(a, r->kind == FA_TOP_K ? r->k_keys : a->len_k, s, p, has);
        weigh_supported(a, p, has, x->v + first_key(a, b, h) * a->head_dim_v, want);
        want += a->head_dim_v + 1;
    }
    free(s), free(p), free(has);
}

/* A row of all heads: products (heads_q, len_k) are mixed, then modified; their probabilities are mixed. */
static void expect_mixed_row(const fa_rowwise_args *r, const operands *x, int64_t b, int64_t i, score *products,
                             score *mixed, expected *want)
{
    const fa_attention_args *a = &r->attention;
    const int64_t heads = a->heads_q, keys = a->len_k;
    FOR(h, heads) FOR(j, keys)
    {
        const double *k = x->k + (first_key(a, b, h) + j) * a->head_dim;
        products[h * keys + j] = product_of(a->head_dim, query_of(a, x, b, h, i), k);
    }
    softmax_row sums[MOST_HEADS];
    FOR(g, heads)
    {
        FOR(j, keys)
        {
            score s = r->pre ? (score){0, 0} : products[g * keys + j];
            FOR(h, r->pre ? heads : 0)
            {
                const double share = entry(r->pre, heads, h, g);
                s.value += share * products[h * keys + j].value;
                s.size += 2 * fabs(share) * products[h * keys + j].size;
            }
            mixed[g * keys + j] = modified(a, b, g, i, j, s);
        }
        sums[g] = softmax_of(a, b, g, mixed + g * keys);
    }
    FOR(f, heads)
    {
        expected *out = want + (f * a->len_q + i) * (a->head_dim_v + 1);
        FOR(j, keys)
        {
            near p = {0, 0};
            int some = 0;
            FOR(g, heads)
            {
                const double share = !r->post ? g == f : entry(r->post, heads, g, f);
                if (mixed[g * keys + j].size == -1 || (!r->post && g != f)) continue;
                const near one = probability(a, sums + g, mixed[g * keys + j]);
                const double eps = eps_of(lane_of(a->q.dtype));
                p.value += share * one.value;
                p.error += fabs(share) * (one.error + 4 * eps * one.value);
                some = 1;
            }
            if (some) weigh(a, p, x->v + (first_key(a, b, f) + j) * a->head_dim_v, out);
        }
        round_out(a, out);
    }
}

static void expect_mixed(const fa_rowwise_args *r, const operands *x, expected *want)
{
    const fa_attention_args *a = &r->attention;
    score *s = calloc((size_t)(2 * a->heads_q * a->len_k) + 1, sizeof *s);
    FOR(b, a->batch)
    FOR(i, a->len_q)
    expect_mixed_row(r, x, b, i, s, s + a->heads_q * a->len_k, want + b * a->heads_q * a->len_q * (a->head_dim_v + 1));
    free(s);
}

static void make_rowwise(int number)
{
    const int i = number / COUNT(dtypes);
    test_case c = {.number = number, .q = dtypes[number % COUNT(dtypes)][0], .kv = dtypes[number % COUNT(dtypes)][1]};
    fa_rowwise_args *r = &rowwise_now.args;
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
    rowwise_now.x = operands_of(a);
    rowwise_now.want = calloc((size_t)(a->batch * a->heads_q * a->len_q * (a->head_dim_v + 1)) + 1, sizeof(expected));
    if (r->kind == FA_TALKING_HEADS) expect_mixed(r, &rowwise_now.x, rowwise_now.want);
    else expect_by_scores(r, &rowwise_now.x, rowwise_now.want);
}

/* Twice: the second time from the last task to the first, with other garbage in the scratch memory. */
static const char *check_rowwise(const fa_kernels *kernels)
{
    fa_rowwise_args calls[2] = {rowwise_now.args, rowwise_now.args};
    const fa_attention_args *a = &calls[0].attention;
    FOR(again, 2)
    {
        fa_rowwise_args *call = calls + again;
        fa_rowwise_plan p;
        call->attention.out = new_floats(a->q.dtype, a->batch, a->heads_q, a->len_q, a->head_dim_v,
                                         rowwise_now.c.out_layout);
        kernels->rowwise_plan(call, &p);
        if (p.scratch_bytes % 64) return UNALIGNED;
        const int mark = n_mappings;
        char *scratch = allocate((size_t)p.scratch_bytes);
        if (again) memset(scratch, 0x55, (size_t)p.scratch_bytes);
        FOR(task, p.n_tasks) kernels->rowwise_run(call, &p, again ? p.n_tasks - 1 - task : task, scratch);
        release(mark);
    }
    const fa_attention_args both[2] = {calls[0].attention, calls[1].attention};
    return wrong_out(both, rowwise_now.want, 0);
}

static void drop_rowwise(void)
{
    drop_operands(&rowwise_now.x);
    free(rowwise_now.want);
}

FAMILY(rowwise, ROWWISE_CASES, make_rowwise, rowwise_now.c.q, &rowwise_now.c, drop_rowwise);

#endif

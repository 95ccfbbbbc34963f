/* The cases: shapes, dtypes and options, and the inputs of each. */
#ifndef CASES_H
#define CASES_H

#include "arrays.h"

#include <float.h>

/* Random numbers: splitmix64. */
static uint64_t seed;

static uint64_t random_bits(void)
{
    uint64_t x = seed += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

static int64_t below(int64_t n) { return n > 0 ? (int64_t)(random_bits() % (uint64_t)n) : 0; }

static double uniform(double low, double high) { return low + (high - low) * (double)(random_bits() >> 11) * 0x1p-53; }

typedef struct {
    int batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v;
} shape;

/* The first two shapes get each option alone, the others several at a time. There are few rows per KV head and many,
 * one row block and several, one split of the keys and several. */
static const shape shapes[] = {
    {2, 4, 2, 21, 140, 12, 10}, {2, 6, 2, 1, 560, 8, 12},   {1, 2, 1, 0, 5, 8, 8},
    {1, 2, 1, 3, 0, 8, 8},      {1, 2, 1, 20, 0, 8, 8},     {1, 1, 1, 1, 1, 1, 1},
    {1, 1, 1, 8, 2, 3, 2},      {1, 1, 1, 9, 7, 1, 3},      {3, 2, 2, 16, 16, 2, 1},
    {1, 4, 1, 5, 33, 7, 9},     {1, 2, 2, 33, 63, 16, 33},  {1, 1, 1, 64, 64, 64, 64},
    {1, 2, 1, 65, 129, 65, 31}, {2, 1, 1, 97, 130, 40, 17}, {1, 1, 1, 31, 65, 130, 97},
    {1, 3, 1, 7, 200, 33, 65},  {1, 1, 1, 13, 66, 531, 5},  {1, 6, 2, 4, 1100, 32, 31},
    {1, 2, 1, 8, 1030, 17, 32}, {1, 1, 1, 32, 520, 5, 48},  {2, 2, 2, 1, 1100, 20, 40},
    {1, 8, 1, 1, 1025, 80, 40}, {1, 3, 1, 2, 513, 128, 15}, {1, 1, 1, 5, 600, 31, 129},
    {1, 7, 1, 1, 577, 96, 80},  {2, 1, 1, 3, 1024, 129, 1}, {1, 1, 1, 40, 100, 128, 128},
    {13, 2, 2, 70, 90, 5, 4},   /* so many tiles that a task has several */
    {6, 2, 1, 100, 4200, 2, 3}, /* the same, with keys for several parts */
};

/* The dtype of q and out, and that of k and v. */
static const fa_dtype dtypes[][2] = {{FA_F32, FA_F32},   {FA_F64, FA_F64}, {FA_F16, FA_F16},
                                     {FA_BF16, FA_BF16}, {FA_F32, FA_F16}, {FA_F32, FA_BF16},
                                     {FA_F32, FA_I8},    {FA_F64, FA_I8},  {FA_BF16, FA_I8}}; /* make_integers */

/* Several to a line, for which clang-format has no option. */
/* clang-format off */
#define OPTIONS(X)                                                                                                     \
    X(CAUSAL) X(WINDOW) X(RANGES) X(MASK) X(PADDING) X(BIAS) X(KEY_BIAS) X(ALIBI) X(SOFTCAP) X(SINKS) X(NO_LSE)        \
    X(LAYOUT) X(NAN_HIDDEN) X(NAN_VALUES) X(NAN_KEYS) X(DROPOUT) X(LISTS) X(SIGMOID) X(STATISTICS)
#define X(name) BIT_##name,
enum { OPTIONS(X) N_OPTIONS };
#undef X
#define X(name) name = 1 << BIT_##name,
enum { OPTIONS(X) };
#undef X
static const int alone[] = {
    0, CAUSAL, WINDOW, RANGES, RANGES | NAN_HIDDEN, RANGES | NAN_VALUES, CAUSAL | NAN_KEYS, MASK, PADDING,
    MASK | NAN_VALUES, MASK | NAN_KEYS, BIAS, KEY_BIAS, ALIBI, SOFTCAP, SINKS, NO_LSE, LAYOUT, DROPOUT,
    DROPOUT | CAUSAL, DROPOUT | RANGES | NAN_VALUES,
};
/* clang-format on */

/* Behind those come, for every shape, two cases with lists of ranges, one with sigmoids, two with statistics. */
enum { PER_SHAPE = 3, ALONE = 2 * COUNT(alone), TOGETHER = PER_SHAPE * (COUNT(shapes) - 2) };
enum { LISTED = 2 * COUNT(shapes), SIGMOIDS = COUNT(shapes), STATED = 2 * COUNT(shapes) };
enum { N_CASES = (ALONE + TOGETHER + LISTED + SIGMOIDS + STATED) * COUNT(dtypes) };

/* Which statistics a case asks for. */
enum { ROW_MAX = 1, ENTROPY = 2, TOP = 4, KEY_SUMS = 8, MEAN_WEIGHTS = 16 };

typedef struct {
    int number, options, out_layout, statistics;
    shape s;
    fa_dtype q, kv;
} test_case;

/* Shape `i`, for cases that take more time: the one with most scores gets fewer rows. */
static shape small_shape(int i)
{
    shape s = shapes[i % COUNT(shapes)];
    if (s.len_k > 4096) s.batch = 1, s.len_q = 20;
    return s;
}

/* Any options before LISTS. */
static int random_options(void)
{
    const int options = (int)(random_bits() & random_bits()) & (LISTS - 1);
    return below(3) ? options & ~(NAN_KEYS | NAN_VALUES) : options; /* they leave few numbers */
}

static test_case case_of(int number)
{
    const int i = number / COUNT(dtypes), listed = i - ALONE - TOGETHER, other = listed - LISTED;
    test_case c = {.number = number, .q = dtypes[number % COUNT(dtypes)][0], .kv = dtypes[number % COUNT(dtypes)][1]};
    seed = (uint64_t)number << 32;
    c.options = i < ALONE ? alone[i / 2] : random_options();
    if (i < ALONE) c.s = shapes[i % 2];
    else if (listed < 0 && (i - ALONE) % PER_SHAPE == 0) c.s = shapes[2 + (i - ALONE) / PER_SHAPE];
    else if (listed < 0) c.s = small_shape(2 + (i - ALONE) / PER_SHAPE);
    else c.s = small_shape(other < 0 ? listed / 2 : other);
    if (listed >= 0 && (other < 0 || below(3) == 0)) c.options |= LISTS;
    if (other >= SIGMOIDS) {
        c.options |= STATISTICS;
        c.statistics = 1 + (int)below(31);
    } else if (other >= 0) {
        c.options = (c.options | SIGMOID | NO_LSE) & ~(SINKS | DROPOUT);
    }
    c.out_layout = c.options & LAYOUT ? (int)below(8) : 0;
    return c;
}

static void describe(const test_case *c)
{
    static const char *const names[] = {"float32", "float64", "float16", "bfloat16", "int8", "int4"};
    const shape *s = &c->s;
    printf("q %s, k and v %s, ", names[c->q], names[c->kv]);
    printf("batch %d, heads %d / %d, len %d x %d, head_dim %d, %d", s->batch, s->heads_q, s->heads_kv, s->len_q,
           s->len_k, s->head_dim, s->head_dim_v);
#define X(name)                                                                                                        \
    if (c->options & name) printf(" " #name);
    OPTIONS(X)
#undef X
    if (c->statistics) printf(" of %d", c->statistics);
}

/* for each element (b, h, i, j) of an array of the call */
#define EACH(heads, rows, cols) FOR(b, a->batch) FOR(h, heads) FOR(i, rows) FOR(j, cols)

/* Row ranges. Mostly the last query stands at the last key, sometimes anywhere. */
static void new_ranges(int options, fa_attention_args *a)
{
    const int layout = options & RANGES ? 0 : ONE_HEAD;
    if (options & (WINDOW | RANGES)) a->masks.row_begin = new_array(8, a->batch, a->heads_q, a->len_q, 1, layout);
    if (options & (CAUSAL | WINDOW | RANGES))
        a->masks.row_end = new_array(8, a->batch, a->heads_q, a->len_q, 1, layout);
    if (options & ALIBI) a->mods.q_position = new_array(8, a->batch, 1, 1, 1, 0);
    FOR(b, a->batch)
    {
        const int64_t anywhere = below(a->len_k + a->len_q) - a->len_q, left = below(a->len_k), right = below(9);
        const int64_t first = below(3) ? a->len_k - a->len_q : anywhere;
        if (a->mods.q_position.data) set_int(&a->mods.q_position, b, 0, 0, first);
        FOR(h, a->heads_q) FOR(i, a->len_q)
        {
            int64_t begin = 0, end = a->len_k;
            if (options & RANGES) begin = below(a->len_k), end -= below(a->len_k + 1); /* some are empty */
            if (options & WINDOW) begin = larger(begin, first + i - left), end = smaller(end, first + i + right + 1);
            if (options & CAUSAL) end = smaller(end, first + i + 1);
            if (a->masks.row_begin.data) set_int(&a->masks.row_begin, b, h, i, smaller(larger(begin, 0), a->len_k));
            if (a->masks.row_end.data) set_int(&a->masks.row_end, b, h, i, larger(end, 0));
        }
    }
}

/* Lists of up to 12 ranges, some of them empty lists; runs of rows share one. */
static void new_lists(fa_attention_args *a)
{
    enum { MOST = 12 };
    const int layout = below(2) ? ONE_HEAD : 0;
    int64_t n = 0, first = 0;
    int64_t *pairs = (int64_t *)allocate((size_t)(a->batch * a->heads_q * a->len_q * MOST + 1) * 2 * sizeof *pairs);
    a->masks.ranges = pairs;
    a->masks.range_first = new_array(8, a->batch, a->heads_q, a->len_q, 1, layout);
    a->masks.range_last = new_array(8, a->batch, a->heads_q, a->len_q, 1, layout);
    FOR(b, a->batch) FOR(h, a->heads_q) FOR(i, a->len_q)
    {
        if (i == 0 || below(4)) {
            const int64_t gap = below(3) ? 1 + a->len_k / 8 : 3, length = below(3) ? 1 + a->len_k / 8 : 3;
            int64_t key = below(gap);
            for (first = n; n - first < MOST && key < a->len_k; n++) {
                pairs[2 * n] = key;
                pairs[2 * n + 1] = smaller(a->len_k, key + 1 + below(length));
                key = pairs[2 * n + 1] + 1 + below(gap);
            }
            if (below(8) == 0) n = first;
        }
        set_int(&a->masks.range_first, b, h, i, first);
        set_int(&a->masks.range_last, b, h, i, n);
    }
}

/* Whether key j is in the row's list, if there is one. */
static int in_list(const fa_attention_args *a, int64_t b, int64_t h, int64_t i, int64_t j)
{
    int64_t n = a->masks.ranges ? get_int(&a->masks.range_first, b, h, i) : 0;
    if (!a->masks.ranges) return 1;
    for (; n < get_int(&a->masks.range_last, b, h, i); n++)
        if (a->masks.ranges[2 * n] <= j && j < a->masks.ranges[2 * n + 1]) return 1;
    return 0;
}

static int attends(const fa_attention_args *a, int64_t b, int64_t h, int64_t i, int64_t j)
{
    return in_list(a, b, h, i, j) && !(a->masks.row_begin.data && j < get_int(&a->masks.row_begin, b, h, i)) &&
           !(a->masks.row_end.data && j >= get_int(&a->masks.row_end, b, h, i)) &&
           !(a->masks.mask.data && *at(&a->masks.mask, b, h, i, j) == 0) &&
           !(a->mods.bias.data && get(&a->mods.bias, b, h, i, j) == -INFINITY);
}

/* Bytes of a row of k or v in FA_I4, which has the scales of its blocks and then their codes; else its numbers. */
static int64_t columns_of(fa_dtype dtype, int64_t n) { return dtype == FA_I4 ? n / 32 * 18 : n; }

/* Rows of FA_I4: any codes, and scales that make numbers from about -1 to 1. */
static void fill_int4(const fa_attention_args *a, const fa_array *x, int64_t width)
{
    FOR(b, a->batch) FOR(h, a->heads_kv) FOR(key, a->len_k)
    {
        FOR(j, columns_of(FA_I4, width)) * at(x, b, h, key, j) = (char)below(256);
        FOR(block, width / 32)
        {
            const uint16_t scale = to_half(half_of(FA_F16), uniform(-0.12, 0.12));
            memcpy(at(x, b, h, key, 2 * block), &scale, sizeof scale);
        }
    }
}

/* Element (b, h, key, d) of k or v becomes about `value`, from -1 to 1. If it is int8 and that is not finite, its key's
 * scale becomes NaN. (Inf times integers of one sign is a score of -Inf: talking heads take that for hidden.) In FA_I4 the
 * scale of its block becomes NaN, or nothing changes. */
static void set_kv(const fa_array *x, const fa_array *scale, int64_t b, int64_t h, int64_t key, int64_t d, double value)
{
    const uint16_t nan = 0x7e00;
    if (x->dtype == FA_I4 && !isfinite(value)) memcpy(at(x, b, h, key, d / 32 * 2), &nan, sizeof nan);
    if (x->dtype == FA_I4) return;
    if (x->dtype != FA_I8) set(x, b, h, key, d, value);
    else if (isfinite(value)) set(x, b, h, key, d, rint(value * 128 - 0.5));
    else set(scale, b, h, key, 0, NAN);
}

/* Scales of int8 keys or values. */
static fa_array new_scales(const fa_attention_args *a, fa_dtype lane, int layout)
{
    fa_array x = new_floats(lane, a->batch, a->heads_kv, a->len_k, 1, layout);
    FOR(b, a->batch) FOR(h, a->heads_kv) FOR(key, a->len_k) set(&x, b, h, key, 0, uniform(0.002, 0.01));
    return x;
}

/* Puts in NaN, which must show in the rows that attend it and in no other; and Inf in keys that no row attends. */
static void spoil(int options, const fa_attention_args *a)
{
    const int64_t group = a->heads_q / a->heads_kv;
    FOR(b, a->batch) FOR(h, a->heads_kv)
    {
        for (int n = 0; n < 4 && a->len_k > 0; n++) {
            const int64_t key = below(a->len_k), d = below(a->head_dim), d_v = below(a->head_dim_v);
            if (options & NAN_KEYS && n == 0) set_kv(&a->k, &a->k_scale, b, h, key, d, NAN);
            if (options & NAN_VALUES) set_kv(&a->v, &a->v_scale, b, h, key, d_v, NAN);
        }
        FOR(key, options & NAN_HIDDEN ? a->len_k : 0)
        {
            int hidden = 1;
            FOR(g, group) FOR(i, a->len_q) hidden = hidden && !attends(a, b, h * group + g, i, key);
            FOR(d, hidden * a->head_dim) set_kv(&a->k, &a->k_scale, b, h, key, d, below(2) ? NAN : INFINITY);
            FOR(d, hidden * a->head_dim_v) set_kv(&a->v, &a->v_scale, b, h, key, d, below(2) ? NAN : -INFINITY);
        }
    }
}

/* The arguments of a case, without out and lse. */
static fa_attention_args new_inputs(const test_case *c)
{
    const shape *s = &c->s;
    const fa_dtype lane = lane_of(c->q);
    const int random = c->options & LAYOUT, share = random && !(c->options & NAN_HIDDEN) && below(2) ? ONE_BATCH : 0;
    fa_attention_args args = {.batch = s->batch,
                              .heads_q = s->heads_q,
                              .heads_kv = s->heads_kv,
                              .len_q = s->len_q,
                              .len_k = s->len_k,
                              .head_dim = s->head_dim,
                              .head_dim_v = s->head_dim_v,
                              .mods.scale = 6 / sqrt(s->head_dim),
                              .mods.softcap = c->options & SOFTCAP ? 3 : 0},
                      *a = &args;
    if (c->options & SIGMOID) a->sigmoid = 1, a->sigmoid_bias = uniform(-3, 0);
    if (c->statistics & TOP) a->stats.n_top = smaller(s->len_k, 1 + below(9));
    a->q = new_floats(c->q, a->batch, a->heads_q, a->len_q, a->head_dim, random ? (int)below(8) : 0);
    const int64_t columns = columns_of(c->kv, a->head_dim), columns_v = columns_of(c->kv, a->head_dim_v);
    a->k = new_floats(c->kv, a->batch, a->heads_kv, a->len_k, columns, random ? (int)below(8) | share : 0);
    a->v = new_floats(c->kv, a->batch, a->heads_kv, a->len_k, columns_v, random ? (int)below(8) | share : 0);
    if (c->kv == FA_I4) fill_int4(a, &a->k, a->head_dim), fill_int4(a, &a->v, a->head_dim_v);
    if (c->kv == FA_I8) {
        a->k_scale = new_scales(a, lane, random ? (int)below(8) | share | (below(2) ? ODD : 0) : 0);
        a->v_scale = new_scales(a, lane, random ? (int)below(8) | share | (below(2) ? ODD : 0) : 0);
    }
    EACH(a->heads_q, a->len_q, a->head_dim) set(&a->q, b, h, i, j, uniform(-1, 1));
    EACH(a->heads_kv, a->len_k, a->head_dim) set_kv(&a->k, &a->k_scale, b, h, i, j, uniform(-1, 1));
    EACH(a->heads_kv, a->len_k, a->head_dim_v) set_kv(&a->v, &a->v_scale, b, h, i, j, uniform(-1, 1));
    new_ranges(c->options, a);
    if (c->options & LISTS) new_lists(a);
    if (c->options & (MASK | PADDING)) { /* every fourth block of 64 keys is hidden, another one is not */
        const int layout = c->options & MASK ? (int)below(64) & (STEP | ONE_BATCH | ONE_HEAD) : ONE_HEAD | ONE_ROW;
        a->masks.mask = new_array(1, a->batch, a->heads_q, a->len_q, a->len_k, layout);
        EACH(a->heads_q, a->len_q, a->len_k)
        *at(&a->masks.mask, b, h, i, j) = (j + 64) / 64 % 4 == 3 ? 0 : (j + 64) / 64 % 4 == 0 || below(4) != 0;
    }
    if (c->options & (BIAS | KEY_BIAS)) { /* with -inf, and some rows of nothing but the lowest number */
        const int layout = c->options & BIAS ? (int)below(64) & (STEP | ONE_BATCH | ONE_HEAD) : ONE_ROW;
        const fa_dtype dtype = below(2) ? FA_F32 : c->q;
        const double lowest = dtype == FA_F64 ? -DBL_MAX : dtype == FA_F32 ? -FLT_MAX : -1;
        a->mods.bias = new_floats(dtype, a->batch, a->heads_q, a->len_q, a->len_k, layout);
        EACH(a->heads_q, a->len_q, a->len_k)
        set(&a->mods.bias, b, h, i, j, below(8) == 0 ? -INFINITY : i % 8 == 5 ? lowest : uniform(-2, 2));
    }
    if (c->options & ALIBI) a->mods.alibi_slopes = new_floats(lane, a->batch, a->heads_q, 1, 1, random ? ODD : 0);
    if (c->options & SINKS) a->sinks = new_floats(lane, a->batch, a->heads_q, 1, 1, ONE_BATCH | (random ? ODD : 0));
    FOR(b, a->batch) FOR(h, a->heads_q)
    {
        if (a->mods.alibi_slopes.data) set(&a->mods.alibi_slopes, b, h, 0, 0, uniform(0, 0.1));
        if (a->sinks.data) set(&a->sinks, b, h, 0, 0, h % 3 == 2 ? -INFINITY : uniform(-2, 4));
    }
    spoil(c->options, a);
    if (c->options & DROPOUT) a->dropout = uniform(0, 0.6), a->seed = random_bits();
    return args;
}

#endif

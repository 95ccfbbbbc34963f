/* The attention kernels. Every call runs twice and must give the same bits. The second time tasks run in another order,
 * planned for more threads, in splits if there are any, and with other garbage in the scratch memory. */
#ifndef ATTENTION_H
#define ATTENTION_H

#include "results.h"

static struct {
    test_case c;
    fa_attention_args args[2]; /* the second one with twins */
    int bf16_dot;              /* the last plan's */
    int integers;              /* products of int8 are asked for */
} attention_now;

static const fa_attention_kernels *kernels_of(const fa_kernels *kernels, int wide)
{
    return attention_now.integers && !wide ? kernels->integers : kernels->attention;
}

/* Runs all tasks, for the first time or `again`. */
static void run_tasks(const fa_attention_kernels *kernels, const fa_attention_args *a, const fa_plan *p, int again)
{
    const int mark = n_mappings;
    char *scratch = allocate((size_t)p->scratch_bytes);
    if (again) memset(scratch, 0x55, (size_t)p->scratch_bytes);
    if (p->scratch_bytes) memset(scratch, 0, 8); /* no task has run */
    if (again && p->split_k) {
        char *state = allocate((size_t)p->partial_bytes);
        char *partials = allocate((size_t)(p->n_splits * p->partial_bytes));
        FOR(head, p->n_tasks)
        {
            int64_t first, last;
            kernels->splits(a, p, head, &first, &last);
            for (int64_t split = last - 1; split >= first; split--)
                kernels->run_split(a, p, head, split, partials + split * p->partial_bytes, scratch);
            for (int64_t split = first; split < last; split++)
                kernels->merge(a, p, head, split, state, partials + split * p->partial_bytes);
        }
    } else FOR(task, p->n_tasks) kernels->run(a, p, again ? p->n_tasks - 1 - task : task, scratch);
    release(mark);
}

/* Moves the rows of keys to blocks with others between them, which are NaN: one list of rows of each item, or pages of
 * them all, in any order. */
static void scatter_keys(int number, fa_attention_args *a)
{
    static const int64_t sizes[] = {1, 16, 64, 128};
    const uint64_t before = seed;
    seed = (uint64_t)number << 16 | 1;
    const int listed = a->heads_kv == 1 && below(2);
    const int64_t size = below(2) ? PICK(sizes) : 1 + below(100), n = (a->len_k + size - 1) / size;
    const int64_t tables = listed ? 1 : a->batch, places = tables * n, stride = 1 + below(3), all = places * stride;
    int32_t *blocks = (int32_t *)allocate((size_t)places * sizeof *blocks);
    FOR(i, places) blocks[i] = (int32_t)(i * stride + below(stride));
    for (int64_t i = places - 1; !listed && i > 0; i--) {
        const int64_t other = below(i + 1);
        const int32_t block = blocks[i];
        blocks[i] = blocks[other], blocks[other] = block;
    }
    fa_array *of_keys[] = {&a->k, &a->v, &a->k_scale, &a->v_scale};
    const int64_t width[] = {columns_of(a->k.dtype, a->head_dim), columns_of(a->v.dtype, a->head_dim_v), 1, 1};
    FOR(x, 4)
    {
        const fa_array from = *of_keys[x];
        const int layout = (int)below(2) * GAP | (int)below(2) * ROWS_FIRST;
        const int64_t items = listed ? a->batch : all;
        if (!from.data) continue;
        fa_array to = new_floats(from.dtype, items, a->heads_kv, listed ? all * size : size, width[x], layout);
        to.block = listed ? size * to.row : all > 1 ? to.batch[1] - to.batch[0] : 0;
        if (!listed) {
            int64_t *offsets = (int64_t *)allocate((size_t)a->batch * sizeof *offsets);
            to.batch = memset(offsets, 0, (size_t)a->batch * sizeof *offsets);
        }
        to.blocks = blocks, to.block_size = size, to.blocks_row = listed ? 0 : n;
        FOR(b, a->batch) FOR(h, a->heads_kv) FOR(j, a->len_k)
        {
            char *row = at(&to, b, h, j % size, 0) + blocks[b * to.blocks_row + j / size] * to.block;
            memcpy(row, at(&from, b, h, j, 0), (size_t)(width[x] * bytes_of(from.dtype)));
        }
        *of_keys[x] = to;
    }
    seed = before;
}

static int run_attention(const fa_kernels *kernels, int again, int wide)
{
    fa_attention_args call = attention_now.args[wide];
    fa_array *const each[] = {&call.out,
                              &call.lse,
                              &call.stats.row_max,
                              &call.stats.entropy,
                              &call.stats.top_weights,
                              &call.stats.top_keys,
                              &call.stats.key_sums,
                              &call.stats.mean_weights};
    const int number = attention_now.c.number;
    fa_plan p;
    FOR(n, n_results) if (results[n].there) * each[n] = results[n].got[again];
    if (!wide && number / COUNT(dtypes) % 3 == 0) scatter_keys(number, &call);
    if (call.stats.key_sums.data || call.stats.mean_weights.data)
        call.stats.norm = new_floats(lane_of(call.q.dtype), call.batch, call.heads_q, call.len_q, 2, 0);
    FOR(pass, 1 + (call.stats.norm.data != NULL))
    {
        call.stats.second_pass = (int)pass;
        kernels_of(kernels, wide)->plan(&call, again ? 64 : 1, &p);
        if (p.scratch_bytes % 64 || p.partial_bytes % 64) return 0;
        run_tasks(kernels_of(kernels, wide), &call, &p, again);
        if (!pass) attention_now.bf16_dot = p.bf16_dot;
    }
    return 1;
}

static void make_case(test_case c)
{
    fa_attention_args *a = attention_now.args;
    const fa_dtype lane = lane_of(c.q);
    attention_now.c = c;
    *a = new_inputs(&c), a[1] = twin_of_attention(*a), n_results = 0;
    const int64_t batch = a->batch, heads = a->heads_q, rows = a->len_q, keys = a->len_k, top = a->stats.n_top;
    add_result("out", 1, c.q, batch, heads, rows, a->head_dim_v, c.out_layout);
    add_result("lse", !(c.options & NO_LSE), lane, batch, heads, rows, 1, c.out_layout);
    add_result("row_max", c.statistics & ROW_MAX, lane, batch, heads, rows, 1, 0);
    add_result("entropy", c.statistics & ENTROPY, lane, batch, heads, rows, 1, 0);
    add_result("top_weights", c.statistics & TOP, lane, batch, heads, rows, top, 0);
    add_result("top_keys", c.statistics & TOP, FA_F64, batch, heads, rows, top, 0); /* as bits; -1 is NaN */
    add_result("key_sums", c.statistics & KEY_SUMS, lane, batch, heads, keys, 1, 0)->zero = 1;
    add_result("mean_weights", c.statistics & MEAN_WEIGHTS, lane, batch, 1, rows, keys, 0)->zero = 1;
    results->first = results[1].first = c.out_layout;
    expect_results(run_attention);
}

/* Behind the cases of attention's dtypes those of keys and values in 4 bits, for queries of three. */
static const int int4_queries[] = {0, 1, 3};
enum { INT4_CASES = N_CASES / COUNT(dtypes) * COUNT(int4_queries) };

static test_case int4_case_of(int number)
{
    test_case c = case_of(number / COUNT(int4_queries) * COUNT(dtypes) + int4_queries[number % COUNT(int4_queries)]);
    c.kv = FA_I4;
    c.statistics &= ~TOP; /* few rows round queries, and so the order of keys changes */
    c.s.head_dim = (c.s.head_dim + 31) / 32 * 32, c.s.head_dim_v = (c.s.head_dim_v + 31) / 32 * 32;
    return c;
}

static void make_attention(int number)
{
    attention_now.integers = 0;
    make_case(number < N_CASES ? case_of(number) : int4_case_of(number - N_CASES));
}

/* The cases of int8 and float lanes, but for what such products cannot do, and for keys whose order rounding changes. */
static void make_integers(int number)
{
    test_case c = case_of(number / 2 * COUNT(dtypes) + COUNT(dtypes) - (number % 2 ? 1 : 3));
    c.options &= ~(SIGMOID | DROPOUT), c.statistics &= ~TOP;
    attention_now.integers = 1;
    make_case(c);
}

static const char *check_integers(const fa_kernels *kernels)
{
    return kernels->integers ? check_results(run_attention, kernels, 1000, 0x1p-5) : NULL;
}

static const char *check_attention(const fa_kernels *kernels)
{
    const test_case *c = &attention_now.c;
    FOR(again, 2) if (!run_into(run_attention, kernels, (int)again, 0)) return UNALIGNED;
    return wrong_results(1000, c->kv == FA_I4 && c->q != FA_F64 ? 0x1p-5 : attention_now.bf16_dot ? 0x1p-7 : 0);
}

FAMILY(attention, N_CASES + INT4_CASES, make_attention, attention_now.c.q, &attention_now.c);
FAMILY(integers, N_CASES / COUNT(dtypes) * 2, make_integers, attention_now.c.q, &attention_now.c);

#endif

/* DeBERTa's attention (He et al. 2020). A query has a product with a vector of its distance from the key, and the key has
 * one, too. Both are added to the scores: a bias, which is made for the rows of one task at a time.
 *
 *     for each tile of queries:    C^T = keys Q^T       for the distances of these rows alone
 *                                  bias[i][j]  = C^T[i - j][i]
 *     for each tile of keys:       C^T = queries K^T
 *                                  bias[i][j] += C^T[i - j][j]
 *     O = attention of Q, K, V with this bias           tasks.inc.h
 *
 * A tile has about as many distances as there are keys, or rows of the task: little of a product is not used.
 *
 * Exports   disentangled_tasks, disentangled_scratch_bytes, disentangled_run. */
#pragma once
#include "tasks.inc.h"

/* Query rows of a task. With more of them, tiles of keys have fewer distances that another task has, too: BLOCK_Q in
 * DISENTANGLED_ROWS. With fewer, short texts have more tasks, and the bias of a long one stays in the caches. */
#define DISENTANGLED_ROWS 64

typedef struct {
    lane *turned;   /* (head_dim, BLOCK_Q): queries or keys of a tile, transposed and scaled */
    lane *products; /* (rows, BLOCK_Q) */
    lane *bias;     /* (rows of the task, len_k) */
    char *rest;     /* of attention */
} disentangled_scratch;

static int64_t cut_disentangled(arena *from, const fa_disentangled_args *d, disentangled_scratch *scratch)
{
    const fa_attention_args *a = &d->attention;
    CUT(from, scratch->turned, a->head_dim * BLOCK_Q);
    CUT(from, scratch->products, d->rows * BLOCK_Q);
    CUT(from, scratch->bias, smaller(a->len_q, DISENTANGLED_ROWS) * a->len_k);
    CUT(from, scratch->rest, 0);
    return from->used;
}

static int64_t disentangled_tasks(const fa_disentangled_args *d)
{
    const fa_attention_args *a = &d->attention;
    return a->batch * a->heads_q * ceil_div(a->len_q, DISENTANGLED_ROWS);
}

/* A row of the batch table of arrays that begin where they are needed. */
static const int64_t no_offset[1] = {0};

INLINE fa_array head_from(const fa_array *x, int64_t b, int64_t head, int64_t row)
{
    fa_array one = *x;
    if (x->data) one.data = at(x, b, head, row, 0), one.batch = no_offset;
    return one;
}

/* The attention of n rows of a head from row0 on, with that bias. */
static fa_attention_args with_bias(const fa_attention_args *a, int64_t b, int64_t head, int64_t row0, int64_t n,
                                   lane *bias)
{
    fa_attention_args one = *a;
    one.q = head_from(&a->q, b, head, row0), one.out = head_from(&a->out, b, head, row0);
    one.k = head_from(&a->k, b, head, 0), one.v = head_from(&a->v, b, head, 0);
    one.masks.row_begin = head_from(&a->masks.row_begin, b, head, row0);
    one.masks.row_end = head_from(&a->masks.row_end, b, head, row0);
    one.first = 0, one.batch = one.heads_q = one.heads_kv = 1, one.len_q = n;
    one.mods.bias = (fa_array){.data = (char *)bias,
                               .batch = no_offset,
                               .row = a->len_k * (int64_t)sizeof(lane),
                               .col = sizeof(lane),
                               .dtype = LANE_DTYPE};
    return one;
}

static int64_t disentangled_scratch_bytes(const fa_disentangled_args *d)
{
    const fa_attention_args *a = &d->attention;
    const int64_t full = smaller(a->len_q, DISENTANGLED_ROWS), rest = a->len_q % DISENTANGLED_ROWS;
    int64_t most = 0;
    fa_plan plan;
    for (int last = 0; last < 2; last++) {
        fa_attention_args one = with_bias(a, a->first, 0, 0, last && rest ? rest : full, NULL);
        one.mods.bias.data = (char *)no_offset; /* not read */
        attention_plan(&one, 1, &plan);
        most = larger(most, plan.scratch_bytes);
    }
    return cut_disentangled(&(arena){0}, d, &(disentangled_scratch){0}) + most;
}

/* products (rows first .. last of a head's table, BLOCK_Q) = table (scale x)^T, of n rows of x from i0 on. */
static void distance_products(const fa_disentangled_args *d, const fa_array *x, const void *table, int64_t b,
                              int64_t head, int64_t i0, int64_t n, int64_t first, int64_t last,
                              const disentangled_scratch *scratch)
{
    const int64_t width = d->attention.head_dim, row_bytes = width * (int64_t)sizeof(lane);
    const char *row[BLOCK_Q] = {NULL};
    for (int64_t r = 0; r < n; r++) row[r] = at(x, b, head, i0 + r, 0);
    transpose_rows(x->dtype, 0, row, BLOCK_Q, width, (lane)d->attention.mods.scale, BLOCK_Q, scratch->turned);
    const outer_product p = {.x = (const char *)table + (head * d->rows + first) * row_bytes,
                             .x_row = row_bytes,
                             .y = scratch->turned,
                             .pitch = BLOCK_Q,
                             .depth = width,
                             .out = scratch->products};
    if (n <= LANES) block_outer(1, 0, last - first + 1, &p, NULL);
    else block_outer(NV, 0, last - first + 1, &p, NULL);
}

/* The bias of n rows of a head from row0 on. Returns 0 if the call was given up. */
static int distance_bias(const fa_disentangled_args *d, int64_t b, int64_t head, int64_t row0, int64_t n,
                         const disentangled_scratch *scratch)
{
    const fa_attention_args *a = &d->attention;
    const int64_t keys = a->len_k, *row_of = d->row_of;
    const lane *products = scratch->products;
    if (!d->keys) memset(scratch->bias, 0, n * keys * sizeof(lane));
    for (int64_t i0 = row0; d->keys && i0 < row0 + n; i0 += BLOCK_Q) {
        const int64_t some = smaller(row0 + n - i0, BLOCK_Q), first = row_of[i0 - keys + 1];
        if (given_up(a->watch)) return 0;
        distance_products(d, &a->q, d->keys, b, head, i0, some, first, row_of[i0 + some - 1], scratch);
        for (int64_t r = 0; r < some; r++) {
            lane *bias = scratch->bias + (i0 - row0 + r) * keys;
            for (int64_t j = 0; j < keys; j++) bias[j] = products[(row_of[i0 + r - j] - first) * BLOCK_Q + r];
        }
    }
    for (int64_t j0 = 0; d->queries && j0 < keys; j0 += BLOCK_Q) {
        const int64_t some = smaller(keys - j0, BLOCK_Q), first = row_of[row0 - (j0 + some - 1)];
        if (j0 % PART_K == 0 && given_up(a->watch)) return 0;
        distance_products(d, &a->k, d->queries, b, head, j0, some, first, row_of[row0 + n - 1 - j0], scratch);
        for (int64_t i = 0; i < n; i++) {
            lane *bias = scratch->bias + i * keys + j0;
            for (int64_t r = 0; r < some; r++) bias[r] += products[(row_of[row0 + i - j0 - r] - first) * BLOCK_Q + r];
        }
    }
    return 1;
}

/* A task is some rows of a head. */
static void disentangled_run(const fa_disentangled_args *d, int64_t task, void *memory)
{
    const fa_attention_args *a = &d->attention;
    const int64_t blocks = ceil_div(a->len_q, DISENTANGLED_ROWS), head = task / blocks % a->heads_q;
    const int64_t b = a->first + task / blocks / a->heads_q, row0 = task % blocks * DISENTANGLED_ROWS;
    const int64_t n = smaller(a->len_q - row0, DISENTANGLED_ROWS);
    disentangled_scratch scratch;
    fa_plan plan;
    cut_disentangled(&(arena){.memory = memory}, d, &scratch);
    if (!distance_bias(d, b, head, row0, n, &scratch)) return;
    const fa_attention_args one = with_bias(a, b, head, row0, n, scratch.bias);
    attention_plan(&one, 1, &plan);
    memset(scratch.rest, 0, sizeof(int64_t)); /* as fa_plan says */
    for (int64_t t = 0; t < plan.n_tasks; t++) attention_run(&one, &plan, t, scratch.rest);
}

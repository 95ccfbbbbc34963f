/* DeBERTa's attention: a score has products of the query, and of the key, with vectors of their distance. */
#ifndef DISENTANGLED_H
#define DISENTANGLED_H

#include "results.h"

static const int64_t disentangled_lens[] = {0, 1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 71, 72, 73, 130, 300};
enum { DISENTANGLED_CASES = 6 * COUNT(disentangled_lens) * COUNT(floats) };

static struct {
    test_case c;
    fa_disentangled_args args[2]; /* the second one with twins */
} disentangled_now;

/* The second time from the last task to the first, with other garbage in the scratch memory. */
static int run_disentangled(const fa_kernels *kernels, int again, int wide)
{
    fa_disentangled_args call = disentangled_now.args[wide];
    call.attention.out = results->got[again];
    const int64_t n_tasks = kernels->attention->disentangled_tasks(&call),
                  bytes = kernels->attention->disentangled_scratch_bytes(&call);
    char *scratch = allocate((size_t)bytes);
    if (again) memset(scratch, 0x55, (size_t)bytes);
    FOR(task, n_tasks) kernels->attention->disentangled_run(&call, again ? n_tasks - 1 - task : task, scratch);
    return bytes % 64 == 0;
}

static void make_disentangled(int number)
{
    const fa_dtype dtype = floats[number % COUNT(floats)];
    const int heads = 1 + number % 3, terms = number / COUNT(floats) % 3, i = number / COUNT(floats) / 6;
    fa_disentangled_args *d = disentangled_now.args;
    test_case c = {.number = number, .q = dtype, .kv = dtype};
    seed = (uint64_t)number << 32 | 5;
    const int length = (int)disentangled_lens[i];
    const int dims[] = {1, 3, 8, 16, 20, 64};
    c.s = (shape){1 + (int)below(2), heads, heads, length, length, dims[below(6)], dims[below(6)]};
    c.options = ((int)random_bits() & (RANGES | NAN_HIDDEN | LAYOUT)) | NO_LSE;
    c.out_layout = c.options & LAYOUT ? (int)below(8) : 0;
    disentangled_now.c = c;
    *d = (fa_disentangled_args){.attention = new_inputs(&c), .rows = 2 + below(40)};
    const fa_attention_args *a = &d->attention;
    const fa_dtype lane = lane_of(dtype);
    if (terms != 1) d->keys = new_matrix(lane, heads * d->rows, a->head_dim, -1, 1);
    if (terms != 2) d->queries = new_matrix(lane, heads * d->rows, a->head_dim, -1, 1);
    int64_t *row_of = (int64_t *)allocate((size_t)larger(0, 2 * length - 1) * sizeof *row_of), row = below(3) ? 0 : 1;
    FOR(distance, 2 * length - 1)
    {
        row_of[distance] = row;
        row = smaller(d->rows - 1, row + below(3) * below(2)); /* some rows several times, and some never */
    }
    d->row_of = row_of + (length ? length - 1 : 0);
    fa_disentangled_args *w = &disentangled_now.args[1];
    *w = *d, w->attention = twin_of_attention(*a), n_results = 0;
    w->keys = twin_of_lanes(d->keys, lane), w->queries = twin_of_lanes(d->queries, lane);
    add_result("out", 1, dtype, a->batch, heads, length, a->head_dim_v, c.out_layout)->first = c.out_layout;
    expect_results(run_disentangled);
}

static const char *check_disentangled(const fa_kernels *kernels)
{
    fa_plan p;
    kernels->attention->plan(&disentangled_now.args->attention, 1, &p);
    return check_results(run_disentangled, kernels, 1000, p.bf16_dot ? 0x1p-7 : 0);
}

FAMILY(disentangled, DISENTANGLED_CASES, make_disentangled, disentangled_now.c.q, &disentangled_now.c);

#endif

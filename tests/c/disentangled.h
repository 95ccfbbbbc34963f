/* DeBERTa's attention: a score has products of the query, and of the key, with vectors of their distance. */
#ifndef DISENTANGLED_H
#define DISENTANGLED_H

#include "rowwise.h"

static const int64_t disentangled_lens[] = {0, 1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 71, 72, 73, 130, 300};
enum { DISENTANGLED_CASES = 6 * COUNT(disentangled_lens) * COUNT(floats) };

static struct {
    test_case c;
    fa_disentangled_args args;
    operands x;
    expected *want;
} disentangled_now;

/* sum over d of x[d] times what the table has in row `row` of head h. */
static score distance_product(const void *table, int64_t h, int64_t row, const double *x)
{
    const fa_disentangled_args *d = &disentangled_now.args;
    double vector[1024];
    FOR(i, d->attention.head_dim)
    vector[i] = entry_of(d->attention.q.dtype, table, d->attention.head_dim, h * d->rows + row, i);
    return product_of(d->attention.head_dim, x, vector);
}

static void expect_disentangled(void)
{
    const fa_disentangled_args *d = &disentangled_now.args;
    const fa_attention_args *a = &d->attention;
    expected *row = disentangled_now.want;
    score *s = calloc((size_t)a->len_k + 1, sizeof *s);
    FOR(b, a->batch) FOR(h, a->heads_q) FOR(i, a->len_q)
    {
        const int64_t first = first_key(a, b, h);
        const double *q = query_of(a, &disentangled_now.x, b, h, i), *keys = disentangled_now.x.k + first * a->head_dim;
        FOR(j, a->len_k)
        {
            const double *k = keys + j * a->head_dim;
            score sum = product_of(a->head_dim, q, k);
            FOR(term, 2)
            {
                const void *table = term ? d->queries : d->keys;
                if (!table) continue;
                const score product = distance_product(table, h, d->row_of[i - j], term ? k : q);
                sum.value += product.value, sum.size += product.size;
            }
            s[j] = modified(a, b, h, i, j, sum);
        }
        expect_row(a, b, h, i, s, disentangled_now.x.v + first * a->head_dim_v, row);
        row += a->head_dim_v + 1;
    }
    free(s);
}

static void make_disentangled(int number)
{
    const fa_dtype dtype = floats[number % COUNT(floats)];
    const int heads = 1 + number % 3, terms = number / COUNT(floats) % 3, i = number / COUNT(floats) / 6;
    fa_disentangled_args *d = &disentangled_now.args;
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
    disentangled_now.x = operands_of(a);
    disentangled_now.want = calloc((size_t)(a->batch * heads * length * (a->head_dim_v + 1)) + 1, sizeof(expected));
    expect_disentangled();
}

/* Twice: the second time from the last task to the first, with other garbage in the scratch memory. */
static const char *check_disentangled(int isa, const fa_kernels *kernels)
{
    fa_disentangled_args calls[2] = {disentangled_now.args, disentangled_now.args};
    const fa_attention_args *a = &calls[0].attention;
    fa_plan p;
    (void)isa;
    FOR(again, 2)
    {
        fa_disentangled_args *call = calls + again;
        call->attention.out = new_floats(a->q.dtype, a->batch, a->heads_q, a->len_q, a->head_dim_v,
                                         disentangled_now.c.out_layout);
        const int64_t n_tasks = kernels->attention->disentangled_tasks(call),
                      bytes = kernels->attention->disentangled_scratch_bytes(call);
        if (bytes % 64) return UNALIGNED;
        const int mark = n_mappings;
        char *scratch = allocate((size_t)bytes);
        if (again) memset(scratch, 0x55, (size_t)bytes);
        FOR(task, n_tasks) kernels->attention->disentangled_run(call, again ? n_tasks - 1 - task : task, scratch);
        release(mark);
    }
    kernels->attention->plan(a, 1, &p);
    const fa_attention_args both[2] = {calls[0].attention, calls[1].attention};
    return wrong_out(both, disentangled_now.want, p.bf16_dot);
}

static void describe_disentangled(void)
{
    const fa_disentangled_args *d = &disentangled_now.args;
    printf("%s%s of %d rows, ", d->keys ? "keys " : "", d->queries ? "queries " : "", (int)d->rows);
    describe(&disentangled_now.c);
}

static void drop_disentangled(void)
{
    drop_operands(&disentangled_now.x);
    free(disentangled_now.want);
}

FAMILY(disentangled, DISENTANGLED_CASES, make_disentangled, disentangled_now.c.q, describe_disentangled,
       drop_disentangled);

#endif

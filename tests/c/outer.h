/* Gradients of weights, sums of outer products, against plain C in double precision. */
#ifndef OUTER_H
#define OUTER_H

#include "linear.h"

static const int64_t outer_m[] = {1, 2, 7, 256, 257, 513, 700}, outer_n[] = {1, 5, 12, 13, 40};
static const int64_t outer_k[] = {0, 1, 17, 32, 33, 70, 400};
enum { OUTER_CASES = COUNT(outer_m) * COUNT(outer_n) * COUNT(outer_k) * COUNT(floats) };

typedef struct {
    fa_outer_args args;
    fa_array a, b, before; /* before: what is added to, and in row n that of sums */
    near *want[2];         /* with lanes, and with the bfloat16 dot product; (n + 1, larger(n, k)) */
} outer_case;

static outer_case outer_now;

static void make_outer(int number)
{
    int i = number;
    outer_case c = {0};
    fa_outer_args *a = &c.args;
    seed = (uint64_t)number << 32 | 7;
    a->a_dtype = a->b_dtype = floats[i % COUNT(floats)], i /= COUNT(floats);
    a->m = outer_m[i % COUNT(outer_m)], i /= COUNT(outer_m);
    a->n = outer_n[i % COUNT(outer_n)], i /= COUNT(outer_n);
    a->k = outer_k[i];
    if (a->a_dtype != FA_F64 && below(4) == 0) a->b_dtype = floats[below(3)];
    a->pairs = (int)below(2), a->more = (int)below(2);
    c.a = random_floats(a->a_dtype, a->m, a->n, -1, 1), c.b = random_floats(a->b_dtype, a->m, a->k, -1, 1);
    a->a = c.a.data, a->a_row = c.a.row, a->b = c.b.data, a->b_row = c.b.row;
    c.before = random_floats(lane_of(a->a_dtype), a->n + 1, larger(a->n, a->k), -1, 1);
    outer_now = c;
}

static near *expect_outer(const outer_case *c, int bf16)
{
    const fa_outer_args *a = &c->args;
    const fa_dtype lane = lane_of(a->a_dtype);
    const int64_t width = larger(a->n, a->k);
    near *all = calloc((size_t)((a->n + 1) * width), sizeof *all);
    FOR(i, a->n + 1) FOR(j, i < a->n ? a->k : a->n)
    {
        double sum = a->more ? get(&c->before, 0, 0, i, j) : 0, terms = fabs(sum);
        FOR(r, a->m)
        {
            double x = get(&c->a, 0, 0, r, i < a->n ? i : j), y = i < a->n ? get(&c->b, 0, 0, r, j) : 1;
            if (bf16 && i < a->n) {
                x = from_half(half_of(FA_BF16), to_half(half_of(FA_BF16), x));
                y = from_half(half_of(FA_BF16), to_half(half_of(FA_BF16), y));
            }
            sum += x * y, terms += fabs(x * y);
        }
        all[i * width + j] = stored((near){sum, eps_of(lane) * (2 + sqrt((double)smaller(a->m, 512))) * terms}, lane);
    }
    return all;
}

/* Computes twice, the second time cut for many threads, the last task first. */
static const char *check_outer(int isa, const fa_kernels *kernels)
{
    fa_outer_args a = outer_now.args;
    const fa_dtype lane = lane_of(a.a_dtype);
    const int bf16 = a.pairs && lane == FA_F32 && kernels->linear->between() == FA_BF16;
    const int64_t width = larger(a.n, a.k);
    fa_array out[2], sums[2];
    int aligned = 1;
    if (!outer_now.want[bf16]) outer_now.want[bf16] = expect_outer(&outer_now, bf16);
    FOR(again, 2)
    {
        fa_outer_plan p;
        out[again] = new_floats(lane, 1, 1, a.n, a.k, again ? GAP : REVERSED);
        sums[again] = new_floats(lane, 1, 1, 1, a.n, 0);
        FOR(i, a.more ? a.n : 0) FOR(j, a.k) set(&out[again], 0, 0, i, j, get(&outer_now.before, 0, 0, i, j));
        FOR(j, a.more ? a.n : 0) set(&sums[again], 0, 0, 0, j, get(&outer_now.before, 0, 0, a.n, j));
        a.out = out[again].data, a.out_row = out[again].row, a.sums = sums[again].data;
        kernels->outer->plan(&a, again ? 64 : 1, &p);
        char *scratch = allocate((size_t)p.scratch_bytes);
        FOR(task, p.n_tasks) kernels->outer->run(&a, &p, again ? p.n_tasks - 1 - task : task, scratch);
        aligned &= p.scratch_bytes % 64 == 0;
    }
    if (!aligned) return UNALIGNED;
    FOR(i, a.n) FOR(j, a.k)
    {
        const char *wrong = differs("out", out, out + 1, 0, 0, i, j, outer_now.want[bf16][i * width + j]);
        if (wrong) return wrong;
    }
    FOR(j, a.n)
    {
        const char *wrong = differs("sums", sums, sums + 1, 0, 0, 0, j, outer_now.want[bf16][a.n * width + j]);
        if (wrong) return wrong;
    }
    return only_rows(out + 1, 1, 1, a.n, a.k) ? NULL : BETWEEN_ROWS;
}

static void describe_outer(void)
{
    const fa_outer_args *a = &outer_now.args;
    printf("dtypes %d, %d, (%d, %d, %d), pairs %d, more %d", a->a_dtype, a->b_dtype, (int)a->m, (int)a->n, (int)a->k,
           a->pairs, a->more);
}

static void drop_outer(void) { free(outer_now.want[0]), free(outer_now.want[1]); }

FAMILY(outer, OUTER_CASES, make_outer, outer_now.args.a_dtype, describe_outer, drop_outer);

#endif

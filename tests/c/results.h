/* Results of a case, computed twice with other tasks and layouts, against those of the generic kernels of double
 * precision for the same numbers. That those are right is what pytest says, by definitions and finite differences. */
#ifndef RESULTS_H
#define RESULTS_H

#include "family.h"

#define PICK(list) (list)[below(COUNT(list))]

static const fa_dtype floats[] = {FA_F32, FA_F16, FA_BF16, FA_F64};

/* The same numbers in double precision, in the same layout. Integers stay. */
static fa_array twin(fa_array x)
{
    const int64_t size = bytes_of(x.dtype), times = 8 / size;
    const mapping *m = mapping_of(x.data), *of_batch = mapping_of(x.batch);
    if (!x.data || x.dtype >= FA_I8) return x;
    if (of_batch) {
        int64_t *offsets = (int64_t *)allocate(of_batch->size);
        FOR(b, of_batch->size / sizeof *offsets) offsets[b] = x.batch[b] * times;
        x.batch = offsets;
    }
    if (m) { /* an array without rows may lie anywhere */
        const int64_t n = (int64_t)m->size / size, zero = 0;
        const fa_array from = {.data = m->base + m->used - m->size, .batch = &zero, .col = size, .dtype = x.dtype};
        const fa_array to = {.data = allocate((size_t)n * 8), .batch = &zero, .col = 8, .dtype = FA_F64};
        FOR(i, n) set(&to, 0, 0, 0, i, get(&from, 0, 0, 0, i));
        x.data = to.data + (x.data - from.data) * times;
    }
    x.dtype = FA_F64, x.head *= times, x.row *= times, x.col *= times;
    return x;
}

static const void *twin_of_lanes(const void *data, fa_dtype lane)
{
    return twin((fa_array){.data = (char *)data, .dtype = lane}).data;
}

static void twins(fa_array *const *x, int n) { FOR(i, n) * x[i] = twin(*x[i]); }

static fa_attention_args twin_of_attention(fa_attention_args a)
{
    fa_array *const all[] = {&a.q,     &a.k,   &a.v,  &a.k_scale, &a.v_scale, &a.mods.bias, &a.mods.alibi_slopes,
                             &a.sinks, &a.out, &a.lse};
    twins(all, COUNT(all));
    return a;
}

static fa_array random_floats(fa_dtype dtype, int64_t rows, int64_t cols, double low, double high)
{
    const fa_array x = new_floats(dtype, 1, 1, rows, cols, (int)below(8) & (GAP | REVERSED));
    FOR(i, rows) FOR(j, cols) set(&x, 0, 0, i, j, uniform(low, high));
    return x;
}

/* A square or oblong matrix of lanes in memory. */
static const void *new_matrix(fa_dtype lane, int64_t rows, int64_t cols, double low, double high)
{
    const fa_array x = new_floats(lane, 1, 1, rows, cols, 0);
    FOR(i, rows) FOR(j, cols) set(&x, 0, 0, i, j, uniform(low, high));
    return x.data;
}

static void copy(const fa_array *from, const fa_array *to, int64_t batch, int64_t heads, int64_t rows, int64_t cols)
{
    FOR(b, batch) FOR(h, heads) FOR(i, rows) FOR(j, cols) set(to, b, h, i, j, get(from, b, h, i, j));
}

/* Sequences of a case. Their arrays lie end to end; or `apart`, each with NaN behind it if another one is longer. */
static struct {
    fa_dtype dtype;
    int64_t n, channels, longest, tokens, *begins;
    int64_t step; /* tokens of a task of the second run */
    int apart, layout, spoiled;
} sequences_now;

static int64_t length_of(int64_t s) { return sequences_now.begins[s + 1] - sequences_now.begins[s]; }

/* Rows of `cols` numbers for each token. */
static fa_array new_rows(fa_dtype dtype, int64_t cols, int layout)
{
    const int64_t n = sequences_now.n;
    if (sequences_now.apart) return new_floats(dtype, n, 1, sequences_now.longest, cols, layout);
    fa_array x = new_floats(dtype, 1, 1, sequences_now.tokens, cols, layout);
    int64_t *offsets = (int64_t *)allocate((size_t)n * sizeof *offsets);
    FOR(s, n) offsets[s] = sequences_now.begins[s] * x.row;
    x.batch = offsets;
    return x;
}

typedef struct {
    const char *name;
    fa_dtype dtype;
    int64_t batch, heads, rows, cols;
    int there, first, second; /* whether it is wanted, and the layouts of both runs */
    int tokens;               /* rows are those of sequences */
    int zero;                 /* what it is added to */
    int sum;                  /* of tasks: the second run, which has others, may have other bits */
    double off;               /* how far off bytes may be */
    fa_array got[2], want;
} result;

static result results[16];
static int n_results;
static int rounded_now; /* what is wanted is itself rounded to the results' dtypes */

/* Results of the next case are (batch, heads, rows, cols). */
static result *add_result(const char *name, int there, fa_dtype dtype, int64_t batch, int64_t heads, int64_t rows,
                          int64_t cols, int layout)
{
    results[n_results] = (result){.name = name,
                                  .dtype = dtype,
                                  .batch = batch,
                                  .heads = heads,
                                  .rows = rows,
                                  .cols = cols,
                                  .there = there,
                                  .first = layout ? GAP : 0,
                                  .second = layout};
    return results + n_results++;
}

static void add_rows(const char *name, int there, int64_t cols)
{
    add_result(name, there, sequences_now.dtype, sequences_now.n, 1, 0, cols, sequences_now.layout)->tokens = 1;
}

#define EACH_OF(r)                                                                                                     \
    FOR(b, (r)->batch) FOR(h, (r)->heads) FOR(i, (r)->tokens ? length_of(b) : (r)->rows) FOR(j, (r)->cols)

/* Computes all results that are there, with the twins if `wide`; returns whether scratch sizes keep memory aligned. */
typedef int run_results(const fa_kernels *kernels, int again, int wide);

static int run_into(run_results *run, const fa_kernels *kernels, int again, int wide)
{
    FOR(n, n_results)
    {
        result *r = results + n;
        const fa_dtype dtype = wide ? FA_F64 : r->dtype;
        const int layout = again ? r->second : r->first;
        if (!r->there) continue;
        r->got[again] = r->tokens ? new_rows(dtype, r->cols, layout)
                                  : new_floats(dtype, r->batch, r->heads, r->rows, r->cols, layout);
        if (r->zero) EACH_OF(r) set(r->got + again, b, h, i, j, 0);
    }
    const int mark = n_mappings, aligned = run(kernels, again, wide);
    release(mark);
    return aligned;
}

static void expect_of(run_results *run, fa_dtype lane, int wide)
{
    int generic = fa_isa_count() - 1;
    while (generic >= 0 && strcmp(fa_isa_name(generic), "generic") != 0) generic--;
    if (generic < 0) fputs("driver: the generic kernels are not compiled\n", stderr), exit(2);
    rounded_now = !wide;
    run_into(run, fa_isa_kernels(generic, lane), 0, wide);
    FOR(n, n_results) results[n].want = results[n].got[0];
}

/* Ends a case's making. */
static void expect_results(run_results *run) { expect_of(run, FA_F64, 1); }

/* The same of what has no twin in double precision, such as packed weights. */
static void expect_same(run_results *run, fa_dtype lane) { expect_of(run, lane, 0); }

/* Bytes, which must be those of the generic kernels. */
static result *add_bytes(const char *name, int there, int64_t n)
{
    return add_result(name, there, FA_I8, 1, 1, 1, n, 0);
}

/* Says what is wrong with both runs. A result may err by so many roundings of its largest number, or of 1, and by
 * `blur` of it, where factors are rounded. */
static const char *wrong_results(double roundings, double blur)
{
    FOR(n, n_results)
    {
        const result *r = results + n;
        double most = 1;
        if (!r->there) continue;
        EACH_OF(r)
        {
            const double x = fabs(get(&r->want, b, h, i, j));
            if (x < 1e30) most = fmax(most, x); /* scores of the lowest bias are larger */
        }
        const double eps = eps_of(lane_of(running->dtype())), error = (roundings * eps + blur) * most;
        EACH_OF(r) FOR(again, 1 + r->sum)
        {
            const double x = get(&r->want, b, h, i, j);
            near want = {x, error + 4 * eps * fabs(x)};
            if (rounded_now) want = stored(want, r->dtype);
            want = r->dtype == FA_I8 ? (near){x, r->off} : stored(want, r->dtype);
            const fa_array *other = r->sum ? r->got + again : r->got + 1;
            const char *wrong = differs(r->name, r->got + again, other, b, h, i, j, want);
            if (wrong) return wrong;
        }
        FOR(again, 2)
        {
            const fa_array *x = r->got + again;
            int64_t some = 0;
            EACH_OF(r) memset(at(x, b, h, i, j), 0xff, (size_t)bytes_of(r->dtype)), some++;
            if (some && !is_blank(x->data)) return BETWEEN_ROWS;
        }
    }
    return NULL;
}

static const char *check_results(run_results *run, const fa_kernels *kernels, double roundings, double blur)
{
    FOR(again, 2) if (!run_into(run, kernels, (int)again, 0)) return UNALIGNED;
    return wrong_results(roundings, blur);
}

/* A check of a family whose results are off by no more than some roundings. */
#define CHECK(name, run, roundings)                                                                                    \
    static const char *check_##name(const fa_kernels *kernels) { return check_results(run, kernels, roundings, 0); }

#endif

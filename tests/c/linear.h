/* Matrix products over packed panels, against those of the generic kernels. Operands end where a page ends, and columns
 * that only fill up a panel are NaN. */
#ifndef LINEAR_H
#define LINEAR_H

#include "activations.h"
#include "results.h"

static const int64_t linear_m[] = {1, 2, 3, 4, 6, 7, 12, 13, 97}, linear_k[] = {1, 31, 33, 255, 513, 1100};
static const int64_t linear_n[] = {1, 17, 32, 33, 70};
static const fa_dtype linear_weights[] = {FA_F32, FA_BF16, FA_I8, FA_I4, FA_Q8, FA_F64};
enum { LINEAR_CASES = COUNT(linear_m) * COUNT(linear_k) * COUNT(linear_n) * COUNT(linear_weights) };

typedef struct {
    fa_linear_args args;
    fa_array x, bias, residual;
} linear_case;

/* Features of a panel's step, and whether blocks of features have scales of their own. */
static int64_t features_of_step(fa_dtype weight)
{
    return weight == FA_I4 ? 8 : weight == FA_I8 || weight == FA_Q8 ? 4 : weight == FA_BF16 ? 2 : 1;
}
static int has_blocks(fa_dtype weight) { return weight == FA_I4 || weight == FA_Q8; }

/* Packs random weights as fastattn/_args/packed.py says. */
static void new_weights(linear_case *c)
{
    fa_linear_args *a = &c->args;
    const int maps = 1 + a->gated;
    const int64_t width = a->weight == FA_F64 ? 16 : 32, panels = maps * ((a->n + width - 1) / width);
    const int64_t each = features_of_step(a->weight), block = a->block = has_blocks(a->weight) && below(2) ? 16 : 32;
    const int64_t whole = has_blocks(a->weight) ? 32 : each, depth = (a->k + whole - 1) / whole * whole,
                  blocks = depth / block;
    const double most = 3 / sqrt((double)a->k);
    char *packed = allocate((size_t)(panels * depth / each * 128));
    float *sums = (float *)allocate((size_t)(panels * width) * sizeof *sums);
    float *scales = a->weight == FA_I8 ? (float *)allocate((size_t)(panels * width) * sizeof *scales) : NULL;
    const int has_minima = has_blocks(a->weight) && below(2);
    fa_array halves = {.batch = (int64_t[]){0}, .col = 2, .dtype = FA_F16}, minima = halves;
    if (has_blocks(a->weight)) halves.data = allocate((size_t)(panels * blocks * width * 2));
    if (has_minima) minima.data = allocate((size_t)(panels * blocks * width * 2));
    a->minima = minima.data, a->unit = 1;
    if (a->weight == FA_I4) {
        float *table = (float *)allocate(16 * sizeof *table);
        int8_t *codes = (int8_t *)allocate(16);
        a->unit = below(2) ? 1 : 1.0 / 127; /* 1: the values are the codes */
        const int ordered = below(2), first = (int)below(200) - 100;
        FOR(i, 16)
        {
            codes[i] = (int8_t)(ordered ? first + i : (int)below(255) - 127);
            table[i] = a->unit == 1 ? codes[i] : (float)uniform(-1, 1);
        }
        a->table = table, a->codes = codes;
    }
    FOR(map, maps) FOR(j, a->n)
    {
        const int64_t panel = j / width * maps + map, column = j % width;
        double sum = 0;
        if (scales) scales[panel * width + column] = (float)(most / 127 * uniform(0.5, 1));
        FOR(d, depth)
        {
            char *step = packed + ((panel * depth + d) / each * width + column) * (128 / width);
            fa_array to = {.data = step + d % each * (128 / width / each), .batch = (int64_t[]){0}, .dtype = a->weight};
            double value;
            if (has_blocks(a->weight)) {
                const int64_t scale = (panel * blocks + d / block) * width + column;
                const double share = a->unit == 1 ? most / 127 : most;
                if (d % block == 0) set(&halves, 0, 0, 0, scale, share * uniform(0.5, 1));
                if (has_minima && d % block == 0) set(&minima, 0, 0, 0, scale, most * uniform(-1, 1));
                value = get(&halves, 0, 0, 0, scale);
                if (a->weight == FA_Q8) {
                    *to.data = (char)(below(256) - 128);
                    value *= (double)(int8_t)*to.data;
                } else {
                    const int code = (int)below(16);
                    step[d % 4] = (char)(d % 8 < 4 ? code : (step[d % 4] & 15) | code << 4);
                    value *= a->x_int8 ? a->codes[code] * a->unit : (double)((const float *)a->table)[code];
                }
                if (has_minima) value += get(&minima, 0, 0, 0, scale) * (a->x_int8 ? a->unit : 1);
            } else if (a->weight == FA_I8) {
                *to.data = (char)(below(255) - 127);
                value = (double)(int8_t)*to.data * scales[panel * width + column];
            } else {
                set(&to, 0, 0, 0, 0, d < a->k ? uniform(-most, most) : 0);
                value = get(&to, 0, 0, 0, 0);
            }
            if (d < a->k) sum += value;
        }
        sums[panel * width + column] = (float)sum;
    }
    a->sums = sums;
    a->panels = packed;
    a->scales = scales ? (void *)scales : halves.data;
}

static linear_case linear_now;

/* Runs all tasks of rows [begin, end). Returns whether the size of a scratch keeps the next one aligned. */
static int run_linear_rows(const fa_kernels *kernels, fa_linear_args a, int64_t begin, int64_t end, int again)
{
    const int mark = n_mappings;
    fa_linear_plan p;
    a.x += begin * a.x_row, a.out += begin * a.out_row, a.m = end - begin;
    if (a.residual) a.residual += begin * a.residual_row;
    if (a.pre) a.pre += begin * a.pre_row;
    kernels->linear->plan(&a, again ? 64 : 1, &p);
    char *scratch = allocate((size_t)p.scratch_bytes);
    if (again) memset(scratch, 0x55, (size_t)p.scratch_bytes);
    memset(scratch, 0, 8);
    FOR(task, p.n_tasks) kernels->linear->run(&a, &p, again ? p.n_tasks - 1 - task : task, scratch);
    release(mark);
    return p.scratch_bytes % 64 == 0;
}

/* The second time a third of the rows and then the others: a row's bits depend on the row alone. */
static int run_linear(const fa_kernels *kernels, int again, int wide)
{
    fa_linear_args a = linear_now.args;
    const fa_array *out = results[0].got + again, *pre = results[1].got + again;
    a.out = out->data, a.out_row = out->row, a.pre = pre->data, a.pre_row = pre->row;
    const int aligned = run_linear_rows(kernels, a, 0, again ? a.m / 3 : a.m, again);
    return (!again || run_linear_rows(kernels, a, a.m / 3, a.m, 1)) && aligned && !wide;
}

static void make_linear(int number)
{
    int i = number;
    linear_case c = {0};
    fa_linear_args *a = &c.args;
    seed = (uint64_t)number << 32 | 1;
    a->weight = linear_weights[i % COUNT(linear_weights)], i /= COUNT(linear_weights);
    a->m = linear_m[i % COUNT(linear_m)], i /= COUNT(linear_m);
    a->k = linear_k[i % COUNT(linear_k)], i /= COUNT(linear_k);
    a->n = linear_n[i];
    a->dtype = a->weight == FA_F64 ? FA_F64 : floats[below(3)];
    a->out_dtype = a->weight == FA_F64 || below(2) ? a->dtype : floats[below(3)];
    a->activation = (fa_activation)below(FA_N_ACTIVATIONS);
    a->gated = (int)below(2);
    a->x_int8 = (a->weight == FA_I8 || has_blocks(a->weight)) && below(2);
    a->unit = 1;
    new_weights(&c);
    if (!a->x_int8 && below(4) == 0) {
        const int64_t features = a->k;
        a->transposed = 1 + a->gated, a->gated = 0;
        a->k = a->transposed * a->n, a->n = features;
    }
    c.x = random_floats(a->dtype, a->m, a->k, -1, 1);
    a->x = c.x.data, a->x_row = c.x.row;
    if (below(2)) {
        c.bias = new_floats(lane_of(a->dtype), 1, 1, 1 + a->gated, a->n, a->m % 2 ? ODD : 0);
        FOR(map, 1 + a->gated) FOR(j, a->n) set(&c.bias, 0, 0, map, j, uniform(-1, 1));
        a->bias = c.bias.data;
    }
    if (below(2)) {
        c.residual = random_floats(a->out_dtype, a->m, a->n, -1, 1);
        a->residual = c.residual.data, a->residual_row = c.residual.row;
    }
    linear_now = c;
    n_results = 0;
    add_result("out", 1, a->out_dtype, 1, 1, a->m, a->n, GAP)->first = REVERSED;
    add_result("pre", a->n % 2 != 0, a->out_dtype, 1, 1, a->m, (1 + a->gated) * a->n, REVERSED);
    expect_same(run_linear, lane_of(a->dtype));
}

static const char *check_linear(const fa_kernels *kernels)
{
    const fa_linear_args *a = &linear_now.args;
    const int tiles = !strncmp(running_isa, "amx", 3), of_one_map = a->transposed == 1 || a->k % 4 == 0;
    const int between = kernels->linear->between() == FA_BF16;
    const int bf16 = a->weight == FA_BF16 && (a->transposed ? tiles && of_one_map : between); /* x is rounded */
    return check_results(run_linear, kernels, 1000, bf16 ? 0x1p-6 : 0);
}

FAMILY(linear, LINEAR_CASES, make_linear, linear_now.args.dtype, NULL);

#endif

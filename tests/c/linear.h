/* Matrix products over packed panels, against plain C in double precision. Operands end where a page ends, and columns
 * that only fill up a panel are NaN. */
#ifndef LINEAR_H
#define LINEAR_H

#include "activations.h"
#include "results.h"

static const int64_t linear_m[] = {1, 2, 3, 4, 6, 7, 12, 13, 97}, linear_k[] = {1, 31, 33, 255, 513, 1100};
static const int64_t linear_n[] = {1, 17, 32, 33, 70};
static const fa_dtype linear_weights[] = {FA_F32, FA_BF16, FA_I8, FA_I4, FA_Q8, FA_F64};
enum { LINEAR_CASES = COUNT(linear_m) * COUNT(linear_k) * COUNT(linear_n) * COUNT(linear_weights) };

static double activation_of(fa_activation activation, double x)
{
    const double cubic = 0.79788456080286535588 * (x + 0.044715 * x * x * x);
    switch (activation) {
    case FA_NONE: return x;
    case FA_RELU: return isnan(x) ? x : fmax(x, 0);
    case FA_GELU: return 0.5 * x * (1 + erf(x * 0.70710678118654752440));
    case FA_GELU_TANH: return 0.5 * x * (1 + tanh(cubic));
    case FA_SILU: return x / (1 + exp(-x));
    case FA_SIGMOID: return 1 / (1 + exp(-x));
    case FA_QUICK_GELU: return x / (1 + exp(-1.702 * x));
    }
    fprintf(stderr, "activation_of() of tests/c/linear.h lacks %s\n", fa_activation_names[activation]), abort();
}

/* The derivative, by differences of the formula. */
static double slope_of(fa_activation activation, double x)
{
    const double step = 1e-5;
    if (activation == FA_RELU) return x > 0;
    return (activation_of(activation, x + step) - activation_of(activation, x - step)) / (2 * step);
}

static near activated(fa_activation activation, near z, double eps)
{
    static double steepest[FA_N_ACTIVATIONS];
    if (steepest[activation] == 0)
        for (double x = -8; x < 8; x += 0.01)
            steepest[activation] = fmax(steepest[activation], fabs(slope_of(activation, x)));
    const int exact = activation == FA_NONE || activation == FA_RELU;
    /* 1 + erf and 1 + tanh err by units in the last place of 1, the exponential in proportion to x. */
    const double error = exact ? 0 : 2 * eps * (1 + fabs(z.value));
    return (near){activation_of(activation, z.value), steepest[activation] * z.error + error};
}

static near product(near x, near y, double eps)
{
    return (near){x.value * y.value,
                  fabs(x.value) * y.error + (fabs(y.value) + y.error) * x.error + eps * fabs(x.value * y.value)};
}

typedef struct {
    fa_linear_args args;
    fa_array x, bias, residual;
    double *w;     /* (maps, output features, input features), with scales */
    near *want[2]; /* with lanes, and with the bfloat16 dot product; computed when first needed */
    near *pre[2];  /* of each row: what its activation is applied to, of one map or of two */
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
    double *w = c->w = calloc((size_t)(maps * a->n * a->k), sizeof *w);
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
            if (d < a->k) *w++ = value, sum += value;
        }
        sums[panel * width + column] = (float)sum;
    }
    a->sums = sums;
    a->panels = packed;
    a->scales = scales ? (void *)scales : halves.data;
}

static linear_case linear_now;

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
}

/* x w^T + bias, or x w + bias. A result may err by a few units in the last place of the sum of its terms' absolute
 * values; by more of them, the longer the sum is. */
static near expect_linear(const linear_case *c, const double *x, int64_t map, int64_t j)
{
    const fa_linear_args *a = &c->args;
    const double *w = c->w + (a->transposed ? j : (map * a->n + j) * a->k),
                 bias = a->bias ? get(&c->bias, 0, 0, map, j) : 0;
    double sum = bias, terms = fabs(bias);
    FOR(d, a->k)
    {
        const double weight = w[a->transposed ? d * a->n : d], term = x[d] * weight;
        sum += term;
        terms += fabs(term);
    }
    const double parts = a->minima ? 4 : 1; /* a weight's product and minimum may each be larger than it is */
    return (near){sum, eps_of(lane_of(a->dtype)) * (2 + sqrt((double)smaller(a->k, 256))) * terms * parts};
}

/* x, rounded to 255 numbers from the smallest to the largest, in the arithmetic of the kernels. */
static void round_to_int8(double *x, int64_t k)
{
    float low = (float)x[0], high = low;
    FOR(d, k) low = fminf(low, (float)x[d]), high = fmaxf(high, (float)x[d]);
    const float middle = low * 0.5f + high * 0.5f, half = fmaxf(fmaxf(high - middle, middle - low), 0x1p-100f);
    const float factor = 127 / half;
    FOR(d, k) x[d] = (double)rintf(((float)x[d] - middle) * factor) * (double)(half / 127) + (double)middle;
}

/* y, by the shorter formulas of results in bfloat16: src/activation.inc.h. */
static near shortened(const fa_linear_args *a, near y)
{
    if (a->out_dtype == FA_BF16) y.error += a->activation == FA_GELU && !a->gated ? 2.5e-5 : 5e-6 * fabs(y.value);
    return y;
}

/* All results. `bf16`: x is rounded to bfloat16 first, as the dot product takes it. */
static near *expect_linears(linear_case *c, int bf16)
{
    const fa_linear_args *a = &c->args;
    const double eps = eps_of(lane_of(a->dtype));
    near *all = calloc((size_t)(a->m * a->n), sizeof *all), *next = all;
    double *x = calloc((size_t)a->k, sizeof *x);
    near *pre = c->pre[bf16] = calloc((size_t)(a->m * (1 + a->gated) * a->n), sizeof *pre);
    FOR(i, a->m)
    {
        FOR(d, a->k)
        {
            x[d] = get(&c->x, 0, 0, i, d);
            if (bf16) x[d] = from_half(half_of(FA_BF16), to_half(half_of(FA_BF16), x[d]));
        }
        if (a->x_int8) round_to_int8(x, a->k);
        FOR(j, a->n)
        {
            const near gate = expect_linear(c, x, 0, j), up = a->gated ? expect_linear(c, x, 1, j) : gate;
            near *row = pre + i * (1 + a->gated) * a->n + j, y = shortened(a, activated(a->activation, gate, eps));
            if (a->gated) y = product(y, up, eps), row[a->n] = stored(up, a->out_dtype);
            row[0] = stored(gate, a->out_dtype);
            if (a->residual) y.value += get(&c->residual, 0, 0, i, j), y.error += eps * fabs(y.value);
            *next++ = stored(y, a->out_dtype);
        }
    }
    free(x);
    return all;
}

/* Runs all tasks of rows [begin, end). Returns whether the size of a scratch keeps the next one aligned. */
static int run_linear(const fa_kernels *kernels, fa_linear_args a, int64_t begin, int64_t end, int again)
{
    const int mark = n_mappings;
    fa_linear_plan p;
    a.x += begin * a.x_row, a.out += begin * a.out_row, a.m = end - begin;
    if (a.residual) a.residual += begin * a.residual_row;
    if (a.pre) a.pre += begin * a.pre_row;
    kernels->linear_plan(&a, again ? 64 : 1, &p);
    char *scratch = allocate((size_t)p.scratch_bytes);
    if (again) memset(scratch, 0x55, (size_t)p.scratch_bytes);
    memset(scratch, 0, 8);
    FOR(task, p.n_tasks) kernels->linear_run(&a, &p, again ? p.n_tasks - 1 - task : task, scratch);
    release(mark);
    return p.scratch_bytes % 64 == 0;
}

/* Computes twice, the second time a third of the rows and then the others: a row's bits depend on the row alone. */
static const char *check_linear(const fa_kernels *kernels)
{
    fa_linear_args a = linear_now.args;
    const int tiles = !strncmp(running_isa, "amx", 3), of_one_map = a.transposed == 1 || a.k % 4 == 0;
    const int bf16 = a.weight == FA_BF16 && (a.transposed ? tiles && of_one_map : kernels->linear_between() == FA_BF16);
    const int64_t width = (1 + a.gated) * a.n;
    fa_array out[2], pre[2];
    int aligned = 1;
    if (!linear_now.want[bf16]) linear_now.want[bf16] = expect_linears(&linear_now, bf16);
    FOR(again, 2)
    {
        out[again] = new_floats(a.out_dtype, 1, 1, a.m, a.n, again ? GAP : REVERSED);
        a.out = out[again].data, a.out_row = out[again].row;
        pre[again] = new_floats(a.out_dtype, 1, 1, a.m, width, again ? REVERSED : GAP);
        a.pre = a.n % 2 ? pre[again].data : NULL, a.pre_row = pre[again].row;
        aligned &= run_linear(kernels, a, 0, again ? a.m / 3 : a.m, (int)again);
        if (again) aligned &= run_linear(kernels, a, a.m / 3, a.m, 1);
    }
    if (!aligned) return UNALIGNED;
    FOR(i, a.m) FOR(j, a.n)
    {
        const char *wrong = differs("out", out, out + 1, 0, 0, i, j, linear_now.want[bf16][i * a.n + j]);
        if (wrong) return wrong;
    }
    FOR(i, a.pre ? a.m : 0) FOR(j, width)
    {
        const char *wrong = differs("pre", pre, pre + 1, 0, 0, i, j, linear_now.pre[bf16][i * width + j]);
        if (wrong) return wrong;
    }
    return only_rows(out + 1, 1, 1, a.m, a.n) ? NULL : BETWEEN_ROWS;
}

static void drop_linear(void)
{
    FOR(bf16, 2) free(linear_now.want[bf16]), free(linear_now.pre[bf16]);
    free(linear_now.w);
}

FAMILY(linear, LINEAR_CASES, make_linear, linear_now.args.dtype, NULL, drop_linear);

#endif

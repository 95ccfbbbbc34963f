/* Gradients of what goes row by row, cross-entropy, dropout and sums of rows by place, against plain C in double
 * precision. */
#ifndef GRADIENTS_H
#define GRADIENTS_H

#include "rows.h"

enum { GRAD_ROWS = 5, GRAD_CASES = 4 * COUNT(rows_n) * COUNT(floats) * ROWS_REPEATS };

typedef struct {
    fa_rows_grad_args args;
    fa_array dout, x, residual, dsum, up, weight;
} rows_grad_case;

static rows_grad_case rows_grad_now;

static fa_array optional(int there, fa_dtype dtype, int64_t rows, int64_t n, const char **data, int64_t *row)
{
    fa_array x = {0};
    if (!there) return x;
    x = random_floats(dtype, rows, n, -1, 1);
    *data = x.data, *row = x.row;
    return x;
}

static void make_rows_grad(int number)
{
    int i = number;
    rows_grad_case c = {0};
    fa_rows_grad_args *a = &c.args;
    int64_t row;
    seed = (uint64_t)number << 32 | 8;
    a->kind = (fa_rows_kind)(i % 4), i /= 4;
    a->dtype = floats[i % COUNT(floats)], i /= COUNT(floats);
    a->n = rows_n[i % COUNT(rows_n)], i /= COUNT(rows_n);
    a->activation = (fa_activation)(i % FA_N_ACTIVATIONS);
    a->m = GRAD_ROWS, a->eps = 1e-2;
    c.dout = optional(1, a->dtype, a->m, a->n, &a->dout, &a->dout_row);
    c.x = random_floats(a->dtype, a->m, a->n, a->kind == FA_SOFTMAX ? 0 : -2, a->kind == FA_SOFTMAX ? 0.01 : 3);
    a->x = c.x.data, a->x_row = c.x.row;
    const int norm = a->kind <= FA_RMS_NORM, up = a->kind >= FA_RMS_NORM && a->kind != FA_SOFTMAX && below(2);
    a->up_each = below(2) ? 1 : a->m, a->gate_first = up && a->kind == FA_RMS_NORM && below(2);
    c.residual = optional(norm && !up && below(2), a->dtype, a->m, a->n, &a->residual, &a->residual_row);
    c.dsum = optional(norm && !up && below(2), a->dtype, a->m, a->n, &a->dsum, &a->dsum_row);
    c.up = optional(up, a->dtype, a->m / a->up_each, a->n * a->up_each, &a->up, &a->up_row);
    c.weight = optional(norm && below(4), lane_of(a->dtype), 1, a->n, (const char **)&a->weight, &row);
    rows_grad_now = c;
}

/* Row i of dx and dup, as they must be; adds to dweight and dbias, and to what they may err by. */
static void expect_rows_grad(const rows_grad_case *c, int64_t i, near *dx, near *dup, near *dweight, near *dbias)
{
    const fa_rows_grad_args *a = &c->args;
    const int64_t n = a->n;
    const double eps = eps_of(lane_of(a->dtype)), steps = 8 + sqrt((double)n);
    double x[300], g[300], mean = 0, squares = 0, means[2] = {0}, most = 0;
    double ups[300], inputs[300];
    near gates[300];
    FOR(j, n)
    {
        ups[j] = a->up ? up_at(&c->up, a->up_each, n, i, j) : 1;
        gates[j] = a->up ? activated(a->activation, (near){ups[j], 0}, eps) : (near){1, 0};
        x[j] = get(&c->x, 0, 0, i, j) + (a->residual ? get(&c->residual, 0, 0, i, j) : 0);
        g[j] = get(&c->dout, 0, 0, i, j);
        if (a->kind == FA_LAYER_NORM) mean += x[j] / (double)n;
        if (a->kind == FA_SOFTMAX) means[0] += x[j] * g[j], most += fabs(x[j] * g[j]);
    }
    if (a->kind == FA_SOFTMAX) {
        FOR(j, n) dx[j] = (near){x[j] * (g[j] - means[0]), eps * steps * fabs(x[j]) * (fabs(g[j]) + most)};
        return;
    }
    if (a->kind == FA_ACTIVATE) {
        FOR(j, n)
        {
            const near y = activated(a->activation, (near){x[j], 0}, eps);
            dx[j] = (near){g[j] * ups[j] * slope_of(a->activation, x[j]),
                           fabs(g[j] * ups[j]) * (16 * eps * (1 + fabs(x[j])) + 1e-9)};
            dup[j] = (near){g[j] * y.value, fabs(g[j]) * (y.error + 4 * eps * fabs(y.value))};
        }
        return;
    }
    FOR(j, n) inputs[j] = x[j], x[j] *= a->gate_first ? gates[j].value : 1;
    FOR(j, n) squares += (x[j] - mean) * (x[j] - mean);
    const double factor = 1 / sqrt(squares / (double)n + a->eps);
    FOR(j, n)
    {
        const double dout = g[j];
        x[j] = (x[j] - mean) * factor;
        if (a->up && !a->gate_first) g[j] *= gates[j].value;
        dweight[j].value += g[j] * x[j], dbias[j].value += g[j];
        dweight[j].error += eps * steps * (fabs(g[j]) + (a->up ? 4 * fabs(dout) : 0)) * (1 + fabs(x[j]) + 4 * factor),
            dbias[j].error += 8 * eps * (fabs(g[j]) + (a->up ? 4 * fabs(dout) : 0));
        if (a->weight) g[j] *= get(&c->weight, 0, 0, 0, j);
        if (a->kind == FA_LAYER_NORM) means[0] += g[j] / (double)n;
        means[1] += g[j] * x[j] / (double)n;
        most = fmax(most, (fabs(g[j]) + (a->up ? fabs(dout) : 0)) * (1 + fabs(x[j])));
    }
    FOR(j, n)
    {
        const double value = factor * (g[j] - means[0] - x[j] * means[1]);
        dx[j] = (near){value, eps * steps * 4 * factor * (1 + factor) * most * (1 + fabs(x[j]))};
        if (a->dsum) dx[j].value += get(&c->dsum, 0, 0, i, j), dx[j].error += eps * fabs(dx[j].value);
        if (!a->up) continue;
        const double slope = slope_of(a->activation, ups[j]), weight = a->weight ? get(&c->weight, 0, 0, 0, j) : 1;
        const near slopes = {slope, 16 * eps * (1 + fabs(ups[j])) + 1e-9};
        const near normed = {weight * x[j], eps * steps * fabs(weight) * (1 + factor) * (1 + fabs(x[j]))};
        const near dz = dx[j], by = a->gate_first ? dz : (near){get(&c->dout, 0, 0, i, j), 0};
        dup[j] = product(product(by, slopes, eps), a->gate_first ? (near){inputs[j], 0} : normed, eps);
        if (a->gate_first) dx[j] = product(dz, gates[j], eps);
    }
}

/* Computes twice, the second time where dout is, with sums of all rows in one task, and of two rows and the others. */
static const char *check_rows_grad(int isa, const fa_kernels *kernels)
{
    fa_rows_grad_args a = rows_grad_now.args;
    const fa_dtype lane = lane_of(a.dtype);
    const int64_t split = 2, n = a.n;
    near dweight[300] = {{0, 0}}, dbias[300] = {{0, 0}}, dx[300], dup[300];
    fa_array out[2], ups[2], sums = new_floats(lane, 1, 1, 2, 2 * n, 0), total = new_floats(lane, 1, 1, 1, 2 * n, 0);
    char *scratch = allocate((size_t)kernels->rows->grad_scratch_bytes(n));
    char *none = a.kind <= FA_RMS_NORM ? sums.data : NULL, *other = none ? none + 2 * n * bytes_of(lane) : NULL;
    (void)isa;
    FOR(again, 2)
    {
        out[again] = new_floats(a.dtype, 1, 1, a.m, n, again ? GAP : REVERSED);
        ups[again] = new_floats(a.dtype, 1, 1, a.m / a.up_each, n * a.up_each, again ? REVERSED : GAP);
        if (again) {
            FOR(i, a.m) FOR(j, n) set(&out[1], 0, 0, i, j, get(&rows_grad_now.dout, 0, 0, i, j));
            a.dout = out[1].data, a.dout_row = out[1].row;
        }
        a.dx = out[again].data, a.dx_row = out[again].row;
        if (a.kind == FA_ACTIVATE || a.up) a.dup = ups[again].data, a.dup_row = ups[again].row;
        kernels->rows->grad_run(&a, split, a.m, other, scratch);
        kernels->rows->grad_run(&a, 0, split, none, scratch);
    }
    kernels->rows->grad_add(sums.data, 2, 2 * n, 2 * n, total.data);
    FOR(i, a.m)
    {
        expect_rows_grad(&rows_grad_now, i, dx, dup, dweight, dbias);
        FOR(j, n)
        {
            const char *wrong = differs("dx", out, out + 1, 0, 0, i, j, stored(dx[j], a.dtype));
            if (!wrong && a.dup)
                wrong = differs("dup", ups, ups + 1, 0, 0, i / a.up_each, i % a.up_each * n + j,
                                stored(dup[j], a.dtype));
            if (wrong) return wrong;
        }
    }
    FOR(j, none ? n : 0)
    {
        const char *wrong = differs("dweight", &total, &total, 0, 0, 0, j, stored(dweight[j], lane));
        if (!wrong) wrong = differs("dbias", &total, &total, 0, 0, 0, n + j, stored(dbias[j], lane));
        if (wrong) return wrong;
    }
    return only_rows(out + 1, 1, 1, a.m, n) ? NULL : BETWEEN_ROWS;
}

static void describe_rows_grad(void)
{
    const fa_rows_grad_args *a = &rows_grad_now.args;
    printf("kind %d, dtype %d, n %d, activation %d%s%s%s%s", a->kind, a->dtype, (int)a->n, a->activation,
           a->residual ? ", residual" : "", a->dsum ? ", dsum" : "", a->up ? ", up" : "",
           a->gate_first ? " first" : "");
}

FAMILY(rows_grad, GRAD_CASES, make_rows_grad, rows_grad_now.args.dtype, describe_rows_grad, drop_nothing);

/* Cross-entropy. */
static const int64_t logits_n[] = {1, 3, 16, 65, 300};
static const fa_dtype lanes[] = {FA_F32, FA_F64};
enum { LOGITS_CASES = COUNT(logits_n) * COUNT(lanes) * 12 };

static struct {
    fa_logits_args args;
    fa_dtype dtype;
    fa_array x, factor;
    int64_t targets[GRAD_ROWS];
} logits_now;

static void make_logits(int number)
{
    fa_logits_args *a = &logits_now.args;
    seed = (uint64_t)number << 32 | 9;
    *a = (fa_logits_args){.m = GRAD_ROWS, .n = logits_n[number % COUNT(logits_n)]};
    logits_now.dtype = lanes[number / COUNT(logits_n) % COUNT(lanes)];
    logits_now.x = random_floats(logits_now.dtype, a->m, a->n, -4, 4);
    FOR(j, a->n) set(&logits_now.x, 0, 0, 1, j, get(&logits_now.x, 0, 0, 1, j) + 300); /* exp() would overflow */
    logits_now.factor = new_floats(logits_now.dtype, 1, 1, 1, a->m, 0);
    FOR(i, a->m) logits_now.targets[i] = below(a->n), set(&logits_now.factor, 0, 0, 0, i, uniform(-1, 1));
    if (below(3)) a->factor = logits_now.factor.data;
    a->label_smoothing = below(2) ? uniform(0, 1) : 0;
    a->targets = logits_now.targets;
}

static const char *check_logits(int isa, const fa_kernels *kernels)
{
    fa_logits_args a = logits_now.args;
    const fa_dtype lane = logits_now.dtype;
    const double eps = eps_of(lane), smoothing = a.label_smoothing;
    fa_array x[2], loss[2];
    (void)isa;
    FOR(again, 2)
    {
        x[again] = new_floats(lane, 1, 1, a.m, a.n, again ? GAP : REVERSED);
        loss[again] = new_floats(lane, 1, 1, 1, a.m, 0);
        FOR(i, a.m) FOR(j, a.n) set(&x[again], 0, 0, i, j, get(&logits_now.x, 0, 0, i, j));
        a.logits = x[again].data, a.row = x[again].row, a.loss = loss[again].data;
        if (!again) kernels->rows->logits_run(&a, 0, a.m);
        else
            for (int64_t i = a.m - 1; i >= 0; i--) kernels->rows->logits_run(&a, i, i + 1);
    }
    FOR(i, a.m)
    {
        double max = -INFINITY, sum = 0, mean = 0, least = INFINITY;
        FOR(j, a.n)
        max = fmax(max, get(&logits_now.x, 0, 0, i, j)), least = fmin(least, get(&logits_now.x, 0, 0, i, j));
        FOR(j, a.n) sum += exp(get(&logits_now.x, 0, 0, i, j) - max);
        FOR(j, a.n) mean += (get(&logits_now.x, 0, 0, i, j) - max) / (double)a.n;
        const double chosen = get(&logits_now.x, 0, 0, i, a.targets[i]) - max;
        const near want = {log(sum) - (1 - smoothing) * chosen - smoothing * mean, eps * (20 + 4 * (max - least))};
        const char *wrong = differs("loss", loss, loss + 1, 0, 0, 0, i, stored(want, lane));
        FOR(j, a.factor && !wrong ? a.n : 0)
        {
            const double hot = j == a.targets[i] ? 1 - smoothing : 0;
            const double prob = exp(get(&logits_now.x, 0, 0, i, j) - max) / sum,
                         by = get(&logits_now.factor, 0, 0, 0, i);
            const near gradient = {(prob - hot - smoothing / (double)a.n) * by, eps * 40 * fabs(by)};
            wrong = differs("gradient", x, x + 1, 0, 0, i, j, stored(gradient, lane));
        }
        if (wrong) return wrong;
    }
    return only_rows(x + 1, 1, 1, a.m, a.n) ? NULL : BETWEEN_ROWS;
}

static void describe_logits(void)
{
    printf("dtype %d, n %d, smoothing %g", logits_now.dtype, (int)logits_now.args.n, logits_now.args.label_smoothing);
}

FAMILY(logits, LOGITS_CASES, make_logits, logits_now.dtype, describe_logits, drop_nothing);

/* Dropout. */
static const int64_t dropout_n[] = {1, 15, 64, 130};
enum { DROPOUT_CASES = COUNT(dropout_n) * COUNT(floats) * 4 };

static struct {
    fa_dropout_args args;
    fa_array x;
} dropout_now;

static void make_dropout(int number)
{
    fa_dropout_args *a = &dropout_now.args;
    seed = (uint64_t)number << 32 | 10;
    *a = (fa_dropout_args){.m = GRAD_ROWS, .n = dropout_n[number % COUNT(dropout_n)], .stream = below(9)};
    a->dtype = floats[number / COUNT(dropout_n) % COUNT(floats)];
    a->rate = uniform(0, 1), a->scale = 1 / (1 - a->rate), a->seed = (uint64_t)below(INT64_MAX) * 2 + 1;
    dropout_now.x = random_floats(a->dtype, a->m, a->n, -1, 1);
    a->x = dropout_now.x.data, a->x_row = dropout_now.x.row;
}

/* Philox4x32-10, as its paper has it. */
static uint32_t philox_word(uint32_t c0, uint32_t c1, uint32_t c2, uint64_t key, int word)
{
    uint32_t c[4] = {c0, c1, c2, 0}, k[2] = {(uint32_t)key, (uint32_t)(key >> 32)};
    FOR(round, 10)
    {
        const uint64_t p0 = (uint64_t)c[0] * 0xd2511f53, p1 = (uint64_t)c[2] * 0xcd9e8d57;
        const uint32_t next[4] = {(uint32_t)(p1 >> 32) ^ c[1] ^ k[0], (uint32_t)p1, (uint32_t)(p0 >> 32) ^ c[3] ^ k[1],
                                  (uint32_t)p0};
        memcpy(c, next, sizeof c);
        k[0] += 0x9e3779b9, k[1] += 0xbb67ae85;
    }
    return c[word];
}

static const char *check_dropout(int isa, const fa_kernels *kernels)
{
    fa_dropout_args a = dropout_now.args;
    fa_array out[2];
    (void)isa;
    FOR(again, 2)
    {
        out[again] = new_floats(a.dtype, 1, 1, a.m, a.n, again ? GAP : REVERSED);
        a.out = out[again].data, a.out_row = out[again].row;
        if (!again) kernels->rows->dropout_run(&a, 0, a.m);
        else
            for (int64_t i = a.m - 1; i >= 0; i--) kernels->rows->dropout_run(&a, i, i + 1);
    }
    FOR(i, a.m) FOR(j, a.n)
    {
        const uint32_t word = philox_word((uint32_t)i, (uint32_t)(j / 64 * 16 + j % 16), (uint32_t)a.stream, a.seed,
                                          (int)(j / 16 % 4));
        const double x = word >= (uint32_t)(a.rate * 0x1p32) ? get(&dropout_now.x, 0, 0, i, j) * a.scale : 0;
        const near want = stored((near){x, eps_of(lane_of(a.dtype)) * fabs(x)}, a.dtype);
        const char *wrong = differs("out", out, out + 1, 0, 0, i, j, want);
        if (wrong) return wrong;
    }
    return only_rows(out + 1, 1, 1, a.m, a.n) ? NULL : BETWEEN_ROWS;
}

static void describe_dropout(void)
{
    printf("dtype %d, n %d, rate %g", dropout_now.args.dtype, (int)dropout_now.args.n, dropout_now.args.rate);
}

FAMILY(dropout, DROPOUT_CASES, make_dropout, dropout_now.args.dtype, describe_dropout, drop_nothing);

/* Sums of rows by their place: place 0 gets most of them, some places one, one none. */
enum { SCATTERED = 600, SCATTER_PLACES = 4, SCATTER_CASES = COUNT(rows_n) * COUNT(floats) };

static struct {
    fa_scatter_args args;
    fa_array x;
    int64_t order[SCATTERED];
} scatter_now;

static const int64_t scatter_firsts[] = {0, SCATTERED - 3, SCATTERED - 2, SCATTERED - 2, SCATTERED};
static const int64_t scatter_places[] = {2, 0, 3, 1};

static void make_scatter(int number)
{
    fa_scatter_args *a = &scatter_now.args;
    seed = (uint64_t)number << 32 | 11;
    *a = (fa_scatter_args){.n = rows_n[number % COUNT(rows_n)], .firsts = scatter_firsts, .places = scatter_places};
    a->dtype = floats[number / COUNT(rows_n)];
    scatter_now.x = random_floats(a->dtype, SCATTERED, a->n, -1, 1);
    a->x = scatter_now.x.data, a->x_row = scatter_now.x.row, a->order = scatter_now.order;
    FOR(i, SCATTERED) scatter_now.order[i] = (i * 7 + number) % SCATTERED;
}

static const char *check_scatter(int isa, const fa_kernels *kernels)
{
    fa_scatter_args a = scatter_now.args;
    const fa_dtype lane = lane_of(a.dtype);
    fa_array out[2];
    char *scratch = allocate((size_t)kernels->rows->scatter_scratch_bytes(a.n));
    (void)isa;
    FOR(again, 2)
    {
        out[again] = new_floats(lane, 1, 1, SCATTER_PLACES, a.n, again ? GAP : REVERSED);
        FOR(i, SCATTER_PLACES) FOR(j, a.n) set(&out[again], 0, 0, i, j, 0.5);
        a.out = out[again].data, a.out_row = out[again].row;
        kernels->rows->scatter_run(&a, 0, again ? 1 : SCATTER_PLACES, scratch);
        if (again) kernels->rows->scatter_run(&a, 1, SCATTER_PLACES, scratch);
    }
    FOR(p, SCATTER_PLACES) FOR(j, a.n)
    {
        near want = {0.5, 0};
        for (int64_t i = scatter_firsts[p]; i < scatter_firsts[p + 1]; i++) {
            const double x = get(&scatter_now.x, 0, 0, scatter_now.order[i], j);
            want.value += x, want.error += 16 * eps_of(lane) * fabs(x);
        }
        const char *wrong = differs("out", out, out + 1, 0, 0, scatter_places[p], j, stored(want, lane));
        if (wrong) return wrong;
    }
    return only_rows(out + 1, 1, 1, SCATTER_PLACES, a.n) ? NULL : BETWEEN_ROWS;
}

static void describe_scatter(void) { printf("dtype %d, n %d", scatter_now.args.dtype, (int)scatter_now.args.n); }

FAMILY(scatter, SCATTER_CASES, make_scatter, scatter_now.args.dtype, describe_scatter, drop_nothing);

#endif

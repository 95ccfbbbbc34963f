/* What an optimizer does to parameters, in one pass over memory, and the sums of squares of gradients.
 *
 * The elements of all parameters are cut into blocks of FA_UPDATE_BLOCK, the last one of a parameter shorter. A task is
 * some blocks. Every element is computed alone, and a sum of squares is of a block: so no bit depends on the tasks.
 * The arithmetic is that of torch's AdamW and SGD, in their order.
 *
 * Literals  momentum, nesterov: 0, 1.
 * Exports   update_run. */
#pragma once
#include "interface/rows.h"
#include "convert.inc.h"

/* The elements of a block. */
typedef struct {
    lane *param, *first, *second;
    const lane *grad;
    int64_t n;
} update_block;

/* The parameter that has a block: the last one that begins at it, or before. */
static const fa_parameter *parameter_of(const fa_update_args *a, int64_t block)
{
    int64_t low = 0, high = a->n_parameters;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (a->parameters[middle].block <= block) low = middle;
        else high = middle;
    }
    return a->parameters + low;
}

/* Element i of an array of a parameter; NULL of a moment that there is not. */
INLINE lane *moment_at(void *of, int64_t i) { return of ? (lane *)of + i : NULL; }

/* Eight accumulators: each has so few terms that no double is needed before the end of the block. */
static double squares_of(const lane *x, int64_t n)
{
    v_t sum[8] = {v_splat(0)};
    int64_t j = 0;
    for (int u = 1; u < 8; u++) sum[u] = sum[0];
    for (; j + 8 * LANES <= n; j += 8 * LANES)
        UNROLL_FOR(int u = 0; u < 8; u++) {
            const v_t y = v_load(x + j + u * LANES);
            sum[u] = v_fma(y, y, sum[u]);
        }
    for (int u = 0; j < n; j += LANES, u++) {
        const v_t y = v_load_part(x + j, n - j);
        sum[u] = v_fma(y, y, sum[u]);
    }
    UNROLL_FOR(int half = 4; half; half /= 2)
        for (int u = 0; u < half; u++) sum[u] += sum[u + half];
    double total = 0;
    for (int i = 0; i < LANES; i++) total += (double)sum[0][i];
    return total;
}

INLINE void adamw(const fa_update_args *a, const update_block *b)
{
    const v_t scale = v_splat((lane)a->scale), keep = v_splat((lane)(1 - a->lr * a->weight_decay));
    const v_t new_first = v_splat((lane)(1 - a->momentum)), new_second = v_splat((lane)(1 - a->beta2));
    const v_t beta2 = v_splat((lane)a->beta2), eps = v_splat((lane)a->eps);
    const v_t root = v_splat((lane)a->second_correction), step = v_splat((lane)(a->lr / a->first_correction));
    for (int64_t j = 0; j < b->n; j += LANES) {
        const int64_t n = b->n - j;
        const v_t grad = v_load_part(b->grad + j, n) * scale;
        const v_t before = v_load_part(b->first + j, n), param = v_load_part(b->param + j, n) * keep;
        const v_t first = v_fma(grad - before, new_first, before);
        const v_t second = v_fma(grad * new_second, grad, v_load_part(b->second + j, n) * beta2);
        v_store_part(b->first + j, first, n);
        v_store_part(b->second + j, second, n);
        v_store_part(b->param + j, param - step * first / (v_sqrt(second) / root + eps), n);
    }
}

INLINE void sgd(int momentum, int nesterov, const fa_update_args *a, const update_block *b)
{
    const v_t scale = v_splat((lane)a->scale), decay = v_splat((lane)a->weight_decay);
    const v_t factor = v_splat((lane)a->momentum), lr = v_splat((lane)a->lr);
    for (int64_t j = 0; j < b->n; j += LANES) {
        const int64_t n = b->n - j;
        const v_t param = v_load_part(b->param + j, n);
        v_t step = v_fma(decay, param, v_load_part(b->grad + j, n) * scale);
        if (momentum) {
            const v_t first = v_fma(factor, v_load_part(b->first + j, n), step);
            v_store_part(b->first + j, first, n);
            step = nesterov ? v_fma(factor, first, step) : first;
        }
        v_store_part(b->param + j, v_fma(-lr, step, param), n);
    }
}

static void update_run(const fa_update_args *a, int64_t begin, int64_t end)
{
    const fa_parameter *p = parameter_of(a, begin), *last = a->parameters + a->n_parameters - 1;
    for (int64_t block = begin; block < end; block++) {
        while (p < last && p[1].block <= block) p++;
        const int64_t first = (block - p->block) * FA_UPDATE_BLOCK;
        const update_block b = {
            .param = moment_at(p->param, first),
            .first = moment_at(p->first, first),
            .second = moment_at(p->second, first),
            .grad = (const lane *)p->grad + first,
            .n = smaller(p->n - first, FA_UPDATE_BLOCK),
        };
        switch (a->kind) {
        case FA_SQUARES: a->sums[block] = squares_of(b.grad, b.n); break;
        case FA_ADAMW: adamw(a, &b); break;
        case FA_SGD:
            if (!p->first) sgd(0, 0, a, &b);
            else if (a->nesterov) sgd(1, 1, a, &b);
            else sgd(1, 0, a, &b);
        }
    }
}

/* Optimizers' steps, and sums of squares, against plain C in double precision. */
#ifndef UPDATES_H
#define UPDATES_H

#include "rows.h"

/* Elements of the parameters of a case: with part of a vector, several blocks, a part of one, none. */
static const int64_t update_sizes[][4] = {
    {1, 0, 7, 129},
    {FA_UPDATE_BLOCK, 3, FA_UPDATE_BLOCK + 1, 0},
    {2 * FA_UPDATE_BLOCK + 77, 1, 0, 64},
    {0, 0, 0, 5},
};
enum { UPDATED = 4, UPDATE_CASES = 2 * COUNT(update_sizes) * 16 };

typedef struct {
    fa_update_args args;
    fa_dtype dtype;
    int64_t blocks;
    int64_t n[UPDATED];
    fa_array grad[UPDATED], before[UPDATED][3]; /* before: weights and both moments */
} update_case;

static update_case update_now;

static void make_update(int number)
{
    int i = number;
    update_case *c = &update_now;
    fa_update_args *a = &c->args;
    seed = (uint64_t)number << 32 | 3;
    memset(c, 0, sizeof *c);
    c->dtype = i % 2 ? FA_F64 : FA_F32, i /= 2;
    memcpy(c->n, update_sizes[i % COUNT(update_sizes)], sizeof c->n), i /= COUNT(update_sizes);
    a->kind = (fa_update_kind)(i % 3);
    a->n_parameters = UPDATED, a->scale = below(2) ? 1 : uniform(-1, 2), a->lr = uniform(0, 1);
    a->weight_decay = below(2) ? uniform(0, 0.5) : 0;
    a->momentum = a->kind == FA_ADAMW || below(2) ? uniform(0, 0.95) : 0, a->nesterov = a->momentum && below(2);
    a->beta2 = uniform(0.5, 0.999), a->eps = 1e-3;
    a->first_correction = uniform(0.1, 1), a->second_correction = uniform(0.1, 1);
    FOR(p, UPDATED)
    {
        c->grad[p] = random_floats(c->dtype, 1, c->n[p], -1, 1);
        FOR(m, 3) c->before[p][m] = random_floats(c->dtype, 1, c->n[p], m == 2 ? 0 : -1, 1);
        c->blocks += (c->n[p] + FA_UPDATE_BLOCK - 1) / FA_UPDATE_BLOCK;
    }
}

/* The weight and the moments j of parameter p, as they must be. */
static void expect_update(int p, int64_t j, near want[3])
{
    const fa_update_args *a = &update_now.args;
    const double eps = eps_of(update_now.dtype), grad = get(&update_now.grad[p], 0, 0, 0, j) * a->scale;
    FOR(m, 3) want[m] = (near){get(&update_now.before[p][m], 0, 0, 0, j), 0};
    near *x = want, *first = want + 1, *second = want + 2;
    if (a->kind == FA_ADAMW) {
        first->value = a->momentum * first->value + (1 - a->momentum) * grad;
        second->value = a->beta2 * second->value + (1 - a->beta2) * grad * grad;
        first->error = second->error = 8 * eps;
        const double root = sqrt(second->value), divisor = root / a->second_correction + a->eps;
        const double step = a->lr / a->first_correction / divisor;
        x->value = x->value * (1 - a->lr * a->weight_decay) - step * first->value;
        /* The root's error is that of what is under it by twice itself. */
        const double of_root = second->error / (2 * root + 1e-30) / a->second_correction / divisor;
        x->error = 8 * eps + step * (first->error + fabs(first->value) * (of_root + 8 * eps));
        return;
    }
    double step = grad + a->weight_decay * x->value;
    if (a->momentum) {
        first->value = a->momentum * first->value + step, first->error = 8 * eps;
        step = a->nesterov ? step + a->momentum * first->value : first->value;
    }
    x->value -= a->lr * step, x->error = 24 * eps;
}

static const char *wrong_sums(const double *sums)
{
    static char wrong[120];
    int64_t block = 0;
    FOR(p, UPDATED) for (int64_t begin = 0; begin < update_now.n[p]; begin += FA_UPDATE_BLOCK, block++)
    {
        double sum = 0;
        for (int64_t j = begin; j < smaller(update_now.n[p], begin + FA_UPDATE_BLOCK); j++) {
            const double x = get(&update_now.grad[p], 0, 0, 0, j);
            sum += x * x;
        }
        if (fabs(sums[block] - sum) <= 64 * eps_of(update_now.dtype) * sum) continue;
        snprintf(wrong, sizeof wrong, "sums[%d] is %.17g, not %.17g", (int)block, sums[block], sum);
        return wrong;
    }
    return NULL;
}

/* Computes twice, the second time block by block, the last one first. */
static const char *check_update(int isa, const fa_kernels *kernels)
{
    fa_update_args a = update_now.args;
    fa_parameter parameters[UPDATED];
    fa_array after[2][UPDATED][3];
    double *sums[2];
    (void)isa;
    FOR(again, 2)
    {
        int64_t block = 0;
        sums[again] = a.sums = (double *)allocate((size_t)update_now.blocks * sizeof(double));
        FOR(p, UPDATED)
        {
            FOR(m, 3)
            {
                after[again][p][m] = new_floats(update_now.dtype, 1, 1, 1, update_now.n[p], 0);
                FOR(j, update_now.n[p])
                set(&after[again][p][m], 0, 0, 0, j, get(&update_now.before[p][m], 0, 0, 0, j));
            }
            const fa_array *x = after[again][p];
            const int squares = a.kind == FA_SQUARES, plain = a.kind == FA_SGD && !a.momentum;
            parameters[p] = (fa_parameter){squares ? NULL : x[0].data,
                                           update_now.grad[p].data,
                                           squares || plain ? NULL : x[1].data,
                                           a.kind == FA_ADAMW ? x[2].data : NULL,
                                           update_now.n[p],
                                           block};
            block += (update_now.n[p] + FA_UPDATE_BLOCK - 1) / FA_UPDATE_BLOCK;
        }
        a.parameters = parameters;
        if (!again) kernels->rows->update_run(&a, 0, block);
        else
            for (int64_t b = block - 1; b >= 0; b--) kernels->rows->update_run(&a, b, b + 1);
    }
    if (a.kind == FA_SQUARES)
        return memcmp(sums[0], sums[1], (size_t)update_now.blocks * sizeof(double)) ? "other sums the second time"
                                                                                    : wrong_sums(sums[0]);
    FOR(p, UPDATED) FOR(j, update_now.n[p])
    {
        near want[3];
        expect_update((int)p, j, want);
        FOR(m, 3)
        {
            const char *wrong = differs(m ? "moment" : "weight", &after[0][p][m], &after[1][p][m], 0, 0, 0, j, want[m]);
            if (wrong) return wrong;
        }
    }
    return NULL;
}

static void describe_update(void)
{
    const fa_update_args *a = &update_now.args;
    printf("kind %d, dtype %d, sizes %d %d %d %d, momentum %g, nesterov %d", a->kind, update_now.dtype,
           (int)update_now.n[0], (int)update_now.n[1], (int)update_now.n[2], (int)update_now.n[3], a->momentum,
           a->nesterov);
}

FAMILY(update, UPDATE_CASES, make_update, update_now.dtype, describe_update, drop_nothing);

#endif

/* Optimizers' steps, and sums of squares. */
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

/* The second time block by block, the last one first. */
static int run_update(const fa_kernels *kernels, int again, int wide)
{
    fa_update_args a = update_now.args;
    fa_parameter parameters[UPDATED];
    int64_t block = 0;
    FOR(p, UPDATED)
    {
        const fa_array *x[3];
        FOR(m, 3)
        {
            x[m] = results[3 * p + m].got + again;
            copy(&update_now.before[p][m], x[m], 1, 1, 1, update_now.n[p]);
        }
        const fa_array grad = wide ? twin(update_now.grad[p]) : update_now.grad[p];
        const int squares = a.kind == FA_SQUARES, plain = a.kind == FA_SGD && !a.momentum;
        parameters[p] = (fa_parameter){squares ? NULL : x[0]->data,
                                       grad.data,
                                       squares || plain ? NULL : x[1]->data,
                                       a.kind == FA_ADAMW ? x[2]->data : NULL,
                                       update_now.n[p],
                                       block};
        block += (update_now.n[p] + FA_UPDATE_BLOCK - 1) / FA_UPDATE_BLOCK;
    }
    a.parameters = parameters;
    if (a.kind == FA_SQUARES) a.sums = (double *)results[3 * UPDATED].got[again].data;
    if (!again) kernels->rows->update_run(&a, 0, block);
    for (int64_t b = block; again && b-- > 0;) kernels->rows->update_run(&a, b, b + 1);
    return 1;
}

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
    n_results = 0;
    FOR(p, UPDATED) FOR(m, 3) add_result(m ? "moment" : "weight", 1, c->dtype, 1, 1, 1, c->n[p], 0);
    add_result("sums", a->kind == FA_SQUARES, FA_F64, 1, 1, 1, c->blocks, 0);
    expect_results(run_update);
}

CHECK(update, run_update, 400)

FAMILY(update, UPDATE_CASES, make_update, update_now.dtype, NULL);

#endif

/* Tests of deformable attention and its gradient. */
#ifndef DEFORMABLE_H
#define DEFORMABLE_H

#include "results.h"

static const int64_t deformable_dims[] = {1, 3, 4, 8, 15, 16, 17, 32, 33, 64, 70};
static const int64_t deformable_lens[] = {0, 1, 2, 15, 16, 17, 33};
static const int64_t level_points[] = {0, 1, 2, 4, 5, 63, 65};
static const int64_t sides[] = {0, 1, 1, 2, 3, 5, 8};

enum { MOST_LEVELS = 3 };
enum { DEFORMABLE_CASES = 4 * COUNT(floats) * COUNT(deformable_dims) * COUNT(deformable_lens) };

static fa_level levels_now[MOST_LEVELS];
static fa_deformable_grad_args deformable_now[2]; /* the second one with twins */
static int64_t places_now;

#define EACH_QUERY(a) FOR(b, (a)->batch) FOR(h, (a)->heads) FOR(i, (a)->len_q)

/* A coordinate that rounding does not carry over a line between places, or beyond half a place. */
static double drawn_location(int64_t size)
{
    for (;;) {
        const double at = (double)(float)uniform(-0.3, 1.3), twice = 2 * at * (double)size;
        if (fabs(twice - rint(twice)) > 1e-3 || size == 0) return at;
    }
}

/* Returns the layout of results. */
static int draw_deformable(int number)
{
    fa_deformable_grad_args *g = deformable_now, *wide = deformable_now + 1;
    fa_deformable_args *a = &g->forward;
    seed = (uint64_t)number << 32 | 17;
    int rest = number / 4;
    const fa_dtype dtype = floats[rest % COUNT(floats)], lane = lane_of(dtype);
    rest /= COUNT(floats);
    *g = (fa_deformable_grad_args){.forward = {.levels = levels_now,
                                               .batch = 1 + below(2),
                                               .heads = 1 + below(3),
                                               .len_q = deformable_lens[rest / COUNT(deformable_dims)],
                                               .head_dim = deformable_dims[rest % COUNT(deformable_dims)],
                                               .n_levels = 1 + below(MOST_LEVELS),
                                               .discrete = below(3) == 0}};
    places_now = 0;
    FOR(l, a->n_levels)
    {
        a->points += PICK(level_points);
        const int64_t height = PICK(sides), width = PICK(sides);
        levels_now[l] = (fa_level){height, width, places_now, a->points};
        places_now += height * width;
    }
    const int layout = (int)below(8);
    a->v = new_floats(dtype, a->batch, a->heads, places_now, a->head_dim, layout);
    a->locations = new_floats(lane, a->batch, a->heads, a->len_q, 2 * a->points, layout);
    a->weights = new_floats(lane, a->batch, a->heads, a->len_q, a->points, (int)below(8));
    g->dout = new_floats(dtype, a->batch, a->heads, a->len_q, a->head_dim, (int)below(8));
    FOR(b, a->batch)
    FOR(h, a->heads) FOR(i, places_now) FOR(j, a->head_dim) set(&a->v, b, h, i, j, uniform(-2, 2));
    EACH_QUERY(a)
    {
        FOR(j, a->head_dim) set(&g->dout, b, h, i, j, uniform(-1, 1));
        FOR(p, a->points)
        {
            const fa_level *l = levels_now;
            while (l->end <= p) l++;
            set(&a->locations, b, h, i, 2 * p, drawn_location(l->width));
            set(&a->locations, b, h, i, 2 * p + 1, drawn_location(l->height));
            set(&a->weights, b, h, i, p, below(8) ? uniform(-1, 1) : 0);
        }
    }
    if (a->len_q && a->points && below(3) == 0) /* it shows in its query, and in its own gradients */
        set(&a->locations, below(a->batch), below(a->heads), below(a->len_q), below(2 * a->points), NAN);
    *wide = *g, n_results = 0;
    twins((fa_array *const[]){&wide->forward.v, &wide->forward.locations, &wide->forward.weights, &wide->dout}, 4);
    return layout;
}

/* The second time a unit at a time, the last one first. */
static int run_deformable(const fa_kernels *kernels, int again, int wide)
{
    fa_deformable_args a = deformable_now[wide].forward;
    const int64_t units = a.batch * a.heads * ((a.len_q + FA_DEFORMABLE_QUERIES - 1) / FA_DEFORMABLE_QUERIES);
    const size_t size = (size_t)kernels->deformable->scratch_bytes(&a);
    char *scratch = allocate(size);
    a.out = results->got[again];
    if (!again) kernels->deformable->run(&a, 0, units, scratch);
    for (int64_t unit = units; again && unit-- > 0;)
        kernels->deformable->run(&a, unit, unit + 1, memset(scratch, 0x55, size));
    return size % 64 == 0;
}

static void make_deformable(int number)
{
    const int layout = draw_deformable(number);
    const fa_deformable_args *a = &deformable_now->forward;
    add_result("out", 1, a->v.dtype, a->batch, a->heads, a->len_q, a->head_dim, layout);
    expect_results(run_deformable);
}

CHECK(deformable, run_deformable, 400)

/* The same, a head at a time; some cases without some of the results. */
static int run_deformable_grad(const fa_kernels *kernels, int again, int wide)
{
    fa_deformable_grad_args g = deformable_now[wide];
    const fa_deformable_args *a = &g.forward;
    const int64_t tasks = a->batch * a->n_levels;
    const size_t size = (size_t)kernels->deformable->grad_scratch_bytes(&g);
    char *scratch = allocate(size);
    g.dv = results[0].got[again], g.dlocations = results[1].got[again], g.dweights = results[2].got[again];
    FOR(task, tasks)
    {
        if (!again) kernels->deformable->grad_run(&g, task, 0, a->heads, scratch);
        for (int64_t h = a->heads; again && h-- > 0;)
            kernels->deformable->grad_run(&g, tasks - 1 - task, h, h + 1, memset(scratch, 0x55, size));
    }
    return size % 64 == 0;
}

static void make_deformable_grad(int number)
{
    const int layout = draw_deformable(number);
    const fa_deformable_args *a = &deformable_now->forward;
    const fa_dtype lane = lane_of(a->v.dtype);
    const int64_t without = below(2) ? (int64_t)random_bits() : 0;
    add_result("dv", !(without & 1), lane, a->batch, a->heads, places_now, a->head_dim, layout)->zero = 1;
    add_result("dlocations", !(without & 2), lane, a->batch, a->heads, a->len_q, 2 * a->points, layout);
    add_result("dweights", !(without & 4), lane, a->batch, a->heads, a->len_q, a->points, layout);
    expect_results(run_deformable_grad);
}

CHECK(deformable_grad, run_deformable_grad, 4000)

FAMILY(deformable, DEFORMABLE_CASES, make_deformable, deformable_now->forward.v.dtype, NULL);

FAMILY(deformable_grad, DEFORMABLE_CASES, make_deformable_grad, deformable_now->forward.v.dtype, NULL);

#endif

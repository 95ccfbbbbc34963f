/* Tests of deformable attention and its gradient, against their definition in double precision: every place of a level has
 * a share of every point. */
#ifndef DEFORMABLE_H
#define DEFORMABLE_H

#include "channels.h"

static const int64_t deformable_dims[] = {1, 3, 4, 8, 15, 16, 17, 32, 33, 64, 70};
static const int64_t deformable_lens[] = {0, 1, 2, 15, 16, 17, 33};
static const int64_t level_points[] = {0, 1, 2, 4, 5, 63, 65};
static const int64_t sides[] = {0, 1, 1, 2, 3, 5, 8};

enum { MOST_LEVELS = 3 };
enum { DEFORMABLE_CASES = 4 * COUNT(floats) * COUNT(deformable_dims) * COUNT(deformable_lens) };
enum { SAMPLED, D_PLACES, D_LOCATIONS, D_WEIGHTS, N_DEFORMABLE_RESULTS };

static struct {
    fa_deformable_grad_args args;
    fa_level levels[MOST_LEVELS];
    int64_t len_v;
    int layout, spoiled;
    uint64_t without; /* bits of gradients */
    near *want[N_DEFORMABLE_RESULTS];
} deformable_now;

static int64_t deformable_rows(int result)
{
    return result == D_PLACES ? deformable_now.len_v : deformable_now.args.forward.len_q;
}

static int64_t deformable_cols(int result)
{
    const fa_deformable_args *a = &deformable_now.args.forward;
    return result <= D_PLACES ? a->head_dim : result == D_LOCATIONS ? 2 * a->points : a->points;
}

static near *deformable_want(int result, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const int64_t rows = deformable_rows(result), cols = deformable_cols(result);
    return deformable_now.want[result] + ((b * deformable_now.args.forward.heads + h) * rows + i) * cols + j;
}

#define EACH_QUERY(a) FOR(b, (a)->batch) FOR(h, (a)->heads) FOR(i, (a)->len_q)
#define EACH_PLACE(l)                                                                                                  \
    for (const fa_level *l = deformable_now.levels, *none = l + deformable_now.args.forward.n_levels; l < none; l++)   \
        for (int64_t p = l > deformable_now.levels ? l[-1].end : 0; p < l->end; p++)                                   \
    FOR(line, l->height) FOR(column, l->width)

/* The share that a column (or line) has in a point, and its derivative; no share is NaN, if it takes no part at all. */
static double share(double at, int64_t size, int64_t place, double *slope)
{
    *slope = 0;
    if (deformable_now.args.forward.discrete) {
        const double nearest = floor(at * (double)size + 0.5), most = (double)size - 1;
        return (nearest < 0 ? 0 : nearest > most ? most : nearest) == (double)place ? 1 : NAN;
    }
    const double apart = at * (double)size - 0.5 - (double)place;
    if (!(fabs(apart) < 1)) return NAN;
    *slope = apart < 0 ? (double)size : -(double)size;
    return 1 - fabs(apart);
}

/* A coordinate that rounding does not carry over a line between places, or beyond half a place. */
static double drawn_location(int64_t size)
{
    for (;;) {
        const double at = (double)(float)uniform(-0.3, 1.3), twice = 2 * at * (double)size;
        if (fabs(twice - rint(twice)) > 1e-3 || size == 0) return at;
    }
}

static void expect_place(const fa_level *l, int64_t b, int64_t h, int64_t i, int64_t p, int64_t line, int64_t column)
{
    const fa_deformable_grad_args *g = &deformable_now.args;
    const fa_deformable_args *a = &g->forward;
    const double eps = eps_of(lane_of(a->v.dtype)), w = get(&a->weights, b, h, i, p);
    /* What the rounding of a coordinate changes, and a few operations. */
    const double off = eps * (4 + 4 * (double)(l->height + l->width));
    const int64_t place = l->row + line * l->width + column;
    double slope_x, slope_y, product = 0, size = 0;
    const double x = share(get(&a->locations, b, h, i, 2 * p), l->width, column, &slope_x);
    const double y = share(get(&a->locations, b, h, i, 2 * p + 1), l->height, line, &slope_y);
    if (isnan(x) || isnan(y)) return;
    FOR(j, a->head_dim)
    {
        const double v = get(&a->v, b, h, place, j), dout = get(&g->dout, b, h, i, j);
        product += dout * v, size += fabs(dout * v);
        if (w == 0) continue;
        add_to(deformable_want(SAMPLED, b, h, i, j), (near){w * x * y * v, off * fabs(w * v)}, eps);
        add_to(deformable_want(D_PLACES, b, h, place, j), (near){w * x * y * dout, off * fabs(w * dout)}, eps);
    }
    const near of_x = {w == 0 ? 0 : w * slope_x * y * product, off * fabs(w * slope_x) * size};
    const near of_y = {w == 0 ? 0 : w * slope_y * x * product, off * fabs(w * slope_y) * size};
    add_to(deformable_want(D_WEIGHTS, b, h, i, p), (near){x * y * product, off * size}, eps);
    add_to(deformable_want(D_LOCATIONS, b, h, i, 2 * p), of_x, eps);
    add_to(deformable_want(D_LOCATIONS, b, h, i, 2 * p + 1), of_y, eps);
}

/* NaN in rows of v that no point reads. */
static void spoil_places(void)
{
    const fa_deformable_args *a = &deformable_now.args.forward;
    double slope;
    char *used = calloc((size_t)(a->batch * a->heads * deformable_now.len_v) + 1, 1);
    EACH_QUERY(a) EACH_PLACE(l)
    {
        const double x = share(get(&a->locations, b, h, i, 2 * p), l->width, column, &slope);
        const double y = share(get(&a->locations, b, h, i, 2 * p + 1), l->height, line, &slope);
        const int64_t place = l->row + line * l->width + column;
        used[(b * a->heads + h) * deformable_now.len_v + place] |= !isnan(x) && !isnan(y);
    }
    FOR(b, a->batch) FOR(h, a->heads) FOR(place, deformable_now.len_v)
    {
        if (used[(b * a->heads + h) * deformable_now.len_v + place]) continue;
        FOR(j, a->head_dim) set(&a->v, b, h, place, j, NAN);
    }
    free(used);
}

/* NaN in one location, before results are expected: it shows in its query, and in its own gradients. */
static void spoil_location(void)
{
    const fa_deformable_args *a = &deformable_now.args.forward;
    if (!a->len_q || !a->points) return;
    const int64_t b = below(a->batch), h = below(a->heads), i = below(a->len_q), p = below(a->points);
    set(&a->locations, b, h, i, 2 * p + below(2), NAN);
    if (get(&a->weights, b, h, i, p) == 0) return;
    FOR(j, a->head_dim) * deformable_want(SAMPLED, b, h, i, j) = exact(NAN);
    FOR(c, 2) * deformable_want(D_LOCATIONS, b, h, i, 2 * p + c) = exact(NAN);
    *deformable_want(D_WEIGHTS, b, h, i, p) = exact(NAN);
}

static void make_deformable(int number)
{
    fa_deformable_grad_args *g = &deformable_now.args;
    fa_deformable_args *a = &g->forward;
    seed = (uint64_t)number << 32 | 17;
    int rest = number / 4;
    const fa_dtype dtype = floats[rest % COUNT(floats)], lane = lane_of(dtype);
    rest /= COUNT(floats);
    *g = (fa_deformable_grad_args){.forward = {.levels = deformable_now.levels,
                                               .batch = 1 + below(2),
                                               .heads = 1 + below(3),
                                               .len_q = deformable_lens[rest / COUNT(deformable_dims)],
                                               .head_dim = deformable_dims[rest % COUNT(deformable_dims)],
                                               .n_levels = 1 + below(MOST_LEVELS),
                                               .discrete = below(3) == 0}};
    deformable_now.len_v = 0;
    FOR(l, a->n_levels)
    {
        a->points += PICK(level_points);
        const int64_t height = PICK(sides), width = PICK(sides);
        deformable_now.levels[l] = (fa_level){height, width, deformable_now.len_v, a->points};
        deformable_now.len_v += height * width;
    }
    const int layout = (int)below(8);
    deformable_now.layout = layout, deformable_now.spoiled = below(3) == 0;
    deformable_now.without = below(2) ? random_bits() : 0;
    a->v = new_floats(dtype, a->batch, a->heads, deformable_now.len_v, a->head_dim, layout);
    a->locations = new_floats(lane, a->batch, a->heads, a->len_q, 2 * a->points, layout);
    a->weights = new_floats(lane, a->batch, a->heads, a->len_q, a->points, (int)below(8));
    g->dout = new_floats(dtype, a->batch, a->heads, a->len_q, a->head_dim, (int)below(8));
    FOR(b, a->batch)
    FOR(h, a->heads) FOR(i, deformable_now.len_v) FOR(j, a->head_dim) set(&a->v, b, h, i, j, uniform(-2, 2));
    EACH_QUERY(a)
    {
        FOR(j, a->head_dim) set(&g->dout, b, h, i, j, uniform(-1, 1));
        FOR(p, a->points)
        {
            const fa_level *l = deformable_now.levels;
            while (l->end <= p) l++;
            set(&a->locations, b, h, i, 2 * p, drawn_location(l->width));
            set(&a->locations, b, h, i, 2 * p + 1, drawn_location(l->height));
            set(&a->weights, b, h, i, p, below(8) ? uniform(-1, 1) : 0);
        }
    }
    FOR(r, N_DEFORMABLE_RESULTS)
    deformable_now.want[r] = new_nears(a->batch * a->heads * deformable_rows((int)r) * deformable_cols((int)r));
    if (deformable_now.spoiled) spoil_location();
    EACH_QUERY(a) EACH_PLACE(l) expect_place(l, b, h, i, p, line, column);
    if (deformable_now.spoiled) spoil_places();
}

/* Says what is wrong with a result that was computed twice, or with what is written beside it; or NULL. */
static const char *wrong_result(int result, const char *name, const fa_array x[2])
{
    const fa_deformable_args *a = &deformable_now.args.forward;
    const int64_t rows = deformable_rows(result), cols = deformable_cols(result);
    FOR(b, a->batch) FOR(h, a->heads) FOR(i, rows) FOR(j, cols)
    {
        const near want = stored(*deformable_want(result, b, h, i, j), x->dtype);
        const char *wrong = differs(name, x, x + 1, b, h, i, j, want);
        if (wrong) return wrong;
    }
    FOR(again, 2)
    if (!only_rows(x + again, a->batch, a->heads, rows, cols)) return BETWEEN_ROWS;
    return NULL;
}

/* Computes twice, the second time a unit at a time, the last one first. */
static const char *check_deformable(int isa, const fa_kernels *kernels)
{
    fa_deformable_args a = deformable_now.args.forward;
    const int64_t units = a.batch * a.heads * ((a.len_q + FA_DEFORMABLE_QUERIES - 1) / FA_DEFORMABLE_QUERIES);
    const size_t size = (size_t)kernels->deformable->scratch_bytes(&a);
    char *scratch = allocate(size);
    fa_array out[2];
    (void)isa;
    if (size % 64) return UNALIGNED;
    FOR(again, 2)
    {
        a.out = out[again] = new_floats(a.v.dtype, a.batch, a.heads, a.len_q, a.head_dim,
                                        again ? deformable_now.layout : GAP);
        if (!again) kernels->deformable->run(&a, 0, units, scratch);
        for (int64_t unit = units; again && unit-- > 0;)
            kernels->deformable->run(&a, unit, unit + 1, memset(scratch, 0x55, size));
    }
    return wrong_result(SAMPLED, "out", out);
}

/* The same, a head at a time; some cases without some of the results. */
static const char *check_deformable_grad(int isa, const fa_kernels *kernels)
{
    static const char *const names[] = {"", "dv", "dlocations", "dweights"};
    fa_deformable_grad_args g = deformable_now.args;
    const fa_deformable_args *a = &g.forward;
    const int64_t tasks = a->batch * a->n_levels;
    const size_t size = (size_t)kernels->deformable->grad_scratch_bytes(&g);
    char *scratch = allocate(size);
    fa_array x[N_DEFORMABLE_RESULTS][2] = {{{0}}};
    (void)isa;
    if (size % 64) return UNALIGNED;
    FOR(again, 2)
    {
        for (int r = D_PLACES; r < N_DEFORMABLE_RESULTS; r++) {
            if (deformable_now.without >> r & 1) continue;
            x[r][again] = new_floats(lane_of(a->v.dtype), a->batch, a->heads, deformable_rows(r), deformable_cols(r),
                                     again ? deformable_now.layout : GAP);
        }
        g.dv = x[D_PLACES][again], g.dlocations = x[D_LOCATIONS][again], g.dweights = x[D_WEIGHTS][again];
        FOR(b, g.dv.data ? a->batch : 0)
        FOR(h, a->heads) FOR(i, deformable_now.len_v) FOR(j, a->head_dim) set(&g.dv, b, h, i, j, 0);
        FOR(task, tasks)
        {
            if (!again) kernels->deformable->grad_run(&g, task, 0, a->heads, scratch);
            for (int64_t h = a->heads; again && h-- > 0;)
                kernels->deformable->grad_run(&g, tasks - 1 - task, h, h + 1, memset(scratch, 0x55, size));
        }
    }
    const char *wrong = NULL;
    for (int r = D_PLACES; r < N_DEFORMABLE_RESULTS && !wrong; r++)
        if (x[r]->data) wrong = wrong_result(r, names[r], x[r]);
    return wrong;
}

static void describe_deformable(void)
{
    const fa_deformable_args *a = &deformable_now.args.forward;
    printf("dtype %d, batch %d, heads %d, queries %d, head_dim %d, levels", a->v.dtype, (int)a->batch, (int)a->heads,
           (int)a->len_q, (int)a->head_dim);
    FOR(l, a->n_levels) printf(" %dx%d", (int)a->levels[l].height, (int)a->levels[l].width);
    printf(", points %d, layout %d%s%s", (int)a->points, deformable_now.layout, a->discrete ? ", discrete" : "",
           deformable_now.spoiled ? ", NaN" : "");
}

static void drop_deformable(void) { FOR(r, N_DEFORMABLE_RESULTS) free(deformable_now.want[r]); }

FAMILY(deformable, DEFORMABLE_CASES, make_deformable, deformable_now.args.forward.v.dtype, describe_deformable,
       drop_deformable);

FAMILY(deformable_grad, DEFORMABLE_CASES, make_deformable, deformable_now.args.forward.v.dtype, describe_deformable,
       drop_deformable);

#endif

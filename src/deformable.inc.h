/* Deformable attention, and its gradient. Rows of v are the places of levels, grids of height times width:
 *
 *     out = sum over points of weight sample,   sample = sum over the 4 places around (x, y) of wx wy v_place
 *
 * where x = width location_x - 1/2 lies between two columns, whose wx are 1 - |x - column|; y likewise between two lines.
 * A place beside the grid is 0. What has no weight is not read: a factor of 0 shields a NaN.
 *
 *     dweight = dout . sample,   dv_place += weight wx wy dout
 *     dlocation_x = weight width (sum over places of (-1 at the left, +1 at the right) wy dout . v_place)
 *
 * If `discrete`, the sample is the place at column width location_x + 1/2, rounded down and cut to the grid.
 *
 * A block is so many points of so many queries. First their places and factors, points on the lanes; then the rows,
 * channels on the lanes. The order of sums is that of points and queries. A task of the gradient is a level of some heads:
 * the rows that it adds to are its own.
 *
 * Literals  dtype. nv: 1, 2 or 4.
 * Exports   deformable_scratch_bytes, deformable_run; deformable_grad_scratch_bytes, deformable_grad_run. */
#pragma once
#include "interface/deformable.h"
#include "convert.inc.h"

#define BLOCK_POINTS 64           /* of a block: where its sums are made, they take a vector for each of 4 places */
#define DEFORMABLE_ASKS (1 << 16) /* points times channels between two calls of given_up(): each may wait for memory */
_Static_assert(BLOCK_POINTS % LANES == 0, "a block is whole vectors");

typedef struct {
    int64_t n, rows;                  /* points of each query, and queries; the arrays have n * rows of them */
    int64_t first;                    /* the first point's number */
    int64_t done;                     /* points times channels since it last asked whether to go on */
    int64_t *level;                   /* of each point */
    lane *width, *height, *x, *y, *w; /* sizes of their levels; positions on the grid; weights */
    ilane *column, *line;             /* of the first of the four places */
    lane *factor[4];                  /* of what is read there; 0 where nothing is */
    ilane *read[4];                   /* of the gradient: whether it reads the place; it may though the factor is 0 */
    const char **from[4];       /* where a place is read, `zeros` if it is not: no branch, which often goes wrong */
    char **to[4];               /* where the gradient adds, or `unused` */
    lane *nan;                  /* NaN where a weight or, unless that is 0, a location is; else 0 */
    int any_nan;                /* maybe */
    lane *row, *zeros, *unused; /* (head_dim), whole vectors; row: sums, or dout */
    lane *parts;                /* of the gradient: a vector for each place, (4, BLOCK_POINTS) */
    lane *dx, *dy, *dw;
} deformable_scratch;

static int64_t take_deformable_scratch(arena *from, const fa_deformable_args *a, int gradient, deformable_scratch *s)
{
    CUT_LANES(from, BLOCK_POINTS, &s->width, &s->height, &s->x, &s->y, &s->w, &s->nan);
    CUT_LANES(from, BLOCK_POINTS, &s->factor[0], &s->factor[1], &s->factor[2], &s->factor[3]);
    CUT_LANES(from, round_up(a->head_dim, LANES), &s->row, &s->zeros);
    CUT(from, s->column, BLOCK_POINTS);
    CUT(from, s->line, BLOCK_POINTS);
    CUT(from, s->level, BLOCK_POINTS);
    for (int c = 0; c < 4; c++) {
        CUT(from, s->from[c], BLOCK_POINTS);
        if (gradient) CUT(from, s->read[c], BLOCK_POINTS);
        if (gradient) CUT(from, s->to[c], BLOCK_POINTS);
    }
    if (gradient) {
        CUT(from, s->parts, 4 * BLOCK_POINTS * LANES);
        CUT_LANES(from, BLOCK_POINTS, &s->dx, &s->dy, &s->dw);
        CUT(from, s->unused, round_up(a->head_dim, LANES));
    }
    return from->used;
}

static void ready_deformable_scratch(void *memory, const fa_deformable_args *a, int gradient, deformable_scratch *s)
{
    const int64_t bytes = round_up(a->head_dim, LANES) * (int64_t)sizeof(lane);
    take_deformable_scratch(&(arena){.memory = memory}, a, gradient, s);
    memset(s->zeros, 0, bytes), memset(s->row, 0, bytes);
    if (gradient) memset(s->unused, 0, bytes);
}

/* Of a coordinate of LANES points: the first of the two columns (or lines), and for each whether it is there and its
 * weight. NaN has none. */
typedef struct {
    vi_t first, there[2];
    v_t weight[2];
} sides;

INLINE sides sides_of(v_t x, v_t size, int discrete)
{
    if (discrete) {
        const vi_t some = (size > 0) & (x == x);
        const v_t cut_x = v_max(v_splat(0), v_min(size - 1, x));
        return (sides){__builtin_convertvector(v_select(some, cut_x, v_splat(0)), vi_t),
                       {some, (vi_t){0}},
                       {v_splat(1), v_splat(0)}};
    }
    const vi_t near_grid = (x >= -1) & (x < size);
    x = v_select(near_grid, x, v_splat(0));
    vi_t first = __builtin_convertvector(x, vi_t);
    first += __builtin_convertvector(first, v_t) > x; /* -1 where that was rounded up */
    const v_t whole = __builtin_convertvector(first, v_t);
    return (sides){first, {near_grid & (first >= 0), near_grid & (whole + 1 < size)}, {1 - (x - whole), x - whole}};
}

/* The levels of points first .. first + n - 1, for each of so many queries. */
static void lay_points(const fa_deformable_args *a, int64_t first, int64_t n, int64_t rows, deformable_scratch *s)
{
    if (s->first == first && s->n == n && s->rows == rows) return; /* as before */
    s->first = first, s->n = n, s->rows = rows;
    int64_t level = 0;
    for (int64_t p = 0; p < n; p++) {
        while (a->levels[level].end <= first + p) level++;
        for (int64_t r = 0; r < rows; r++) {
            s->level[r * n + p] = level;
            s->width[r * n + p] = (lane)a->levels[level].width, s->height[r * n + p] = (lane)a->levels[level].height;
        }
    }
}

/* Places and factors of the block's points, of queries i and later ones; dv, of the gradient alone, optional. */
static void place_points(const fa_deformable_args *a, int64_t b, int64_t h, int64_t i, int gradient, const fa_array *dv,
                         deformable_scratch *s)
{
    const lane shift = a->discrete ? (lane)0.5 : (lane)-0.5;
    for (int64_t r = 0, e = 0; r < s->rows; r++) {
        const lane_u *xy = (const lane_u *)at(&a->locations, b, h, i + r, 0) + 2 * s->first;
        const lane_u *w = (const lane_u *)at(&a->weights, b, h, i + r, 0) + s->first;
        for (int64_t p = 0; p < s->n; p++, e++) s->x[e] = xy[2 * p], s->y[e] = xy[2 * p + 1], s->w[e] = w[p];
    }
    vi_t any = {0};
    for (int64_t e = 0; e < s->n * s->rows; e += LANES) {
        const v_t width = v_load(s->width + e), height = v_load(s->height + e), w = v_load(s->w + e);
        const v_t at_x = v_load(s->x + e), at_y = v_load(s->y + e);
        const v_t x = at_x * width + shift, y = at_y * height + shift; /* infinity times no width is NaN: nowhere */
        const sides of_x = sides_of(x, width, a->discrete), of_y = sides_of(y, height, a->discrete);
        const vi_t is_nan = (((at_x != at_x) | (at_y != at_y)) & (w != 0)) | (w != w);
        any |= is_nan;
        v_store(s->x + e, x), v_store(s->y + e, y);
        v_store(s->nan + e, v_select(is_nan, v_splat((lane)NAN), v_splat(0)));
        v_store(s->column + e, (v_t)of_x.first), v_store(s->line + e, (v_t)of_y.first);
        UNROLL_FOR(int c = 0; c < 4; c++) {
            const vi_t there = of_x.there[c % 2] & of_y.there[c / 2];
            const v_t factor = of_x.weight[c % 2] * of_y.weight[c / 2] * w;
            v_store(s->factor[c] + e, v_select(there, factor, v_splat(0)));
            if (gradient)
                v_store(s->read[c] + e, (v_t)(there & ((of_x.weight[c % 2] != 0) | (of_y.weight[c / 2] != 0))));
        }
    }
    s->any_nan = v_any(any);
    const char *v = at(&a->v, b, h, 0, 0);
    char *to = dv && dv->data ? at(dv, b, h, 0, 0) : NULL;
    for (int64_t e = 0; e < s->n * s->rows; e++) {
        const fa_level *level = a->levels + s->level[e];
        const int64_t place = level->row + s->line[e] * level->width + s->column[e];
        UNROLL_FOR(int c = 0; c < 4; c++) {
            const int64_t row = place + c / 2 * level->width + c % 2;
            const int used = s->factor[c][e] != 0;
            s->from[c][e] = (gradient ? s->read[c][e] : used) ? v + row * a->v.row : (const char *)s->zeros;
            if (to) s->to[c][e] = used ? to + row * dv->row : (char *)s->unused;
            /* Asked for ahead: 14% on a core whose second-level cache v is larger than. More lines gain nothing. */
            __builtin_prefetch(s->from[c][e]);
            if (c % 2 == 0) __builtin_prefetch(s->from[c][e] + 64);
        }
    }
}

/* sums (nv vectors, or n < LANES numbers) += samples of points e .. end - 1, `offset` bytes into the rows. */
INLINE void add_samples(fa_dtype dtype, int nv, const deformable_scratch *s, int64_t e, int64_t end, int64_t offset,
                        int64_t n, lane *sums)
{
    v_t acc[2][4]; /* of the left places, and of the right ones */
    UNROLL_FOR(int u = 0; u < nv; u++) acc[0][u] = v_load(sums + u * LANES), acc[1][u] = v_splat(0);
    for (; e < end; e++)
        UNROLL_FOR(int c = 0; c < 4; c++) {
            const v_t factor = v_splat(s->factor[c][e]);
            const char *from = s->from[c][e] + offset;
            UNROLL_FOR(int u = 0; u < nv; u++) {
                const char *next = from + u * LANES * dtype_size(dtype);
                const v_t x = nv == 1 ? v_load_as_part(dtype, next, n) : v_load_as(dtype, next);
                acc[c % 2][u] = v_fma(factor, x, acc[c % 2][u]);
            }
        }
    UNROLL_FOR(int u = 0; u < nv; u++) v_store(sums + u * LANES, acc[0][u] + acc[1][u]);
}

/* The parts of points e .. end - 1 (+)= products of s->row with their places: nv vectors from column j on. */
INLINE void add_dots(fa_dtype dtype, int nv, const deformable_scratch *s, int64_t e, int64_t end, int64_t j, int64_t n)
{
    v_t dout[4];
    UNROLL_FOR(int u = 0; u < nv; u++) dout[u] = v_load(s->row + j + u * LANES);
    for (; e < end; e++)
        UNROLL_FOR(int c = 0; c < 4; c++) {
            lane *part = s->parts + (c * BLOCK_POINTS + e) * LANES;
            v_t sum = j ? v_load(part) : v_splat(0);
            UNROLL_FOR(int u = 0; u < nv; u++) {
                const char *next = s->from[c][e] + (j + u * LANES) * dtype_size(dtype);
                const v_t x = nv == 1 ? v_load_as_part(dtype, next, n) : v_load_as(dtype, next);
                sum = v_fma(dout[u], x, sum);
            }
            v_store(part, sum);
        }
}

/* Where points e .. end - 1 add, += their factors times s->row. */
INLINE void add_shares(int nv, const deformable_scratch *s, int64_t e, int64_t end, int64_t j, int64_t n)
{
    v_t dout[4];
    UNROLL_FOR(int u = 0; u < nv; u++) dout[u] = v_load(s->row + j + u * LANES);
    for (; e < end; e++)
        UNROLL_FOR(int c = 0; c < 4; c++) {
            const v_t factor = v_splat(s->factor[c][e]);
            lane *to = (lane *)s->to[c][e] + j;
            UNROLL_FOR(int u = 0; u < nv; u++) {
                const v_t sum = nv == 1 ? v_load_part(to, n) : v_load(to + u * LANES);
                v_store_part(to + u * LANES, v_fma(factor, dout[u], sum), nv == 1 ? n : LANES);
            }
        }
}

/* EACH_PIECE(n, piece): piece with literal nv, at columns j of n: most vectors first. */
#define EACH_PIECE(n, ...)                                                                                             \
    for (int64_t j = 0; j < (n);) {                                                                                    \
        if ((n) - j >= 4 * LANES) WITH_LITERAL(nv, 4, __VA_ARGS__; j += nv * LANES)                                    \
        else if ((n) - j >= 2 * LANES) WITH_LITERAL(nv, 2, __VA_ARGS__; j += nv * LANES)                               \
        else WITH_LITERAL(nv, 1, __VA_ARGS__; j += nv * LANES)                                                         \
    }

/* s->row += what is sampled for query number r of the block. */
INLINE void add_row_samples(fa_dtype dtype, int64_t n, int64_t r, const deformable_scratch *s)
{
    const int64_t e = r * s->n, end = e + s->n;
    EACH_PIECE(n, add_samples(dtype, nv, s, e, end, j * dtype_size(dtype), n - j, s->row + j));
    if (!s->any_nan) return;
    lane nan = 0;
    for (int64_t p = e; p < end; p++) nan += s->nan[p];
    for (int64_t j = 0; j < n; j++) s->row[j] += nan;
}

/* Of the points of query number r, whose dout is s->row: the parts, and what they add to dv; one after the other, for a
 * load waits for a store before it whose address ends in the same 12 bits. */
INLINE void add_row_gradients(fa_dtype dtype, int64_t n, int64_t r, int products, int shares,
                              const deformable_scratch *s)
{
    const int64_t e = r * s->n, end = e + s->n;
    if (products) EACH_PIECE(n, add_dots(dtype, nv, s, e, end, j, n - j));
    if (shares) EACH_PIECE(n, add_shares(nv, s, e, end, j, n - j));
}

/* Whether the task is to end, asked before so many points; `done` is -1 from then on. */
INLINE int over(const fa_deformable_args *a, int64_t points, deformable_scratch *s)
{
    if ((s->done += points * a->head_dim) < DEFORMABLE_ASKS) return 0;
    s->done = given_up(a->watch) ? -1 : 0;
    return s->done < 0;
}

/* Queries of a block whose n points each are the same for many queries, at least one. */
INLINE int64_t queries_of(int64_t n) { return larger(1, BLOCK_POINTS / larger(1, n)); }

static int64_t deformable_scratch_bytes(const fa_deformable_args *a)
{
    return take_deformable_scratch(&(arena){0}, a, 0, &(deformable_scratch){0});
}

/* Queries i .. end - 1 of a head. */
static void sample_queries(const fa_deformable_args *a, int64_t b, int64_t h, int64_t i, int64_t end,
                           deformable_scratch *s)
{
    for (int64_t rows; i < end; i += rows) {
        rows = smaller(queries_of(a->points), end - i);
        for (int64_t first = 0; first == 0 || first < a->points; first += BLOCK_POINTS) {
            const int64_t n = smaller(BLOCK_POINTS, a->points - first);
            if (over(a, n * rows, s)) return;
            lay_points(a, first, n, rows, s);
            place_points(a, b, h, i, 0, NULL, s);
            for (int64_t r = 0; r < rows; r++) { /* where there are several, they have all points here */
                if (first == 0) memset(s->row, 0, round_up(a->head_dim, LANES) * sizeof(lane));
                WITH_DTYPE(a->v.dtype, dtype, add_row_samples(dtype, a->head_dim, r, s));
                if (first + n == a->points) store_row(a->v.dtype, s->row, a->head_dim, 1, at(&a->out, b, h, i + r, 0));
            }
        }
    }
}

/* Whether the heads of a row of v lie side by side. Heads of a query often sample much the same rows: whose pages, and
 * whose sets of a cache, they then share, and so they take turns. Else a head comes after the other. */
INLINE int heads_take_turns(const fa_deformable_args *a)
{
    return larger(a->v.head, -a->v.head) < larger(a->v.row, -a->v.row);
}

/* Units [begin, end) of (batch, heads, ceil(len_q / FA_DEFORMABLE_QUERIES)), or where heads take turns, heads last. */
static void deformable_run(const fa_deformable_args *a, int64_t begin, int64_t end, void *scratch)
{
    deformable_scratch s = {0};
    ready_deformable_scratch(scratch, a, 0, &s);
    const int64_t blocks = ceil_div(a->len_q, FA_DEFORMABLE_QUERIES), each = blocks * a->heads;
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t b = unit / each, rest = unit % each;
        const int64_t h = heads_take_turns(a) ? rest % a->heads : rest / blocks;
        const int64_t i = (heads_take_turns(a) ? rest / a->heads : rest % blocks) * FA_DEFORMABLE_QUERIES;
        sample_queries(a, b, h, i, smaller(a->len_q, i + FA_DEFORMABLE_QUERIES), &s);
        if (s.done < 0) return;
    }
}

static int64_t deformable_grad_scratch_bytes(const fa_deformable_grad_args *g)
{
    return take_deformable_scratch(&(arena){0}, &g->forward, 1, &(deformable_scratch){0});
}

/* s->dx, dy and dw of the block's points, of the sums of their parts. */
static void finish_points(const fa_deformable_args *a, const deformable_scratch *s)
{
    for (int64_t e = 0; e < s->n * s->rows; e += LANES) {
        const v_t width = v_load(s->width + e), height = v_load(s->height + e), w = v_load(s->w + e);
        const sides of_x = sides_of(v_load(s->x + e), width, a->discrete);
        const sides of_y = sides_of(v_load(s->y + e), height, a->discrete);
        v_t dx = v_splat(0), dy = dx, dw = dx;
        UNROLL_FOR(int c = 0; c < 4; c++) {
            v_t part[LANES]; /* 0 where nothing was read */
            UNROLL_FOR(int l = 0; l < LANES; l++) part[l] = v_load(s->parts + (c * BLOCK_POINTS + e + l) * LANES);
            const v_t product = v_sum_each(part), wx = of_x.weight[c % 2], wy = of_y.weight[c / 2];
            const v_t by_x = v_select(wy != 0, wy * product, v_splat(0));
            const v_t by_y = v_select(wx != 0, wx * product, v_splat(0));
            dw += v_select((wx != 0) & (wy != 0), wx * wy * product, v_splat(0));
            dx = c % 2 ? dx + by_x : dx - by_x;
            dy = c / 2 ? dy + by_y : dy - by_y;
        }
        const vi_t moves = a->discrete ? (vi_t){0} : w != 0;
        const v_t nan = v_load(s->nan + e);
        v_store(s->dx + e, v_select(moves, dx * width * w, v_splat(0)) + nan);
        v_store(s->dy + e, v_select(moves, dy * height * w, v_splat(0)) + nan);
        v_store(s->dw + e, dw + nan);
    }
}

/* Gradients of points begin .. end - 1, those of one level, of queries i .. last - 1 of a head. */
static void differentiate_queries(const fa_deformable_grad_args *g, int64_t b, int64_t h, int64_t i, int64_t last,
                                  int64_t begin, int64_t end, deformable_scratch *s)
{
    const fa_deformable_args *a = &g->forward;
    const int sums = g->dlocations.data || g->dweights.data;
    for (int64_t rows; i < last; i += rows) {
        rows = smaller(queries_of(end - begin), last - i);
        for (int64_t first = begin; first < end; first += BLOCK_POINTS) {
            const int64_t n = smaller(BLOCK_POINTS, end - first);
            if (over(a, n * rows, s)) return;
            lay_points(a, first, n, rows, s);
            place_points(a, b, h, i, 1, &g->dv, s);
            for (int64_t r = 0; r < rows; r++) {
                load_row(a->v.dtype, at(&g->dout, b, h, i + r, 0), a->head_dim, 1, s->row);
                WITH_DTYPE(a->v.dtype, dtype, add_row_gradients(dtype, a->head_dim, r, sums, g->dv.data != NULL, s));
            }
            if (sums) finish_points(a, s);
            for (int64_t r = 0, e = 0; sums && r < rows; r++, e += n) {
                lane_u *dxy = g->dlocations.data ? (lane_u *)at(&g->dlocations, b, h, i + r, 0) + 2 * first : NULL;
                lane_u *dw = g->dweights.data ? (lane_u *)at(&g->dweights, b, h, i + r, 0) + first : NULL;
                for (int64_t p = 0; dxy && p < n; p++) dxy[2 * p] = s->dx[e + p], dxy[2 * p + 1] = s->dy[e + p];
                for (int64_t p = 0; dw && p < n; p++) dw[p] = s->dw[e + p];
            }
        }
    }
}

/* Task (batch, levels): the gradients of a level's points, and of its rows of v, of heads [first, end). */
static void deformable_grad_run(const fa_deformable_grad_args *g, int64_t task, int64_t first, int64_t end,
                                void *scratch)
{
    const fa_deformable_args *a = &g->forward;
    const int64_t level = task % a->n_levels, b = task / a->n_levels;
    const int64_t begin = level ? a->levels[level - 1].end : 0, last = a->levels[level].end;
    const int64_t each = heads_take_turns(a) ? FA_DEFORMABLE_QUERIES : a->len_q;
    deformable_scratch s = {0};
    ready_deformable_scratch(scratch, a, 1, &s);
    for (int64_t i = 0; i < a->len_q; i += each)
        for (int64_t h = first; h < end; h++) {
            differentiate_queries(g, b, h, i, smaller(a->len_q, i + each), begin, last, &s);
            if (s.done < 0) return;
        }
}

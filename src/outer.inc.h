/* The gradient of a linear map's weight, out (n, k) = a (m, n)^T b (m, k): a sum over rows of outer products.
 *
 *   for each piece of MAX_DEPTH rows
 *     copy the task's columns of b, panel by panel          they stay in the second-level cache
 *     for each strip of LINEAR_ROWS columns of a
 *       copy it                                             it stays in the first-level cache
 *       for each panel
 *         out (strip, PANEL) += strip^T panel               in registers
 *
 * By tiles a strip has AMX_STRIP columns and is transposed, a piece has 2 MAX_DEPTH rows, and sums come by way of memory.
 *
 * The lanes are columns of b; a is broadcast. A task is some columns of each. It goes through all rows in order, so that
 * the bits depend neither on the tasks nor on who runs them. What is copied next, lines far apart, is prefetched while
 * products are computed: without that, copies took a quarter of the time.
 *
 * Literals  nx: 1 .. LINEAR_ROWS. bf16: 1 only if V_BF16_DOT. dtype.
 * Exports   outer_plan, outer_run. */
#pragma once
#include "interface/outer.h"
#include "linear_pass.inc.h"
#if V_AMX
#include "tile_amx.inc.h"
#endif

/* Columns of b that a task has at most: a piece of them takes 400 KB, and those that come next as much. */
#define OUTER_B (12 * PANEL)
#define OUTER_TASKS 3        /* a thread at least: the more there are, the more often a and b are copied */
#define OUTER_ASKS (1 << 20) /* products of each row between two calls of given_up(): a fraction of a millisecond */
#define STRIP_VECTORS ((LINEAR_ROWS + LANES - 1) / LANES)

/* Of a strip that tiles take: its columns, and the bytes between two, a cache line more than a piece of rows has. */
#define AMX_STRIP 32
#define AMX_STRIP_ROW (4 * MAX_DEPTH + 64)

/* Columns of a strip. */
INLINE int64_t strip_columns(int bf16) { return V_AMX && bf16 ? AMX_STRIP : LINEAR_ROWS; }

/* Rows that are prefetched, one a step, with `bf16` two. */
typedef struct {
    const char *line;
    int64_t row;
} rows_ahead;

/* out (nx, GROUP) = or += the product of one pass. */
typedef struct {
    const lane *x; /* (depth, nx), side by side */
    const lane *y; /* (depth, PANEL), from a column of the panel on */
    int64_t depth; /* with `bf16` in pairs */
    int more;
    int64_t columns; /* of out that there are from here on */
    lane *out;
    int64_t out_row; /* lanes */
    rows_ahead ahead;
} outer_sum;

INLINE void tile_sum(int nx, int bf16, const outer_sum *p)
{
    v_t acc[MR_MAX][NV_MAX];
    const char *x = (const char *)p->x, *ahead = p->ahead.line;
    const lane *y = p->y;
    UNROLL_FOR(int j = 0; j < nx; j++)
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) {
            acc[j][u] = v_splat(0);
            if (p->more && u * LANES < p->columns) __builtin_prefetch(p->out + j * p->out_row + u * LANES, 1, 2);
        }
    UNROLL_2_FOR(int64_t d = 0; d < p->depth; d++, y += PANEL, x += nx * sizeof(lane)) {
        v_t row[NV_MAX];
        UNROLL_FOR(int i = 0; i < 1 + bf16; i++, ahead += p->ahead.row) __builtin_prefetch(ahead, 0, 2);
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) row[u] = v_load(y + u * LANES);
        UNROLL_FOR(int j = 0; j < nx; j++) {
            const v_t element = v_splat(*(const lane_u *)(x + j * sizeof(lane)));
            UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) acc[j][u] = v_madd(bf16, element, row[u], acc[j][u]);
        }
    }
    UNROLL_FOR(int j = 0; j < nx; j++)
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) {
            lane *to = p->out + j * p->out_row + u * LANES;
            const int64_t left = p->columns - u * LANES;
            if (left <= 0) break;
            if (p->more) acc[j][u] += v_load_part(to, left);
            v_store_part(to, acc[j][u], left);
        }
}

static void tile_sum_of(int bf16, int64_t nx, const outer_sum *p)
{
    if (bf16) WITH_ROWS(nx, LINEAR_ROWS, tile_sum, V_BF16_DOT, p);
    else WITH_ROWS(nx, LINEAR_ROWS, tile_sum, 0, p);
}

/* Copies nx columns of `rows` rows of a side by side; of an odd last row of pairs, the other half is 0. The last vector
 * of a row fills up the next one's place. sums (nx) = those of the rows. */
INLINE void copy_strip(int bf16, fa_dtype dtype, const fa_outer_args *a, int64_t row, int64_t rows, int64_t column,
                       int64_t nx, lane *to, lane *sums)
{
    const int64_t size = dtype_size(dtype);
    const char *from = a->a + row * a->a_row + column * size;
    v_t sum[MR_MAX];
    UNROLL_FOR(int i = 0; i < STRIP_VECTORS; i++) sum[i] = v_splat(0);
    for (int64_t r = 0; r < rows; r += 1 + bf16, from += (1 + bf16) * a->a_row, to += nx)
        UNROLL_FOR(int i = 0; i < STRIP_VECTORS; i++) {
            const int64_t left = a->n - column - i * LANES;
            if (i * LANES >= nx) break;
            v_t x = v_load_as_part(dtype, from + i * LANES * size, left), next = v_splat(0);
            sum[i] += x;
            if (bf16) {
                if (r + 1 < rows) next = v_load_as_part(dtype, from + a->a_row + i * LANES * size, left);
                sum[i] += next;
                x = v_pack_bf16(x, next);
            }
            v_store(to + i * LANES, x);
        }
    UNROLL_FOR(int i = 0; i < STRIP_VECTORS; i++) v_store(sums + i * LANES, sum[i]);
}

#if V_AMX
/* to (nx, rows) = those columns of `rows` rows of a, in pairs, as tiles load them: up to a whole step of rows 0. */
INLINE void turn_strip(fa_dtype dtype, const fa_outer_args *a, int64_t row, int64_t rows, int64_t column, int64_t nx,
                       lane *to, lane *sums)
{
    const int64_t size = dtype_size(dtype);
    const char *from = a->a + row * a->a_row + column * size;
    for (int64_t c = 0; c < nx; c += LANES, from += LANES * size, sums += LANES) {
        const int64_t left = a->n - column - c;
        v_t sum = v_splat(0);
        for (int64_t r = 0; r < rows; r += 2 * LANES) {
            v_t pairs[LANES];
            UNROLL_FOR(int i = 0; i < LANES; i++) {
                const char *x = from + (r + 2 * i) * a->a_row;
                v_t first = v_splat(0), second = first;
                if (r + 2 * i < rows) first = v_load_as_part(dtype, x, left);
                if (r + 2 * i + 1 < rows) second = v_load_as_part(dtype, x + a->a_row, left);
                sum = sum + first + second;
                pairs[i] = v_pack_bf16(first, second);
            }
            v_transpose(pairs);
            char *step = (char *)to + c * AMX_STRIP_ROW + r * 2;
            UNROLL_FOR(int i = 0; i < LANES; i++) v_store(step + i * AMX_STRIP_ROW, pairs[i]);
        }
        v_store(sums, sum);
    }
}
#endif

/* Of b, panel by panel: (panels, MAX_DEPTH, PANEL). Behind the last column, and up to a whole step of rows, stand zeros. */
INLINE void copy_panels(int bf16, fa_dtype dtype, const fa_outer_args *a, int64_t row, int64_t rows, int64_t column,
                        int64_t columns, lane *to)
{
    const int64_t size = dtype_size(dtype), whole = round_up(rows, key_step(bf16));
    const char *from = a->b + row * a->b_row + column * size;
    for (int64_t r = 0; r < whole; r += 1 + bf16, from += (1 + bf16) * a->b_row, to += PANEL)
        for (int64_t c = 0; c < round_up(columns, PANEL); c += LANES) {
            const int64_t left = r < rows ? a->k - column - c : 0;
            v_t y = v_splat(0), next = y;
            if (left > 0) y = v_load_as_part(dtype, from + c * size, left);
            if (bf16 && left > 0 && r + 1 < rows) next = v_load_as_part(dtype, from + a->b_row + c * size, left);
            v_store(to + c / PANEL * (MAX_DEPTH * PANEL) + c % PANEL, bf16 ? v_pack_bf16(y, next) : y);
        }
}

typedef struct {
    lane *strip, *panels, *sums, *acc;
} outer_scratch;

static int64_t take_outer_scratch(arena *from, const fa_outer_plan *plan, outer_scratch *scratch)
{
    const int64_t of_tiles = V_AMX ? AMX_STRIP * AMX_STRIP_ROW / (int64_t)sizeof(lane) : 0;
    CUT(from, scratch->strip, larger(of_tiles, LINEAR_ROWS * MAX_DEPTH + LANES));
    CUT(from, scratch->panels, plan->b_columns * MAX_DEPTH);
    CUT(from, scratch->sums, larger(STRIP_VECTORS * LANES, V_AMX ? AMX_STRIP : 0));
    CUT(from, scratch->acc, V_AMX ? AMX_STRIP * PANEL : 0);
    return from->used;
}

/* Of all grids of enough tasks, that which copies least: each column of a is copied for each task in b's direction, and
 * the other way round. */
static void outer_plan(const fa_outer_args *a, int threads, fa_outer_plan *plan)
{
    const int64_t wanted = threads > 1 ? OUTER_TASKS * threads : 1, each = strip_columns(a->pairs);
    const int64_t strips = larger(1, ceil_div(a->n, each));
    const int64_t panels = larger(1, ceil_div(a->k, PANEL)), least = ceil_div(panels, OUTER_B / PANEL);
    int64_t a_tasks = 1, least_copies = INT64_MAX;
    for (int64_t b = least; b <= larger(least, smaller(panels, wanted)); b++) {
        const int64_t with = smaller(strips, ceil_div(wanted, b)), copies = a->n * b + a->k * with;
        if (with * b < smaller(wanted, strips * panels) && b < panels) continue;
        if (copies < least_copies) least_copies = copies, plan->b_tasks = b, a_tasks = with;
    }
    plan->a_columns = ceil_div(strips, a_tasks) * each;
    plan->b_columns = ceil_div(panels, plan->b_tasks) * PANEL;
    plan->b_tasks = larger(1, ceil_div(a->k, plan->b_columns));
    plan->n_tasks = ceil_div(a->n, plan->a_columns) * plan->b_tasks;
    plan->scratch_bytes = take_outer_scratch(&(arena){0}, plan, &(outer_scratch){0});
    plan->flops = 2.0 * (double)a->m * (double)a->n * (double)larger(1, a->k);
}

/* Columns of a task, and the rows it is at. */
typedef struct {
    int64_t first_a, end_a, first_b, columns_b;
    int64_t row, rows;
} outer_place;

#if V_AMX
/* outer_strip by tiles: sums of a panel come by way of scratch->acc, and the next strip is asked for meanwhile. */
static void tiles_strip(const fa_outer_args *a, const outer_place *at, int64_t column, int64_t nx,
                        const outer_scratch *scratch)
{
    const int64_t size = dtype_size(a->a_dtype), next = column + nx;
    const int64_t panels = ceil_div(at->columns_b, PANEL), share = ceil_div(at->rows, larger(1, panels));
    const int more = a->more || at->row;
    outer_product p = {.x = (const char *)scratch->strip, .x_row = AMX_STRIP_ROW, .pitch = PANEL, .factor = 1};
    p.depth = ceil_div(at->rows, 2), p.out = scratch->acc;
    amx_begin();
    for (int64_t i = 0; i < panels; i++) {
        const int64_t left = at->columns_b - i * PANEL, first = i * share;
        p.y = scratch->panels + i * (MAX_DEPTH * PANEL);
        amx_outer(2, nx, &p);
        if (next < at->end_a)
            prefetch_rows(a->a + (at->row + first) * a->a_row + next * size, a->a_row, smaller(share, at->rows - first),
                          smaller(AMX_STRIP, at->end_a - next) * size);
        for (int64_t j = 0; j < nx; j++)
            for (int64_t c = 0; c < smaller(left, PANEL); c += LANES) {
                lane *to = (lane *)(a->out + (column + j) * a->out_row) + at->first_b + i * PANEL + c;
                const v_t sum = v_load(scratch->acc + j * PANEL + c);
                v_store_part(to, more ? sum + v_load_part(to, left - c) : sum, left - c);
            }
    }
    amx_end();
}
#endif

/* out of one strip, nx columns of a from `column` on. Its first panel's product prefetches the next strip, those of the
 * others for a line each of the next rows of b. */
INLINE void outer_strip(int bf16, const fa_outer_args *a, const outer_place *at, int64_t column, int64_t nx,
                        int64_t *line, const outer_scratch *scratch)
{
    const int64_t a_size = dtype_size(a->a_dtype), b_size = dtype_size(a->b_dtype), next = at->row + at->rows;
#if V_AMX
    if (bf16) {
        tiles_strip(a, at, column, nx, scratch);
        return;
    }
#endif
    for (int64_t c = 0; c < at->columns_b; c += GROUP) {
        outer_sum p = {
            .x = scratch->strip,
            .y = scratch->panels + c / PANEL * (MAX_DEPTH * PANEL) + c % PANEL,
            .depth = bf16 ? ceil_div(at->rows, 2) : at->rows,
            .more = a->more || at->row,
            .columns = at->columns_b - c,
            .out = (lane *)(a->out + column * a->out_row) + at->first_b + c,
            .out_row = a->out_row / (int64_t)sizeof(lane),
            .ahead = {(const char *)scratch->strip, 0},
        };
        if (c == 0 && column + nx < at->end_a) {
            const int64_t last = smaller(column + nx + LINEAR_ROWS, at->end_a) - 1;
            p.ahead = (rows_ahead){a->a + at->row * a->a_row + last * a_size, a->a_row};
        } else if (next + at->rows <= a->m && *line < at->columns_b * b_size) {
            p.ahead = (rows_ahead){a->b + next * a->b_row + at->first_b * b_size + *line, a->b_row};
            *line += 64;
        }
        tile_sum_of(bf16, nx, &p);
    }
}

/* Copies the strip, as products take it. */
INLINE void load_strip(int bf16, fa_dtype dtype, const fa_outer_args *a, const outer_place *at, int64_t column,
                       int64_t nx, const outer_scratch *scratch)
{
#if V_AMX
    if (bf16) {
        turn_strip(dtype, a, at->row, at->rows, column, nx, scratch->strip, scratch->sums);
        return;
    }
#endif
    copy_strip(bf16, dtype, a, at->row, at->rows, column, nx, scratch->strip, scratch->sums);
}

INLINE void outer_rows(int bf16, const fa_outer_args *a, const fa_outer_plan *plan, int64_t task, void *memory)
{
    outer_scratch scratch;
    take_outer_scratch(&(arena){.memory = memory}, plan, &scratch);
    const int64_t most = (1 + bf16) * MAX_DEPTH;
    int64_t done = 0; /* products of each column of a, since it last asked */
    outer_place at = {.first_a = task / plan->b_tasks * plan->a_columns,
                      .first_b = task % plan->b_tasks * plan->b_columns};
    at.end_a = smaller(a->n, at.first_a + plan->a_columns);
    at.columns_b = smaller(a->k - at.first_b, plan->b_columns);
    do { /* without rows, out becomes 0 */
        at.rows = smaller(a->m - at.row, most);
        WITH_DTYPE(a->b_dtype, dtype,
                   copy_panels(bf16, dtype, a, at.row, at.rows, at.first_b, at.columns_b, scratch.panels));
        int64_t line = 0, nx = 0;
        for (int64_t c = at.first_a; c < at.end_a; c += nx) {
            if ((done += at.rows * at.columns_b) > OUTER_ASKS) {
                if (given_up(a->watch)) return;
                done = 0;
            }
            nx = ceil_div(at.end_a - c, ceil_div(at.end_a - c, strip_columns(bf16)));
            WITH_DTYPE(a->a_dtype, dtype, load_strip(bf16, dtype, a, &at, c, nx, &scratch));
            for (int64_t i = 0; a->sums && !at.first_b && i < nx; i++) {
                lane *sum = (lane *)a->sums + c + i;
                *sum = a->more || at.row ? *sum + scratch.sums[i] : scratch.sums[i];
            }
            outer_strip(bf16, a, &at, c, nx, &line, &scratch);
        }
        at.row += most;
    } while (at.row < a->m);
}

static void outer_run(const fa_outer_args *a, const fa_outer_plan *plan, int64_t task, void *memory)
{
    if (V_BF16_DOT && a->pairs) outer_rows(V_BF16_DOT, a, plan, task, memory);
    else outer_rows(0, a, plan, task, memory);
}

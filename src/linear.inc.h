/* The layers' matrix product, out (m, n) = activation(x (m, k) w^T + bias) + residual, over packed panels of w:
 *
 *   for each block of LINEAR_DEPTH input features           one accumulator sums no more products
 *     copy x's part, as lanes or pairs of bfloat16          unless it is read in place: x_in_place
 *     for each panel of the task                            its part stays in the first-level cache
 *       widen the part, unless it is lanes already          int8; bfloat16 without the dot product
 *       for each LINEAR_ROWS rows of the task
 *         acc (rows, PANEL) += x (rows, block) part (block, PANEL)
 *   for each panel (gated: each pair of panels), each row
 *     out = activation(acc scale + bias) [up] + residual
 *
 * The lanes are output features; x is broadcast, a value or a pair at a time. A row's bits depend on that row alone.
 *
 * Requires  basics.inc.h, convert.inc.h, tile.inc.h, activation.inc.h.
 * Literals  columns: a multiple of GROUP. dot: 1 only if V_BF16_DOT. triangular: 0, 1. weight: FA_I8, FA_BF16. rows of
 *           narrow_pass: 1 .. NARROW_ROWS. activation: any fa_activation.
 * Exports   PANEL, GROUP, multiply (linear attention has such products, too); linear_plan, linear_run. */
#define PANEL (FA_PANEL_BYTES / (int64_t)sizeof(lane))

/* A pass has LINEAR_ROWS x LINEAR_NV accumulators, and needs LINEAR_NV vectors and a broadcast beside them. */
#define GROUP (LINEAR_NV * LANES) /* columns of a pass */
_Static_assert(LINEAR_ROWS *LINEAR_NV + LINEAR_NV + 1 <= V_REGISTERS, "the tile spills");
_Static_assert(LINEAR_ROWS <= TILE_MAX && PANEL % GROUP == 0, "passes fill a panel");

/* Input features of a block: a part of a panel is then 32 KB. With 128 it would leave room in the first-level cache,
 * but accumulators would move twice as often: 1 to 3% slower. */
#define LINEAR_DEPTH 256
_Static_assert(LINEAR_DEPTH <= MAX_DEPTH, "one accumulator sums no more products");

/* Bytes from row to row of x's copy: a line more than the row has. Rows a multiple of 4 KB apart would meet in the same
 * sets of the first-level cache. */
#define X_ROW (LINEAR_DEPTH * (int64_t)sizeof(lane) + 64)

/* Rows and panels of a task at most. The accumulators, 256 KB in float32, stay in the second-level cache. The fewer the
 * rows, the more often a panel comes from further away; but with 192, 4096 rows of 384 features are 5% slower. */
#define LINEAR_TASK_ROWS 128
#define LINEAR_TASK_PANELS 16
#define LINEAR_TASKS_PER_THREAD 6

#define NARROW_ROWS 4  /* rows up to which narrow weights are widened in registers: memory would cost more */
#define LINEAR_ASKS 16 /* blocks of input features between two calls of given_up() */

typedef struct {
    char *x;    /* (rows, LINEAR_DEPTH): lanes or pairs of bfloat16, rows X_ROW apart */
    lane *wide; /* (LINEAR_DEPTH, PANEL): a panel's part, widened */
    lane *acc;  /* (panels, rows, PANEL) */
} linear_scratch;

static int64_t take_linear_scratch(arena *from, const fa_linear_plan *plan, linear_scratch *scratch)
{
    CUT(from, scratch->x, plan->rows * X_ROW);
    CUT(from, scratch->wide, LINEAR_DEPTH * PANEL);
    CUT(from, scratch->acc, (int64_t)plan->panels * plan->rows * PANEL);
    return from->used;
}

INLINE int linear_dot(const fa_linear_args *a) { return V_BF16_DOT && a->weight == FA_BF16; }

/* Whether weights must be widened to lanes: int8, and bfloat16 without the dot product. */
INLINE int is_narrow(const fa_linear_args *a) { return LANE_BITS == 32 && a->weight != FA_F32 && !linear_dot(a); }

/* Bytes of a panel's row, which is one input feature, or two where weights are pairs of bfloat16. */
INLINE int64_t panel_row(fa_dtype weight) { return weight == FA_I8 ? PANEL : FA_PANEL_BYTES; }

/* Whether x is read where it is: if it is lanes, and its rows do not meet in one set of the first-level cache. Pairs of
 * weights would read past a row with an odd k. Copying costs 2 to 13% of the time, with few rows up to 40%. */
INLINE int x_in_place(const fa_linear_args *a)
{
    return a->dtype == LANE_DTYPE && !linear_dot(a) && a->x_row % 4096 && !(a->weight == FA_BF16 && a->k % 2);
}

static void linear_plan(const fa_linear_args *a, int threads, fa_linear_plan *plan)
{
    const int maps = 1 + a->gated;
    const int64_t panels = maps * ceil_div(a->n, PANEL), row_blocks = larger(1, ceil_div(a->m, LINEAR_TASK_ROWS));
    const int64_t share = panels * row_blocks / (threads * LINEAR_TASKS_PER_THREAD);
    const int64_t most = larger(maps, smaller(share, LINEAR_TASK_PANELS) / maps * maps);
    plan->rows = (int)ceil_div(a->m, row_blocks);
    plan->panel_tasks = ceil_div(panels, most);
    plan->panels = plan->panel_tasks ? (int)round_up(ceil_div(panels, plan->panel_tasks), maps) : maps;
    plan->n_tasks = plan->rows ? ceil_div(a->m, plan->rows) * plan->panel_tasks : 0;
    plan->scratch_bytes = take_linear_scratch(&(arena){0}, plan, &(linear_scratch){0});
    plan->flops = 2.0 * maps * a->m * a->n * a->k;
}

/* One pass: n rows of a product, GROUP columns. */
INLINE void multiply_pass(int dot, int fetch, int64_t n, const outer_product *p)
{
#define ROWS(rows)                                                                                                     \
    case rows:                                                                                                         \
        if (rows <= LINEAR_ROWS) tile_outer(rows, LINEAR_NV, dot, fetch, p, 0);                                        \
        break;
    switch (n) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
    }
}

/* Multiplies all rows, pass by pass. With `triangular`, row r needs whole->depth + r + 1 rows of y, so many are read.
 *
 * With one or two passes, the arithmetic takes no longer than memory takes to bring y. Fetching a line or two of
 * `ahead`, if it is not NULL, at every step then gains 15 to 50% where weights come from far away. With more passes it
 * costs more where weights are near than it gains where they are far. */
INLINE void multiply(int64_t columns, int dot, int triangular, int64_t rows, const outer_product *whole)
{
    const int64_t n_passes = ceil_div(rows, LINEAR_ROWS);
    const int64_t fetch = whole->ahead ? FA_PANEL_BYTES / 64 * GROUP / PANEL / n_passes : 0; /* lines a step */
    const char *ahead = whole->ahead;
    for (int64_t r = 0, passes = n_passes; passes; passes--) {
        const int64_t n = ceil_div(rows - r, passes); /* even passes: a last one of one row wastes most */
        for (int64_t c = 0; c < columns; c += GROUP) {
            outer_product p = *whole;
            p.x += r * p.x_row, p.y += c, p.out += r * p.pitch + c;
            p.depth += triangular ? r + n : 0;
            p.ahead = ahead;
            if (fetch == 2) multiply_pass(dot, 2, n, &p);
            else if (fetch == 1) multiply_pass(dot, 1, n, &p);
            else multiply_pass(dot, 0, n, &p);
            ahead += fetch * p.depth * 64;
        }
        r += n;
    }
}

/* One pass of at most NARROW_ROWS rows, and GROUP columns from c on, with the bits of multiply_pass. p->y is int8 or
 * pairs of bfloat16, and p->depth counts features. It fetches as many lines of `ahead` as y has. */
INLINE void narrow_pass(int rows, fa_dtype weight, int64_t c, const outer_product *p)
{
    const int64_t step = panel_row(weight);
    const char *y = (const char *)p->y + c * step / PANEL, *ahead = p->ahead;
    v_t sum[NARROW_ROWS][LINEAR_NV], low[LINEAR_NV], high[LINEAR_NV];
    UNROLL_FOR(int r = 0; r < rows; r++)
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) sum[r][u] = v_splat(0);
    for (int64_t d = 0; d < p->depth; d += 1 + (weight == FA_BF16), y += step, ahead += step) {
        UNROLL_FOR(int64_t line = 0; line < step; line += 64) __builtin_prefetch(ahead + line, 0, 2);
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) {
            if (weight == FA_I8) low[u] = v_load_i8(y + u * LANES);
            else v_unpair_bf16(v_load(y + u * V_BYTES), low + u, high + u);
        }
        UNROLL_FOR(int r = 0; r < rows; r++) {
            const lane_u *x = (const lane_u *)(p->x + r * p->x_row) + d;
            UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) {
                sum[r][u] = v_fma(v_splat(x[0]), low[u], sum[r][u]);
                if (weight == FA_BF16) sum[r][u] = v_fma(v_splat(x[1]), high[u], sum[r][u]);
            }
        }
    }
    UNROLL_FOR(int r = 0; r < rows; r++)
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) {
            lane *to = p->out + r * PANEL + c + u * LANES;
            v_store(to, p->more ? v_load(to) + sum[r][u] : sum[r][u]);
        }
}

INLINE void multiply_narrow(fa_dtype weight, int64_t rows, const outer_product *p)
{
    for (int64_t c = 0; c < PANEL; c += GROUP) switch (rows) {
        case 1: narrow_pass(1, weight, c, p); break;
        case 2: narrow_pass(2, weight, c, p); break;
        case 3: narrow_pass(3, weight, c, p); break;
        default: narrow_pass(4, weight, c, p);
        }
}

/* to (depth, PANEL) = a panel's part, int8 or pairs of bfloat16: with an odd depth a row more, of the last pair. */
static void widen_part(fa_dtype weight, const char *part, int64_t depth, lane *to)
{
    for (int64_t c = 0; weight == FA_I8 && c < depth * PANEL; c += LANES) v_store(to + c, v_load_i8(part + c));
    for (int64_t d = 0; weight == FA_BF16 && d < depth; d += 2, part += FA_PANEL_BYTES)
        for (int64_t c = 0; c < PANEL; c += LANES) {
            v_t low, high;
            v_unpair_bf16(v_load(part + c * (int64_t)sizeof(lane)), &low, &high);
            v_store(to + d * PANEL + c, low);
            v_store(to + (d + 1) * PANEL + c, high);
        }
}

/* Multiplies a block of x with a panel's part, p.y, by the kernel for these weights and this number of rows. */
INLINE void multiply_part(const fa_linear_args *a, int64_t rows, outer_product p, lane *wide)
{
    if (is_narrow(a) && rows <= NARROW_ROWS) {
        if (a->weight == FA_BF16) multiply_narrow(FA_BF16, rows, &p);
        else multiply_narrow(FA_I8, rows, &p);
        return;
    }
    if (is_narrow(a)) {
        widen_part(a->weight, (const char *)p.y, p.depth, wide);
        p.y = wide, p.ahead = NULL;
    }
    if (linear_dot(a)) multiply(PANEL, 1, 0, rows, &p);
    else multiply(PANEL, 0, 0, rows, &p);
}

/* Copies `features` elements of each row as lanes, or as pairs for the dot product. Weights may be pairs, too: behind
 * an odd number of elements stands a 0. */
static void copy_x(const fa_linear_args *a, const char *from, int64_t rows, int64_t features, char *to)
{
    for (int64_t r = 0; r < rows; r++, from += a->x_row, to += X_ROW) {
        if (linear_dot(a)) round_row(a->dtype, from, features, to);
        else load_row(a->dtype, from, features, 1, (lane *)to);
        if (!linear_dot(a) && features % 2) ((lane *)to)[features] = 0;
    }
}

/* out = activation(acc scale + bias) [(up scale + bias)] + residual: one row of the output features of one panel. If
 * gated, acc has the row of the gate, and `up` that of the panel that follows. */
INLINE void finish_panel(const fa_linear_args *a, fa_activation activation, int64_t row, int64_t panel, lane *acc,
                         const lane *up)
{
    const int64_t first = panel / (1 + a->gated) * PANEL, n = smaller(a->n - first, PANEL), size = dtype_size(a->dtype);
    const lane *scale = a->scales ? (const lane *)a->scales + panel * PANEL : NULL;
    const lane *bias = a->bias ? (const lane *)a->bias + first : NULL, *up_bias = bias ? bias + a->n : NULL;
    const char *residual = a->residual ? a->residual + row * a->residual_row + first * size : NULL;
    char *out = a->out + row * a->out_row + first * size;
    const int whole = n == PANEL && a->dtype == LANE_DTYPE;
    UNROLL_FOR(int64_t c = 0; c < PANEL; c += LANES) {
        if (c >= n) break;
        v_t y = v_load(acc + c);
        if (scale) y = y * v_load(scale + c);
        if (bias) y = y + v_load_part(bias + c, n - c);
        y = v_activate(activation, y);
        if (a->gated) {
            v_t factor = v_load(up + c);
            if (scale) factor = factor * v_load(scale + PANEL + c);
            if (bias) factor = factor + v_load_part(up_bias + c, n - c);
            y = y * factor;
        }
        if (whole && residual) y = y + v_load(residual + c * (int64_t)sizeof(lane));
        v_store(whole ? (lane *)out + c : acc + c, y);
    }
    if (whole) return;
    if (residual) add_row(a->dtype, residual, n, acc);
    store_row(a->dtype, acc, n, 1, out);
}

/* Goes row by row, so that out is written in long runs. */
INLINE void finish_rows(const fa_linear_args *a, fa_activation activation, int64_t panel, int64_t count, int64_t row,
                        int64_t rows, lane *acc)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < count; i += 1 + a->gated) {
            lane *of_row = acc + (i * rows + r) * PANEL;
            finish_panel(a, activation, row + r, panel + i, of_row, of_row + rows * PANEL);
        }
}

static void linear_run(const fa_linear_args *a, const fa_linear_plan *plan, int64_t task, void *memory)
{
    linear_scratch scratch;
    take_linear_scratch(&(arena){.memory = memory}, plan, &scratch);
    const int in_place = x_in_place(a), per_step = 1 + (a->weight == FA_BF16); /* features of a panel's row */
    const int64_t row = task / plan->panel_tasks * plan->rows, rows = smaller(a->m - row, plan->rows);
    const int64_t panel = task % plan->panel_tasks * plan->panels;
    const int64_t count = smaller((1 + a->gated) * ceil_div(a->n, PANEL) - panel, plan->panels);
    /* Steps are rows of a panel. A block of pairs that are widened has half as many: they become two products each. */
    const int64_t steps = ceil_div(a->k, per_step), block = is_narrow(a) ? LINEAR_DEPTH / per_step : LINEAR_DEPTH;
    for (int64_t s = 0; s < steps; s += block) {
        if (s && s % (LINEAR_ASKS * block) == 0 && given_up(a->watch)) return;
        const int64_t n = smaller(steps - s, block), features = smaller(a->k - s * per_step, n * per_step);
        const char *x = a->x + row * a->x_row + s * per_step * dtype_size(a->dtype);
        if (!in_place) copy_x(a, x, rows, features, scratch.x);
        for (int64_t i = 0; i < count; i++) {
            const int64_t next = i + 1 < count ? (panel + i + 1) * steps + s : panel * steps + s + n;
            const outer_product product = {
                .x = in_place ? x : scratch.x,
                .x_row = in_place ? a->x_row : X_ROW,
                .y = (const lane *)(a->panels + ((panel + i) * steps + s) * panel_row(a->weight)),
                .pitch = PANEL,
                .depth = linear_dot(a) ? n : features,
                .factor = 1,
                .more = s > 0,
                .ahead = a->panels + next * panel_row(a->weight),
                .out = scratch.acc + i * rows * PANEL,
            };
            multiply_part(a, rows, product, scratch.wide);
        }
    }
    if (!steps) memset(scratch.acc, 0, count * rows * FA_PANEL_BYTES);
    switch (a->activation) {
#define FA_ACTIVATION(constant, name, formula)                                                                         \
    case constant: finish_rows(a, constant, panel, count, row, rows, scratch.acc); break;
#include "activations.inc"
    default: finish_rows(a, FA_NONE, panel, count, row, rows, scratch.acc);
    }
}

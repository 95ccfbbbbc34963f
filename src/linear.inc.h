/* The layers' matrix product, out (m, n) = activation(x (m, k) w^T + bias) + residual, over packed panels:
 *
 *   for each block of LINEAR_DEPTH input features           one accumulator sums no more products
 *     copy x's part, as lanes or pairs of bfloat16       unless it is read in place: x_in_place
 *     for each panel of the task                         its part stays in the first-level cache
 *       widen the part, unless it is lanes already       int8; bfloat16 without the dot product
 *       for each LINEAR_ROWS rows of the task
 *         acc (rows, PANEL) += x (rows, block) part (block, PANEL)
 *   for each panel (gated: each pair), each row
 *     out = activation(acc scale + bias) [up] + residual
 *
 * The lanes are output features, x is broadcast, one value (bfloat16: one pair) at a time. A row's bits depend on
 * nothing but the row, whatever the tasks. */
#define PANEL (FA_PANEL_BYTES / (int64_t)sizeof(lane))

/* A pass has LINEAR_ROWS x LINEAR_NV accumulators, and needs as many vectors and a broadcast beside them. */
_Static_assert(LINEAR_ROWS *LINEAR_NV + LINEAR_NV + 1 <= V_REGISTERS, "the tile spills");
_Static_assert(LINEAR_ROWS <= TILE_MAX && FA_PANEL_BYTES % (LINEAR_NV * V_BYTES) == 0, "passes fill a panel");

/* Input features of a block: a part of a panel is 32 KB. 128, with which it would leave room in the first-level cache,
 * is 1 to 3% behind: it moves the accumulators twice as often. */
#define LINEAR_DEPTH 256
_Static_assert(LINEAR_DEPTH <= MAX_DEPTH, "one accumulator sums no more products");

/* Bytes from row to row of a copied part of x: a line more than the part, so that they do not meet in the same sets of
 * the first-level cache, as rows do that are a multiple of 4 KB apart. */
#define X_ROW (LINEAR_DEPTH * (int64_t)sizeof(lane) + 64)

/* Rows and panels of a task at most: acc (128, 16 panels), 256 KB in float32, stays in the second-level cache. The fewer
 * the rows, the more often a panel comes from further away; with 192, 4096 rows of 384 features are 5% behind. */
#define LINEAR_TASK_ROWS 128
#define LINEAR_TASK_PANELS 16
#define LINEAR_TASKS_PER_THREAD 6

/* Blocks of input features between the questions whether to give up. */
#define LINEAR_ASKS 16

typedef struct {
    char *x;    /* (rows, LINEAR_DEPTH) as lanes or bfloat16 pairs */
    lane *part; /* (LINEAR_DEPTH, PANEL), widened */
    lane *acc;  /* (panels, rows, PANEL) */
} linear_scratch;

INLINE int linear_dot(const fa_linear_args *a) { return V_BF16_DOT && a->weight == FA_BF16; }

/* Whether x is read where it is: lanes, in rows that do not meet in one set of the first-level cache. A half of a pair
 * behind its last feature is another row's, or nobody's. Copying cost 2 to 13% of the time, of few rows up to 40%. */
INLINE int x_in_place(const fa_linear_args *a)
{
    const int lanes = a->dtype == (LANE_BITS == 64 ? FA_F64 : FA_F32) && !linear_dot(a);
    return lanes && a->x_row % 4096 && !(a->weight == FA_BF16 && a->k % 2);
}

static int64_t linear_scratch_at(const fa_linear_plan *p, void *memory, linear_scratch *w)
{
    char *at = memory;
    w->x = at;
    at += p->rows * X_ROW;
    w->part = (lane *)at;
    at += LINEAR_DEPTH * FA_PANEL_BYTES;
    w->acc = (lane *)at;
    at += (int64_t)p->panels * p->rows * FA_PANEL_BYTES;
    return at - (char *)memory;
}

static void linear_plan(const fa_linear_args *a, int threads, fa_linear_plan *p)
{
    linear_scratch w;
    const int maps = 1 + a->gated;
    const int64_t panels = maps * ((a->n + PANEL - 1) / PANEL);
    const int64_t row_blocks = a->m > LINEAR_TASK_ROWS ? (a->m + LINEAR_TASK_ROWS - 1) / LINEAR_TASK_ROWS : 1;
    const int64_t share = panels * row_blocks / (threads * LINEAR_TASKS_PER_THREAD);
    p->rows = (int)((a->m + row_blocks - 1) / row_blocks);
    const int64_t most = share < maps ? maps : share < LINEAR_TASK_PANELS ? share / maps * maps : LINEAR_TASK_PANELS;
    p->panel_tasks = (panels + most - 1) / most;
    p->panels = p->panel_tasks ? (int)round_up((panels + p->panel_tasks - 1) / p->panel_tasks, maps) : maps;
    p->n_tasks = p->rows ? (a->m + p->rows - 1) / p->rows * p->panel_tasks : 0;
    p->scratch_bytes = linear_scratch_at(p, NULL, &w);
    p->flops = 2.0 * maps * a->m * a->n * a->k;
}

/* dst (n, PANEL) as lanes from a panel's part of int8, or from bfloat16 pairs: n of them, 2n input features. */
static void widen_part(fa_dtype weight, const char *part, int64_t n, lane *dst)
{
#if LANE_BITS == 32
    if (weight == FA_I8) {
        for (int64_t i = 0; i < n * PANEL; i += LANES) v_store(dst + i, v_load_i8(part + i));
        return;
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < PANEL; c += LANES) {
            v_t low, high;
            v_unpair_bf16(v_load(part + (i * PANEL + c) * (int64_t)sizeof(lane)), &low, &high);
            v_store(dst + 2 * i * PANEL + c, low);
            v_store(dst + (2 * i + 1) * PANEL + c, high);
        }
#else
    (void)weight, (void)part, (void)n, (void)dst;
#endif
}

/* acc (rows, LINEAR_NV vectors) = or with `more` += x (rows, depth) y (depth, the same), for rows <= LINEAR_ROWS; rows
 * of y and acc are `pitch` lanes apart. */
INLINE void tile_rows(int64_t pitch, int dot, int more, const char *x, int64_t x_row, int64_t rows, const lane *y,
                      int64_t depth, int fetch, const char *ahead, lane *acc)
{
    const outer_product p = {.x = x,
                             .x_row = x_row,
                             .y = y,
                             .pitch = pitch,
                             .depth = depth,
                             .factor = 1,
                             .more = more,
                             .ahead = ahead,
                             .out = acc};
#define ROWS(n)                                                                                                        \
    case n: tile_outer(n, LINEAR_NV, dot, fetch, &p, 0); break;
    switch (rows) {
        ROWS(1)
        ROWS(2)
        ROWS(3)
        ROWS(4)
        ROWS(5)
        ROWS(6)
#if LINEAR_ROWS == 12
        ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
    }
#undef ROWS
}

/* acc (rows, PANEL) = or with `more` += x (rows, depth) part (depth, PANEL).
 *
 * In one or two passes each line of the part is met once or twice, and the arithmetic takes no longer than memory does
 * to bring it: asking for the next part, `ahead` if there is one, a line or two at every step, gains 15 to 50% where
 * weights come from far away. With more passes it gains less than it costs where they do not. */
INLINE void block_linear(int dot, int more, const char *x, int64_t x_row, int64_t rows, const lane *part, int64_t depth,
                         const char *ahead, lane *acc)
{
    const int64_t all = (rows + LINEAR_ROWS - 1) / LINEAR_ROWS;
    const int64_t fetch = ahead ? FA_PANEL_BYTES / 64 * LINEAR_NV * LANES / PANEL / all : 0; /* lines a step */
    for (int64_t r = 0, passes = all; passes; passes--) {
        const int64_t n = (rows - r + passes - 1) / passes; /* even passes: a last one of one row wastes most */
        for (int64_t c = 0; c < PANEL; c += LINEAR_NV * LANES) {
#define FETCH(fetch)                                                                                                   \
    tile_rows(PANEL, dot, more, x + r * x_row, x_row, n, part + c, depth, fetch, ahead, acc + r * PANEL + c)
            if (fetch == 2) FETCH(2);
            else if (fetch == 1) FETCH(1);
            else FETCH(0);
#undef FETCH
            ahead += fetch * depth * 64;
        }
        r += n;
    }
}

/* y = activation(acc scale + bias) [(up scale + bias)] + residual: row `row` of output features [first, first + n) of
 * one panel, or of a gated pair, whose accumulators are acc and up, and its scales `scale` and scale + PANEL. */
INLINE void finish_panel(const fa_linear_args *a, fa_activation activation, int64_t row, int64_t first, int64_t n,
                         const lane *scale, lane *acc, const lane *up)
{
    const lane *bias = a->bias ? (const lane *)a->bias + first : NULL, *up_bias = bias ? bias + a->n : NULL;
    const int64_t size = dtype_size(a->dtype);
    const char *residual = a->residual ? a->residual + row * a->residual_row + first * size : NULL;
    char *out = a->out + row * a->out_row + first * size;
    const int whole = n == PANEL && a->dtype == (LANE_BITS == 64 ? FA_F64 : FA_F32);
    UNROLL_FOR(int64_t c = 0; c < PANEL; c += LANES) {
        const int64_t left = n - c;
        if (left <= 0) break;
#define AT(p) (left >= LANES ? v_load((p) + c) : v_load_n((p) + c, left))
        v_t y = v_load(acc + c);
        if (scale) y = y * v_load(scale + c);
        if (bias) y = y + AT(bias);
        y = v_activate(activation, y);
        if (a->gated) {
            v_t z = v_load(up + c);
            if (scale) z = z * v_load(scale + PANEL + c);
            if (bias) z = z + AT(up_bias);
            y = y * z;
        }
#undef AT
        if (whole && residual) y = y + v_load(residual + c * (int64_t)sizeof(lane));
        v_store(whole ? (lane *)out + c : acc + c, y);
    }
    if (whole) return;
    if (residual) add_row(a->dtype, residual, n, acc);
    store_row(a->dtype, acc, n, 1, out);
}

/* Rows up to which narrow weights are widened in registers: for so few, memory to widen them in costs more. */
#define NARROW_ROWS 4

/* acc (rows, LINEAR_NV) as tile_outer has it, bit for bit, from int8 or bfloat16 pairs; x (rows, features). Asks for
 * the lines of `ahead`, as many as there are in the part. */
INLINE void tile_narrow(int rows, fa_dtype weight, int more, const char *x, int64_t x_row, const char *part,
                        int64_t features, const char *ahead, lane *acc)
{
    const int64_t step_bytes = weight == FA_I8 ? PANEL : FA_PANEL_BYTES;
    v_t sum[NARROW_ROWS][LINEAR_NV], low[LINEAR_NV], high[LINEAR_NV];
    UNROLL_FOR(int r = 0; r < rows; r++)
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) sum[r][u] = v_splat(0);
    for (int64_t d = 0; d < features; d += 1 + (weight == FA_BF16), ahead += step_bytes) {
        UNROLL_FOR(int64_t line = 0; line < step_bytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) {
            if (weight == FA_I8) low[u] = v_load_i8(part + d * PANEL + u * LANES);
            else v_unpair_bf16(v_load(part + (d / 2 * PANEL + u * LANES) * (int64_t)sizeof(lane)), low + u, high + u);
        }
        UNROLL_FOR(int r = 0; r < rows; r++) {
            const lane_u *at = (const lane_u *)(x + r * x_row) + d;
            UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) {
                sum[r][u] = v_fma(v_splat(at[0]), low[u], sum[r][u]);
                if (weight == FA_BF16) sum[r][u] = v_fma(v_splat(at[1]), high[u], sum[r][u]);
            }
        }
    }
    UNROLL_FOR(int r = 0; r < rows; r++)
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) {
            lane *to = acc + r * PANEL + u * LANES;
            v_store(to, more ? v_load(to) + sum[r][u] : sum[r][u]);
        }
}

/* acc (rows, PANEL) += x (rows, features) part^T, rows <= NARROW_ROWS. */
INLINE void block_narrow(fa_dtype weight, int more, const char *x, int64_t x_row, int64_t rows, const char *part,
                         int64_t features, const char *ahead, lane *acc)
{
    for (int64_t c = 0; c < PANEL; c += LINEAR_NV * LANES) {
        const char *from = part + c * (weight == FA_I8 ? 1 : (int64_t)sizeof(lane));
        switch (rows) {
        case 1: tile_narrow(1, weight, more, x, x_row, from, features, ahead, acc + c); break;
        case 2: tile_narrow(2, weight, more, x, x_row, from, features, ahead, acc + c); break;
        case 3: tile_narrow(3, weight, more, x, x_row, from, features, ahead, acc + c); break;
        default: tile_narrow(4, weight, more, x, x_row, from, features, ahead, acc + c);
        }
    }
}

/* The epilogue of `count` panels from `panel` on. Row by row: out is written in long runs. */
INLINE void finish_rows(const fa_linear_args *a, fa_activation activation, int64_t panel, int64_t count, int64_t row,
                        int64_t rows, lane *acc)
{
    const int maps = 1 + a->gated;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < count; i += maps) {
            const int64_t first = (panel + i) / maps * PANEL, n = a->n - first < PANEL ? a->n - first : PANEL;
            const lane *scale = a->scales ? (const lane *)a->scales + (panel + i) * PANEL : NULL;
            lane *at = acc + (i * rows + r) * PANEL;
            finish_panel(a, activation, row + r, first, n, scale, at, at + rows * PANEL);
        }
}

static void linear_run(const fa_linear_args *a, const fa_linear_plan *p, int64_t task, void *scratch)
{
    linear_scratch w;
    linear_scratch_at(p, scratch, &w);
    const int dot = linear_dot(a), pairs = a->weight == FA_BF16, in_place = x_in_place(a);
    const int64_t x_row = in_place ? a->x_row : X_ROW;
    const int64_t row = task / p->panel_tasks * p->rows, rows = a->m - row < p->rows ? a->m - row : p->rows;
    const int64_t panels = (1 + a->gated) * ((a->n + PANEL - 1) / PANEL), panel = task % p->panel_tasks * p->panels;
    const int64_t count = panels - panel < p->panels ? panels - panel : p->panels;
    const int64_t steps = pairs ? (a->k + 1) / 2 : a->k; /* of a panel: it has as many rows */
    const int64_t step_bytes = a->weight == FA_I8 ? PANEL : FA_PANEL_BYTES;
    const int64_t block = pairs && !dot ? LINEAR_DEPTH / 2 : LINEAR_DEPTH; /* widened pairs are two products each */
    const int64_t per_step = 1 + pairs, size = dtype_size(a->dtype);
    for (int64_t s = 0; s < steps; s += block) {
        if (s && s % (LINEAR_ASKS * block) == 0 && given_up(a->watch)) return;
        const int64_t n = steps - s < block ? steps - s : block, more = s > 0, first = s * per_step;
        const int64_t features = a->k - first < n * per_step ? a->k - first : n * per_step;
        const char *from = a->x + row * a->x_row + first * size, *x = in_place ? from : w.x;
        for (int64_t r = 0; r < rows && !in_place; r++, from += a->x_row) {
            lane *to = (lane *)(w.x + r * X_ROW);
            if (dot) round_row(a->dtype, from, features, (char *)to);
            else load_row(a->dtype, from, features, 1, to);
            if (!dot && features % 2) to[features] = 0; /* the other half of a last pair */
        }
        for (int64_t i = 0; i < count; i++) {
            const char *part = a->panels + ((panel + i) * steps + s) * step_bytes;
            const int64_t next = i + 1 < count ? (panel + i + 1) * steps + s : panel * steps + s + n;
            const char *ahead = a->panels + next * step_bytes;
            lane *acc = w.acc + i * rows * PANEL;
            if (LANE_BITS == 32 && rows <= NARROW_ROWS && (a->weight == FA_I8 || (pairs && !dot))) {
#define BLOCK(weight, more) block_narrow(weight, more, x, x_row, rows, part, features, ahead, acc)
                if (pairs) more ? BLOCK(FA_BF16, 1) : BLOCK(FA_BF16, 0);
                else more ? BLOCK(FA_I8, 1) : BLOCK(FA_I8, 0);
#undef BLOCK
                continue;
            }
            if (a->weight == FA_I8 || (pairs && !dot)) {
                widen_part(a->weight, part, n, w.part);
                part = (const char *)w.part;
                ahead = NULL;
            }
#define BLOCK(dot, more) block_linear(dot, more, x, x_row, rows, (const lane *)part, dot ? n : features, ahead, acc)
            if (V_BF16_DOT && dot) more ? BLOCK(1, 1) : BLOCK(1, 0);
            else more ? BLOCK(0, 1) : BLOCK(0, 0);
#undef BLOCK
        }
    }
    if (!steps) memset(w.acc, 0, count * rows * FA_PANEL_BYTES);
#define FINISH(activation)                                                                                             \
    case activation: finish_rows(a, activation, panel, count, row, rows, w.acc); break;
    switch (a->activation) {
        FINISH(FA_NONE) FINISH(FA_RELU) FINISH(FA_GELU) FINISH(FA_GELU_TANH) FINISH(FA_SILU) FINISH(FA_SIGMOID)
    }
#undef FINISH
}

/* The layers' matrix product, out (m, n) = activation(x (m, k) w^T + bias) + residual, over packed panels:
 *
 *   for each block of MAX_DEPTH input features           one accumulator sums no more products
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

/* The accumulators of a pass, and the registers they need: rows x vectors + vectors + the broadcast.
 *
 *            AVX-512  12 x 2: 27 of 32     AVX2  6 x 2: 15 of 16     NEON  6 x 4: 29 of 32     generic  6 x 2: 15 */
#if V_BYTES == 64
#define LINEAR_ROWS 12
#else
#define LINEAR_ROWS 6
#endif
#ifdef V_NEON
#define LINEAR_NV 4
#else
#define LINEAR_NV 2
#endif
_Static_assert(LINEAR_ROWS * LINEAR_NV + LINEAR_NV + 1 <= V_REGISTERS, "the tile spills");
_Static_assert(LINEAR_ROWS <= TILE_MAX && FA_PANEL_BYTES % (LINEAR_NV * V_BYTES) == 0, "passes fill a panel");

/* Rows and panels of a task at most: x (96, 256) and acc (96, 8 panels) are 100 KB each in float32, and stay in the
 * second-level cache. */
#define LINEAR_TASK_ROWS 96
#define LINEAR_TASK_PANELS 8
#define LINEAR_TASKS_PER_THREAD 6

typedef struct {
    char *x;    /* (rows, k) as lanes or bfloat16 pairs, where x cannot be read in place */
    lane *part; /* (MAX_DEPTH, PANEL), widened */
    lane *acc;  /* (panels, rows, PANEL) */
} linear_scratch;

INLINE int linear_dot(const fa_linear_args *a)
{
    return V_BF16_DOT && a->weight == FA_BF16;
}

/* Whether x's rows can be read where they are. */
INLINE int linear_in_place(const fa_linear_args *a)
{
    if (linear_dot(a)) return a->dtype == FA_BF16 && a->k % 2 == 0;
    return a->dtype == (LANE_BITS == 64 ? FA_F64 : FA_F32);
}

/* Bytes of a converted row of x: pairs of bfloat16, or lanes. */
INLINE int64_t linear_x_row(const fa_linear_args *a)
{
    return round_up(linear_dot(a) ? (a->k + 1) / 2 * 4 : a->k * (int64_t)sizeof(lane), 64);
}

static int64_t linear_scratch_at(const fa_linear_args *a, const fa_linear_plan *p, void *memory, linear_scratch *w)
{
    char *at = memory;
    w->x = at;
    if (!linear_in_place(a)) at += p->rows * linear_x_row(a);
    w->part = (lane *)at;
    at += MAX_DEPTH * FA_PANEL_BYTES;
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
    p->panels = share < maps ? maps : share < LINEAR_TASK_PANELS ? (int)(share / maps * maps) : LINEAR_TASK_PANELS;
    p->panel_tasks = (panels + p->panels - 1) / p->panels;
    p->n_tasks = p->rows ? (a->m + p->rows - 1) / p->rows * p->panel_tasks : 0;
    p->scratch_bytes = linear_scratch_at(a, p, NULL, &w);
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
    const vw_t high = (vw_t){0} + 0xffff0000u;
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < PANEL; c += LANES) {
            const vw_t pairs = (vw_t)v_load(part + (i * PANEL + c) * (int64_t)sizeof(lane));
            v_store(dst + 2 * i * PANEL + c, (v_t)(pairs << 16));
            v_store(dst + (2 * i + 1) * PANEL + c, (v_t)(pairs & high));
        }
#else
    (void)weight, (void)part, (void)n, (void)dst;
#endif
}

/* acc (rows, PANEL) += x (rows, depth) part (depth, PANEL), or without `more` acc = that. */
INLINE void block_linear(int dot, int more, const char *x, int64_t x_row, int64_t rows, const lane *part,
                         int64_t depth, lane *acc)
{
    for (int64_t r = 0, passes = (rows + LINEAR_ROWS - 1) / LINEAR_ROWS; passes; passes--) {
        const int64_t n = (rows - r + passes - 1) / passes; /* even passes: a last one of one row wastes most */
        for (int64_t c = 0; c < PANEL; c += LINEAR_NV * LANES) {
#define ROWS(n)                                                                                                        \
    case n:                                                                                                            \
        tile_outer(n, LINEAR_NV, PANEL, dot, more, x + r * x_row, x_row, part + c, depth, 1, acc + r * PANEL + c);     \
        break;
            switch (n) {
                ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#if LINEAR_ROWS == 12
                ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
            }
#undef ROWS
        }
        r += n;
    }
}

/* acc = activation(acc scale + bias) [(up up_scale + up_bias)], a row of a panel whose first `n` lanes count. */
INLINE void finish_row(fa_activation activation, const lane *scale, const lane *bias, const lane *up,
                       const lane *up_scale, const lane *up_bias, int64_t n, lane *acc)
{
    for (int64_t c = 0; c < n; c += LANES) {
        const int64_t count = n - c < LANES ? n - c : LANES;
        v_t y = v_load(acc + c);
        if (scale) y = y * v_load(scale + c);
        if (bias) y = y + (count == LANES ? v_load(bias + c) : v_load_n(bias + c, count));
        y = v_activate(activation, y);
        if (up) {
            v_t z = v_load(up + c);
            if (up_scale) z = z * v_load(up_scale + c);
            if (up_bias) z = z + (count == LANES ? v_load(up_bias + c) : v_load_n(up_bias + c, count));
            y = y * z;
        }
        v_store(acc + c, y);
    }
}

/* The epilogue of one panel, or of a gated pair, whose accumulators follow each other. */
static void finish_panel(const fa_linear_args *a, int64_t panel, int64_t row, int64_t rows, lane *acc)
{
    const int64_t first = panel / (1 + a->gated) * PANEL, n = a->n - first < PANEL ? a->n - first : PANEL;
    const lane *bias = a->bias ? (const lane *)a->bias + first : NULL, *up_bias = bias ? bias + a->n : NULL;
    const lane *scale = a->scales ? (const lane *)a->scales + panel * PANEL : NULL;
    const lane *up_scale = scale ? scale + PANEL : NULL;
    const int64_t size = dtype_size(a->dtype);
    for (int64_t r = 0; r < rows; r++, acc += PANEL) {
        const lane *up = a->gated ? acc + rows * PANEL : NULL;
#define FINISH(activation)                                                                                             \
    case activation: finish_row(activation, scale, bias, up, up_scale, up_bias, n, acc); break;
        switch (a->activation) {
            FINISH(FA_NONE) FINISH(FA_RELU) FINISH(FA_GELU) FINISH(FA_GELU_TANH) FINISH(FA_SILU) FINISH(FA_SIGMOID)
        }
#undef FINISH
        if (a->residual) add_row(a->dtype, a->residual + (row + r) * a->residual_row + first * size, n, acc);
        store_row(a->dtype, acc, n, 1, a->out + (row + r) * a->out_row + first * size);
    }
}

static void linear_run(const fa_linear_args *a, const fa_linear_plan *p, int64_t task, void *scratch)
{
    linear_scratch w;
    linear_scratch_at(a, p, scratch, &w);
    const int dot = linear_dot(a), pairs = a->weight == FA_BF16;
    const int64_t row = task / p->panel_tasks * p->rows, rows = a->m - row < p->rows ? a->m - row : p->rows;
    const int64_t panels = (1 + a->gated) * ((a->n + PANEL - 1) / PANEL), panel = task % p->panel_tasks * p->panels;
    const int64_t count = panels - panel < p->panels ? panels - panel : p->panels;
    const int64_t steps = pairs ? (a->k + 1) / 2 : a->k; /* of a panel: it has as many rows */
    const int64_t step_bytes = a->weight == FA_I8 ? PANEL : FA_PANEL_BYTES;
    const char *x = a->x + row * a->x_row;
    int64_t x_row = a->x_row;
    if (!linear_in_place(a)) {
        x_row = linear_x_row(a);
        for (int64_t r = 0; r < rows; r++, x += a->x_row) {
            if (dot) round_row(a->dtype, x, a->k, w.x + r * x_row);
            else load_row(a->dtype, x, a->k, 1, (lane *)(w.x + r * x_row));
        }
        x = w.x;
    }
    const int64_t block = pairs && !dot ? MAX_DEPTH / 2 : MAX_DEPTH; /* widened pairs are two products each */
    for (int64_t s = 0; s < steps; s += block) {
        const int64_t n = steps - s < block ? steps - s : block, more = s > 0;
        for (int64_t i = 0; i < count; i++) {
            const char *part = a->panels + ((panel + i) * steps + s) * step_bytes;
            lane *acc = w.acc + i * rows * PANEL;
            int64_t depth = n, first = s;
            if (a->weight == FA_I8 || (pairs && !dot)) {
                widen_part(a->weight, part, n, w.part);
                part = (const char *)w.part;
                if (pairs) first = 2 * s, depth = a->k - first < 2 * n ? a->k - first : 2 * n;
            }
            const char *from = x + first * (int64_t)sizeof(lane);
#define BLOCK(dot, more) block_linear(dot, more, from, x_row, rows, (const lane *)part, depth, acc)
            if (V_BF16_DOT && dot) more ? BLOCK(1, 1) : BLOCK(1, 0);
            else more ? BLOCK(0, 1) : BLOCK(0, 0);
#undef BLOCK
        }
    }
    if (!steps) memset(w.acc, 0, count * rows * FA_PANEL_BYTES);
    for (int64_t i = 0; i < count; i += 1 + a->gated)
        finish_panel(a, panel + i, row, rows, w.acc + i * rows * PANEL);
}

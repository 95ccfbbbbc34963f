/* The layers' matrix product, out (m, n) = activation(x (m, k) w^T + bias) + residual, over packed panels of w:
 *
 *   copy the rows of x, if they cannot be read in place     linear_input.inc.h; a thread's next tasks find them ready
 *   for each block of input features                        most often there is one; x's stays in the second-level cache
 *     for each panel of the task, or gated pair of them
 *       for each piece of the block                           the panel's stays in the first-level cache
 *         for each LINEAR_ROWS rows of the task
 *           acc (rows, PANEL) += x (rows, piece) panel (piece, PANEL)    linear_pass.inc.h
 *       after the last block: out = activation(acc scale + bias) [up] + residual, while acc is in the caches
 *
 * The lanes are output features; x is broadcast. A row's bits depend on that row alone. Transposed, a part of the panel
 * that w^T would have is made of the same panels first, as one is widened; where there are tiles, all panels of a task.
 *
 * Where there are tiles, linear_tiles.inc.h multiplies in another order.
 *
 * Exports   linear_plan, linear_run, linear_between. */
#pragma once
#include "linear_tiles.inc.h"

/* Steps of a block: of a panel 128 KB, and of x for 128 rows 512 KB, which the second-level cache holds together. */
#define LINEAR_STEPS 1024

/* Where panels are too few for that, a task has fewer rows, but not fewer than two passes: a panel is read anew for
 * each task. At (128, 384, 384), which has 12 panels, 8 cores would end 33% late (tools/threads_model.py). */
#define LINEAR_LEAST_ROWS (2 * LINEAR_ROWS)

/* Rows of a task at most: fewer where their copies would take more than linear_copy_bytes. By tiles, four times as many:
 * a panel then comes less often from memory. */
INLINE int64_t task_rows(const fa_linear_args *a)
{
    const int64_t rows = fa_tuned.linear_rows * (by_tiles(a) ? 4 : 1);
    return x_in_place(a) ? rows : larger(LINEAR_ROWS, smaller(rows, fa_tuned.linear_copy_bytes / copied_row(a)));
}

static void linear_plan(const fa_linear_args *a, int threads, fa_linear_plan *plan)
{
    const int maps = 1 + a->gated, tiles = by_tiles(a);
    const int64_t panels = maps * ceil_div(a->n, PANEL), least_rows = tiles ? 2 * AMX_BLOCK_ROWS : LINEAR_LEAST_ROWS;
    const int64_t most_blocks = a->m / least_rows, least_tasks = threads * fa_tuned.linear_tasks;
    const int64_t most_panels = larger(maps, (tiles ? tiles_panels(a) : fa_tuned.linear_panels) / maps * maps);
    /* Tasks have fewer panels before they have fewer rows; by tiles the other way round, as x is read for each of them. */
    const int64_t panel_tasks = larger(1, ceil_div(panels, tiles ? most_panels : maps));
    const int64_t wanted = threads > 1 ? ceil_div(least_tasks, panel_tasks) : 1;
    const int64_t row_blocks = larger(larger(1, ceil_div(a->m, task_rows(a))), smaller(wanted, most_blocks));
    const int64_t share = panels * row_blocks / least_tasks;
    const int64_t most = larger(maps, smaller(share, most_panels) / maps * maps);
    plan->rows = (int)round_up(ceil_div(a->m, row_blocks), tiles ? AMX_BLOCK_ROWS : 1);
    plan->panel_tasks = ceil_div(panels, most);
    plan->panels = plan->panel_tasks ? (int)round_up(ceil_div(panels, plan->panel_tasks), maps) : maps;
    plan->n_tasks = plan->rows ? ceil_div(a->m, plan->rows) * plan->panel_tasks : 0;
    plan->widen = (a->transposed && !tiles) ||
                  (multiplication_of(a) == BY_WIDENING && plan->rows > fa_tuned.narrow_rows);
    const int64_t steps = tiles ? LINEAR_STEPS / 4
                                : LINEAR_STEPS; /* by tiles, x's are to stay in the first-level cache */
    const int64_t most_features = plan->widen ? LINEAR_WIDE : steps * features_per_step(a->weight);
    const int64_t sources = tiles ? 1 : larger(1, a->transposed), k = a->k / sources;
    plan->blocks = sources * larger(1, ceil_div(k, most_features));
    plan->features = round_up(ceil_div(k, plan->blocks / sources), LINEAR_SUM);
    plan->scratch_bytes = take_linear_scratch(&(arena){0}, a, plan, &(linear_scratch){0});
    plan->flops = 2.0 * maps * a->m * a->n * a->k;
}

/* to (features, PANEL) = a part of a panel, widened. Where features are odd ones of their last step, a few rows more. */
static void widen_part(const packed_product *p, lane *to)
{
    const fa_dtype weight = p->a->weight;
    const int64_t each = features_per_step(weight);
    for (int64_t d = 0; d < p->features; d += each)
        for (int64_t c = 0; c < PANEL; c += LANES) {
            const v_t step = v_load(p->part + d / each * FA_PANEL_BYTES + c * (int64_t)sizeof(lane));
            const int64_t offset = scales_at(p->a, d) + c * 2;
            const v_t scale = in_blocks(weight) ? v_load_f16(p->scales + offset) : v_splat(0);
            const v_t minimum = p->minima ? v_load_f16(p->minima + offset) : v_splat(0);
            for (int f = 0; f < each; f++) {
                const v_t wide = v_widen(weight, f, step, p->a->table, scale, minimum);
                v_store(to + (d + f) * PANEL + c, wide);
            }
        }
}

/* to (PANEL features, PANEL) = the transposed square of panel number `panel` of w from input feature `first` on. */
INLINE void turn_square(fa_dtype weight, const fa_linear_args *a, int64_t panel, int64_t first, lane *to)
{
    const int64_t each = features_per_step(weight), features = panel_features(a, a->n);
    const char *part = a->panels + (panel * features + first) / each * FA_PANEL_BYTES;
    const int64_t next = a->transposed * features / each * FA_PANEL_BYTES;
    for (int64_t c = 0; c < PANEL; c += LANES) {
        v_t scale = v_splat(0), minimum = v_splat(0);
        if (by_row(weight)) scale = v_load((const lane *)a->scales + panel * PANEL + c);
        for (int64_t d = 0; d < PANEL; d += LANES) {
            v_t square[LANES];
            const int64_t at = scales_at(a, panel * features + first + d) + c * 2;
            if (in_blocks(weight) && first + d < features) scale = v_load_f16((const char *)a->scales + at);
            if (a->minima && first + d < features) minimum = v_load_f16((const char *)a->minima + at);
            UNROLL_FOR(int i = 0; i < LANES; i++) {
                const char *step = part + (d + i) / each * FA_PANEL_BYTES + c * (int64_t)sizeof(lane);
                square[i] = v_splat(0);
                if ((d + i) % each == 0) __builtin_prefetch(step + next, 0, 2);
                if (first + d + i >= features) continue;
                square[i] = v_widen(weight, (int)((d + i) % each), v_load(step), a->table, scale, minimum);
                if (by_row(weight)) square[i] = square[i] * scale;
            }
            v_transpose(square);
            UNROLL_FOR(int i = 0; i < LANES; i++) v_store(to + (c + i) * PANEL + d, square[i]);
        }
    }
}

/* to (features, PANEL) = a part of panel number `panel` of w^T: its input features are output features of w, from
 * `first` of a map on. Where they end inside a panel, a few rows more. */
static void turn_part(const fa_linear_args *a, int64_t panel, int map, int64_t first, int64_t features, lane *to)
{
    for (int64_t d = 0; d < features; d += PANEL, to += PANEL * PANEL) {
        const int64_t from = (first + d) / PANEL * a->transposed + map, column = panel * PANEL;
        if (a->weight == LANE_DTYPE) turn_square(LANE_DTYPE, a, from, column, to);
        else WITH_NARROW(a->weight, weight, turn_square(weight, a, from, column, to));
    }
}

/* out (rows, PANEL) = or += a product with `features` of lanes or pairs. */
INLINE void multiply_plain(int bf16, int64_t rows, const packed_product *p)
{
    const outer_product plain = {
        .x = p->x,
        .x_row = p->x_row,
        .y = (const lane *)p->part,
        .pitch = PANEL,
        .depth = bf16 ? ceil_div(p->features, 2) : p->features,
        .factor = 1,
        .more = p->more,
        .ahead = p->part + (rows > LINEAR_ROWS ? PART_AHEAD : NEAR_AHEAD),
        .out = p->out,
    };
    multiply(PANEL, bf16, 0, rows, &plain);
}

/* The same with weights that are narrower: integers, or widened in registers. */
INLINE void multiply_narrow(multiplication how, int64_t rows, const packed_product *whole)
{
    const int64_t n_passes = ceil_div(rows, pass_rows(whole->a));
    packed_product p = *whole;
    p.ahead = n_passes > 1 || how == BY_WIDENING ? PART_AHEAD : NEAR_AHEAD;
    for (int64_t r = 0, passes = n_passes; passes; passes--) {
        const int64_t n = ceil_div(rows - r, passes);
        p.x = whole->x + r * p.x_row;
        p.sums = whole->sums + r * p.sums_row;
        p.out = whole->out + r * PANEL;
        for (int64_t c = 0; c < PANEL; c += GROUP) {
            p.lines = c == 0 ? lines_ahead(n_passes, n_passes - passes) : 0;
            narrow_pass(how, n, c, &p);
            p.ahead += ceil_div(p.features, features_per_step(p.a->weight)) * p.lines * 64;
        }
        r += n;
    }
}

/* out (rows, PANEL) = or += the product; of a part widened to memory, if `wide` is not NULL. Pieces of LINEAR_SUM steps,
 * 32 KB, stay in the first-level cache for all passes; so do those that are unpacked to `codes`, if that is not NULL. */
static void multiply_packed(int64_t rows, const packed_product *whole, const lane *wide, char *codes)
{
    const fa_dtype weight = wide ? FA_F32 : whole->a->weight;
    const multiplication how = wide ? BY_LANES : multiplication_of(whole->a);
    const int64_t each = features_per_step(weight);
    const int64_t most = codes ? CODES_FEATURES : LINEAR_SUM * (how == BY_WIDENING ? 1 : each);
    packed_product p = *whole;
    int64_t d = 0;
    do { /* without features, out becomes 0 */
        const int runs = wide_runs(rows), together = how == BY_WIDENING && whole->features - d >= runs * most;
        p.runs = together ? runs : 1;
        p.features = smaller(whole->features - d, most);
        p.x = whole->x + d * x_size(p.a), p.sums = whole->sums + block_at(p.a, d);
        p.part = wide ? (const char *)(wide + d * PANEL) : whole->part + d / each * FA_PANEL_BYTES;
        if (in_blocks(weight)) p.scales = whole->scales + scales_at(p.a, d);
        if (whole->minima) p.minima = whole->minima + scales_at(p.a, d);
        p.more = whole->more || d;
        if (how == BY_LANES) multiply_plain(0, rows, &p);
        else if (how == BY_PAIRS) multiply_plain(V_BF16_DOT, rows, &p);
        else if (codes) blocks_by_tiles(rows, &p, codes);
        else multiply_narrow(how, rows, &p);
        d += p.runs * most;
    } while (d < whole->features);
}

/* Points p to a part of panel number `panel`, from a feature on that begins a block. */
static void find_part(packed_product *p, int64_t panel, int64_t feature)
{
    const int64_t each = features_per_step(p->a->weight), features = features_padded(p->a);
    p->part = p->a->panels + (panel * features + feature) / each * FA_PANEL_BYTES;
    const int64_t of_block = scales_at(p->a, panel * features + feature);
    if (in_blocks(p->a->weight)) p->scales = (const char *)p->a->scales + of_block;
    if (p->a->minima) p->minima = (const char *)p->a->minima + of_block;
}

static void linear_run(const fa_linear_args *a, const fa_linear_plan *plan, int64_t task, void *memory)
{
    linear_scratch scratch;
    take_linear_scratch(&(arena){.memory = memory}, a, plan, &scratch);
    const int maps = 1 + a->gated;
    const int64_t block = task / plan->panel_tasks, row = block * plan->rows, rows = smaller(a->m - row, plan->rows);
    const int64_t panel = task % plan->panel_tasks * plan->panels;
    const int64_t sources = larger(1, a->transposed), features = features_padded(a) / sources;
    const int64_t end = smaller(maps * ceil_div(a->n, PANEL), panel + plan->panels);
    const linear_input x = ready_input(a, block, row, rows, &scratch);
    if (by_tiles(a)) {
        linear_tiles(a, plan, row, rows, panel, end, x, &scratch);
        return;
    }
    char *codes = rows < CODES_LEAST_ROWS ? NULL : scratch.codes;
    int64_t done = 0; /* products of each column, since it last asked */
    for (int64_t b = 0; b < plan->blocks; b++) {
        const int64_t of_each = plan->blocks / sources, source = b / of_each, d = b % of_each * plan->features;
        packed_product p = {.a = a, .x_row = x.x_row, .sums_row = sums_of_row(a), .more = b > 0};
        p.x = x.x + (source * features + d) * x_size(a), p.sums = scratch.sums + block_at(a, d);
        p.features = smaller(features - d, plan->features);
        for (int64_t i = panel; i < end; i += maps) {
            lane *acc = scratch.acc + (plan->blocks > 1 ? (i - panel) * rows * PANEL : 0), *up = acc + rows * PANEL;
            if ((done += rows * plan->features) > LINEAR_ASKS) {
                if (given_up(a->watch)) return;
                done = 0;
            }
            for (int map = 0; map < maps; map++) {
                p.out = map ? up : acc;
                if (!a->transposed) find_part(&p, i + map, d);
                if (a->transposed) turn_part(a, i, (int)source, d, p.features, scratch.wide);
                else if (plan->widen) widen_part(&p, scratch.wide);
                multiply_packed(rows, &p, plan->widen ? scratch.wide : NULL, codes);
            }
            if (b + 1 < plan->blocks) continue;
            panel_rows summed = rows_of_panel(a, row, rows, i, acc, up, scratch.grid);
            finish_rows(&summed, rows);
        }
    }
}

static fa_dtype linear_between(void) { return V_BF16_DOT ? FA_BF16 : LANE_DTYPE; }

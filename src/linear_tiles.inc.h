/* The layers' product by the tiles of AMX, four tiles being 32 rows of x times a panel:
 *
 *   for each 32 rows of the task
 *     for each piece of the input features           of x it stays in the first-level cache
 *       for each panel of the task                     panels come from the second-level cache
 *         acc (32, PANEL) = or += x (32, piece) panel (piece, PANEL)
 *         meanwhile, step by step: rows of the panel before are finished (linear_finish.inc.h); of x, 64 bytes of some
 *         of the next rows are copied to where tiles load them fast, or asked for
 *
 * All of these overlap best in small portions at every step. Weights in blocks by int8 are products of single tiles:
 * blocks_by_tiles.
 *
 * The panels are those of all other instruction sets: 16 steps of 16 columns are a tile. A row's bits depend on that row
 * alone: tiles of one row or of 16 do the same for each. docs/dev/intel.md has what was measured.
 *
 * Literals  bytes: 1 for int8, 0 for pairs of bfloat16. hi: 1 where there are more than 16 rows.
 * Exports   tiles_panels, linear_tiles, CODES_LEAST_ROWS, blocks_by_tiles. */
#pragma once
#include "linear_finish.inc.h"
#if V_AMX
#include "tile_amx.inc.h"
#endif

/* Panels of a task: 1 MB, half of the second-level cache of the CPUs that have tiles. */
INLINE int64_t tiles_panels(const fa_linear_args *a)
{
    return larger(1, (1 << 20) / larger(1, features_padded(a) / features_per_step(a->weight) * FA_PANEL_BYTES));
}

#define CODES_LEAST_ROWS 14 /* fewer are faster in blocks_pass: a tile takes as long for one row as for 16 */
#define CODES_BEHIND 2      /* blocks between a product and the use of its sums */
#define CODES_SUMS 4        /* blocks whose sums have memory */
_Static_assert(CODES_BEHIND < CODES_SUMS, "sums are used before others take their memory");

#if V_AMX
/* Rows of x that are multiplied next, beside the features of a product. */
typedef struct {
    int64_t rows;
    const char *from;
    int64_t from_row;
    char *to; /* where they are copied, or NULL: then they are asked for */
    int64_t to_row;
} rows_to_come;

/* Copies AMX_BYTES of each from byte `at` on, or asks for them; of copied rows, asks for as many of those behind them. */
NOINLINE void bring_rows(const rows_to_come *p, int64_t at)
{
    const int64_t row = p->from_row, to_row = p->to_row, ahead = p->to ? p->rows * row : 0;
    const char *from = p->from + at;
    char *to = p->to ? p->to + at : NULL;
    for (int64_t r = p->rows; r; r--, from += row) {
        __builtin_prefetch(from + ahead, 0, 2);
        if (!to) continue;
        v_store(to, v_load(from));
        to += to_row;
    }
}

/* Those of part number `part` of `parts`: none before the first. */
INLINE rows_to_come some_to_come(const rows_to_come *all, int64_t part, int64_t parts)
{
    rows_to_come some = *all;
    const int64_t first = larger(0, part) * all->rows / parts;
    some.rows = larger(0, part + 1) * all->rows / parts - first;
    some.from += first * all->from_row;
    if (some.to) some.to += first * all->to_row;
    return some;
}

/* acc (rows, PANEL) = or += x times a piece of a panel. */
typedef struct {
    const char *x; /* (rows, features), 0 up to whole tiles */
    int64_t x_row;
    const char *part, *last; /* the panel's piece; its last tile, 0 where there are no features */
    int64_t steps;           /* tiles of the piece */
    int more;                /* += */
    lane *acc;
    panel_rows *waiting;
    rows_to_come next;
} tiles_product;

INLINE void tiles_multiply(int bytes, int hi, const tiles_product *p)
{
    const int64_t x_row = p->x_row, steps = p->steps;
    const int64_t share = ceil_div(p->waiting->rows, larger(1, steps));
    const char *x = p->x, *part = p->part;
    amx_load_sums(2, hi, p->more ? ACC_KEEP : ACC_ZERO, p->acc, PANEL);
    for (int64_t t = 1; t <= steps; t++, x += AMX_BYTES, part += AMX_ROWS * FA_PANEL_BYTES) {
        const char *y = t == steps ? p->last : part;
        AMX_LOAD(6, y, FA_PANEL_BYTES);
        AMX_LOAD(4, x, x_row);
        if (bytes) AMX_DOT_I8(0, 4, 6);
        else AMX_DOT_BF16(0, 4, 6);
        AMX_LOAD(7, y + AMX_BYTES, FA_PANEL_BYTES);
        if (bytes) AMX_DOT_I8(1, 4, 7);
        else AMX_DOT_BF16(1, 4, 7);
        if (hi) {
            AMX_LOAD(5, x + AMX_ROWS * x_row, x_row);
            if (bytes) AMX_DOT_I8(2, 5, 6);
            else AMX_DOT_BF16(2, 5, 6);
            if (bytes) AMX_DOT_I8(3, 5, 7);
            else AMX_DOT_BF16(3, 5, 7);
        }
        if (p->next.rows) bring_rows(&p->next, (t - 1) * AMX_BYTES);
        if (p->waiting->rows) finish_rows(p->waiting, smaller(share, p->waiting->rows));
    }
    if (p->waiting->rows) finish_rows(p->waiting, p->waiting->rows); /* without features there was no step */
    amx_store_sums(2, hi, p->acc, PANEL);
}

/* to = the last tiles of a panel, of which `features` are left. */
INLINE const char *last_tile(fa_dtype weight, const char *part, int64_t features, lane *to)
{
    const int64_t steps = ceil_div(features, features_per_step(weight));
    if (steps >= AMX_ROWS) return part;
    memcpy(to, part, steps * FA_PANEL_BYTES);
    memset((char *)to + steps * FA_PANEL_BYTES, 0, (AMX_ROWS - steps) * FA_PANEL_BYTES);
    return (const char *)to;
}

/* to (pairs, PANEL) = panel number `panel` of w^T in pairs of its input features: output features of w, map after map. */
static void turn_panel(const fa_linear_args *a, int64_t panel, char *to)
{
    const int64_t maps = a->transposed, n = a->k / maps, steps = panel_features(a, a->n) / 2, first = panel * LANES;
    for (int64_t c = 0; c < maps * n; c += smaller(LANES, n - c % n)) {
        const int64_t map = c / n, column = c % n, left = n - column;
        const char *from = a->panels + (column / PANEL * maps + map) * steps * FA_PANEL_BYTES +
                           column % PANEL * (int64_t)sizeof(lane);
        v_t square[LANES + 1]; /* an odd last row is paired with 0 */
        UNROLL_FOR(int i = 0; i < LANES; i++) {
            const char *step = from + (first + i) * FA_PANEL_BYTES;
            square[i] = first + i < steps ? v_load(step) : v_splat(0);
        }
        v_transpose(square);
        for (int64_t i = left; i <= LANES; i++) square[i] = v_splat(0);
        for (int64_t i = 0; i < smaller(LANES, left); i += 2, to += FA_PANEL_BYTES)
            v_store_paired_bf16(to, square + i, square + i + 1);
    }
}

/* The results of `rows` rows of x from `row` on, of panels [panel, end). */
static void linear_tiles(const fa_linear_args *a, const fa_linear_plan *plan, int64_t row, int64_t rows, int64_t panel,
                         int64_t end, linear_input x, const linear_scratch *scratch)
{
    const int64_t maps = 1 + a->gated, each = features_per_step(a->weight), features = features_padded(a);
    const int64_t panel_bytes = features / each * FA_PANEL_BYTES, of_tile = AMX_ROWS * each,
                  square = AMX_BLOCK_ROWS * PANEL;
    const int bytes = a->x_int8;
    int64_t done = 0, shaped = 0; /* products of each column, since it last asked; rows that tiles have */
    const int late = x_copied_late(a);
    const int64_t x_row = late ? copied_row(a) : x.x_row;
    const char *panels = a->panels + panel * panel_bytes;
    panel_rows waiting = {.a = a};
    for (int64_t i = panel; a->transposed && i < end; i++)
        turn_panel(a, i, scratch->turned + (i - panel) * panel_bytes);
    if (a->transposed) panels = scratch->turned;
    for (int64_t r = 0; late && r < smaller(rows, AMX_BLOCK_ROWS); r++)
        memcpy(scratch->x + r * x_row, x.x + r * x.x_row, features * 2);
    for (int64_t r = 0; r < rows; r += AMX_BLOCK_ROWS) {
        const int64_t n = smaller(rows - r, AMX_BLOCK_ROWS), low = smaller(n, AMX_ROWS);
        if (n != shaped) amx_shapes(low, n - low, AMX_BYTES);
        shaped = n;
        for (int64_t b = 0; b < plan->blocks; b++) { /* one without features, too: out becomes its bias */
            const int64_t d = b * plan->features, here = smaller(features - d, plan->features);
            const int64_t parts = smaller(end - panel, 8); /* at the last panels: rows copied sooner push others out */
            char *const copy[2] = {scratch->x + d * 2, scratch->x + AMX_BLOCK_ROWS * x_row + d * 2};
            const int odd = r / AMX_BLOCK_ROWS % 2;
            rows_to_come next = {.from = x.x + (r + AMX_BLOCK_ROWS) * x.x_row + d * x_size(a), .from_row = x.x_row};
            if (late) next.to = copy[!odd], next.to_row = x_row;
            if (late || x_in_place(a)) next.rows = smaller(larger(0, rows - r - AMX_BLOCK_ROWS), AMX_BLOCK_ROWS);
            tiles_product p = {.x_row = x_row, .steps = ceil_div(here, of_tile), .more = b > 0, .waiting = &waiting};
            p.x = late ? copy[odd] : x.x + r * x.x_row + d * x_size(a);
            for (int64_t i = panel; i < end; i++) {
                const int64_t last = (p.steps - 1) * of_tile, map = (i - panel) % maps;
                p.next = some_to_come(&next, i - end + parts, parts);
                p.acc = scratch->acc + (plan->blocks > 1 ? i - panel : (i - panel) % (2 * maps)) * square;
                p.part = panels + (i - panel) * panel_bytes + d / each * FA_PANEL_BYTES;
                p.last = last_tile(a->weight, p.part + last / each * FA_PANEL_BYTES, here - last, scratch->wide);
                if (bytes && n > AMX_ROWS) tiles_multiply(1, 1, &p);
                else if (bytes) tiles_multiply(1, 0, &p);
                else if (n > AMX_ROWS) tiles_multiply(0, 1, &p);
                else tiles_multiply(0, 0, &p);
                if (map + 1 < maps || b + 1 < plan->blocks) continue;
                const lane *acc = p.acc - map * square;
                waiting = rows_of_panel(a, row + r, n, i - map, acc, acc + square, scratch->grid + r);
            }
            if ((done += n * here * (end - panel)) > LINEAR_ASKS) {
                if (given_up(a->watch)) rows = 0;
                amx_shapes(low, n - low, AMX_BYTES); /* whoever was asked may have used them */
                done = 0;
            }
        }
    }
    if (waiting.rows) finish_rows(&waiting, waiting.rows);
    AMX_END();
}

/* to (features / 4, PANEL) of four int8 = the codes of a part of a panel of 4 bits. */
static void unpack_codes(const packed_product *p, char *to)
{
    const vi_t table = v_table_i8(p->a->codes);
    for (int64_t s = 0; s < p->features / 8; s++, to += 2 * FA_PANEL_BYTES)
        UNROLL_FOR(int64_t c = 0; c < FA_PANEL_BYTES; c += V_BYTES) {
            const char *step = p->part + s * FA_PANEL_BYTES + c;
            __builtin_prefetch(step + PART_AHEAD, 0, 2);
            UNROLL_FOR(int half = 0; half < 2; half++)
                v_store(to + half * FA_PANEL_BYTES + c, (v_t)v_code_bytes(FA_I4, half, table, v_load(step)));
        }
}

/* What blocks_pass does, to the bit, for all rows. A tile holds a block's sums of 16 rows and 16 columns, which are scaled
 * and added while the next blocks are multiplied. */
static void blocks_by_tiles(int64_t rows, const packed_product *p, char *codes)
{
    const int64_t block = p->a->block, blocks = block_at(p->a, p->features), block_bytes = block / 4 * FA_PANEL_BYTES;
    const char *bytes = by_table(p->a->weight) ? codes : p->part;
    lane sums[CODES_SUMS][AMX_ROWS * LANES] __attribute__((aligned(64))) = {0};
    if (by_table(p->a->weight)) unpack_codes(p, codes);
    for (int64_t r = 0, shaped = 0; r < rows; r += AMX_ROWS) {
        const int64_t n = smaller(rows - r, AMX_ROWS);
        if (n != shaped) amx_shapes(n, 0, (int)block);
        shaped = n;
        for (int64_t c = 0; c < PANEL; c += LANES) {
            lane *out = p->out + r * PANEL + c;
            v_t total[AMX_ROWS];
            UNROLL_FOR(int i = 0; i < AMX_ROWS; i++) total[i] = p->more && i < n ? v_load(out + i * PANEL) : v_splat(0);
            for (int64_t b = 0; b < blocks + CODES_BEHIND; b++) {
                if (b < blocks) {
                    AMX_ZERO(0);
                    AMX_LOAD(4, p->x + r * p->x_row + b * block, p->x_row);
                    AMX_LOAD(6, bytes + b * block_bytes + c * (int64_t)sizeof(lane), FA_PANEL_BYTES);
                    AMX_DOT_I8(0, 4, 6);
                    AMX_STORE(0, sums[b % CODES_SUMS], AMX_BYTES);
                }
                const int64_t done = b - CODES_BEHIND;
                if (done < 0) continue;
                const v_t scale = v_load_f16(p->scales + (done * PANEL + c) * 2);
                UNROLL_FOR(int i = 0; i < AMX_ROWS; i++) {
                    const vi_t sum = (vi_t)v_load(sums[done % CODES_SUMS] + i * LANES);
                    total[i] = v_fma(__builtin_convertvector(sum, v_t), scale, total[i]);
                }
                if (!p->minima) continue;
                const v_t minimum = v_load_f16(p->minima + (done * PANEL + c) * 2);
                UNROLL_FOR(int i = 0; i < AMX_ROWS; i++)
                    if (i < n)
                        total[i] = v_fma(minimum, v_splat((lane)p->sums[(r + i) * p->sums_row + done]), total[i]);
            }
            UNROLL_FOR(int i = 0; i < AMX_ROWS; i++)
                if (i < n) v_store(out + i * PANEL, total[i]);
        }
    }
    AMX_END();
}
#else
static void linear_tiles(const fa_linear_args *a, const fa_linear_plan *plan, int64_t row, int64_t rows, int64_t panel,
                         int64_t end, linear_input x, const linear_scratch *scratch)
{
    (void)a, (void)plan, (void)row, (void)rows, (void)panel, (void)end, (void)x, (void)scratch;
}

static void blocks_by_tiles(int64_t rows, const packed_product *p, char *codes) { (void)rows, (void)p, (void)codes; }
#endif

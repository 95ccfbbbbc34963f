/* The micro-kernels of products with packed weights: rows of x times one panel, whose columns are the lanes.
 *
 * A panel holds FA_PANEL_BYTES of weights for each step: one input feature of PANEL columns or, side by side in a lane,
 * a pair of them in bfloat16, four in int8 and Q8, eight in 4 bits. x is broadcast, as many features at a time.
 *
 *   weights          x          product
 *   lanes            lanes      multiply-adds                                           tile_outer
 *   bfloat16         pairs      the dot product of pairs, where there is one            tile_outer
 *   bfloat16, int8,  lanes      multiply-adds; weights are widened in registers         wide_pass
 *   Q8, 4 bits
 *   int8             int8       the dot product of four, in integers                    bytes_pass
 *                               eight of two rows and two columns, where there is one   squares_pass
 *   Q8, 4 bits       int8       the same; each block of features is scaled              blocks_pass
 *
 * Literals  columns: a multiple of GROUP. bf16: 1 only if V_BF16_DOT. fetch: 0 .. STEP_LINES, of bytes_pass 0, 1.
 *           triangular: 0, 1. weight: of blocks_pass one of WITH_INTEGERS. rows: 1 .. LINEAR_ROWS,
 *           of bytes_pass BYTES_ROWS, of blocks_pass BLOCK_ROWS.
 *           runs: 1, 2 with two rows at most, WIDE_RUNS with one. by_bytes, in_order: 1 only if by_table.
 * Exports   PANEL, GROUP, WITH_ROWS, multiply (linear attention has such products, too); PACKED_BLOCK, BLOCK_ROWS,
 *           block_at, scales_at, LINEAR_SUM, PART_AHEAD, NEAR_AHEAD, lines_ahead; BY_LANES, BY_PAIRS, BY_WIDENING,
 *           BY_BYTES, BY_BLOCKS, turns_pairs, multiplication, multiplication_of; packed_product, narrow_pass,
 *           wide_runs. */
#pragma once
#include "interface/linear.h"
#include "tile.inc.h"
#include "weights.inc.h"

#define PANEL (FA_PANEL_BYTES / (int64_t)sizeof(lane))

/* A pass has LINEAR_ROWS x LINEAR_NV accumulators at most, and needs LINEAR_NV vectors and a broadcast beside them. */
#define GROUP (LINEAR_NV * LANES) /* columns of a pass */
_Static_assert(LINEAR_ROWS *LINEAR_NV + LINEAR_NV + 1 <= V_REGISTERS, "the tile spills");
_Static_assert(LINEAR_ROWS <= MR_MAX && PANEL % GROUP == 0, "passes fill a panel");
_Static_assert(BYTES_ROWS <= LINEAR_ROWS && (!V_I8_SQUARES || BYTES_ROWS == LINEAR_ROWS), "see narrow_pass");

#define PACKED_BLOCK 32 /* input features that pack gives a scale; panels in blocks are whole ones of these */
#define BLOCK_ROWS (LINEAR_ROWS / 2) /* rows of blocks_pass, which has two accumulators for each result */

/* The number of the block that a feature is in, and a feature's place among float16 scales (blocks, PANEL), in bytes. */
INLINE int64_t block_at(const fa_linear_args *a, int64_t feature) { return feature >> (a->block == 16 ? 4 : 5); }
INLINE int64_t scales_at(const fa_linear_args *a, int64_t feature) { return block_at(a, feature) * PANEL * 2; }

/* pass(rows, ...) with `rows`, at most `limit`, as a literal. */
#define ROWS_CASE(rows, limit, pass, ...)                                                                              \
    case rows:                                                                                                         \
        if (rows <= limit) pass(rows, __VA_ARGS__);                                                                    \
        break
#define WITH_ROWS(rows, ...)                                                                                           \
    do {                                                                                                               \
        switch (rows) {                                                                                                \
            ROWS_CASE(1, __VA_ARGS__);                                                                                 \
            ROWS_CASE(2, __VA_ARGS__);                                                                                 \
            ROWS_CASE(3, __VA_ARGS__);                                                                                 \
            ROWS_CASE(4, __VA_ARGS__);                                                                                 \
            ROWS_CASE(5, __VA_ARGS__);                                                                                 \
            ROWS_CASE(6, __VA_ARGS__);                                                                                 \
            ROWS_CASE(7, __VA_ARGS__);                                                                                 \
            ROWS_CASE(8, __VA_ARGS__);                                                                                 \
            ROWS_CASE(9, __VA_ARGS__);                                                                                 \
            ROWS_CASE(10, __VA_ARGS__);                                                                                \
            ROWS_CASE(11, __VA_ARGS__);                                                                                \
            ROWS_CASE(12, __VA_ARGS__);                                                                                \
        }                                                                                                              \
    } while (0)

/* One pass: n rows of a product, GROUP columns. */
INLINE void multiply_pass(int bf16, int fetch, int64_t n, const outer_product *p)
{
    WITH_ROWS(n, LINEAR_ROWS, tile_outer, LINEAR_NV, bf16, fetch, p, 0);
}

/* With one or two passes, the arithmetic takes no longer than memory takes to bring the weights. Asking for a line or two
 * of later ones at every step then gains 15 to 50% on a Cascade Lake where they come from far away. With more passes, the
 * first two ask: 10% on a Zen 5 at 2048 cubed, level where weights are near. To ask in all passes, at every fourth step,
 * cost a Cascade Lake 5 to 10% there. */
#define PART_AHEAD (1 << 15)
/* The same with a single pass over one run of features. An Intel with AMX reads a row's weights in float32 at 28 GB/s so,
 * and at 22 from PART_AHEAD on; 4 bits by int8 at 25 and 23. Elsewhere to be measured. */
#define NEAR_AHEAD (V_AMX ? 3 << 10 : PART_AHEAD)
#define STEP_LINES (FA_PANEL_BYTES / 64) /* of a step */

/* Lines to ask for at each step. */
INLINE int lines_ahead(int64_t n_passes, int64_t pass) { return n_passes == 1 ? STEP_LINES : pass < STEP_LINES; }

/* Multiplies all rows, pass by pass. With `triangular`, row r needs whole->depth + r + 1 rows of y, so many are read. Lines
 * of `ahead`, if it is not NULL, are prefetched beside the first GROUP columns. */
INLINE void multiply(int64_t columns, int bf16, int triangular, int64_t rows, const outer_product *whole)
{
    const int64_t n_passes = ceil_div(rows, LINEAR_ROWS);
    const char *ahead = whole->ahead;
    for (int64_t r = 0, passes = n_passes; passes; passes--) {
        const int64_t n = ceil_div(rows - r, passes); /* even passes: a last one of one row wastes most */
        for (int64_t c = 0; c < columns; c += GROUP) {
            outer_product p = *whole;
            p.x += r * p.x_row, p.y += c, p.out += r * p.pitch + c;
            p.depth += triangular ? r + n : 0;
            p.ahead = ahead;
            const int fetch = ahead && c == 0 ? lines_ahead(n_passes, n_passes - passes) : 0;
            if (fetch == 2) multiply_pass(bf16, 2, n, &p);
            else if (fetch == 1) multiply_pass(bf16, 1, n, &p);
            else multiply_pass(bf16, 0, n, &p);
            ahead += fetch * p.depth * 64;
        }
        r += n;
    }
}

/* out (rows, PANEL) = x (rows, features) times a part of a panel. */
typedef struct {
    const fa_linear_args *a;
    const char *x;       /* lanes, pairs of bfloat16 or int8, 0 up to a whole step, or a whole block */
    int64_t x_row;       /* bytes */
    const int32_t *sums; /* of int8 x: if V_I8_OFFSET of each row; by weights in blocks, of each block */
    int64_t sums_row;
    const char *part, *scales; /* scales: float16, (blocks, PANEL); weights in blocks only */
    const char *minima;        /* as scales, or NULL */
    int64_t features;
    int runs;      /* of so many features, one behind the other: more than 1 only in wide_pass */
    int more;      /* out += the product */
    int lines;     /* cache lines of later weights that are prefetched at a step ... */
    int64_t ahead; /* ... from so many bytes behind the first on */
    lane *out;     /* int8 by int8: integers of the same width */
} packed_product;

/* From scales to those that are prefetched with weights PART_AHEAD behind, in bytes. */
INLINE int64_t scales_ahead(fa_dtype weight, const fa_linear_args *a)
{
    return scales_at(a, PART_AHEAD / FA_PANEL_BYTES * features_per_step(weight));
}

/* Asks for lines at step number `step`. */
INLINE void fetch_step(const packed_product *p, int64_t step)
{
    UNROLL_FOR(int i = 0; i < STEP_LINES; i++)
        if (i < p->lines) __builtin_prefetch(p->part + p->ahead + (step * p->lines + i) * 64, 0, 2);
}

#define LINEAR_SUM MAX_DEPTH /* steps, or features widened, that one accumulator sums at most */
#define WIDE_RUNS 4          /* runs of LINEAR_SUM features that one row is multiplied with at once */

/* Runs of features that a pass of so many rows goes through at once, if there are as many. */
INLINE int wide_runs(int64_t rows) { return rows == 1 ? WIDE_RUNS : rows == 2 ? WIDE_RUNS / 2 : 1; }

#if LANE_BITS == 32
/* One pass of x in lanes: `rows` rows, GROUP columns from c on. Weights are widened in registers, feature by feature;
 * the bits are those of multiply_pass on widened ones. With `by_bytes`, which needs values of 4 bits that are their
 * codes, these become bytes first, four by one instruction: v_lookup takes four instructions for one on AVX2.
 *
 * A multiply-add waits for the one before on its accumulator, four cycles. Few rows have too few of them to fill the
 * time. They go through several runs of features at once, LINEAR_SUM each, whose sums are then added in order. */
INLINE void wide_pass(int rows, int runs, fa_dtype weight, int by_bytes, int64_t c, const packed_product *p)
{
    const int64_t each = features_per_step(weight), run_bytes = LINEAR_SUM / each * FA_PANEL_BYTES;
    const int64_t ahead = scales_ahead(weight, p->a), in_block = p->a->block - 1;
    const char *part = p->part + c * (int64_t)sizeof(lane);
    const vi_t codes = by_bytes ? v_table_i8(p->a->codes) : (vi_t){0};
    v_t sum[MR_MAX][LINEAR_NV], scale[WIDE_RUNS][LINEAR_NV], minimum[WIDE_RUNS][LINEAR_NV], wide[LINEAR_NV];
    vi_t bytes[LINEAR_NV];
    UNROLL_FOR(int r = 0; r < rows * runs; r++)
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) sum[r][u] = v_splat(0);
    UNROLL_FOR(int run = 0; run < runs; run++)
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) scale[run][u] = minimum[run][u] = v_splat(0);
    for (int64_t d = 0; d < p->features; d += each, part += FA_PANEL_BYTES)
        UNROLL_FOR(int run = 0; run < runs; run++) {
            const char *step = part + run * run_bytes;
            const int64_t feature = run * LINEAR_SUM + d;
            fetch_step(p, feature / each);
            if (in_blocks(weight) && (d & in_block) == 0) {
                const int64_t offset = scales_at(p->a, feature) + c * 2;
                if (p->lines) __builtin_prefetch(p->scales + offset + ahead, 0, 2);
                UNROLL_FOR(int u = 0; u < LINEAR_NV; u++)
                    scale[run][u] = v_load_f16(p->scales + offset + u * LANES * 2);
                if (p->minima) {
                    if (p->lines) __builtin_prefetch(p->minima + offset + ahead, 0, 2);
                    UNROLL_FOR(int u = 0; u < LINEAR_NV; u++)
                        minimum[run][u] = v_load_f16(p->minima + offset + u * LANES * 2);
                }
            }
            UNROLL_FOR(int f = 0; f < each; f++) {
                const char *x = p->x + (feature + f) * (int64_t)sizeof(lane);
                HIDE(x);
                UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) {
                    const v_t here = v_load(step + u * V_BYTES);
                    if (by_bytes && f % 4 == 0) bytes[u] = v_code_bytes(weight, f / 4, codes, here);
                    wide[u] = v_widen(by_bytes ? FA_Q8 : weight, by_bytes ? f % 4 : f, by_bytes ? (v_t)bytes[u] : here,
                                      p->a->table, scale[run][u], minimum[run][u]);
                }
                UNROLL_FOR(int r = 0; r < rows; r++) {
                    const v_t element = v_splat(*(const lane_u *)(x + r * p->x_row));
                    UNROLL_FOR(int u = 0; u < LINEAR_NV; u++)
                        sum[r * runs + run][u] = v_fma(element, wide[u], sum[r * runs + run][u]);
                }
            }
        }
    UNROLL_FOR(int r = 0; r < rows; r++)
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) {
            lane *to = p->out + r * PANEL + c + u * LANES;
            v_t total = p->more ? v_load(to) + sum[r * runs][u] : sum[r * runs][u];
            UNROLL_FOR(int run = 1; run < runs; run++) total += sum[r * runs + run][u];
            v_store(to, total);
        }
}

INLINE void wide_runs_pass(int64_t rows, fa_dtype weight, int by_bytes, int64_t c, const packed_product *p)
{
    if (p->runs == WIDE_RUNS) wide_pass(1, WIDE_RUNS, weight, by_bytes, c, p);
    else if (p->runs > 1) wide_pass(2, WIDE_RUNS / 2, weight, by_bytes, c, p);
    else WITH_ROWS(rows, LINEAR_ROWS, wide_pass, 1, weight, by_bytes, c, p);
}

INLINE void wide_passes(int64_t rows, fa_dtype weight, int64_t c, const packed_product *p)
{
    if (V_BF16_DOT && weight == FA_BF16) return; /* BY_PAIRS */
    const int values_are_codes = by_table(weight) && p->a->unit == 1;
    if (!V_LOOKUP_ONCE && values_are_codes) wide_runs_pass(rows, weight, 1, c, p);
    else wide_runs_pass(rows, weight, 0, c, p);
}

typedef int32_t four_u __attribute__((aligned(1), may_alias)); /* four int8 anywhere in memory */

/* Where the integer sums of a row begin: see v_dot_i8. */
INLINE vi_t first_sum(const packed_product *p, int r, int64_t block)
{
    return (vi_t){0} - (V_I8_OFFSET ? V_I8_OFFSET * p->sums[r * p->sums_row + block] : 0);
}

/* One pass of int8 by int8, in integers. */
INLINE void bytes_pass(int rows, int fetch, int64_t c, const packed_product *p)
{
    const char *part = p->part + c * (int64_t)sizeof(lane), *x[MR_MAX / 3];
    /* Every third row, as in tile_outer; a few rows are the first and multiples of x_row. */
    const int apart = V_I8_DOT ? 3 : MR_MAX;
    int64_t x_row = p->x_row;
    vi_t sum[MR_MAX][LINEAR_NV], step[LINEAR_NV];
    UNROLL_FOR(int r = 0; r < rows; r += apart) {
        x[r / apart] = p->x + r * x_row;
        HIDE(x[r / apart]);
    }
    UNROLL_FOR(int r = 0; r < rows; r++)
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) {
            const lane *from = p->out + r * PANEL + c + u * LANES;
            sum[r][u] = p->more ? (vi_t)v_load(from) : first_sum(p, r, 0);
        }
    const char *end = part + ceil_div(p->features, 4) * FA_PANEL_BYTES;
    for (int64_t s = 0; part < end; s++, part += FA_PANEL_BYTES) {
        if (fetch) fetch_step(p, s);
        HIDE(x_row);
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) step[u] = (vi_t)v_load(part + u * V_BYTES);
        UNROLL_FOR(int r = 0; r < rows; r++) {
            const vi_t four = (vi_t){0} + *(const four_u *)(x[r / apart] + r % apart * x_row);
            UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) sum[r][u] = v_dot_i8(step[u], four, sum[r][u]);
        }
        UNROLL_FOR(int r = 0; r < rows; r += apart) x[r / apart] += 4;
    }
    UNROLL_FOR(int r = 0; r < rows; r++)
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) v_store(p->out + r * PANEL + c + u * LANES, (v_t)sum[r][u]);
}

/* One function for each number of rows: inlined into one for all, gcc 12 moves addresses of rows to vector registers and
 * back at every step, by instructions that wait for the same port as the dot products (a tenth of the time on a Zen 4). */
#define BYTES_PASS(rows)                                                                                               \
    NOINLINE void bytes_pass_##rows(int64_t c, const packed_product *p)                                                \
    {                                                                                                                  \
        if (rows > BYTES_ROWS) return; /* a pass never has them: none is compiled */                                   \
        if (p->lines) bytes_pass(rows, 1, c, p);                                                                       \
        else bytes_pass(rows, 0, c, p);                                                                                \
    }
BYTES_PASS(1)
BYTES_PASS(2)
BYTES_PASS(3)
BYTES_PASS(4)
BYTES_PASS(5)
BYTES_PASS(6)
BYTES_PASS(7)
BYTES_PASS(8)
BYTES_PASS(9)
BYTES_PASS(10)
BYTES_PASS(11)
BYTES_PASS(12)

#if V_I8_SQUARES
/* The same, two rows and two columns at a time. With an odd number of rows the last is its own partner. */
INLINE void squares_pass(int rows, int64_t c, const packed_product *p)
{
    typedef int64_t eight_u __attribute__((aligned(1), may_alias));
    static const char none[FA_PANEL_BYTES]; /* for the second half of eight features, of which there are four */
    const char *part = p->part + c * (int64_t)sizeof(lane), *x = p->x;
    vi_t sum[MR_MAX / 2][2 * LINEAR_NV];
    UNROLL_FOR(int r = 0; r < rows; r += 2)
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) {
            const lane *from = p->out + r * PANEL + c + u * LANES, *other = from + (r + 1 < rows ? PANEL : 0);
            const vi_t first = p->more ? (vi_t)v_load(from) : (vi_t){0}, second = p->more ? (vi_t)v_load(other) : first;
            UNROLL_FOR(int half = 0; half < 2; half++) sum[r / 2][2 * u + half] = v_halves(half, first, second);
        }
    for (int64_t d = 0; d < p->features; d += 8, part += 2 * FA_PANEL_BYTES, x += 8) {
        const char *next = d + 4 < p->features ? part + FA_PANEL_BYTES : none;
        vi_t both[MR_MAX / 2];
        fetch_step(p, d / 4), fetch_step(p, d / 4 + 1);
        UNROLL_FOR(int r = 0; r < rows; r += 2) {
            const char *row = x + r * p->x_row, *other = row + (r + 1 < rows ? p->x_row : 0);
            both[r / 2] = (vi_t)(int64x2_t){*(const eight_u *)row, *(const eight_u *)other};
        }
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) {
            const vi_t first = (vi_t)v_load(part + u * V_BYTES), second = (vi_t)v_load(next + u * V_BYTES);
            UNROLL_FOR(int half = 0; half < 2; half++) {
                const vi_t columns = v_zipped(half, first, second);
                UNROLL_FOR(int r = 0; r < rows; r += 2)
                    sum[r / 2][2 * u + half] = v_square_i8(both[r / 2], columns, sum[r / 2][2 * u + half]);
            }
        }
    }
    UNROLL_FOR(int r = 0; r < rows; r++)
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++)
            v_store(p->out + r * PANEL + c + u * LANES, (v_t)v_halves(r % 2, sum[r / 2][2 * u], sum[r / 2][2 * u + 1]));
}
#endif

/* Whether the codes that are places in a table are integers there, one after another. */
INLINE int codes_ascend(const fa_linear_args *a)
{
    int in_order = by_table(a->weight);
    for (int i = 1; in_order && i < 16; i++) in_order = a->codes[i] == a->codes[0] + i;
    return in_order;
}

/* One pass of weights in blocks by int8: a block's products are summed in integers, scaled, and added in lanes. Codes
 * that are `in_order` need no table: their places are multiplied, and the first code times the sum of x is added. */
INLINE void blocks_pass(int rows, fa_dtype weight, int in_order, int64_t c, const packed_product *p)
{
    const int64_t each = features_per_step(weight), steps = p->a->block / each, ahead = scales_ahead(weight, p->a);
    const char *part = p->part + c * (int64_t)sizeof(lane), *x = p->x;
    const vi_t table = by_table(weight) ? v_table_i8(p->a->codes) : (vi_t){0};
    const ilane first_code = by_table(weight) ? p->a->codes[0] : 0;
    v_t total[BLOCK_ROWS][LINEAR_NV];
    vi_t sum[BLOCK_ROWS][LINEAR_NV];
    UNROLL_FOR(int r = 0; r < rows; r++)
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) {
            total[r][u] = p->more ? v_load(p->out + r * PANEL + c + u * LANES) : v_splat(0);
        }
    for (int64_t block = 0; block < block_at(p->a, p->features); block++) {
        UNROLL_FOR(int r = 0; r < rows; r++)
            UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) sum[r][u] = in_order ? (vi_t){0} : first_sum(p, r, block);
        ROLLED_FOR(int64_t s = 0; s < steps; s++, part += FA_PANEL_BYTES, x += each) {
            fetch_step(p, block * steps + s);
            UNROLL_FOR(int half = 0; half < each / 4; half++) {
                const char *half_x = x + half * 4;
                vi_t codes[LINEAR_NV];
                HIDE(half_x);
                UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) {
                    const v_t here = v_load(part + u * V_BYTES);
                    codes[u] = in_order ? v_places(half, here) : v_code_bytes(weight, half, table, here);
                }
                UNROLL_FOR(int r = 0; r < rows; r++) {
                    const vi_t four = (vi_t){0} + *(const four_u *)(half_x + r * p->x_row);
                    UNROLL_FOR(int u = 0; u < LINEAR_NV; u++)
                        sum[r][u] = in_order ? v_dot_u4(codes[u], four, sum[r][u])
                                             : v_dot_i8(codes[u], four, sum[r][u]);
                }
            }
        }
        const char *scales = p->scales + (block * PANEL + c) * 2;
        if (p->lines) __builtin_prefetch(scales + ahead, 0, 2);
        UNROLL_FOR(int r = 0; r < rows; r++)
            UNROLL_FOR(int u = 0; u < LINEAR_NV && in_order; u++)
                sum[r][u] = v_sums_u4(sum[r][u]) + first_code * p->sums[r * p->sums_row + block];
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) {
            const v_t scale = v_load_f16(scales + u * LANES * 2);
            UNROLL_FOR(int r = 0; r < rows; r++)
                total[r][u] = v_fma(__builtin_convertvector(sum[r][u], v_t), scale, total[r][u]);
            if (!p->minima) continue;
            const v_t minimum = v_load_f16(p->minima + (block * PANEL + c + u * LANES) * 2);
            UNROLL_FOR(int r = 0; r < rows; r++)
                total[r][u] = v_fma(minimum, v_splat((lane)p->sums[r * p->sums_row + block]), total[r][u]);
        }
    }
    UNROLL_FOR(int r = 0; r < rows; r++)
        UNROLL_FOR(int u = 0; u < LINEAR_NV; u++) v_store(p->out + r * PANEL + c + u * LANES, total[r][u]);
}

INLINE void blocks_passes(int64_t rows, fa_dtype weight, int64_t c, const packed_product *p)
{
    if (by_table(weight) && codes_ascend(p->a)) WITH_ROWS(rows, BLOCK_ROWS, blocks_pass, weight, 1, c, p);
    else WITH_ROWS(rows, BLOCK_ROWS, blocks_pass, weight, 0, c, p);
}
#endif

/* How a call multiplies. */
typedef enum { BY_LANES, BY_PAIRS, BY_WIDENING, BY_BYTES, BY_BLOCKS } multiplication;

/* Whether transposed weights become pairs that tiles take. Not where a pair would be of two maps. */
INLINE int turns_pairs(const fa_linear_args *a)
{
    return V_AMX && a->weight == FA_BF16 && (a->transposed == 1 || a->k % 4 == 0);
}

INLINE multiplication multiplication_of(const fa_linear_args *a)
{
    if (a->x_int8) return in_blocks(a->weight) ? BY_BLOCKS : BY_BYTES;
    if (a->transposed) return turns_pairs(a) ? BY_PAIRS : BY_WIDENING;
    if (LANE_BITS == 64 || a->weight == FA_F32) return BY_LANES;
    return V_BF16_DOT && a->weight == FA_BF16 ? BY_PAIRS : BY_WIDENING;
}

#if LANE_BITS == 32
/* One pass of weights that are not lanes, over GROUP columns from c on. `features` are at most what an accumulator sums. */
INLINE void narrow_pass(multiplication how, int64_t rows, int64_t c, const packed_product *p)
{
#if V_I8_SQUARES
    if (how == BY_BYTES) WITH_ROWS(rows, LINEAR_ROWS, squares_pass, c, p);
#else
    typedef void pass(int64_t c, const packed_product *p);
    static pass *const bytes_passes[] = {
        bytes_pass_1, bytes_pass_2, bytes_pass_3, bytes_pass_4,  bytes_pass_5,  bytes_pass_6,
        bytes_pass_7, bytes_pass_8, bytes_pass_9, bytes_pass_10, bytes_pass_11, bytes_pass_12,
    };
    if (how == BY_BYTES) bytes_passes[rows - 1](c, p);
#endif
    else if (how == BY_BLOCKS) WITH_INTEGERS(p->a->weight, weight, blocks_passes(rows, weight, c, p));
    else WITH_NARROW(p->a->weight, weight, wide_passes(rows, weight, c, p));
}
#else
INLINE void narrow_pass(multiplication how, int64_t rows, int64_t c, const packed_product *p)
{
    (void)how, (void)rows, (void)c, (void)p;
}
#endif

/* What a product with packed weights reads of x: rows where they lie, or a thread's copy of a task's rows, as lanes, as
 * pairs of bfloat16 for the dot product, or as int8 on the row's grid.
 *
 * An int8 row is (x - middle) / scale, rounded to nearest even: middle is that of the smallest and the largest element,
 * scale their distance / 254. So each element errs by scale / 2 at most. Of a row x times weights w, the middle makes
 * middle * sum(w), whose sums lie ready. A row that holds Inf or NaN has a scale of NaN, and so
 * has its result.
 *
 * Exports   LINEAR_ASKS, LINEAR_WIDE, AMX_BLOCK_ROWS, CODES_FEATURES; row_grid, linear_scratch, take_linear_scratch;
 *           linear_input, ready_input, x_in_place, x_copied_late, copied_row; by_tiles, panel_features,
 *           features_padded, pass_rows, sums_of_row, x_size. */
#pragma once
#include "linear_pass.inc.h"

#define LINEAR_ASKS (1 << 20) /* products of each column between two calls of given_up(): a fraction of a millisecond */
#define WIDE_ROW (1 << 16)    /* features of a row whose copying takes long enough to ask before each */
#define LINEAR_WIDE 1024      /* features of a part of a panel that is widened to memory: 128 KB */
#define AMX_BLOCK_ROWS 32     /* rows of a product by tiles: two tiles of x and two of a panel are four of acc */
#define AMX_STEPS 16          /* steps of a panel that make a tile */
#define CODES_FEATURES 1024   /* features of a panel of 4 bits that are unpacked for tiles: 32 KB */
#define COPIED_LATE (5 << 10) /* bytes of a row: 2 AMX_BLOCK_ROWS of them are 320 KB */
#define LEAST_HALF 0x1p-100f  /* of a row's range: below it, 127 / half could overflow */

/* An int8 row of x: its elements are scale times the integers, plus the middle. Of 4 bits, the scale times a->unit. */
typedef struct {
    lane scale, middle;
} row_grid;

/* A thread's memory. It outlives a task: the next one, if it has the same rows, finds x ready. */
typedef struct {
    int64_t *block; /* the block of rows that x holds, counted from 1: 0 is none */
    char *x;        /* (rows, features) as linear_input says, or two times AMX_BLOCK_ROWS of them: x_copied_late */
    row_grid *grid; /* (rows): of int8 x */
    int32_t *sums;  /* (rows, blocks): of int8 x */
    lane *wide;     /* (LINEAR_WIDE, PANEL): a part of a panel, widened; or its last tiles, filled up */
    char *codes;    /* (CODES_FEATURES, PANEL): of 4 bits by int8, where tiles multiply them; else NULL */
    lane *acc;      /* (panels, rows, PANEL) of a task; of a panel or pair, if all features are one block. By tiles,
                       (panels, AMX_BLOCK_ROWS, PANEL); then two panels or pairs, if all features are one block */
    char *turned;   /* the task's panels of w^T, where tiles multiply them; else NULL */
} linear_scratch;

typedef struct {
    const char *x;
    int64_t x_row; /* bytes */
} linear_input;

/* Input features of a panel, of which w has k. */
INLINE int64_t panel_features(const fa_linear_args *a, int64_t k)
{
    return round_up(k, in_blocks(a->weight) ? PACKED_BLOCK : features_per_step(a->weight));
}

/* Features of x that have weights. */
INLINE int64_t features_padded(const fa_linear_args *a)
{
    return a->transposed && !turns_pairs(a) ? a->k : panel_features(a, a->k);
}

/* Whether tiles multiply. */
INLINE int by_tiles(const fa_linear_args *a)
{
    return V_AMX && (multiplication_of(a) == BY_PAIRS || multiplication_of(a) == BY_BYTES);
}

/* Features of x that the product reads. */
INLINE int64_t features_read(const fa_linear_args *a)
{
    const int64_t features = features_padded(a);
    return by_tiles(a) ? round_up(features, AMX_STEPS * features_per_step(a->weight)) : features;
}

/* Whether x is read where it is: if it is what the product takes, its rows do not meet in one set of the first-level
 * cache, and tiles load them fast. Weights may be of more features than x has. Copying costs 2 to 13% of the time, with
 * few rows up to 40%. */
INLINE int x_in_place(const fa_linear_args *a)
{
    const int pairs = multiplication_of(a) == BY_PAIRS;
#if V_AMX
    if (by_tiles(a) && !amx_fit(a->x, a->x_row)) return 0;
#endif
    return !a->x_int8 && a->dtype == (pairs ? FA_BF16 : LANE_DTYPE) && a->x_row % 4096 && a->k == features_read(a);
}

/* Bytes of a feature of x, as the product reads it. */
INLINE int64_t x_size(const fa_linear_args *a)
{
    return a->x_int8 ? 1 : multiplication_of(a) == BY_PAIRS ? 2 : (int64_t)sizeof(lane);
}

/* Bytes from row to row of x's copy. Rows a multiple of 4 KB apart would meet in the same sets of the first-level cache. */
INLINE int64_t copied_row(const fa_linear_args *a)
{
    const int64_t row = round_up(features_read(a) * x_size(a), 64);
    return row % 4096 ? row : row + 64;
}

/* Whether 32 rows of x at a time are copied as they are, while tiles multiply the rows before. Only short ones: of 14336
 * features two copies fill the second-level cache, and every task of few panels makes them again, in 4 times the time. */
INLINE int x_copied_late(const fa_linear_args *a)
{
    const int as_it_is = !a->x_int8 && a->dtype == FA_BF16 && a->k == features_read(a);
    return by_tiles(a) && as_it_is && !x_in_place(a) && copied_row(a) <= COPIED_LATE;
}

/* Rows of a pass at most. */
INLINE int64_t pass_rows(const fa_linear_args *a)
{
    const multiplication how = multiplication_of(a);
    return how == BY_BLOCKS ? BLOCK_ROWS : how == BY_BYTES ? BYTES_ROWS : LINEAR_ROWS;
}

INLINE int64_t sums_of_row(const fa_linear_args *a)
{
    return in_blocks(a->weight) ? block_at(a, features_padded(a)) : 1;
}

static int64_t take_linear_scratch(arena *from, const fa_linear_args *a, const fa_linear_plan *plan,
                                   linear_scratch *scratch)
{
    const int64_t pair = 1 + a->gated, two = by_tiles(a) ? 2 : 1; /* one is finished while another is summed */
    const int64_t kept = plan->blocks == 1 ? two * pair : plan->panels;
    const int64_t kept_rows = by_tiles(a) ? AMX_BLOCK_ROWS : plan->rows;
    CUT(from, scratch->block, 1);
    const int64_t rows = x_copied_late(a) ? smaller(2 * AMX_BLOCK_ROWS, plan->rows) : plan->rows;
    CUT(from, scratch->x, x_in_place(a) ? 0 : rows * copied_row(a));
    CUT(from, scratch->grid, a->x_int8 ? plan->rows : 0);
    CUT(from, scratch->sums, a->x_int8 ? plan->rows * sums_of_row(a) : 0);
    CUT(from, scratch->wide, plan->widen ? LINEAR_WIDE * PANEL : by_tiles(a) ? AMX_STEPS * PANEL : 0);
    CUT(from, scratch->acc, kept * kept_rows * PANEL);
    scratch->codes = NULL, scratch->turned = NULL;
    if (a->transposed && by_tiles(a))
        CUT(from, scratch->turned, plan->panels * features_padded(a) / features_per_step(a->weight) * FA_PANEL_BYTES);
    if (V_AMX && multiplication_of(a) == BY_BLOCKS) CUT(from, scratch->codes, CODES_FEATURES * PANEL);
    return from->used;
}

#if LANE_BITS == 32
/* sums = those of every `block` of n bytes. */
static void sum_blocks(int64_t block, const char *bytes, int64_t n, int32_t *sums)
{
    for (int64_t b = 0; b < n / block; b++) {
        sums[b] = 0;
        for (int i = 0; i < block; i++) sums[b] += ((const int8_t *)bytes)[b * block + i];
    }
}

/* range = the smallest and the largest element of a row of k, or 0 if one is not finite. Returns whether all are. */
INLINE int range_of_row(fa_dtype dtype, const char *from, int64_t k, lane range[2])
{
    const int64_t size = dtype_size(dtype), last = larger(0, k - LANES);
    v_t x = v_load_as_part(dtype, from + last * size, k); /* of fewer than LANES, the other lanes are 0 */
    if (k < LANES)
        UNROLL_FOR(int i = 1; i < LANES; i++) x[i] = i < k ? x[i] : x[0];
    v_t most = x, least = x, odd = v_splat(0);
    for (int64_t d = 0; d < last; d += LANES) {
        odd = v_fma(x, v_splat(0), odd); /* NaN from an Inf or NaN on */
        x = v_load_as(dtype, from + d * size);
        most = v_max(x, most), least = v_min(x, least);
    }
    odd = v_fma(x, v_splat(0), odd);
    const int finite = !v_any(odd != odd);
    range[0] = finite ? -v_max_lanes(-least) : 0, range[1] = finite ? v_max_lanes(most) : 0;
    return finite;
}

/* Adding it to a number rounds that to an integer, in the lowest bits of the sum. */
#define TO_INTEGER v_splat(0x1.8p23f)

/* to (features_padded) = from (k) on its grid, in int8, and its sums. */
INLINE row_grid quantise_row_as(fa_dtype dtype, const fa_linear_args *a, const char *from, char *to, int32_t *sums)
{
    const int64_t size = dtype_size(dtype), k = a->k; /* which a store might change, for all gcc knows */
    lane range[2];
    const int finite = range_of_row(dtype, from, k, range);
    const lane middle = range[0] * 0.5f + range[1] * 0.5f; /* rounded: so either end may be the farther one */
    const lane half = fmaxf(fmaxf(range[1] - middle, middle - range[0]), LEAST_HALF);
    const v_t centre = v_splat(middle), factor = v_splat(127 / half);
    vi_t sum = {0};
    int64_t d = 0;
    for (; d + LANES <= k; d += LANES) {
        const v_t x = v_load_as(dtype, from + d * size);
        const vi_t rounded = (vi_t)((x - centre) * factor + TO_INTEGER);
        v_store_i8(to + d, rounded);
        sum += rounded;
    }
    sum -= (vi_t)TO_INTEGER * (ilane)(d / LANES); /* of the lowest 32 bits, which are all */
    if (d < k) {
        v_t x = v_load_as_n(dtype, from + d * size, k - d);
        UNROLL_FOR(int i = 0; i < LANES; i++) x[i] = i < k - d ? x[i] : middle;
        const vi_t rounded = (vi_t)((x - centre) * factor + TO_INTEGER);
        v_store_i8_part(to + d, rounded, k - d);
        sum += rounded - (vi_t)TO_INTEGER;
    }
    memset(to + k, 0, round_up(k, 64) - k);
    if (in_blocks(a->weight)) sum_blocks(a->block, to, features_padded(a), sums);
    else if (V_I8_OFFSET) /* below 2^24: _args/ops.py */
        *sums = finite ? (int32_t)v_sum(__builtin_convertvector(sum, v_t)) : 0;
    return (row_grid){finite ? half / 127 * (lane)a->unit : NAN, middle};
}

/* A function for each dtype: inlined into one, their sums would be on the stack. */
#define QUANTISE(name, dtype)                                                                                          \
    NOINLINE row_grid name(const fa_linear_args *a, const char *from, char *to, int32_t *sums)                         \
    {                                                                                                                  \
        return quantise_row_as(dtype, a, from, to, sums);                                                              \
    }
QUANTISE(quantise_f16, FA_F16)
QUANTISE(quantise_bf16, FA_BF16)
QUANTISE(quantise_lanes, LANE_DTYPE)
#undef QUANTISE

static row_grid quantise_row(const fa_linear_args *a, const char *from, char *to, int32_t *sums)
{
    switch (a->dtype) {
    case FA_F16: return quantise_f16(a, from, to, sums);
    case FA_BF16: return quantise_bf16(a, from, to, sums);
    default: return quantise_lanes(a, from, to, sums);
    }
}
#else
static row_grid quantise_row(const fa_linear_args *a, const char *from, char *to, int32_t *sums)
{
    return (void)a, (void)from, (void)to, (void)sums, (row_grid){NAN, 0};
}
#endif

/* The rows of x from `row` on. `block` is their number among the blocks of the plan. */
static linear_input ready_input(const fa_linear_args *a, int64_t block, int64_t row, int64_t rows,
                                const linear_scratch *scratch)
{
    const char *from = a->x + row * a->x_row;
    if (x_in_place(a) || x_copied_late(a)) return (linear_input){from, a->x_row};
    const linear_input ready = {scratch->x, copied_row(a)};
    const int64_t size = ready.x_row, features = features_padded(a);
    if (*scratch->block == block + 1) return ready;
    char *to = scratch->x;
    for (int64_t r = 0; r < rows; r++, from += a->x_row, to += size) {
        if (features >= WIDE_ROW && given_up(a->watch)) break;
        if (a->x_int8) {
            scratch->grid[r] = quantise_row(a, from, to, scratch->sums + r * sums_of_row(a));
        } else if (multiplication_of(a) == BY_PAIRS) {
            round_row(a->dtype, from, a->k, to);
            if (by_tiles(a)) memset(to + a->k * 2, 0, (features_read(a) - a->k) * 2);
        } else {
            load_row(a->dtype, from, a->k, 1, (lane *)to);
            for (int64_t d = a->k; d < features; d++) ((lane *)to)[d] = 0;
        }
    }
    *scratch->block = block + 1;
    return ready;
}

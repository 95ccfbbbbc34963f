/* Rows of weights that are packed: where they are, a thread's memory for them, and whether their numbers are finite.
 *
 * Exports   PACK_WORDS, PACK_PITCH, PACK_GROUP, LEAST_BLOCK; pack_scratch, take_pack_scratch, pack_scratch_bytes,
 *           pack_row; of_file, side_by_side, pack_features; load_source, v_magnitude_bits, v_most_bits, most_bits,
 *           most_of, judge. */
#pragma once
#include "interface/pack.h"
#include "linear_pass.inc.h"

#define PACK_WORDS 1024                   /* of each row: PANEL rows of them stay in the second-level cache */
#define PACK_PITCH (PACK_WORDS + LANES)   /* a power of two would put all rows into the same sets of a cache */
#define PACK_GROUP (LANES * PACKED_BLOCK) /* features whose scales are found together */
#define LEAST_BLOCK 16                    /* features that share a scale in some files */

/* A thread's memory. */
typedef struct {
    lane *x;          /* the features of PACK_WORDS words, and 0 up to a whole PACK_GROUP */
    lane *words;      /* (PANEL, PACK_PITCH) */
    lane *gathered;   /* (PANEL, k): rows whose features do not lie side by side */
    lane *divisors;   /* of weights in blocks: of LANES blocks of x */
    uint16_t *scales; /* the same: of each block of x, as they are stored */
    uint16_t *minima; /* the same */
    uint8_t *codes;   /* of 4 bits: of each feature of x */
    double *sums;     /* (PANEL): of integers, what a->sums has of the rows, so far */
} pack_scratch;

/* A row of a panel. */
typedef struct {
    const char *data; /* NULL: a row of 0 */
    fa_dtype dtype;
    int64_t block; /* number of its block of rows */
} pack_row;

INLINE int of_file(const fa_pack_args *a) { return a->n_blocks && a->blocks[0].layout; }

INLINE int side_by_side(const fa_pack_args *a, const fa_pack_rows *block)
{
    return a->k <= 1 || block->col == dtype_size(block->dtype);
}

/* Features of a row that are packed at a time: whole blocks. */
INLINE int64_t pack_features(const fa_pack_args *a) { return PACK_WORDS * features_per_step(a->weight); }

static int64_t take_pack_scratch(arena *from, const fa_pack_args *a, pack_scratch *scratch)
{
    const int64_t most = round_up(smaller(a->k, pack_features(a)), PACK_GROUP), coded = in_blocks(a->weight);
    int gathers = 0;
    for (int64_t i = 0; i < a->n_blocks; i++) gathers |= !side_by_side(a, &a->blocks[i]);
    CUT(from, scratch->x, most);
    CUT(from, scratch->words, PANEL * PACK_PITCH);
    CUT(from, scratch->gathered, gathers * PANEL * a->k);
    CUT(from, scratch->divisors, coded * LANES);
    CUT(from, scratch->scales, coded * (most / LEAST_BLOCK + LANES));
    CUT(from, scratch->minima, coded * (most / LEAST_BLOCK + LANES));
    CUT(from, scratch->codes, coded * most);
    CUT(from, scratch->sums, PANEL);
    return from->used;
}

static int64_t pack_scratch_bytes(const fa_pack_args *a)
{
    return take_pack_scratch(&(arena){0}, a, &(pack_scratch){0});
}

#if LANE_BITS == 64
/* The numbers of two bytes that convert.inc.h has for float lanes alone. */
INLINE lane widened(fa_dtype dtype, uint32_t bits)
{
    const uint32_t magnitude = dtype == FA_BF16 ? bits << 16 : (bits & 0x7fff) << 13;
    float x;
    memcpy(&x, &magnitude, sizeof x);
    if (dtype == FA_BF16) return x;
    x *= 0x1p112f; /* what then is 2^16 or more was Inf or NaN, and stays too large for float16 */
    return x >= 65536.0f ? (lane)NAN : bits & 0x8000 ? -x : x;
}
#endif

/* to (n) = from (n), side by side. A float64 too large for float32 becomes infinite. */
static void load_source(fa_dtype dtype, const char *from, int64_t n, lane *to)
{
#if LANE_BITS == 32
    typedef double other_u __attribute__((aligned(1), may_alias));
    if (dtype == FA_F64)
        for (int64_t j = 0; j < n; j++) to[j] = (lane)((const other_u *)from)[j];
#else
    typedef float other_u __attribute__((aligned(1), may_alias));
    typedef uint16_t two_u __attribute__((aligned(1), may_alias));
    if (dtype == FA_F32)
        for (int64_t j = 0; j < n; j++) to[j] = ((const other_u *)from)[j];
    else if (dtype != FA_F64)
        for (int64_t j = 0; j < n; j++) to[j] = widened(dtype, ((const two_u *)from)[j]);
#endif
    else load_row(dtype, from, n, 1, to);
}

/* The bits of |x|: they are in the order of the numbers, then Inf, then NaN. v_abs leaves NaN and 0 their signs. */
INLINE vi_t v_magnitude_bits(v_t x) { return (vi_t)x & (ilane)(~(wlane)0 >> 1); }

INLINE vi_t v_most_bits(vi_t most, v_t x) { return v_max_i(most, v_magnitude_bits(x)); }

/* The largest of `most` and of the bits of |x|, x (n). */
static vi_t most_bits(vi_t most, const char *x, int64_t n)
{
    vi_t other = most;
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) {
        most = v_most_bits(most, v_load(x + j * (int64_t)sizeof(lane)));
        other = v_most_bits(other, v_load(x + (j + LANES) * (int64_t)sizeof(lane)));
    }
    for (; j < n; j += LANES) most = v_most_bits(most, v_load_part(x + j * (int64_t)sizeof(lane), n - j));
    return v_most_bits(most, (v_t)other);
}

INLINE lane most_of(vi_t most)
{
    ilane largest = 0;
    lane x;
    UNROLL_FOR(int i = 0; i < LANES; i++) largest = largest > most[i] ? largest : most[i];
    memcpy(&x, &largest, sizeof x);
    return x;
}

/* `largest` is that of |x| over some of the row. */
INLINE void judge(const fa_pack_args *a, const pack_row *row, lane largest)
{
    if (row->data && !(largest < (lane)a->beyond)) __atomic_store_n(a->bad + row->block, 1, __ATOMIC_RELAXED);
}

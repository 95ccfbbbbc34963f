/* Weights of linear maps, from rows of any floating type into panels, as _args/packed.py says.
 *
 * A step of a panel is one word, as wide as a lane, for each of its PANEL output features: one input feature in float32
 * and float64, two in bfloat16, four in int8 and Q8, eight in 4 bits. So every type is packed in the same way:
 *
 *   for each panel, for each PACK_WORDS words of its rows
 *     for each row: its words, side by side               read once from memory; words that lie there already are
 *                                                         looked at only, for NaN and infinities
 *     words (PANEL, n) are transposed to (n, PANEL)       from the caches
 *
 * What is too large for the type, infinite or NaN marks its block of rows as bad. Then nobody uses the panels.
 * The arithmetic is that of _reference/pack.py, bit by bit.
 *
 * Exports   pack_scratch_bytes, pack_run. */
#pragma once
#include "linear_pass.inc.h"

#define PACK_WORDS 1024                   /* of each row: PANEL rows of them stay in the second-level cache */
#define PACK_PITCH (PACK_WORDS + LANES)   /* a power of two would put all rows into the same sets of a cache */
#define PACK_GROUP (LANES * PACKED_BLOCK) /* features whose scales are found together */

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
    CUT(from, scratch->scales, coded * (most / PACKED_BLOCK));
    CUT(from, scratch->minima, coded * (most / PACKED_BLOCK));
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

#if LANE_BITS == 32
/* The same of n pairs of bfloat16. */
static vi_t most_pair_bits(vi_t most, const char *x, int64_t n)
{
    for (int64_t j = 0; j < n; j += LANES) {
        const vi_t pairs = (vi_t)v_load_part(x + j * 4, n - j);
        most = v_most_bits(v_most_bits(most, (v_t)(pairs & (ilane)0xffff0000)), (v_t)(pairs << 16));
    }
    return most;
}

static void pack_pairs(const lane *x, int64_t n, char *to)
{
    for (int64_t j = 0; j < n; j += LANES) v_store_bf16(to + j * 2, v_load(x + j));
}

/* to = quotients, rounded to nearest even, which it returns, too. By a scale that is coarse they may exceed 127. */
INLINE v_t v_rounded_bytes(v_t quotients, char *to)
{
    const v_t most = v_splat(127), magic = v_splat(0x1.8p23f); /* adding it rounds, into the lowest bits */
    const v_t rounded = v_min(most, v_max(-most, quotients)) + magic;
    v_store_i8(to, (vi_t)rounded);
    return rounded - magic;
}

/* to (n) = x / scale, rounded. Returns the sum, times the scale: exact, as are the sums of all parts of a row. */
static double pack_bytes(const lane *x, int64_t n, lane scale, char *to)
{
    const v_t divisor = v_splat(scale == 0 ? 1 : scale);
    v_t sum = v_splat(0);
    for (int64_t j = 0; j < n; j += LANES) sum += v_rounded_bytes(v_load(x + j) / divisor, to + j);
    return (double)v_sum(sum) * scale;
}

/* The scales of LANES blocks of x: their largest magnitudes, or what makes the element of that magnitude, the first of
 * them, a->extreme. */
INLINE v_t v_block_scales(const fa_pack_args *a, const lane *x)
{
    v_t up[LANES], down[LANES]; /* the largest of x and of -x, of each block */
    for (int b = 0; b < LANES; b++) {
        up[b] = v_load(x + b * PACKED_BLOCK), down[b] = -up[b];
        UNROLL_FOR(int j = LANES; j < PACKED_BLOCK; j += LANES) {
            const v_t more = v_load(x + b * PACKED_BLOCK + j);
            up[b] = v_max(up[b], more), down[b] = v_max(down[b], -more);
        }
    }
    const v_t high = v_max_each(up), low = v_max_each(down);
    const v_t magnitude = (v_t)v_magnitude_bits(v_max(high, low));
    if (a->weight == FA_Q8) return magnitude / v_splat(127);
    if (a->extreme == 0) return magnitude;
    v_t largest = v_select(high > low, high, -low);
    if (v_any(high == low))
        for (int b = 0; b < LANES; b++)
            if (high[b] == low[b]) {
                const lane *each = x + b * PACKED_BLOCK;
                while (fabsf(*each) != high[b] && each < x + (b + 1) * PACKED_BLOCK - 1) each++;
                largest[b] = *each;
            }
    return largest / v_splat((lane)a->extreme);
}

/* The minima of LANES blocks of x, from which they are subtracted, as float16. */
INLINE v_t v_block_minima(lane *x, uint16_t *minima)
{
    v_t most[LANES]; /* of -x */
    for (int b = 0; b < LANES; b++) {
        most[b] = -v_load(x + b * PACKED_BLOCK);
        UNROLL_FOR(int j = LANES; j < PACKED_BLOCK; j += LANES)
            most[b] = v_max(most[b], -v_load(x + b * PACKED_BLOCK + j));
    }
    v_store_f16(minima, -v_max_each(most));
    const v_t minimum = v_load_f16(minima);
    for (int b = 0; b < LANES; b++)
        UNROLL_FOR(int j = 0; j < PACKED_BLOCK; j += LANES)
            v_store(x + b * PACKED_BLOCK + j, v_load(x + b * PACKED_BLOCK + j) - v_splat(minimum[b]));
    return minimum;
}

/* How many of the fifteen numbers `middles` are less than x. */
INLINE vi_t v_code(const lane *middles, v_t x)
{
    vi_t code = {0};
    UNROLL_FOR(int step = 8; step; step /= 2) code += (v_lookup(middles, code + (step - 1)) < x) & step;
    return code;
}

/* Codes of n features of x, and of zeros up to a whole block, of 4 bits two a byte; scales and minima of blocks, `block`
 * numbers after a's first and PANEL apart. Returns the sum of the n weights as integers have them: each block's is exact,
 * and is scaled; these are added in order. */
static double pack_codes(const fa_pack_args *a, const pack_scratch *s, int64_t n, int64_t block, char *to)
{
    typedef uint64_t eight_u __attribute__((aligned(1), may_alias));
    typedef uint32_t four_u __attribute__((aligned(1), may_alias));
    const int64_t blocks = ceil_div(n, PACKED_BLOCK);
    const int bytes = a->weight == FA_Q8;
    double sum = 0;
    for (int64_t first = 0; first < blocks; first += LANES) {
        v_t minimum = v_splat(0);
        if (a->minima) minimum = v_block_minima(s->x + first * PACKED_BLOCK, s->minima + first);
        v_store_f16(s->scales + first, v_block_scales(a, s->x + first * PACKED_BLOCK));
        const v_t scale = v_load_f16(s->scales + first);
        v_t sums[LANES];                                                      /* of each block, exactly */
        v_store(s->divisors, v_select(scale == 0, v_splat(INFINITY), scale)); /* the codes are then those of 0 */
        for (int64_t i = 0; i < LANES; i++) {
            const int64_t b = first + i;
            sums[i] = v_splat(0);
            if (b >= blocks) continue;
            UNROLL_FOR(int64_t j = b * PACKED_BLOCK; j < (b + 1) * PACKED_BLOCK; j += LANES) {
                const v_t scaled = v_load(s->x + j) / v_splat(s->divisors[i]);
                if (bytes) {
                    sums[i] += v_rounded_bytes(scaled, to + j);
                    continue;
                }
                const vi_t code = v_code(a->middles, scaled);
                v_store_i8(s->codes + j, code);
                sums[i] += v_lookup(a->codes, code);
            }
            for (int64_t j = n; !bytes && j < (b + 1) * PACKED_BLOCK; j++)
                sums[i][0] -= ((const lane *)a->codes)[s->codes[j]];
            ((uint16_t *)a->scales)[block + b * PANEL] = s->scales[b];
            if (a->minima) ((uint16_t *)a->minima)[block + b * PANEL] = s->minima[b];
        }
        const v_t whole = v_sum_each(sums);
        for (int64_t i = 0; i < smaller(LANES, blocks - first); i++) {
            const int64_t features = smaller(PACKED_BLOCK, n - (first + i) * PACKED_BLOCK);
            sum += (double)whole[i] * scale[i] + (double)features * minimum[i];
        }
    }
    const eight_u *restrict eights = (const eight_u *)s->codes;
    four_u *restrict words = (four_u *)to;
    for (int64_t j = 0; !bytes && j < blocks * PACKED_BLOCK / 8; j++)
        words[j] = (uint32_t)(eights[j] | eights[j] >> 28);
    return sum;
}
#endif

/* s->x = n features of a row, and 0 up to a whole group. */
INLINE void load_features(const pack_scratch *s, const pack_row *row, int64_t first, int64_t n)
{
    if (row->data) load_source(row->dtype, row->data + first * dtype_size(row->dtype), n, s->x);
    else memset(s->x, 0, n * sizeof(lane));
    memset(s->x + n, 0, (round_up(n, PACK_GROUP) - n) * sizeof(lane));
}

#if LANE_BITS == 32
/* The scale of a row of int8. A row of one part is then in s->x. */
static lane row_scale(const fa_pack_args *a, const pack_scratch *s, const pack_row *row)
{
    vi_t most = {0};
    for (int64_t first = 0; first < a->k; first += pack_features(a)) {
        const int64_t n = smaller(a->k - first, pack_features(a));
        load_features(s, row, first, n);
        most = most_bits(most, (const char *)s->x, n);
    }
    judge(a, row, most_of(most));
    return most_of(most) / 127;
}

/* Adds a part's sum to that of row r. The sum of weights that are finite may not be. */
INLINE void add_sum(const fa_pack_args *a, const pack_scratch *s, int64_t r, int64_t panel, int64_t first, double sum)
{
    s->sums[r] = first ? s->sums[r] + sum : sum;
    ((lane *)a->sums)[panel * PANEL + r] = (lane)fmax(-LANE_MAX, fmin(LANE_MAX, s->sums[r] * a->unit));
}
#endif

/* The words of n features of a row, side by side: where they are, or where they were written to. */
static const char *row_words(const fa_pack_args *a, const pack_scratch *s, const pack_row *row, int64_t r,
                             int64_t panel, int64_t first, int64_t n)
{
    char *const to = (char *)(s->words + r * PACK_PITCH);
    const char *const source = row->data ? row->data + first * dtype_size(row->dtype) : NULL;
    const vi_t none = {0};
    if (a->weight == LANE_DTYPE) {
        if (!source) return memset(to, 0, n * sizeof(lane));
        if (row->dtype != LANE_DTYPE) load_source(row->dtype, source, n, (lane *)to);
        const char *words = row->dtype == LANE_DTYPE ? source : to;
        judge(a, row, most_of(most_bits(none, words, n)));
        return words;
    }
#if LANE_BITS == 32
    if (a->weight == FA_BF16 && source && row->dtype == FA_BF16 && n % 2 == 0) {
        judge(a, row, most_of(most_pair_bits(none, source, n / 2)));
        return source;
    }
    if (a->weight == FA_I8) {
        lane *scale = (lane *)a->scales + panel * PANEL + r;
        if (!first) *scale = row_scale(a, s, row);
        if (a->k > pack_features(a)) load_features(s, row, first, n);
        add_sum(a, s, r, panel, first, pack_bytes(s->x, n, *scale, to));
        return to;
    }
    load_features(s, row, first, n);
    judge(a, row, most_of(most_bits(none, (const char *)s->x, n)));
    if (a->weight == FA_BF16) pack_pairs(s->x, n, to);
    else {
        const int64_t block = panel * ceil_div(a->k, PACKED_BLOCK) + first / PACKED_BLOCK;
        add_sum(a, s, r, panel, first, pack_codes(a, s, n, block * PANEL + r, to));
    }
#else
    (void)panel;
#endif
    return to;
}

/* to (n, PANEL) = the first n words of each row of `from`, transposed. */
static void transpose_words(const char *const *from, int64_t n, char *to)
{
    for (int64_t j = 0; j < n; j += LANES, to += LANES * FA_PANEL_BYTES)
        for (int64_t c = 0; c < PANEL; c += LANES) {
            const int64_t count = smaller(n - j, LANES);
            v_t words[LANES];
            char *const column = to + c * (int64_t)sizeof(lane);
            if (count == LANES) {
                UNROLL_FOR(int i = 0; i < LANES; i++) words[i] = v_load(from[c + i] + j * (int64_t)sizeof(lane));
                v_transpose(words);
                UNROLL_FOR(int i = 0; i < LANES; i++) v_stream(column + i * FA_PANEL_BYTES, words[i]);
            } else {
                for (int i = 0; i < LANES; i++) words[i] = v_load_n(from[c + i] + j * (int64_t)sizeof(lane), count);
                v_transpose(words);
                for (int i = 0; i < count; i++) v_stream(column + i * FA_PANEL_BYTES, words[i]);
            }
        }
}

/* to (rows, k) = rows of a block whose features do not lie side by side. Those of a transposed matrix are read LANES
 * rows at a time. */
static void gather_rows(const fa_pack_args *a, const fa_pack_rows *block, const char *from, int64_t rows, lane *to)
{
    const int64_t k = a->k, col = block->col, size = dtype_size(block->dtype);
    const int tiles = block->row == size && size <= (int64_t)sizeof(lane) && (LANE_BITS == 32 || size == 8);
    for (int64_t d = 0; d < k; d += LANES) {
        const int64_t n = smaller(k - d, LANES);
        int64_t r = 0;
        if (d % PACK_WORDS == 0 && given_up(a->watch)) return;
        for (; tiles && n == LANES && r + LANES <= rows; r += LANES) {
            v_t x[LANES];
            for (int i = 0; i < LANES; i++) x[i] = v_load_as(block->dtype, from + r * size + (d + i) * col);
            v_transpose(x);
            for (int i = 0; i < LANES; i++) v_store(to + (r + i) * k + d, x[i]);
        }
        for (; r < rows; r++)
            for (int64_t i = d; i < d + n; i++)
                load_source(block->dtype, from + r * block->row + i * col, 1, to + r * k + i);
    }
}

/* Where the PANEL rows from output feature `first` of a map on are. */
static void find_rows(const fa_pack_args *a, const pack_scratch *s, int map, int64_t first, pack_row rows[])
{
    for (int64_t r = 0; r < PANEL; r++) rows[r] = (pack_row){0};
    for (int64_t i = 0; i < a->n_blocks; i++) {
        const fa_pack_rows *block = &a->blocks[i];
        const int64_t begin = larger(block->begin, first), end = smaller(block->end, first + PANEL);
        if (block->map != map || begin >= end) continue;
        const char *data = block->data + (begin - block->begin) * block->row;
        lane *gathered = side_by_side(a, block) ? NULL : s->gathered + (begin - first) * a->k;
        if (gathered) gather_rows(a, block, data, end - begin, gathered);
        for (int64_t r = 0; r < end - begin; r++) {
            rows[begin - first + r] = (pack_row){data + r * block->row, block->dtype, i};
            if (gathered) rows[begin - first + r] = (pack_row){(char *)(gathered + r * a->k), LANE_DTYPE, i};
        }
    }
}

/* Packs panels begin .. end - 1. */
static void pack_run(const fa_pack_args *a, int64_t begin, int64_t end, void *memory)
{
    pack_scratch s;
    take_pack_scratch(&(arena){.memory = memory}, a, &s);
    const int64_t each = features_per_step(a->weight), unit = in_blocks(a->weight) ? PACKED_BLOCK : each;
    const int64_t steps = round_up(a->k, unit) / each;
    for (int64_t panel = begin; panel < end; panel++) {
        pack_row rows[PANEL];
        find_rows(a, &s, (int)(panel % a->maps), panel / a->maps * PANEL, rows);
        for (int64_t d = 0; d < a->k; d += pack_features(a)) {
            const int64_t n = smaller(a->k - d, pack_features(a));
            const char *from[PANEL];
            if ((d || panel > begin) && given_up(a->watch)) return;
            for (int64_t r = 0; r < PANEL; r++) from[r] = row_words(a, &s, &rows[r], r, panel, d, n);
            transpose_words(from, round_up(n, unit) / each, a->panels + (panel * steps + d / each) * FA_PANEL_BYTES);
        }
    }
    v_stream_end();
}

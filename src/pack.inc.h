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
 * Codes of a file's blocks are kept, with their scales: file_blocks.inc.h decodes them.
 *
 * What is too large for the type, infinite or NaN marks its block of rows as bad. Then nobody uses the panels.
 * The arithmetic is that of _reference/pack.py, bit by bit.
 *
 * Exports   pack_run. */
#pragma once
#include "file_blocks.inc.h"

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

/* to (n) = x in a narrow type without scales. */
static void pack_narrow(fa_dtype weight, const lane *x, int64_t n, char *to)
{
    for (int64_t j = 0; j < n; j += LANES) v_store_code(weight, NULL, NULL, v_load(x + j), to + j * code_bytes(weight));
}

/* to (n) = x / scale, rounded. Returns the sum, times the scale: exact, as are the sums of all parts of a row. */
static double pack_bytes(const lane *x, int64_t n, lane scale, char *to)
{
    const v_t divisor = v_splat(scale == 0 ? 1 : scale);
    v_t sum = v_splat(0);
    for (int64_t j = 0; j < n; j += LANES) sum += v_rounded_bytes(v_load(x + j) / divisor, to + j);
    return (double)v_sum(sum) * scale;
}

/* The scales of LANES blocks of x, which make a->extreme of the largest magnitude, or of the element that has it, the
 * first of them. */
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
    if (a->by_magnitude) return magnitude / v_splat((lane)a->extreme);
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

/* Codes of n features of x, and of zeros up to a whole block, of 4 bits two a byte; scales and minima of blocks, `block`
 * numbers after a's first and PANEL apart. Returns the sum of the n weights as integers have them: each block's is exact,
 * and is scaled; these are added in order. */
static double pack_codes(const fa_pack_args *a, const pack_scratch *s, int64_t n, int64_t block, char *to)
{
    const int64_t blocks = ceil_div(n, PACKED_BLOCK);
    const int joined = by_table(a->weight);
    char *codes = joined ? (char *)s->codes : to;
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
                sums[i] += v_store_code(a->weight, a->middles, a->codes, scaled, codes + j);
            }
            for (int64_t j = n; joined && j < (b + 1) * PACKED_BLOCK; j++)
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
    if (joined) join_codes(s->codes, blocks * PACKED_BLOCK, to);
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
    if (!a->sums) return;
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
    if (by_row(a->weight)) {
        lane *scale = (lane *)a->scales + panel * PANEL + r;
        if (!first) *scale = row_scale(a, s, row);
        if (a->k > pack_features(a)) load_features(s, row, first, n);
        add_sum(a, s, r, panel, first, pack_bytes(s->x, n, *scale, to));
        return to;
    }
    const int64_t block = (panel * ceil_div(a->k, a->block) + first / a->block) * PANEL + r;
    if (of_file(a)) return add_sum(a, s, r, panel, first, pack_file_codes(a, s, row, first, n, block, to)), to;
    load_features(s, row, first, n);
    judge(a, row, most_of(most_bits(none, (const char *)s->x, n)));
    if (!in_blocks(a->weight)) pack_narrow(a->weight, s->x, n, to);
    else add_sum(a, s, r, panel, first, pack_codes(a, s, n, block, to));
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

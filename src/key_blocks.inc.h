/* Keys and values as micro-kernels read them, block by block: in place or copied.
 *
 * Literals  form: what products multiply.
 * Exports   load_block, is_dense, lies_well, rows_as_lanes, pair_values, rows_as_pairs, values_in_bf16, pair_rows,
 *           clear_paired_row, prefetch_block, prefetch_task. */
#pragma once
#include "operands.inc.h"

INLINE int is_dense(const fa_array *x, int64_t width) { return x->row == row_size(x->dtype, width); }

/* Whether n rows of `width` are read where they lie as fast as from a copy: if they are dense, or spread over the sets of
 * the first-level cache, which repeat after 4096 bytes and hold 8 lines at least. Of a short sequence, which few tiles
 * read, 16 rows in a set gain 7 to 40% on a Zen 3; 32 lose 6%, and of a whole block 64 lose 15%. */
INLINE int lies_well(const fa_array *x, int64_t width, int64_t n)
{
    const int64_t bytes = larger(1, row_size(x->dtype, width)), past = x->row & 4095, near = smaller(past, 4096 - past);
    /* Places in the sets: those that steps reach before they come round, if n rows drift over so many. */
    const int64_t reached = smaller(past ? 4096 / larger(64, past & -past) : 1, 1 + n * near / bytes);
    const int64_t places = smaller(4096 / bytes, reached);
    return is_dense(x, width) || n <= (n < BLOCK_K ? 16 : 8) * places;
}

/* Rows [first, first + n) of k or v as lanes: in place, or widened, scaled and gathered in `copy`, unless they are
 * `there`. */
INLINE const char *rows_as_lanes(const fa_array *x, const fa_array *scale, const row_block *rows, int64_t first,
                                 int64_t n, int64_t width, int there, lane *copy, int64_t *row_bytes)
{
    *row_bytes = x->row;
    const int in_place = lies_well(x, width, n) && in_a_row(x, first, n);
    if (dtype_size(x->dtype) == sizeof(lane) && in_place) return at_key(x, rows, first);
    *row_bytes = width * (int64_t)sizeof(lane);
    if (there) return (const char *)copy;
    EACH_KEY(x, rows, first, n, j, from)
    load_row(x->dtype, from, width, scale_of(scale, rows, first + j), copy + j * width);
    return (const char *)copy;
}

/* Pairs of rows: 2j and 2j + 1 of v become row j of pairs, `pitch` lanes apart; an odd last one is paired with 0. */
INLINE void pair_values(const char *v, int64_t v_row, int64_t n, int64_t width, int64_t pitch, lane *to)
{
    static const uint16_t zeros[2 * LANES];
    for (int64_t j = 0; j < n; j += 2, to += pitch) {
        const char *row0 = v + j * v_row, *row1 = row0 + v_row;
        int64_t d = 0;
        for (; d + 2 * LANES <= width; d += 2 * LANES)
            v_store_paired_bf16(to + d, row0 + d * 2, j + 1 < n ? row1 + d * 2 : (const char *)zeros);
        for (; d + LANES <= width; d += LANES)
            v_store(to + d, v_pair_bf16(row0 + d * 2, j + 1 < n ? row1 + d * 2 : (const char *)zeros));
        if (d < width) {
            uint16_t part[2][LANES] = {{0}};
            memcpy(part[0], row0 + d * 2, (width - d) * 2);
            if (j + 1 < n) memcpy(part[1], row1 + d * 2, (width - d) * 2);
            v_store_n(to + d, v_pair_bf16(part[0], part[1]), width - d);
        }
    }
}

/* The power of two of x, or one that leaves x as it is: int8 times it are exact in bfloat16, and sums of products with them
 * overflow no earlier than those with k. */
INLINE lane power_of(lane x)
{
    wlane bits;
    memcpy(&bits, &x, sizeof bits);
    bits = bits << 1 >> (MANTISSA_BITS + 1) << MANTISSA_BITS;
    memcpy(&x, &bits, sizeof bits);
    return x < LANE_MIN ? LANE_MIN : x <= LANE_MAX ? x : 1;
}

/* A row of int8 or int4 times `scale` in bfloat16. */
static void widen_to_bf16(fa_dtype dtype, const char *from, int64_t n, lane scale, char *to)
{
    if (dtype == FA_I8) {
        for (int64_t d = 0; d < n; d += LANES)
            v_store_as_part(FA_BF16, to + d * 2, v_load_as_part(FA_I8, from + d, n - d) * v_splat(scale), n - d);
        return;
    }
    const int64_t blocks = n / I4_BLOCK;
    scale += zero_i4(from, blocks);
    for (int64_t b = 0; b < blocks; b++, to += I4_BLOCK * 2) {
        lane x[I4_BLOCK];
        load_block_i4(from, blocks, b, scale, x);
        for (int d = 0; d < I4_BLOCK; d += LANES) v_store_as_part(FA_BF16, to + d * 2, v_load(x + d), LANES);
    }
}

/* Rows [first, first + n) of bfloat16, of int8 times the powers of their scales, or of int4 as products of pairs read them: in
 * place; or copied, unless they are `there`, and filled up with 0 to whole steps, where they are integers, something would be
 * read past a row or past the last, or tiles would load them slowly. */
INLINE const char *rows_as_pairs(const fa_array *x, const fa_array *scale, const row_block *rows, int64_t first,
                                 int64_t n, int64_t width, int there, lane *copy, int64_t *row_bytes)
{
    const char *from = at_key(x, rows, first);
    const int64_t padded = padded_k(width), whole = V_AMX ? round_up(n, AMX_KEYS) : n;
    const int widens = x->dtype != FA_BF16;
    int copies = padded > width || whole > n || !in_a_row(x, first, n) || widens;
    copies |= V_AMX ? !is_dense(x, width) : !lies_well(x, width, n);
#if V_AMX
    copies |= !amx_fit(from, x->row);
#endif
    *row_bytes = copies ? padded * 2 : x->row;
    if (!copies) return from;
    if (there) return (const char *)copy;
    EACH_KEY(x, rows, first, n, j, row)
    {
        char *to = (char *)copy + j * *row_bytes;
        if (widens) widen_to_bf16(x->dtype, row, width, power_of(scale_of(scale, rows, first + j)), to);
        else memcpy(to, row, width * 2);
        memset(to + width * 2, 0, (padded - width) * 2);
    }
    memset((char *)copy + n * *row_bytes, 0, (whole - n) * *row_bytes);
    return (const char *)copy;
}

/* Values [first, first + n) in bfloat16: key_rows or, of integers, scaled and rounded. */
INLINE const char *values_in_bf16(const fa_attention_args *a, const row_block *rows, int64_t first, int64_t n,
                                  void *copy, int64_t *row_bytes)
{
    const int64_t width = a->head_dim_v;
    if (a->v.dtype == FA_BF16) return key_rows(&a->v, rows, first, n, width, copy, row_bytes);
    *row_bytes = width * 2;
    EACH_KEY(&a->v, rows, first, n, j, from)
    widen_to_bf16(a->v.dtype, from, width, scale_of(&a->v_scale, rows, first + j), (char *)copy + j * *row_bytes);
    return copy;
}

/* Pairs of n rows of bfloat16 as sums over rows read them, padded_v(width) lanes each: by tiles transposed, of each
 * AMX_KEYS rows. */
INLINE void pair_rows(const char *x, int64_t x_row, int64_t n, int64_t width, lane *to)
{
#if V_AMX
    transpose_values(x, x_row, n, width, to);
#else
    pair_values(x, x_row, n, width, width, to);
#endif
}

/* A row of them becomes 0: one half of every pair. */
INLINE void clear_paired_row(int64_t row, int64_t width, lane *pairs)
{
    const int64_t step = key_step(1);
    char *half = (char *)(pairs + row / step * step / 2 * padded_v(width)) + row % step * 2;
    for (int64_t d = 0; d < width; d++) memset(half + d * step * 2, 0, 2);
}

/* The block's keys and values, copied where that is needed: a part of the head's copy is a whole block of the grid. */
INLINE void load_block(const fa_attention_args *a, const row_block *rows, int form, tile_scratch *scratch)
{
    key_block *block = &scratch->block;
    const int64_t width = a->head_dim, width_v = a->head_dim_v;
    int64_t first = block->first, n = block->n;
    scratch->odd = !scratch->odd; /* only here: a product that waits reads the other one */
    lane *k = scratch->k, *v = in_tiles(form) && scratch->odd ? scratch->v_odd : scratch->v;
    int there = 0;
    if (scratch->copy.head) {
        uint8_t *copied = scratch->copy.blocks + first / BLOCK_K;
        first = first / BLOCK_K * BLOCK_K, n = smaller(BLOCK_K, a->len_k - first);
        k = scratch->copy.k + first * copied_lanes(form, width);
        v = scratch->copy.v + first * copied_lanes(form, width_v);
        there = *copied, *copied = 1;
    }
    const int64_t skip = block->first - first;
    if (form == OF_BYTES) {
        block->k_row = round_up(width, 4), block->k = (const char *)k + skip * block->k_row;
        block->v_row = width_v * (int64_t)sizeof(lane), block->v = (const char *)v + skip / 4 * block->v_row;
        load_key_scales(&a->k_scale, rows, block->first, block->n, scratch->k_scale);
        load_value_scales(&a->v_scale, rows, block->first, block->n, scratch->v_scale, &block->bad);
        if (there) return;
        rows_as_bytes(&a->k, rows, first, n, width, (char *)k);
        if (!a->stats.second_pass) values_as_bytes(&a->v, rows, first, n, width_v, v);
        return;
    }
    if (form == OF_LANES) {
        block->k = rows_as_lanes(&a->k, &a->k_scale, rows, first, n, width, there, k, &block->k_row);
        block->k += skip * block->k_row;
        if (a->stats.second_pass) return;
        block->v = rows_as_lanes(&a->v, &a->v_scale, rows, first, n, width_v, there, v, &block->v_row);
        block->v += skip * block->v_row;
        return;
    }
    if (a->k.dtype == FA_I8) { /* what is not in the copy already */
        load_key_scales(&a->k_scale, rows, block->first, block->n, scratch->k_scale);
        for (int64_t j = 0; j < block->n; j++) scratch->k_scale[j] /= power_of(scratch->k_scale[j]);
    }
    block->k = rows_as_pairs(&a->k, &a->k_scale, rows, first, n, width, there, k, &block->k_row);
    block->k += skip * block->k_row;
    if (a->stats.second_pass) return;
    block->v_row = padded_v(width_v) * (int64_t)sizeof(lane), block->v = (const char *)v + skip / 2 * block->v_row;
    if (there) return;
    int64_t v_row;
    const char *values = values_in_bf16(a, rows, first, n, scratch->listed, &v_row);
    pair_rows(values, v_row, n, width_v, v);
}

/* Asks for part `i` of `parts` of what a task of `rows` reads first. Many sequences are each too short for the hardware's
 * prefetching to find anything to follow. */
INLINE void prefetch_task(const fa_attention_args *a, const row_block *rows, int i, int parts)
{
    row_block part = *rows;
    const int64_t keys = smaller(a->len_k, BLOCK_K), j0 = i * keys / parts, n = (i + 1) * keys / parts - j0;
    prefetch_keys(&a->k, rows, j0, n, a->head_dim);
    prefetch_keys(&a->v, rows, j0, n, a->head_dim_v);
    part.row0 += i * BLOCK_Q, part.n = smaller(part.n - i * BLOCK_Q, BLOCK_Q);
    EACH_ROW(&part, r, id) prefetch_rows(at_row(&a->q, &part, id), 0, 1, a->head_dim * dtype_size(a->q.dtype));
}

/* Asks for part `i` of `parts` of the block of keys and values from `first` on, where rows do not lie side by side:
 * there the hardware's prefetching finds nothing to follow. */
INLINE void prefetch_block(const fa_attention_args *a, const row_block *rows, const head_copy *copy, int64_t first,
                           int64_t last, int i, int parts)
{
    if (first >= last || (copy->head && copy->blocks[first / BLOCK_K])) return;
    const int64_t j0 = first + i * BLOCK_K / parts, n = smaller(first + (i + 1) * BLOCK_K / parts, last) - j0;
    if (n <= 0) return;
    if (!is_dense(&a->k, a->head_dim) || a->k.blocks) prefetch_keys(&a->k, rows, j0, n, a->head_dim);
    if ((!is_dense(&a->v, a->head_dim_v) || a->k.blocks) && !a->stats.second_pass)
        prefetch_keys(&a->v, rows, j0, n, a->head_dim_v);
}

/* Blocks of numbers as files have them: codes, scales and minima of a row, as fa_layout says where they lie. The
 * arithmetic is that of _args/coded.py, bit by bit.
 *
 *   for each block
 *     codes: sixteen at a time, whose bytes follow one another, have one shift and one mask
 *     scales and minima: LANES at a time, each with a byte and a shift of its own, times a float16
 *
 * Nothing is read before or after a block. Then codes become those that are stored, and each block's integers are added
 * up, for the sums of rows.
 *
 * Exports   pack_file_codes. */
#pragma once
#include "pack_rows.inc.h"

#if LANE_BITS == 32
#define EACH_BYTE 0x0101010101010101u

typedef uint64_t two_words __attribute__((vector_size(16)));
typedef two_words two_words_u __attribute__((aligned(1), may_alias));
typedef uint8_t sixteen __attribute__((vector_size(16)));

/* Where the bits above a code's are. */
typedef enum { NO_HIGH, HIGH, HIGH_IN_ORDER } high_bits;

/* The bits of two bytes, from the lowest one up, as sixteen bytes. */
INLINE two_words bits_apart(const char *from)
{
    const uint64_t a = (uint8_t)from[0] * EACH_BYTE, b = (uint8_t)from[1] * EACH_BYTE;
    const two_words bits = (two_words){a, b} & 0x8040201008040201u;
    return (bits + 0x7f * EACH_BYTE) >> 7 & EACH_BYTE;
}

/* to (features) = the codes of a block plus a number. `high` is literal. */
INLINE void decode_codes(const fa_layout *f, high_bits high, int add, const char *from, char *to)
{
    const fa_bits *bits = &f->codes;
    const uint64_t mask = EACH_BYTE * ((1u << bits->width) - 1), high_mask = EACH_BYTE * ((1u << bits->high_width) - 1);
    for (int r = 0; r < f->features / 16; r++) {
        two_words x = *(const two_words_u *)(from + bits->at[r]) >> bits->shift[r] & mask;
        const char *above = from + bits->high_at[r];
        if (high == HIGH) x |= (*(const two_words_u *)above >> bits->high_shift[r] & high_mask) << bits->width;
        if (high == HIGH_IN_ORDER) x |= bits_apart(above) << bits->width;
        *(two_words_u *)(to + 16 * r) = (two_words)((sixteen)x + (uint8_t)add);
    }
}

/* 2^(e - 128) as float16. */
INLINE uint16_t power_of_two(uint8_t e)
{
    const int power = e - 128;
    return (uint16_t)(power > 15 ? 0x7c00 : power >= -14 ? (power + 15) << 10 : power >= -24 ? 1 << (power + 24) : 0);
}

INLINE lane half_at(const fa_layout *f, const char *from, int at)
{
    const int first = (int)smaller(at, f->bytes - V_BYTES / 2);
    return v_load_f16(from + first)[(at - first) / 2];
}

/* Through floats, which are exact: for that way, unlike the direct one, compilers have an instruction. */
INLINE vi_t v_bytes(const uint8_t *from) { return __builtin_convertvector(v_load_i8(from), vi_t); }

/* LANES numbers from the i-th on. `bytes` are those of the block from f->window on. */
INLINE v_t v_integers(const fa_bits *bits, vi_t bytes, int i)
{
    vi_t x = v_lookup_i8(bytes, v_bytes(bits->at + i)) >> v_bytes(bits->shift + i) & ((1 << bits->width) - 1);
    if (bits->width == 8) x = x << 24 >> 24;
    if (bits->high_width) {
        const vi_t high = v_lookup_i8(bytes, v_bytes(bits->high_at + i)) >> v_bytes(bits->high_shift + i);
        x |= (high & ((1 << bits->high_width) - 1)) << bits->width;
    }
    return __builtin_convertvector(x + bits->add, v_t);
}

/* Scales and minima of a block as float16; up to LANES - 1 more are written. */
INLINE void decode_scales(const fa_layout *f, const char *from, uint16_t *scales, uint16_t *minima)
{
    if (!f->scales.width) {
        if (f->exponent) *scales = power_of_two((uint8_t)from[f->unit]);
        else memcpy(scales, from + f->unit, 2);
        if (f->minimum >= 0) memcpy(minima, from + f->minimum, 2);
        return;
    }
    const vi_t bytes = v_table_i8((const int8_t *)from + f->window);
    const v_t scale = v_splat(half_at(f, from, f->unit));
    for (int i = 0; i < f->features / f->shared; i += LANES)
        v_store_f16(scales + i, scale * v_integers(&f->scales, bytes, i));
    if (f->minimum < 0) return;
    const v_t minimum = v_splat(half_at(f, from, f->minimum));
    for (int i = 0; i < f->features / f->shared; i += LANES)
        v_store_f16(minima + i, -(minimum * v_integers(&f->minima, bytes, i)));
}

/* Codes of n features, whole blocks, plus a number, and their scales and minima. */
static void decode_blocks(const fa_layout *f, int add, const char *from, int64_t n, char *codes, uint16_t *scales,
                          uint16_t *minima)
{
    const int64_t each = f->features / f->shared;
    for (int64_t d = 0; d < n; d += f->features, from += f->bytes, scales += each, minima += each) {
        if (f->in_order) decode_codes(f, HIGH_IN_ORDER, add, from, codes + d);
        else if (f->codes.high_width) decode_codes(f, HIGH, add, from, codes + d);
        else decode_codes(f, NO_HIGH, add, from, codes + d);
        decode_scales(f, from, scales, minima);
    }
}

/* Twice as many scales: each is that of two blocks. */
static void double_scales(uint16_t *scales, int64_t n)
{
    for (int64_t i = n - 1; i >= 0; i--) scales[2 * i] = scales[2 * i + 1] = scales[i];
}

/* codes (n) = what is stored of a row's codes; s->scales and s->minima = those of its blocks, up to LANES of them 0. */
static void take_blocks(const fa_pack_args *a, const pack_scratch *s, const pack_row *row, int64_t first, int64_t n,
                        char *codes)
{
    const fa_pack_rows *rows = &a->blocks[row->block];
    const fa_layout *f = rows->layout;
    const int64_t blocks = n / a->block;
    decode_blocks(f, rows->add, row->data + first / f->features * f->bytes, n, codes, s->scales, s->minima);
    if (rows->table) {
        const vi_t table = v_table_i8(rows->table);
        for (int64_t d = 0; d < n; d += V_BYTES) v_store(codes + d, (v_t)v_lookup_i8(table, (vi_t)v_load(codes + d)));
    }
    if (f->shared > a->block) double_scales(s->scales, n / f->shared);
    if (f->shared > a->block && f->minimum >= 0) double_scales(s->minima, n / f->shared);
    for (int64_t b = blocks; b < round_up(blocks, LANES); b++) s->scales[b] = s->minima[b] = 0;
    if (!a->minima || f->minimum >= 0) return;
    for (int64_t b = 0; b < blocks; b += LANES) /* codes from 0 up that the file has from -8 up */
        v_store_f16(s->minima + b, by_table(a->weight) ? v_splat(-8) * v_load_f16(s->scales + b) : v_splat(0));
}

/* Sums of the integers of LANES blocks of codes, of which n are there, `block` features each: that is literal. Of what
 * lies behind a block within a vector nothing is added. */
INLINE v_t v_block_sums(int block, const vi_t *table, const char *codes, int64_t n)
{
    const vi_t none = {0},
               ones = (vi_t)v_load_n((const int32_t[16]){[0 ... 15] = 0x01010101}, smaller(LANES, block / 4));
    v_t sums[LANES];
    UNROLL_FOR(int i = 0; i < LANES; i++) {
        vi_t sum = none;
        sums[i] = v_splat(0);
        if (i >= n) continue;
        UNROLL_FOR(int j = 0; j < block / 4; j += LANES) {
            vi_t x = (vi_t)v_load(codes + i * block + 4 * j);
            if (table) x = v_lookup_i8(*table, x);
            sum += v_dot_i8(x, ones, none) - v_dot_i8(none, ones, none); /* the latter: V_I8_OFFSET */
        }
        sums[i] = __builtin_convertvector(sum, v_t);
    }
    return v_sum_each(sums);
}

/* Words of n features of a row of a file's blocks; scales and minima of blocks, `block` numbers after a's first and PANEL
 * apart. Returns the sum of the weights as integers have them: these of each block are exact, and are scaled; they are
 * added in order. */
static double pack_file_codes(const fa_pack_args *a, const pack_scratch *s, const pack_row *row, int64_t first,
                              int64_t n, int64_t block, char *to)
{
    const int64_t blocks = n / a->block;
    const int bytes = !by_table(a->weight);
    char *codes = bytes ? to : (char *)s->codes;
    int8_t integers[16];
    double sum = 0;
    vi_t most = {0};
    if (row->data) take_blocks(a, s, row, first, n, codes);
    else {
        memset(codes, bytes ? 0 : a->zero, n);
        memset(s->scales, 0, round_up(blocks, LANES) * 2), memset(s->minima, 0, round_up(blocks, LANES) * 2);
    }
    for (int i = 0; !bytes && i < 16; i += LANES)
        v_store_i8(integers + i, __builtin_convertvector(v_load((const lane *)a->codes + i), vi_t));
    const vi_t table = bytes ? most : v_table_i8(integers);
    for (int64_t b = 0; b < blocks; b += LANES) {
        const int64_t count = smaller(LANES, blocks - b);
        const char *here = codes + b * a->block;
        const v_t scale = v_load_f16(s->scales + b), minimum = a->minima ? v_load_f16(s->minima + b) : v_splat(0);
        v_t sums;
        if (a->block == 32) sums = v_block_sums(32, bytes ? NULL : &table, here, count);
        else sums = v_block_sums(LEAST_BLOCK, bytes ? NULL : &table, here, count);
        most = v_most_bits(v_most_bits(most, scale), minimum);
        for (int64_t i = 0; i < count; i++) {
            if (row->data) sum += (double)sums[i] * scale[i] + (double)a->block * minimum[i];
            ((uint16_t *)a->scales)[block + (b + i) * PANEL] = s->scales[b + i];
            if (a->minima) ((uint16_t *)a->minima)[block + (b + i) * PANEL] = s->minima[b + i];
        }
    }
    judge(a, row, most_of(most));
    if (!bytes) join_codes(s->codes, n, to);
    return sum;
}
#endif

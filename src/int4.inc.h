/* Rows of FA_I4, keys and values of caches. I4_BLOCK numbers share a scale in float16; a row has the scales of its blocks, then
 * 16 bytes for each block, of which byte i has number i in its lower half and number i + 16 in the upper. A number is scale *
 * (its four bits - 8). Rows have been multiplied by a Hadamard matrix (hadamard.inc.h) before they are rounded.
 *
 * Exports   I4_BLOCK, I4_BYTES, i4_codes, i4_scale; load_block_i4, zero_i4, load_row_i4; round_row_i4. */
#pragma once
#include "basics.inc.h"

#define I4_BLOCK 32
#define I4_BYTES (2 + I4_BLOCK / 2)
#define I4_VECTORS (I4_BLOCK / LANES) /* of a block */

/* Where the codes of block b begin, in a row of so many blocks. */
INLINE int64_t i4_codes(int64_t blocks, int64_t b) { return 2 * blocks + I4_BLOCK / 2 * b; }

/* A scale. Shifting exponent and mantissa into place leaves a bias of 127 - 15 to mend, which also normalises subnormals; what
 * then is 2^16 or more was Inf or NaN. */
INLINE lane i4_scale(const char *from)
{
    uint16_t half;
    float x;
    memcpy(&half, from, sizeof half);
    const uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    memcpy(&x, &bits, sizeof x);
    x = x * 0x1p112f < 0x1p16f ? x * 0x1p112f : NAN;
    return half & 0x8000 ? -x : x;
}

/* dst (I4_BLOCK) = factor * block b of src, of so many blocks. */
INLINE void load_block_i4(const char *src, int64_t blocks, int64_t b, lane factor, lane *dst)
{
    const v_t scale = v_splat(i4_scale(src + 2 * b) * factor);
    const char *codes = src + i4_codes(blocks, b);
    UNROLL_FOR(int i = 0; i < I4_BLOCK / 2; i += LANES)
        UNROLL_FOR(int upper = 0; upper < 2; upper++)
            v_store(dst + i + upper * I4_BLOCK / 2, v_scaled_u4(upper, v_load_u8(codes + i), scale));
}

/* 0; NaN where a scale is. */
INLINE lane zero_i4(const char *src, int64_t blocks)
{
    lane zero = 0;
    for (int64_t b = 0; b < blocks; b++) zero += i4_scale(src + 2 * b) * 0;
    return zero;
}

/* dst (n) = factor * src (n): exact, without a factor. All of it is NaN where a scale is. */
static void load_row_i4(const char *src, int64_t n, lane factor, lane *dst)
{
    const int64_t blocks = n / I4_BLOCK;
    factor += zero_i4(src, blocks);
    for (int64_t b = 0; b < blocks; b++) load_block_i4(src, blocks, b, factor, dst + b * I4_BLOCK);
}

/* The float16 next to x, of whose magnitude 65520 is too much: as v_store_f16 of simd_narrow.h. */
INLINE uint16_t half_of(float x)
{
    const float size = x < 0 ? -x : x, moved = size + 0.5f; /* subnormals: rounded, in the last bits of the mantissa */
    uint32_t bits, low, sign;
    memcpy(&bits, &size, sizeof bits), memcpy(&low, &moved, sizeof low), memcpy(&sign, &x, sizeof sign);
    const uint32_t normal = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
    return (uint16_t)((size < 0x1p-14f ? low - 0x3f000000 : normal) | (sign >> 16 & 0x8000));
}

/* to = x (n), rounded to blocks. Their scale is the element of the largest magnitude / -8, which has a code: that of 8 has none.
 * A row becomes NaN as a whole where some element is not finite, or too large for such a scale. */
static void round_row_i4(const lane *x, int64_t n, char *to)
{
    const v_t magic = v_splat((lane)(LANE_BITS == 64 ? 0x1.8p52 : 0x1.8p23)); /* adding it rounds to integers */
    v_t zero = v_splat(0), most = v_splat(0);
    for (int64_t d = 0; d < n; d += LANES) zero += v_load(x + d) * v_splat(0), most = v_max(v_abs(v_load(x + d)), most);
    const int fits = !v_any(zero != zero) && (float)v_max_lanes(most) < 8 * 65520.0f;
    const int64_t blocks = n / I4_BLOCK;
    for (int64_t b = 0; b < blocks; b++, x += I4_BLOCK) {
        v_t high = v_load(x), low = -high;
        for (int i = LANES; i < I4_BLOCK; i += LANES)
            high = v_max(high, v_load(x + i)), low = v_max(low, -v_load(x + i));
        const lane up = v_max_lanes(high), down = v_max_lanes(low);
        const uint16_t half = fits ? half_of((float)((up >= down ? up : -down) / -8)) : 0x7e00;
        memcpy(to + 2 * b, &half, sizeof half);
        const lane scale = i4_scale(to + 2 * b);
        const v_t by = v_splat(fits && scale != 0 ? scale : INFINITY);
        vi_t code[I4_VECTORS];
        for (int i = 0; i < I4_VECTORS; i++) {
            const v_t number = fits ? v_load(x + i * LANES) / by : v_splat(0);
            code[i] = (vi_t)(v_max(v_splat(0), v_min(v_splat(15), number + v_splat(8))) + magic) & 15;
        }
        for (int i = 0; i < I4_VECTORS / 2; i++)
            v_store_i8_part(to + i4_codes(blocks, b) + i * LANES, code[i] | code[i + I4_VECTORS / 2] << 4, LANES);
    }
}

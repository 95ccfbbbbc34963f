/* What the machine can do, for the bench: multiply-adds from registers, and a sum that reads memory once.
 *
 * Exports   fma_rounds, read_bytes. */
#pragma once
#include "simd.h"

/* FLOP that `rounds` rounds of multiply-adds take; of FA_BF16 and FA_I8, of the instruction that multiplies and adds
 * several in a lane, or 0 where there is none. A processor issues two multiply-adds a cycle and needs four cycles for
 * each: more than 8 independent ones hide that. */
#define FMA_CHAINS (V_BYTES == 64 ? 16 : 12)
#if V_I8_SQUARES
#define PEAK_DOT_I8 v_square_i8
#else
#define PEAK_DOT_I8 v_dot_i8
#endif
static double dot_i8_rounds(int64_t rounds)
{
#if V_I8_DOT && LANE_BITS == 32
    vi_t acc[FMA_CHAINS], a = (vi_t){0} + 3, b = (vi_t){0} + 5;
    UNROLL_FOR(int i = 0; i < FMA_CHAINS; i++) acc[i] = (vi_t){0} + i;
    __asm__ volatile("" : "+m"(a), "+m"(b));
    for (int64_t i = 0; i < rounds; i++)
        UNROLL_FOR(int c = 0; c < FMA_CHAINS; c++) acc[c] = PEAK_DOT_I8(a, b, acc[c]);
    UNROLL_FOR(int c = 0; c < FMA_CHAINS; c++) __asm__ volatile("" : "+m"(acc[c]));
    return (double)rounds * FMA_CHAINS * LANES * (V_I8_SQUARES ? 16 : 8);
#else
    return 0 * (double)rounds;
#endif
}

#if V_AMX
/* The same of products of tiles: four accumulators. */
static double tile_rounds(int64_t rounds, int bytes)
{
    amx_shapes(AMX_ROWS, AMX_ROWS, AMX_BYTES);
    for (int64_t i = 0; i < rounds; i++) {
        if (bytes) {
            AMX_DOT_I8(0, 4, 6);
            AMX_DOT_I8(1, 4, 7);
            AMX_DOT_I8(2, 5, 6);
            AMX_DOT_I8(3, 5, 7);
        } else {
            AMX_DOT_BF16(0, 4, 6);
            AMX_DOT_BF16(1, 4, 7);
            AMX_DOT_BF16(2, 5, 6);
            AMX_DOT_BF16(3, 5, 7);
        }
    }
    AMX_END();
    return (double)rounds * 4 * 2 * AMX_ROWS * LANES * AMX_BYTES / (bytes ? 1 : 2);
}
#endif

static double fma_rounds(int64_t rounds, fa_dtype kind)
{
#if V_AMX
    if (kind == FA_I8 || kind == FA_BF16) return tile_rounds(rounds / 4, kind == FA_I8);
#endif
    if (kind == FA_I8) return dot_i8_rounds(rounds);
    const int bf16 = kind == FA_BF16;
    if (bf16 && !V_BF16_DOT) return 0;
    v_t acc[FMA_CHAINS], a = v_splat((lane)0.5), b = v_splat((lane)0.25);
    UNROLL_FOR(int i = 0; i < FMA_CHAINS; i++) acc[i] = v_splat((lane)i);
    __asm__ volatile("" : "+m"(a), "+m"(b));
    for (int64_t i = 0; i < rounds; i++)
        UNROLL_FOR(int c = 0; c < FMA_CHAINS; c++)
            acc[c] = V_BF16_DOT && bf16 ? v_dot_bf16(a, b, acc[c]) : v_fma(a, acc[c], b);
    UNROLL_FOR(int c = 0; c < FMA_CHAINS; c++) __asm__ volatile("" : "+m"(acc[c]));
    return (double)rounds * FMA_CHAINS * LANES * (bf16 ? 4 : 2);
}

/* The sum of the numbers in n bytes, each read once; what does not fill 8 vectors at the end is left out. */
static double read_bytes(const char *data, int64_t n)
{
    v_t sum[8];
    UNROLL_FOR(int i = 0; i < 8; i++) sum[i] = v_splat(0);
    for (int64_t i0 = 0; i0 + 8 * V_BYTES <= n; i0 += 8 * V_BYTES)
        UNROLL_FOR(int i = 0; i < 8; i++) sum[i] += v_load(data + i0 + i * V_BYTES);
    UNROLL_FOR(int i = 1; i < 8; i++) sum[0] += sum[i];
    return v_sum(sum[0]);
}

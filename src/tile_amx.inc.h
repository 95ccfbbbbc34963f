/* The two products of attention by the tiles of AMX, in bfloat16; only if V_TILES. As in tile.inc.h lanes are queries: so everything
 * between the products is as it is without tiles.
 *
 *     tile            A                                  B                                  C
 *     S^T = K Q^T     16 keys x 32 dimensions of K       16 pairs of dimensions x queries   16 keys x 16 queries
 *     O^T += V^T P^T  16 dimensions x 32 keys of V^T     16 pairs of keys x queries         16 dimensions x 16 queries
 *
 * Four accumulators are 32 keys, or dimensions, x BLOCK_Q queries. K is read in place if its rows are whole tiles; V^T
 * is made of a block once (transpose_values). Keys are taken in steps of TILE_KEYS of the sequence, so that a row's bits
 * do not depend on where others begin: ranges.inc.h.
 *
 * Literals  nv: 1, NV. hi: 0, 1.
 * Exports   amx_scores, amx_values, transpose_values. */
#pragma once
#include "tile.inc.h"

_Static_assert(BLOCK_Q == 2 * TILE_ROWS && BLOCK_K % TILE_KEYS == 0, "tiles fill a block");

/* s (n, nv) = k (n, head_dim) qt (head_dim / 2, nv), for n rounded up to TILE_KEYS. */
INLINE void amx_scores(int nv, int64_t n, int64_t head_dim, const char *k, int64_t k_row, const lane *qt, lane *s)
{
    const int64_t pitch = BLOCK_Q * sizeof(lane), high = TILE_ROWS * k_row;
    for (int64_t j = 0; j < n; j += TILE_KEYS, k += TILE_KEYS * k_row, s += TILE_KEYS * BLOCK_Q) {
        TILE_ZERO(0);
        TILE_ZERO(2);
        if (nv > 1) TILE_ZERO(1);
        if (nv > 1) TILE_ZERO(3);
        for (int64_t d = 0; d < head_dim; d += TILE_KEYS) {
            const char *x = k + d * 2;
            const lane *y = qt + d / 2 * BLOCK_Q;
            TILE_LOAD(4, x, k_row);
            TILE_LOAD(6, y, pitch);
            TILE_DOT_BF16(0, 4, 6);
            TILE_LOAD(5, x + high, k_row);
            TILE_DOT_BF16(2, 5, 6);
            if (nv == 1) continue;
            TILE_LOAD(7, y + LANES, pitch);
            TILE_DOT_BF16(1, 4, 7);
            TILE_DOT_BF16(3, 5, 7);
        }
        TILE_STORE(0, s, pitch);
        TILE_STORE(2, s + TILE_ROWS * BLOCK_Q, pitch);
        if (nv == 1) continue;
        TILE_STORE(1, s + LANES, pitch);
        TILE_STORE(3, s + TILE_ROWS * BLOCK_Q + LANES, pitch);
    }
}

/* Rows [d, d + 16 or, with `hi`, 32) of out. */
INLINE void amx_value_tiles(int nv, int hi, int64_t d, const value_product *p)
{
    const int64_t pitch = BLOCK_Q * sizeof(lane), square = TILE_ROWS * TILE_BYTES;
    lane *out = p->out + d * BLOCK_Q;
    const char *v = p->v + d * TILE_BYTES;
    if (p->mode == ACC_ZERO) {
        TILE_ZERO(0);
        if (nv > 1) TILE_ZERO(1);
        if (hi) TILE_ZERO(2);
        if (hi && nv > 1) TILE_ZERO(3);
    } else {
        TILE_LOAD(0, out, pitch);
        if (nv > 1) TILE_LOAD(1, out + LANES, pitch);
        if (hi) TILE_LOAD(2, out + TILE_ROWS * BLOCK_Q, pitch);
        if (hi && nv > 1) TILE_LOAD(3, out + TILE_ROWS * BLOCK_Q + LANES, pitch);
    }
    for (int64_t j = 0; j < p->n; j += TILE_KEYS / 2, v += TILE_KEYS / 2 * p->v_row) {
        const lane *probs = p->probs + j * BLOCK_Q;
        TILE_LOAD(4, v, TILE_BYTES);
        TILE_LOAD(6, probs, pitch);
        TILE_DOT_BF16(0, 4, 6);
        if (hi) TILE_LOAD(5, v + square, TILE_BYTES);
        if (hi) TILE_DOT_BF16(2, 5, 6);
        if (nv == 1) continue;
        TILE_LOAD(7, probs + LANES, pitch);
        TILE_DOT_BF16(1, 4, 7);
        if (hi) TILE_DOT_BF16(3, 5, 7);
    }
    TILE_STORE(0, out, pitch);
    if (nv > 1) TILE_STORE(1, out + LANES, pitch);
    if (hi) TILE_STORE(2, out + TILE_ROWS * BLOCK_Q, pitch);
    if (hi && nv > 1) TILE_STORE(3, out + TILE_ROWS * BLOCK_Q + LANES, pitch);
}

/* block_values: v is V^T as transpose_values makes it, v_row the bytes of a pair of keys. */
INLINE void amx_values(int nv, const value_product *p)
{
    const int64_t width = padded_v(p->head_dim_v);
    for (int64_t d = 0; p->mode == ACC_SCALE && d < width; d++)
        UNROLL_FOR(int u = 0; u < nv; u++) {
            lane *out = p->out + d * BLOCK_Q + u * LANES;
            v_store(out, v_load(out) * v_load(p->alpha + u * LANES));
        }
    for (int64_t d = 0; d < width; d += 2 * TILE_ROWS) {
        if (d + TILE_ROWS < width) amx_value_tiles(nv, 1, d, p);
        else amx_value_tiles(nv, 0, d, p);
    }
}

/* to = V^T of n keys: of each TILE_KEYS, tiles of 16 dimensions x keys, 0 where there are none. */
static void transpose_values(const char *v, int64_t v_row, int64_t n, int64_t width, lane *to)
{
    static const uint16_t zeros[LANES];
    for (int64_t j = 0; j < n; j += TILE_KEYS, v += TILE_KEYS * v_row)
        for (int64_t d = 0; d < width; d += LANES, to += TILE_ROWS * LANES) {
            v_t pairs[LANES];
            UNROLL_FOR(int i = 0; i < LANES; i++) {
                const char *row0 = v + 2 * i * v_row + d * 2, *row1 = row0 + v_row;
                const int64_t left = n - j - 2 * i, some = smaller(width - d, LANES) * 2;
                uint16_t part[2][LANES] = {{0}};
                if (some < 2 * LANES && left > 0) row0 = memcpy(part[0], row0, some);
                if (some < 2 * LANES && left > 1) row1 = memcpy(part[1], row1, some);
                pairs[i] = v_pair_bf16(left > 0 ? row0 : (const char *)zeros, left > 1 ? row1 : (const char *)zeros);
            }
            v_transpose(pairs);
            UNROLL_FOR(int i = 0; i < LANES; i++) v_store(to + i * LANES, pairs[i]);
        }
}

/* Rotary positions (Su et al. 2021): a pair (a, b) of dimensions becomes (a cos - b sin, b cos + a sin). The pairs are
 * neighbours where `interleaved`; else dimension j is paired with dimension j + pairs.
 *
 * Exports   rope_run. */
#pragma once
#include "interface/rows.h"
#include "hadamard.inc.h"
#include "int8_products.inc.h"

/* Rotates x (head_dim) in place; cos and sin are (pairs). */
INLINE void rotate_row(const fa_rope_args *a, const lane_u *cos, const lane_u *sin, lane *x)
{
    const int64_t pairs = a->pairs;
    if (a->interleaved) {
        for (int64_t j = 0; j < pairs; j++) {
            const lane first = x[2 * j], second = x[2 * j + 1];
            x[2 * j] = first * cos[j] - second * sin[j];
            x[2 * j + 1] = second * cos[j] + first * sin[j];
        }
        return;
    }
    for (int64_t j = 0; j < pairs; j += LANES) {
        const int64_t n = pairs - j;
        const v_t cosine = v_load_part(cos + j, n), sine = v_load_part(sin + j, n);
        const v_t first = v_load_part(x + j, n), second = v_load_part(x + pairs + j, n);
        v_store_part(x + j, first * cosine - second * sine, n);
        v_store_part(x + pairs + j, second * cosine + first * sine, n);
    }
}

/* Rows [begin, end) of the batch * length rows, each of all heads. `row`, scratch, holds head_dim lanes. */
static void rope_run(const fa_rope_args *a, int64_t begin, int64_t end, void *row)
{
    for (int64_t r = begin; r < end; r++) {
        const int64_t b = r / a->length, i = r % a->length;
        const lane_u *cos = (const lane_u *)at(&a->cos, b, 0, i, 0), *sin = (const lane_u *)at(&a->sin, b, 0, i, 0);
        const char *x = at(&a->x, b, 0, i, 0);
        char *out = at(&a->out, b, 0, i, 0);
        for (int64_t h = 0; h < a->heads; h++, x += a->x.head, out += a->out.head) {
            load_row(a->x.dtype, x, a->head_dim, 1, row);
            rotate_row(a, cos, sin, row);
            if (a->hadamard || a->out.dtype == FA_I4) hadamard_row(a->head_dim, row);
            if (a->out.dtype == FA_I4) round_row_i4(row, a->head_dim, out);
            else if (a->out.dtype == FA_I8)
                *(lane_u *)at(&a->scale, b, h, i, 0) = round_row_i8(row, a->head_dim, (int8_t *)out);
            else store_row(a->out.dtype, row, a->head_dim, 1, out);
        }
    }
}

/* The additive tile: what is added to the scores of a block of keys before softmax. It holds the bias, and -inf where a
 * dense mask, the bias itself, or a gap between the ranges of a row's list hides a key.
 *
 * Exports   key_run, masked_run, adds; additive_row, additive_rows (rows of keys, BLOCK_K lanes apart). */
#pragma once
#include "ranges.inc.h"

/* Keys [j0, j0 + n) of a block, and what a dense mask makes of them: FULL, MASKED or EMPTY. */
typedef struct {
    int64_t j0, n;
    block_kind mask;
} key_run;

/* What a dense mask leaves of n keys from j0 on. Where all rows share the mask, as they share a padding mask, the keys
 * are trimmed to those attended, at multiples of `step`, as j0 is: often that leaves a full block. */
static key_run trimmed_run(const fa_attention_args *a, const row_block *rows, int step, int64_t j0, int64_t n)
{
    const int64_t col = a->masks.mask.col;
    int some = 0, all = 1;
    if (rows_share(rows, &a->masks.mask)) {
        const char *mask = at(&a->masks.mask, rows->b, first_row(rows).head, first_row(rows).query, j0);
        int64_t first = 0, last = n;
        while (first < last && !mask[first * col]) first++;
        if (first == last) return (key_run){j0, n, BLOCK_EMPTY};
        while (!mask[(last - 1) * col]) last--;
        first -= first % step;
        last = smaller(round_up(last, step), n);
        j0 += first;
        n = last - first;
    }
    EACH_ROW(rows, r, id) {
        const uint8_t *mask = (const uint8_t *)at(&a->masks.mask, rows->b, id.head, id.query, j0);
        uint8_t any = 0, none = 0;
        if (col == 1)
            for (int64_t j = 0; j < n; j++) any |= mask[j], none |= mask[j] == 0;
        else
            for (int64_t j = 0; j < n; j++) any |= mask[j * col], none |= mask[j * col] == 0;
        some |= any != 0;
        all &= !none;
        if ((some && !all) || rows_share(rows, &a->masks.mask)) break;
    }
    return (key_run){j0, n, !some ? BLOCK_EMPTY : all ? BLOCK_FULL : BLOCK_MASKED};
}

INLINE key_run masked_run(const fa_attention_args *a, const row_block *rows, int step, int64_t j0, int64_t n)
{
    if (n > 0 && a->masks.mask.data) return trimmed_run(a, rows, step, j0, n);
    return (key_run){j0, n, n > 0 ? BLOCK_FULL : BLOCK_EMPTY};
}

/* Whether these keys need an additive tile. */
INLINE int adds(const fa_attention_args *a, const row_block *rows, block_kind mask)
{
    return a->mods.bias.data || mask == BLOCK_MASKED || rows->several;
}

/* add (n) = what is added to the row's scores; says whether it hides no key, some (MASKED) or all (EMPTY). `list` is
 * the row's, where it may have several ranges in the block, or NULL. */
static block_kind additive_row(const fa_attention_args *a, const row_block *rows, row_id id, const range_list *list,
                               int64_t j0, int64_t n, lane *add)
{
    vi_t any = {0}, none = {0};
    if (a->mods.bias.data) {
        const char *bias = at(&a->mods.bias, rows->b, id.head, id.query, j0);
        const int native = a->mods.bias.dtype == LANE_DTYPE || dtype_size(a->mods.bias.dtype) == 2;
        if (native && a->mods.bias.col == dtype_size(a->mods.bias.dtype)) load_row(a->mods.bias.dtype, bias, n, 1, add);
        else
            for (int64_t j = 0; j < n; j++) add[j] = load_element(a->mods.bias.dtype, bias + j * a->mods.bias.col);
    } else memset(add, 0, n * sizeof(lane));
    if (a->masks.mask.data) {
        const uint8_t *mask = (const uint8_t *)at(&a->masks.mask, rows->b, id.head, id.query, j0);
        for (int64_t j = 0; j < n; j++) add[j] = mask[j * a->masks.mask.col] ? add[j] : -(lane)INFINITY;
    }
    /* From the end of a range, pair[1], to the beginning of the next one, pair[2]. */
    for (const int64_t *pair = list ? list->shown : NULL; pair && pair + 2 < list->stop && pair[1] < j0 + n; pair += 2)
        for (int64_t j = larger(pair[1] - j0, 0); j < n && j < pair[2] - j0; j++) add[j] = -(lane)INFINITY;
    for (int64_t j = n; j < round_up(n, LANES); j++) add[j] = add[0]; /* add holds BLOCK_K, a multiple of LANES */
    for (int64_t j = 0; j < n; j += LANES) {
        const vi_t hidden = v_load(add + j) == v_splat(-INFINITY);
        none |= hidden;
        any |= ~hidden;
    }
    return !v_any(any) ? BLOCK_EMPTY : v_any(none) ? BLOCK_MASKED : BLOCK_FULL;
}

static block_kind additive_rows(const fa_attention_args *a, const row_block *rows, int64_t j0, int64_t n, lane *add)
{
    block_kind kind = BLOCK_EMPTY;
    const int lists_alone = rows->several && !a->mods.bias.data && !a->masks.mask.data;
    block_kind row = BLOCK_EMPTY;
    EACH_ROW(rows, r, id) {
        const range_list *list = rows->several ? rows->lists + r : NULL;
        lane *to = add + r * BLOCK_K;
        if (lists_alone && rows->like[r] != r) memcpy(to, to - BLOCK_K, BLOCK_K * sizeof(lane)); /* row - 1's */
        else row = additive_row(a, rows, id, list, j0, n, to);
        kind = r == 0 || row == kind ? row : BLOCK_MASKED;
    }
    return kind;
}

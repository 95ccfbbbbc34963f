/* The additive tile: what is added to the scores of a block of keys before softmax. It holds the bias, and -inf where a
 * dense mask, the bias itself, or a gap between the ranges of a row's list hides a key.
 *
 * Requires  ranges.inc.h, convert.inc.h.
 * Exports   key_run, masked_run, adds, additive_row, additive_rows. These write rows of keys, BLOCK_K lanes apart; the tile kernel
 *           transposes them, operands.inc.h. */

/* Keys [j0, j0 + n) of a block, and what a dense mask makes of them: FULL, MASKED or EMPTY. */
typedef struct {
    int64_t j0, n;
    block_kind mask;
} key_run;

/* What the dense mask leaves of n keys from j0 on. Where all rows share the mask, as they share a padding mask, the keys are
 * trimmed to those attended, at multiples of `step` from the even j0: often that leaves a full block. */
static key_run masked_run(const fa_attention_args *a, const row_block *rows, int step, int64_t j0, int64_t n)
{
    const int64_t col = a->mask.col;
    int some = 0, all = 1;
    if (n <= 0) return (key_run){j0, n, BLOCK_EMPTY};
    if (!a->mask.data) return (key_run){j0, n, BLOCK_FULL};
    if (rows_share(rows, &a->mask)) {
        const char *mask = at(&a->mask, rows->b, first_row(rows).head, first_row(rows).query, j0);
        int64_t first = 0, last = n;
        while (first < last && !mask[first * col]) first++;
        if (first == last) return (key_run){j0, n, BLOCK_EMPTY};
        while (!mask[(last - 1) * col]) last--;
        first -= first % step;
        last += last % step && last < n;
        j0 += first;
        n = last - first;
    }
    EACH_ROW(rows, r, id) {
        const uint8_t *mask = (const uint8_t *)at(&a->mask, rows->b, id.head, id.query, j0);
        uint8_t any = 0, none = 0;
        if (col == 1)
            for (int64_t j = 0; j < n; j++) any |= mask[j], none |= mask[j] == 0;
        else
            for (int64_t j = 0; j < n; j++) any |= mask[j * col], none |= mask[j * col] == 0;
        some |= any != 0;
        all &= !none;
        if ((some && !all) || rows_share(rows, &a->mask)) break;
    }
    return (key_run){j0, n, !some ? BLOCK_EMPTY : all ? BLOCK_FULL : BLOCK_MASKED};
}

/* Whether these keys need an additive tile. */
INLINE int adds(const fa_attention_args *a, const row_block *rows, block_kind mask)
{
    return a->bias.data || mask == BLOCK_MASKED || rows->several;
}

/* add (n) = what is added to the row's scores; says whether it hides no key, some (MASKED) or all (EMPTY). `list` is the
 * row's, where it may have several ranges in the block, or NULL. */
static block_kind additive_row(const fa_attention_args *a, const row_block *rows, row_id id, const range_list *list,
                               int64_t j0, int64_t n, lane *add)
{
    vi_t any = {0}, none = {0};
    if (a->bias.data) {
        const char *bias = at(&a->bias, rows->b, id.head, id.query, j0);
        const int native = a->bias.dtype == LANE_DTYPE || dtype_size(a->bias.dtype) == 2;
        if (native && a->bias.col == dtype_size(a->bias.dtype)) load_row(a->bias.dtype, bias, n, 1, add);
        else
            for (int64_t j = 0; j < n; j++) add[j] = load_element(a->bias.dtype, bias + j * a->bias.col);
    } else memset(add, 0, n * sizeof(lane));
    if (a->mask.data) {
        const uint8_t *mask = (const uint8_t *)at(&a->mask, rows->b, id.head, id.query, j0);
        for (int64_t j = 0; j < n; j++) add[j] = mask[j * a->mask.col] ? add[j] : -(lane)INFINITY;
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

/* That for all rows. */
static block_kind additive_rows(const fa_attention_args *a, const row_block *rows, int64_t j0, int64_t n, lane *add)
{
    block_kind kind = BLOCK_EMPTY;
    EACH_ROW(rows, r, id) {
        const range_list *list = rows->several ? rows->lists + r : NULL;
        const block_kind row = additive_row(a, rows, id, list, j0, n, add + r * BLOCK_K);
        kind = r == 0 || row == kind ? row : BLOCK_MASKED;
    }
    return kind;
}

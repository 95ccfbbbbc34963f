/* Which keys a row attends, and what is done to their scores: EVERY attention variant lives here.
 *
 * Structural masks are a half-open range of keys per row, or a list of such. A task walks the key blocks of the grid,
 * multiples of BLOCK_K, that the union of its rows' ranges touches; a block is empty (not touched), full (nothing extra
 * happens) or an edge. With lists it steps from block to block, row_block_enter: what lies between costs nothing, and
 * within a block a row has one range again, unless several of its list lie in it. A dense mask, a bias and what lies
 * between several ranges are one additive tile, -inf where it hides, and where that is all there is, the tile is not
 * touched either. Order, in one function, v_modify:
 *
 *     scale (a factor of q, or of the product) -> softcap -> bias -> ALiBi -> masks
 *
 * The two kernels differ only in what stands on the lanes: queries (tile) or keys (dot). */

/* What a dense mask or a bias makes of a block: no row attends any key, some rows some keys, or all rows all keys. */
typedef enum { BLOCK_EMPTY, BLOCK_EDGE, BLOCK_FULL } block_kind;

enum { ADD_BIAS = 1, ADD_MASK = 2, ADD_LISTS = 4 };

/* Of a block of which mask_kind says `kind`. */
INLINE int additive_parts(const fa_attention_args *a, const row_block *rows, block_kind kind)
{
    return (a->bias.data ? ADD_BIAS : 0) | (kind == BLOCK_EDGE ? ADD_MASK : 0) | (rows->several ? ADD_LISTS : 0);
}

/* Keys [*j0, *j0 + *n) under the dense mask, if there is one. Where all rows share it, as a padding mask is shared, the
 * keys are first trimmed to those attended, at multiples of `step` from the even *j0: often that leaves a full block. */
static block_kind mask_kind(const fa_attention_args *a, const row_block *rows, int step, int64_t *j0, int64_t *n)
{
    const int64_t col = a->mask.col;
    int some = 0, all = 1;
    if (!a->mask.data) return BLOCK_FULL;
    if (rows_share(rows, &a->mask)) {
        const char *mask = at(&a->mask, rows->b, first_row(rows).head, first_row(rows).query, *j0);
        int64_t first = 0, last = *n;
        while (first < last && !mask[first * col]) first++;
        if (first == last) return BLOCK_EMPTY;
        while (!mask[(last - 1) * col]) last--;
        first -= first % step;
        last += last % step && last < *n;
        *j0 += first;
        *n = last - first;
    }
    EACH_ROW(rows, r, id) {
        const uint8_t *mask = (const uint8_t *)at(&a->mask, rows->b, id.head, id.query, *j0);
        uint8_t any = 0, none = 0;
        if (col == 1)
            for (int64_t j = 0; j < *n; j++) any |= mask[j], none |= mask[j] == 0;
        else
            for (int64_t j = 0; j < *n; j++) any |= mask[j * col], none |= mask[j * col] == 0;
        some |= any != 0;
        all &= !none;
        if ((some && !all) || rows_share(rows, &a->mask)) break;
    }
    return !some ? BLOCK_EMPTY : all ? BLOCK_FULL : BLOCK_EDGE;
}

/* add (n) = the row's bias, -inf where bias or mask hides, and between the row's ranges if it has a list. */
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
    for (const int64_t *pair = list ? list->shown : NULL; pair && pair + 2 < list->stop && pair[1] < j0 + n; pair += 2)
        for (int64_t j = pair[1] > j0 ? pair[1] - j0 : 0; j < n && j < pair[2] - j0; j++) add[j] = -(lane)INFINITY;
    for (int64_t j = n; j < round_up(n, LANES); j++) add[j] = add[0]; /* add holds BLOCK_K, a multiple of LANES */
    for (int64_t j = 0; j < n; j += LANES) {
        const vi_t hides = v_load(add + j) == v_splat(-INFINITY);
        none |= hides;
        any |= ~hides;
    }
    return !v_any(any) ? BLOCK_EMPTY : v_any(none) ? BLOCK_EDGE : BLOCK_FULL;
}

/* That for all rows of the block, BLOCK_K lanes apart. */
static block_kind additive_rows(const fa_attention_args *a, const row_block *rows, int64_t j0, int64_t n, lane *add)
{
    block_kind kind = BLOCK_EMPTY;
    EACH_ROW(rows, r, id) {
        const range_list *list = rows->several ? rows->lists + r : NULL;
        const block_kind row = additive_row(a, rows, id, list, j0, n, add + r * BLOCK_K);
        kind = r == 0 || row == kind ? row : BLOCK_EDGE;
    }
    return kind;
}

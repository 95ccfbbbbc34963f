/* What the tile kernels do to a tile of scores (n keys, nv vectors of queries): modifiers and masks of scores.inc.h, and
 * which of its rows attend which keys where that cannot be told from the scores. */

INLINE void modify_tile_as(int nv, const modifiers *mods, int edge, int hides, const tile_state *tile, int64_t n,
                           const tile_scratch *scratch)
{
    for (int64_t lanes = 0; lanes < nv * LANES; lanes += LANES) {
        const v_t begin = v_load(scratch->begin + lanes), end = v_load(scratch->end + lanes);
        const v_t slope = v_load(tile->slope + lanes), position = v_load(scratch->position + lanes);
        for (int64_t j = 0; j < n; j++) {
            const int64_t at = j * BLOCK_Q + lanes;
            const v_t key = v_splat((lane)j), s = v_load(scratch->s + at);
            const v_t distance = mods->alibi ? v_abs(position - key) : key;
            const v_t add = mods->additive ? v_load(scratch->add + at) : key;
            v_store(scratch->s + at,
                    v_modify(mods, edge, hides, s, add, slope, distance, (begin <= key) & (key < end)));
        }
    }
}

/* Modifiers and masks of s (n keys, nv vectors of queries); j0 is the first key, `kind` what load_additive said. One
 * modifier alone, with nothing hidden, has a loop of its own: those are the usual ones. */
INLINE void modify_tile(const fa_attention_args *a, const modifiers *mods, int nv, block_kind kind, int edge,
                        const tile_state *tile, int64_t j0, int64_t n, const tile_scratch *scratch)
{
    const row_block *rows = &tile->rows;
    const modifiers cap = {.q_factor = 1, .s_factor = 1, .softcap = mods->softcap};
    const modifiers add = {.q_factor = 1, .s_factor = 1, .additive = ADD_BIAS};
    const modifiers alibi = {.q_factor = 1, .s_factor = 1, .alibi = 1};
    const int one = mods->s_factor == 1 && !edge && kind == BLOCK_FULL;
    if (!modifies(mods, edge)) return;
    const int64_t position = mods->alibi ? load_int(at(&a->q_position, rows->b, 0, 0, 0)) : 0;
    for (int64_t r = 0; r < BLOCK_Q; r++) { /* a row that there is: nothing of no row is looked at */
        const int64_t row = r < rows->n ? r : rows->n - 1;
        scratch->begin[r] = (lane)(rows->begin[row] - j0); /* relative to j0, where they are small and exact */
        scratch->end[r] = (lane)(rows->end[row] - j0);
        if (mods->alibi) scratch->position[r] = (lane)(position + (rows->row0 + row) / rows->group - j0);
    }
    if (one && mods->softcap != 0 && !mods->additive && !mods->alibi) modify_tile_as(nv, &cap, 0, 0, tile, n, scratch);
    else if (one && mods->softcap == 0 && mods->additive && !mods->alibi)
        modify_tile_as(nv, &add, 0, 0, tile, n, scratch);
    else if (one && mods->softcap == 0 && !mods->additive && mods->alibi)
        modify_tile_as(nv, &alibi, 0, 0, tile, n, scratch);
    else modify_tile_as(nv, mods, edge, kind != BLOCK_FULL, tile, n, scratch);
}

/* Turns the additive tile, free by now, into masks: which lanes attend which of n keys. Not to be had from the scores:
 * one of -inf may have been computed. */
INLINE void note_attending(int nv, const modifiers *mods, int64_t n, const tile_scratch *scratch)
{
    for (int64_t j = 0; j < n; j++)
        for (int u = 0; u < nv; u++) {
            const v_t key = v_splat((lane)j), add = v_load(scratch->add + j * BLOCK_Q + u * LANES);
            const vi_t inside = (v_load(scratch->begin + u * LANES) <= key) & (key < v_load(scratch->end + u * LANES));
            const vi_t hidden = mods->additive ? add == v_splat(-INFINITY) : inside ^ inside;
            v_store(scratch->add + j * BLOCK_Q + u * LANES, (v_t)(inside & ~hidden));
        }
}

/* Raises to -LANE_MAX the maxima of rows that attend some of n keys, and have met no score but -inf; `bad`: the masks
 * are noted. */
INLINE void note_rows(int nv, const modifiers *mods, int hides, int bad, int64_t n, const tile_scratch *scratch,
                      lane *row_max)
{
    vi_t some = {0};
    for (int u = 0; u < nv; u++) some |= v_load(row_max + u * LANES) == v_splat(-INFINITY);
    if (!v_any(some)) return;
    if (hides && !bad) note_attending(nv, mods, n, scratch);
    for (int u = 0; u < nv; u++) {
        lane *max = row_max + u * LANES;
        vi_t attends = {0};
        for (int64_t j = 0; hides && j < n; j++) attends |= (vi_t)v_load(scratch->add + j * BLOCK_Q + u * LANES);
        for (int i = 0; i < LANES; i++)
            if (max[i] == -(lane)INFINITY && (!hides || attends[i])) max[i] = -LANE_MAX;
    }
}

/* What the tile kernels do to a tile of scores (n keys, nv vectors of queries): modifiers and masks of scores.inc.h, and
 * which of its rows attend which keys where that cannot be told from the scores. */

INLINE void modify_tile_as(int nv, const modifiers *m, int edge, int hides, const tile_state *tile, int64_t n,
                           const tile_scratch *w)
{
    for (int64_t lanes = 0; lanes < nv * LANES; lanes += LANES) {
        const v_t begin = v_load(w->begin + lanes), end = v_load(w->end + lanes);
        const v_t slope = v_load(tile->slope + lanes), position = v_load(w->position + lanes);
        for (int64_t j = 0; j < n; j++) {
            const int64_t at = j * BLOCK_Q + lanes;
            const v_t key = v_splat((lane)j), s = v_load(w->s + at);
            const v_t distance = m->alibi ? v_abs(position - key) : key;
            const v_t add = m->additive ? v_load(w->add + at) : key;
            v_store(w->s + at, v_modify(m, edge, hides, s, add, slope, distance, (begin <= key) & (key < end)));
        }
    }
}

/* Modifiers and masks of s (n keys, nv vectors of queries); j0 is the first key, `kind` what load_additive said. One
 * modifier alone, with nothing hidden, has a loop of its own: those are the usual ones. */
INLINE void modify_tile(const fa_attention_args *a, const modifiers *m, int nv, block_kind kind, int edge,
                        const tile_state *tile, int64_t j0, int64_t n, const tile_scratch *w)
{
    const row_block *t = &tile->t;
    const modifiers cap = {.q_factor = 1, .s_factor = 1, .softcap = m->softcap};
    const modifiers add = {.q_factor = 1, .s_factor = 1, .additive = ADD_BIAS};
    const modifiers alibi = {.q_factor = 1, .s_factor = 1, .alibi = 1};
    const int one = m->s_factor == 1 && !edge && kind == BLOCK_FULL;
    if (!modifies(m, edge)) return;
    const int64_t position = m->alibi ? load_int(at(&a->q_position, t->b, 0, 0, 0)) : 0;
    for (int64_t r = 0; r < BLOCK_Q; r++) { /* a row that there is: nothing of no row is looked at */
        const int64_t row = r < t->rows ? r : t->rows - 1;
        w->begin[r] = (lane)(t->begin[row] - j0); /* relative to j0, where they are small and exact */
        w->end[r] = (lane)(t->end[row] - j0);
        if (m->alibi) w->position[r] = (lane)(position + (t->row0 + row) / t->group - j0);
    }
    if (one && m->softcap != 0 && !m->additive && !m->alibi) modify_tile_as(nv, &cap, 0, 0, tile, n, w);
    else if (one && m->softcap == 0 && m->additive && !m->alibi) modify_tile_as(nv, &add, 0, 0, tile, n, w);
    else if (one && m->softcap == 0 && !m->additive && m->alibi) modify_tile_as(nv, &alibi, 0, 0, tile, n, w);
    else modify_tile_as(nv, m, edge, kind != BLOCK_FULL, tile, n, w);
}

/* Turns the additive tile, free by now, into masks: which lanes attend which of n keys. Not to be had from the scores:
 * one of -inf may have been computed. */
INLINE void note_attending(int nv, const modifiers *m, int64_t n, const tile_scratch *w)
{
    for (int64_t j = 0; j < n; j++)
        for (int u = 0; u < nv; u++) {
            const v_t key = v_splat((lane)j), add = v_load(w->add + j * BLOCK_Q + u * LANES);
            const vi_t inside = (v_load(w->begin + u * LANES) <= key) & (key < v_load(w->end + u * LANES));
            const vi_t hidden = m->additive ? add == v_splat(-INFINITY) : inside ^ inside;
            v_store(w->add + j * BLOCK_Q + u * LANES, (v_t)(inside & ~hidden));
        }
}

/* Raises to -LANE_MAX the maxima of rows that attend some of n keys, and have met no score but -inf; `bad`: the masks
 * are noted. */
INLINE void note_rows(int nv, const modifiers *m, int hides, int bad, int64_t n, const tile_scratch *w, lane *row_max)
{
    vi_t some = {0};
    for (int u = 0; u < nv; u++) some |= v_load(row_max + u * LANES) == v_splat(-INFINITY);
    if (!v_any(some)) return;
    if (hides && !bad) note_attending(nv, m, n, w);
    for (int u = 0; u < nv; u++) {
        lane *max = row_max + u * LANES;
        vi_t attends = {0};
        for (int64_t j = 0; hides && j < n; j++) attends |= (vi_t)v_load(w->add + j * BLOCK_Q + u * LANES);
        for (int i = 0; i < LANES; i++)
            if (max[i] == -(lane)INFINITY && (!hides || attends[i])) max[i] = -LANE_MAX;
    }
}

/* Keys of one block, and values of any: side by side in scratch, as lanes. For kernels that read them once a tile. */

/* Keys between the questions whether to give up. */
#define ROWWISE_ASKS (8 * BLOCK_K)

/* Keys [first, first + n) of the task's head, in place or widened or gathered. */
INLINE const char *keys_at(const fa_attention_args *a, const row_block *rows, int64_t first, int64_t n, lane *copy,
                           int64_t *k_row)
{
    const char *k = at(&a->k, rows->b, rows->h_kv, first, 0);
    *k_row = a->k.row;
    if (dtype_size(a->k.dtype) == sizeof(lane) && is_dense(&a->k, a->head_dim)) return k;
    *k_row = a->head_dim * (int64_t)sizeof(lane);
    for (int64_t j = 0; j < n; j++) load_row(a->k.dtype, k + j * a->k.row, a->head_dim, 1, copy + j * a->head_dim);
    return (const char *)copy;
}

/* The values of n keys, side by side. Those that are not finite become 0 and are noted: see
 * take_out_bad_values. */
INLINE void gather_values(const fa_attention_args *a, const row_block *rows, const int64_t *key, int64_t n, lane *v,
                          key_block *block)
{
    const int64_t width = a->head_dim_v;
    block->n_bad = 0;
    for (int64_t j = 0; j < n; j++) {
        lane *row = v + j * width;
        load_row(a->v.dtype, at(&a->v, rows->b, rows->h_kv, key[j], 0), width, 1, row);
        if (row_finite(LANE_DTYPE, (const char *)row, width)) continue;
        memset(row, 0, width * sizeof(lane));
        block->bad[block->n_bad++] = j;
    }
}

/* ot += p v for the value of key j, one that was taken out, in the lanes of the mask `attends`, or all. */
INLINE void add_value(const fa_attention_args *a, const row_block *rows, int nv, int64_t j, const lane *probs,
                      const lane *attends, lane *ot)
{
    const char *value = at(&a->v, rows->b, rows->h_kv, j, 0);
    for (int64_t d = 0; d < a->head_dim_v; d++, value += dtype_size(a->v.dtype))
        for (int u = 0; u < nv; u++) {
            lane *to = ot + d * BLOCK_Q + u * LANES;
            const v_t x = v_load(probs + u * LANES) * v_splat(load_element(a->v.dtype, value));
            v_store(to, v_load(to) + (attends ? v_select((vi_t)v_load(attends + u * LANES), x, v_splat(0)) : x));
        }
}

/* Rotary positions (Su et al. 2021): of each pair of dimensions, (a cos - b sin, b cos + a sin). */

/* z (head_dim) rotated; cos and sin are (pairs). */
INLINE void rotate_row(const fa_rope_args *a, const lane_u *cos, const lane_u *sin, lane *z)
{
    const int64_t pairs = a->pairs;
    if (a->interleaved) {
        for (int64_t j = 0; j < pairs; j++) {
            const lane p = z[2 * j], q = z[2 * j + 1];
            z[2 * j] = p * cos[j] - q * sin[j];
            z[2 * j + 1] = q * cos[j] + p * sin[j];
        }
        return;
    }
    for (int64_t j = 0; j < pairs; j += LANES) {
        const int64_t n = pairs - j < LANES ? pairs - j : LANES;
        const v_t c = v_load_n(cos + j, n), s = v_load_n(sin + j, n);
        const v_t p = v_load_n(z + j, n), q = v_load_n(z + pairs + j, n);
        v_store_n(z + j, p * c - q * s, n);
        v_store_n(z + pairs + j, q * c + p * s, n);
    }
}

/* Rows [begin, end) of batch * length, each of all heads; scratch holds head_dim lanes. */
static void rope_run(const fa_rope_args *a, int64_t begin, int64_t end, void *scratch)
{
    for (int64_t r = begin; r < end; r++) {
        const int64_t b = r / a->length, i = r % a->length;
        const lane_u *cos = (const lane_u *)(a->cos.data + a->cos.batch[b] + i * a->cos.row);
        const lane_u *sin = (const lane_u *)(a->sin.data + a->sin.batch[b] + i * a->sin.row);
        const char *x = a->x.data + a->x.batch[b] + i * a->x.row;
        char *out = a->out.data + a->out.batch[b] + i * a->out.row;
        for (int64_t h = 0; h < a->heads; h++, x += a->x.head, out += a->out.head) {
            load_row(a->x.dtype, x, a->head_dim, 1, scratch);
            rotate_row(a, cos, sin, scratch);
            store_row(a->x.dtype, scratch, a->head_dim, 1, out);
        }
    }
}

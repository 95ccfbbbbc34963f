/* The matrix micro-kernels: outer products with queries on the lanes, TILE x NV vectors of accumulators in registers
 * (simd.h says why so many). */
_Static_assert(TILE *NV + NV + 1 <= V_REGISTERS, "the tile spills");

#define BLOCK_Q (NV * LANES) /* query rows of a tile: the row pitch of every transposed array */
#define BLOCK_K 64           /* keys of a block: P^T, BLOCK_K x BLOCK_Q, stays in the first-level cache */

/* c + a b, on lanes or on pairs of bfloat16. */
INLINE v_t v_madd(int dot, v_t a, v_t b, v_t c) { return dot ? v_dot_bf16(a, b, c) : v_fma(a, b, c); }

#define TILE_MAX 12 /* rows and vectors of any tile: the arrays below lie in registers */
#define NV_MAX 4

/* s (nk, nv) = k (nk, depth) qt (depth, nv), or with `more` s += that; rows of qt and s are `pitch` lanes apart. `dot`:
 * depth counts pairs of bfloat16, and the product is scaled here, for folded into a bfloat16 q the factor would be
 * rounded once more. The layers' matmul is the same product: x for k, a panel of weights for qt. Meanwhile `fetch`
 * lines a step are asked for, from `ahead` on. */
INLINE void tile_outer(int nk, int nv, int64_t pitch, int dot, int more, const char *k, int64_t k_row, const lane *qt,
                       int64_t depth, lane factor, int fetch, const char *ahead, lane *s)
{
    v_t acc[TILE_MAX][NV_MAX];
    UNROLL_FOR(int j = 0; j < nk; j++)
        UNROLL_FOR(int u = 0; u < nv; u++) acc[j][u] = v_splat(0);
    UNROLL_2_FOR(int64_t d = 0; d < depth; d++, k += sizeof(lane), qt += pitch) {
        UNROLL_FOR(int i = 0; i < fetch; i++) __builtin_prefetch(ahead + (d * fetch + i) * 64, 0, 2);
        v_t q[NV_MAX];
        UNROLL_FOR(int u = 0; u < nv; u++) q[u] = v_load(qt + u * LANES);
        UNROLL_FOR(int j = 0; j < nk; j++) {
            v_t key = v_splat(*(const lane_u *)(k + j * k_row));
            UNROLL_FOR(int u = 0; u < nv; u++) acc[j][u] = v_madd(dot, key, q[u], acc[j][u]);
        }
    }
    UNROLL_FOR(int j = 0; j < nk; j++)
        UNROLL_FOR(int u = 0; u < nv; u++) {
            lane *to = s + j * pitch + u * LANES;
            const v_t product = dot ? acc[j][u] * v_splat(factor) : acc[j][u];
            v_store(to, more ? v_load(to) + product : product);
        }
}

/* One accumulator sums at most this many products: rounding grows with their number, and at 1024 would be twice that
 * of a BLAS, which has several. */
#define MAX_DEPTH 256

/* Rows of a bias that will be read soon: bytes [begin, end) of each. */
typedef struct {
    const char *const *rows;
    int64_t n_rows, begin, end;
} bias_ahead;

/* Asks for the share of TILE keys of BLOCK_K, j the first: all at once would have to wait for one another. */
INLINE void prefetch_bias(const bias_ahead *x, int64_t j)
{
    const int64_t stop = (j + TILE) * x->n_rows / BLOCK_K;
    for (int64_t r = j * x->n_rows / BLOCK_K; r < stop; r++)
        for (int64_t at = x->begin; at < x->end; at += 64) __builtin_prefetch(x->rows[r] + at, 0, 2);
}

/* s (n, nv) = k (n, depth) qt (depth, nv); meanwhile `ahead`, if not NULL, is fetched. */
INLINE void block_qk(int nv, int dot, const char *k, int64_t k_row, int64_t n, const lane *qt, int64_t depth,
                     lane factor, const bias_ahead *ahead, lane *s)
{
    for (int64_t d = 0; d < depth; d += MAX_DEPTH) {
        const int64_t part = depth - d < MAX_DEPTH ? depth - d : MAX_DEPTH;
        const int more = d > 0;
        const char *from = k + d * (int64_t)sizeof(lane);
        int64_t j = 0;
#define KEYS(nk)                                                                                                       \
    tile_outer(nk, nv, BLOCK_Q, dot, more, from + j * k_row, k_row, qt + d * BLOCK_Q, part, factor, 0, NULL,           \
               s + j * BLOCK_Q)
        for (; j + TILE <= n; j += TILE) {
            if (ahead && !more) prefetch_bias(ahead, j);
            KEYS(TILE);
        }
        for (; j + 4 <= n; j += 4) KEYS(4);
        for (; j + 2 <= n; j += 2) KEYS(2);
        for (; j < n; j++) KEYS(1);
#undef KEYS
    }
}

/* What becomes of the accumulators before a product is added. */
typedef enum { ACC_ZERO, ACC_KEEP, ACC_SCALE } acc_mode;

/* ot (nd, nv) = mode(ot) + v (n, nd)^T p (n, nv). The product is summed from 0 and then added: values of one sign, summed
 * onto all that came before, would be rounded at the size of the whole at every key. */
INLINE void tile_pv(int nd, int nv, int dot, const char *v, int64_t v_row, const lane *p, int64_t n, acc_mode mode,
                    const lane *alpha, lane *ot)
{
    v_t acc[TILE][NV];
    UNROLL_FOR(int d = 0; d < nd; d++)
        UNROLL_FOR(int u = 0; u < nv; u++) acc[d][u] = v_splat(0);
    UNROLL_2_FOR(int64_t j = 0; j < n; j++, v += v_row, p += BLOCK_Q) {
        v_t prob[NV];
        UNROLL_FOR(int u = 0; u < nv; u++) prob[u] = v_load(p + u * LANES);
        UNROLL_FOR(int d = 0; d < nd; d++) {
            v_t value = v_splat(*(const lane_u *)(v + d * sizeof(lane)));
            UNROLL_FOR(int u = 0; u < nv; u++) acc[d][u] = v_madd(dot, value, prob[u], acc[d][u]);
        }
    }
    UNROLL_FOR(int d = 0; d < nd; d++)
        UNROLL_FOR(int u = 0; u < nv; u++) {
            lane *to = ot + d * BLOCK_Q + u * LANES;
            if (mode == ACC_SCALE) acc[d][u] = v_fma(v_load(to), v_load(alpha + u * LANES), acc[d][u]);
            if (mode == ACC_KEEP) acc[d][u] += v_load(to);
            v_store(to, acc[d][u]);
        }
}

/* ot (head_dim_v, nv) = mode(ot) + v (n, head_dim_v)^T p (n, nv) */
INLINE void block_pv(int nv, int dot, const char *v, int64_t v_row, const lane *p, int64_t n, acc_mode mode,
                     const lane *alpha, lane *ot, int64_t head_dim_v)
{
    const int64_t step = sizeof(lane);
    int64_t d = 0;
    for (; d + TILE <= head_dim_v; d += TILE)
        tile_pv(TILE, nv, dot, v + d * step, v_row, p, n, mode, alpha, ot + d * BLOCK_Q);
    for (; d + 2 <= head_dim_v; d += 2) tile_pv(2, nv, dot, v + d * step, v_row, p, n, mode, alpha, ot + d * BLOCK_Q);
    for (; d < head_dim_v; d++) tile_pv(1, nv, dot, v + d * step, v_row, p, n, mode, alpha, ot + d * BLOCK_Q);
}

/* dst (cols, rows) = src (rows, cols) transposed. Writes whole vectors: dst rows hold a multiple of LANES, and what
 * lies past `rows` becomes 0. */
static void transpose(const lane *src, int64_t src_row, int64_t rows, int64_t cols, lane *dst, int64_t dst_row)
{
    for (int64_t r = 0; r < rows; r += LANES)
        for (int64_t c = 0; c < cols; c += LANES) {
            v_t t[LANES];
            const int64_t width = cols - c < LANES ? cols - c : LANES;
            for (int i = 0; i < LANES; i++)
                t[i] = r + i >= rows    ? v_splat(0)
                       : width == LANES ? v_load(src + (r + i) * src_row + c)
                                        : v_load_n(src + (r + i) * src_row + c, width);
            v_transpose(t);
            for (int i = 0; i < width; i++) v_store(dst + (c + i) * dst_row + r, t[i]);
        }
}

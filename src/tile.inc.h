/* The matrix micro-kernels: outer products whose accumulators, MR x NV vectors, stay in registers. In attention the
 * lanes are queries: for each key, or dimension, a tile has a row of BLOCK_Q lanes (docs/dev/architecture.md draws it).
 *
 * Literals  form: what products multiply. nv: 1 .. NV_MAX. nx, rows at a time: 1 .. MR_MAX.
 *           nd, the same of values: MR, 2, 1. fetch, the cache lines that a step prefetches: 0 .. 2.
 * Exports   OF_LANES, OF_PAIRS, OF_BYTES; BLOCK_Q, BLOCK_K, MAX_DEPTH, NV_LOW, NV_MAX, MR_MAX; AMX_KEYS, per_lane,
 *           in_tiles, key_step, padded_k, padded_v; amx_begin, amx_end; v_madd; outer_product, tile_outer, fetched_rows, block_outer; acc_mode,
 *           value_product, ACC_ZERO, ACC_KEEP, ACC_SCALE, block_values; transpose. */
#pragma once
#include "convert.inc.h"

_Static_assert(MR *NV + NV + 1 <= V_REGISTERS, "the accumulators spill");

/* What the elements of products are: lanes, pairs of bfloat16, or four signed bytes (int8_products.inc.h). */
enum { OF_LANES, OF_PAIRS, OF_BYTES };

#define BLOCK_Q (NV * LANES) /* query rows of a tile */
#define BLOCK_K 64           /* keys of a block: BLOCK_K x BLOCK_Q probabilities stay in the first-level cache */
#define MR_MAX 12            /* most rows of accumulators: MR, and LINEAR_ROWS of layers; NV_MAX: their vectors */
#define NV_MAX 4
_Static_assert(MR <= 8 && MR_MAX % 3 == 0, "remainders of block_outer, pointers of tile_outer");

/* Most products that one accumulator sums. With 1024, rounding would be twice that of a BLAS, which has several. */
#define MAX_DEPTH 256

#define AMX_KEYS 32 /* numbers that one AMX product sums: dimensions of scores, keys of values; and keys of two tiles */

/* Elements of a lane. */
INLINE int per_lane(int form) { return form == OF_BYTES ? 4 : form == OF_PAIRS ? 2 : 1; }

/* Whether AMX computes the products. */
INLINE int in_tiles(int form) { return V_AMX && form == OF_PAIRS; }

/* Keys that products take at once: runs begin at multiples of it and, but for the last key of all, end there. */
INLINE int key_step(int form) { return in_tiles(form) ? AMX_KEYS : per_lane(form); }

/* Dimensions of a row of K, and of V, as products of pairs read them. */
INLINE int64_t padded_k(int64_t head_dim) { return round_up(head_dim, V_AMX ? AMX_KEYS : 2); }
INLINE int64_t padded_v(int64_t head_dim_v) { return round_up(head_dim_v, V_AMX ? LANES : 1); }

/* Around products of pairs. */
INLINE void amx_begin(void)
{
#if V_AMX
    amx_shapes(AMX_ROWS, AMX_ROWS, AMX_BYTES);
#endif
}

INLINE void amx_end(void)
{
#if V_AMX
    AMX_END();
#endif
}

/* c + a b; of bytes, c is integers, and a as v_dot_u8 takes it. */
INLINE v_t v_madd(int form, v_t a, v_t b, v_t c)
{
    if (form == OF_BYTES) return (v_t)v_dot_u8((vi_t)a, (vi_t)b, (vi_t)c);
    return form == OF_PAIRS ? v_dot_bf16(a, b, c) : v_fma(a, b, c);
}

/* out (rows, nv) = x (rows, depth) y (depth, nv). Scores: x is K, y is Q^T. A layer: x is its input, y its weights. */
typedef struct {
    const char *x; /* broadcast one element at a time: any address, rows `x_row` bytes apart */
    int64_t x_row;
    const lane *y; /* rows `pitch` lanes apart, as in out */
    int64_t pitch;
    int64_t depth; /* in pairs or fours of elements, where lanes are these */
    lane factor;   /* OF_PAIRS: out is multiplied by it: folded into a bfloat16 y it would be rounded once more */
    const lane *of_x, *of_y; /* OF_BYTES: out is multiplied by these, of its rows and its columns (nv) ... */
    const lane *start;       /* ... and the sums begin with these (nv): integers */
    int more;                /* out += the product */
    const char *ahead;       /* `fetch` lines are prefetched at each step, from here on */
    lane *out;
} outer_product;

/* Rows [first, first + nx) of out. */
INLINE void tile_outer(int nx, int nv, int form, int fetch, const outer_product *p, int64_t first)
{
    v_t acc[MR_MAX][NV_MAX];
    int64_t x_row = p->x_row;
    /* One pointer for three rows: x, x + x_row and x + 2 x_row are addressing modes. */
    const char *x[MR_MAX / 3];
    const lane *y = p->y;
    UNROLL_FOR(int j = 0; j < nx; j += 3) {
        x[j / 3] = p->x + (first + j) * x_row;
        HIDE(x[j / 3]);
    }
    UNROLL_FOR(int j = 0; j < nx; j++)
        UNROLL_FOR(int u = 0; u < nv; u++)
            acc[j][u] = form == OF_BYTES && !p->more ? v_load(p->start + u * LANES) : v_splat(0);
    UNROLL_2_FOR(int64_t d = 0; d < p->depth; d++, y += p->pitch) {
        UNROLL_FOR(int i = 0; i < fetch; i++) __builtin_prefetch(p->ahead + (d * fetch + i) * 64, 0, 2);
        v_t row[NV_MAX];
        HIDE(x_row);
        UNROLL_FOR(int u = 0; u < nv; u++) row[u] = v_load(y + u * LANES);
        UNROLL_FOR(int j = 0; j < nx; j++) {
            v_t element = v_splat(*(const lane_u *)(x[j / 3] + j % 3 * x_row));
            UNROLL_FOR(int u = 0; u < nv; u++) acc[j][u] = v_madd(form, element, row[u], acc[j][u]);
        }
        UNROLL_FOR(int j = 0; j < nx; j += 3) x[j / 3] += sizeof(lane);
    }
    UNROLL_FOR(int j = 0; j < nx; j++)
        UNROLL_FOR(int u = 0; u < nv; u++) {
            lane *to = p->out + (first + j) * p->pitch + u * LANES;
            v_t product = form == OF_PAIRS ? acc[j][u] * v_splat(p->factor) : acc[j][u];
            if (form == OF_BYTES)
                product = v_from_i((vi_t)product) * (v_load(p->of_y + u * LANES) * v_splat(p->of_x[first + j]));
            v_store(to, p->more ? v_load(to) + product : product);
        }
}

/* Rows that will be read soon, of a bias or of keys: bytes [begin, end) of each. */
typedef struct {
    const char *const *rows;
    int64_t n_rows, begin, end;
} fetched_rows;

/* Asks for the share of MR keys among BLOCK_K, `j` being the first: all at once would wait for one another. */
INLINE void prefetch_ahead(const fetched_rows *ahead, int64_t j)
{
    const int64_t stop = smaller(j + MR, BLOCK_K) * ahead->n_rows / BLOCK_K; /* of bytes, the last MR may be past n */
    for (int64_t r = j * ahead->n_rows / BLOCK_K; r < stop; r++)
        for (int64_t byte = ahead->begin; byte < ahead->end; byte += 64)
            __builtin_prefetch(ahead->rows[r] + byte, 0, 3);
}

/* All n rows of a product. Meanwhile `ahead`, if not NULL, is fetched. */
INLINE void block_outer(int nv, int form, int64_t n, const outer_product *whole, const fetched_rows *ahead)
{
    for (int64_t d = 0; d < whole->depth; d += MAX_DEPTH) {
        outer_product p = *whole;
        p.x += d * (int64_t)sizeof(lane), p.y += d * whole->pitch;
        p.depth = smaller(whole->depth - d, MAX_DEPTH);
        p.more = whole->more || d > 0;
        int64_t j = 0;
        for (; j + (form == OF_BYTES ? 1 : MR) <= n; j += MR) { /* of bytes, all rows are copies, and more are there */
            if (ahead && !p.more) prefetch_ahead(ahead, j);
            tile_outer(MR, nv, form, 0, &p, j);
        }
        switch (form == OF_BYTES ? 0 : n - j) { /* in one piece: each waits for its own sums */
        case 0: break;
        case 1: tile_outer(1, nv, form, 0, &p, j); break;
        case 2: tile_outer(2, nv, form, 0, &p, j); break;
        case 3: tile_outer(3, nv, form, 0, &p, j); break;
#if MR > 4
        case 4: tile_outer(4, nv, form, 0, &p, j); break;
        case 5: tile_outer(5, nv, form, 0, &p, j); break;
#endif
#if MR > 6
        case 6: tile_outer(6, nv, form, 0, &p, j); break;
        case 7: tile_outer(7, nv, form, 0, &p, j); break;
#endif
        }
    }
}

/* What becomes of the accumulators before a product is added. */
typedef enum { ACC_ZERO, ACC_KEEP, ACC_SCALE } acc_mode;

/* Of NV vectors, the first NV_LOW may attend no key from n_low on. */
#define NV_LOW (NV / 2)

/* out (head_dim_v, nv) = mode(out) + v (n, head_dim_v)^T probs (n, nv); n counts pairs or fours of keys, where lanes are
 * these. From n_low on, probabilities of the first NV_LOW of NV vectors are 0 and not read. */
typedef struct {
    const char *v;
    int64_t v_row, n, n_low, head_dim_v;
    const lane *probs, *alpha; /* alpha (nv): the factor of ACC_SCALE */
    const lane *weight;        /* (nv), OF_BYTES: the product is multiplied by it */
    int64_t pitch;             /* of the rows of probs and out */
    acc_mode mode;
    lane *out;
} value_product;

/* Rows d .. d + nd - 1 of out. The product is summed from 0 and then added: values of one sign, summed onto all that
 * came before, would be rounded at the size of the whole at every key. */
INLINE void tile_values(int nd, int nv, int form, int64_t d, const value_product *p)
{
    v_t acc[MR][NV];
    const char *v = p->v + d * (int64_t)sizeof(lane);
    const lane *probs = p->probs;
    UNROLL_FOR(int c = 0; c < nd; c++)
        UNROLL_FOR(int u = 0; u < nv; u++) acc[c][u] = v_splat(0);
    UNROLL_FOR(int low = 0; low < 2; low++) {
        const int first = low && nv == NV ? NV_LOW : 0;
        const int64_t n = low ? p->n - p->n_low : p->n_low;
        UNROLL_2_FOR(int64_t j = 0; j < n; j++, v += p->v_row, probs += p->pitch) {
            v_t prob[NV];
            UNROLL_FOR(int u = first; u < nv; u++) prob[u] = v_load(probs + u * LANES);
            UNROLL_FOR(int c = 0; c < nd; c++) {
                v_t value = v_splat(*(const lane_u *)(v + c * sizeof(lane)));
                UNROLL_FOR(int u = first; u < nv; u++)
                    acc[c][u] = form == OF_BYTES ? v_madd(form, prob[u], value, acc[c][u])
                                                 : v_madd(form, value, prob[u], acc[c][u]);
            }
        }
    }
    UNROLL_FOR(int c = 0; c < nd; c++)
        UNROLL_FOR(int u = 0; u < nv; u++) {
            lane *to = p->out + (d + c) * p->pitch + u * LANES;
            if (form == OF_BYTES) {
                const v_t sum = v_from_i((vi_t)acc[c][u]), weight = v_load(p->weight + u * LANES);
                if (p->mode == ACC_KEEP) v_store(to, v_fma(sum, weight, v_load(to)));
                if (p->mode == ACC_KEEP) continue;
                acc[c][u] = sum * weight;
            }
            if (p->mode == ACC_SCALE) acc[c][u] = v_fma(v_load(to), v_load(p->alpha + u * LANES), acc[c][u]);
            if (p->mode == ACC_KEEP) acc[c][u] += v_load(to);
            v_store(to, acc[c][u]);
        }
}

INLINE void block_values(int nv, int form, const value_product *p)
{
    int64_t d = 0;
    for (; d + MR <= p->head_dim_v; d += MR) tile_values(MR, nv, form, d, p);
    for (; d + 2 <= p->head_dim_v; d += 2) tile_values(2, nv, form, d, p);
    for (; d < p->head_dim_v; d++) tile_values(1, nv, form, d, p);
}

/* dst (cols, rows) = src (rows, cols) transposed. Whole vectors are written: what lies past `rows` becomes 0. */
static void transpose(const lane *src, int64_t src_row, int64_t rows, int64_t cols, lane *dst, int64_t dst_row)
{
    for (int64_t r = 0; r < rows; r += LANES)
        for (int64_t c = 0; c < cols; c += LANES) {
            v_t square[LANES];
            const int64_t width = smaller(cols - c, LANES);
            for (int i = 0; i < LANES; i++)
                square[i] = r + i < rows ? v_load_part(src + (r + i) * src_row + c, width) : v_splat(0);
            v_transpose(square);
            for (int i = 0; i < width; i++) v_store(dst + (c + i) * dst_row + r, square[i]);
        }
}

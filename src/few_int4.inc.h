/* The few-row kernel's products with keys and values in blocks of 4 bits (int4.inc.h), by integers: unpacked to floats they
 * take longer than int8. Queries are rounded to bytes, block by block, and probabilities times the scales of a block's values
 * to 16 bits, by the largest of BLOCK_K keys.
 *
 *     s_j = sum over blocks b of k_scale_jb q_scale_b (sum_d k_jd q_d - 8 sum_d q_d)             k: 0 to 15, q: -127 to 127
 *     o_d = alpha o_d + unit_b (sum_j w_jb v_jd - 8 sum_j w_jb), w_jb = round(p_j v_scale_jb / unit_b)
 *
 * Literals  nr, rows at a time: 1, 2 or 4.
 * Exports   few_int4, cut_few_int4; IN_FOURS_TWOS_ONES; int4_query, int4_scores, int4_value_scales, int4_values. */
#pragma once
#include "nonfinite.inc.h"
#include "int8_products.inc.h"

typedef struct {
    const char *k, *v;              /* rows, of which whole vectors can be read, ... */
    int64_t k_row, v_row;           /* ... so many bytes apart */
    char *k_copy, *v_copy;          /* (BLOCK_K, bytes of a row) */
    int fetches;                    /* values are read, too */
    int8_t *q;                      /* (rows, head_dim) */
    lane *q_scale;                  /* (rows, blocks) */
    ilane *q_start;                 /* (rows, blocks): 8 times the sum of q */
    lane *scale;                    /* (blocks, BLOCK_K): of keys, then of values */
    int16_t *weight;                /* (blocks_v, rows, BLOCK_K) */
    lane *unit, *start;             /* (blocks_v, rows): unit, and 8 times the sum of weights */
    int64_t blocks, blocks_v, rows; /* of a key, of a value; room for rows */
} few_int4;

static void cut_few_int4(arena *from, const fa_attention_args *a, int64_t rows, few_int4 *f)
{
    if (a->k.dtype != FA_I4) return;
    f->blocks = a->head_dim / I4_BLOCK, f->blocks_v = a->head_dim_v / I4_BLOCK;
    CUT(from, f->k_copy, BLOCK_K * row_size(FA_I4, a->head_dim));
    CUT(from, f->v_copy, BLOCK_K * row_size(FA_I4, a->head_dim_v));
    CUT(from, f->q, rows * a->head_dim);
    CUT(from, f->q_scale, rows * f->blocks), CUT(from, f->q_start, rows * f->blocks);
    CUT(from, f->scale, larger(f->blocks, f->blocks_v) * BLOCK_K);
    CUT(from, f->weight, f->blocks_v * rows * BLOCK_K);
    CUT_LANES(from, f->blocks_v * rows, &f->unit, &f->start);
    f->rows = rows;
}

/* Row r of the queries, (head_dim), which is multiplied by a Hadamard matrix first. */
INLINE void int4_query(const few_int4 *f, int64_t r, lane *q)
{
    hadamard_row(f->blocks * I4_BLOCK, q);
    for (int64_t b = r * f->blocks; b < (r + 1) * f->blocks; b++, q += I4_BLOCK) {
        int8_t *to = f->q + b * I4_BLOCK;
        f->q_scale[b] = round_row_i8(q, I4_BLOCK, to), f->q_start[b] = 0;
        for (int i = 0; i < I4_BLOCK; i++) f->q_start[b] += 8 * to[i];
    }
}

/* call(nr), for four rows at a time, then two, then one, from row r on. A macro each, so that nr is a literal. */
#define IN_FOURS_TWOS_ONES(rows, r, call)                                                                              \
    do {                                                                                                               \
        int64_t r = 0;                                                                                                 \
        for (; LANES >= 4 && r + 4 <= (rows)->n; r += 4) call(4);                                                      \
        for (; r + 2 <= (rows)->n; r += 2) call(2);                                                                    \
        for (; r < (rows)->n; r++) call(1);                                                                            \
    } while (0)

#if LANE_BITS == 32
/* Scores of nr rows from r0 on, (rows, BLOCK_K), of n keys, and of whole vectors. Values are fetched beside the first rows. */
INLINE void int4_scores_of(int nr, const few_int4 *f, int64_t n, int64_t r0, lane *s)
{
    const vi_t four_bits = (vi_t){0} + 0x0f0f0f0f;
    const int64_t bytes = f->fetches ? row_size(FA_I4, f->blocks_v * I4_BLOCK) : 0, dense = bytes && f->v_row == bytes;
    for (int64_t j = 0; j < n; j += LANES) {
        if (r0 == 0 && bytes) /* of rows side by side the lines that they share, once */
            prefetch_rows(f->v + j * f->v_row, f->v_row, dense ? 1 : LANES, dense ? LANES * bytes : bytes);
        v_t sum[4] = {v_splat(0), v_splat(0), v_splat(0), v_splat(0)};
        for (int64_t b = 0; b < f->blocks; b++) {
            const char *from = f->k + j * f->k_row + i4_codes(f->blocks, b);
            vi_t low[4], high[4];
            UNROLL_FOR(int i = 0; i < 4; i++) {
                const vi_t codes = v_load_16s(from + i * f->k_row, 4 * f->k_row);
                low[i] = codes & four_bits, high[i] = codes >> 4 & four_bits;
            }
            const v_t scale = v_load(f->scale + b * BLOCK_K + j);
            UNROLL_FOR(int r = 0; r < nr; r++) {
                const int64_t at = (r0 + r) * f->blocks + b;
                const vi_t q_low = v_table_i8(f->q + at * I4_BLOCK), q_high = v_table_i8(f->q + at * I4_BLOCK + 16);
                vi_t product[4];
                UNROLL_FOR(int i = 0; i < 4; i++)
                    product[i] = v_sums_u4(v_dot_u4(high[i], q_high, v_dot_u4(low[i], q_low, (vi_t){0})));
                const vi_t whole = v_sum_fours(product) - f->q_start[at];
                sum[r] = v_fma(v_from_i(whole), scale * v_splat(f->q_scale[at]), sum[r]);
            }
        }
        UNROLL_FOR(int r = 0; r < nr; r++) v_store(s + (r0 + r) * BLOCK_K + j, sum[r]);
    }
}

/* The weights of a row's n probabilities for block b of the values. */
INLINE void int4_weights(const few_int4 *f, int64_t r, int64_t b, const lane *probs, int64_t n)
{
    const int64_t at = b * f->rows + r;
    const lane *scale = f->scale + b * BLOCK_K;
    const v_t magic = v_splat(0x1.8p23f); /* adding it rounds to integers, in the lower bits */
    v_t most = v_splat(0), zero = v_splat(0), sum = v_splat(0);
    for (int64_t j = 0; j < n; j += LANES) {
        const v_t weight = v_load(probs + j) * v_load(scale + j);
        most = v_max(v_abs(weight), most), zero += weight * v_splat(0);
    }
    const lane unit = v_max_lanes(most) * (1 / 32767.0f);
    f->unit[at] = v_any(zero != zero) ? NAN : unit < LANE_MIN ? 0 : unit; /* of smaller ones nothing would be left */
    const v_t by = v_splat(unit < LANE_MIN ? 0 : 1 / unit);
    for (int64_t j = 0; j < n; j += LANES) {
        const v_t rounded = v_load(probs + j) * v_load(scale + j) * by + magic;
        v_store_u16(f->weight + at * BLOCK_K + j, (vw_t)rounded);
        sum += rounded - magic;
    }
    f->start[at] = 8 * v_sum(sum);
}

/* acc (rows, acc_row) of nr rows from r0 on, at LANES numbers of the lower halves of bytes, from byte `first` of block b on,
 * and at as many of the upper halves. */
INLINE void int4_values_of(int nr, const few_int4 *f, int64_t n, int64_t b, int64_t first, int64_t r0,
                           const lane *alpha, lane *acc, int64_t acc_row)
{
    const int each = nr == 1 ? 2 : 1; /* sums, as every product waits for the one before */
    const vi_t four_bits = (vi_t){0} + 0x000f000f;
    const char *from = f->v + i4_codes(f->blocks_v, b) + first;
    const int64_t at = b * f->rows + r0;
    vi_t low[4][2] = {{{0}}}, high[4][2] = {{{0}}};
    for (int64_t j = 0; j < n; j += 2 * each)
        UNROLL_FOR(int u = 0; u < each; u++) {
            const char *v = from + (j + 2 * u) * f->v_row;
            const vi_t pairs = v_load_u8(v) | v_load_u8(v + f->v_row) << 16;
            UNROLL_FOR(int r = 0; r < nr; r++) {
                ilane two;
                memcpy(&two, f->weight + (at + r) * BLOCK_K + j + 2 * u, sizeof two);
                low[r][u] = v_dot_i16(pairs & four_bits, (vi_t){0} + two, low[r][u]);
                high[r][u] = v_dot_i16(pairs >> 4 & four_bits, (vi_t){0} + two, high[r][u]);
            }
        }
    UNROLL_FOR(int r = 0; r < nr; r++) {
        lane *to = acc + (r0 + r) * acc_row + b * I4_BLOCK + first;
        const v_t by = v_splat(alpha[r0 + r]), unit = v_splat(f->unit[at + r]), start = v_splat(f->start[at + r]);
        if (each == 2) low[r][0] += low[r][1], high[r][0] += high[r][1];
        v_store(to, v_fma(v_load(to), by, (v_from_i(low[r][0]) - start) * unit));
        to += I4_BLOCK / 2;
        v_store(to, v_fma(v_load(to), by, (v_from_i(high[r][0]) - start) * unit));
    }
}

/* n rows from j0 on, `row` bytes apart, of which whole vectors can be read: where they are, or copied. */
INLINE const char *int4_rows(const fa_array *x, const row_block *rows, int64_t j0, int64_t n, int64_t width, char *copy,
                             int64_t *row)
{
    *row = x->row;
    if (n % LANES == 0 && in_a_row(x, j0, n)) return at_key(x, rows, j0);
    *row = row_size(FA_I4, width);
    EACH_KEY(x, rows, j0, n, j, from) memcpy(copy + j * *row, from, (size_t)*row);
    return copy;
}

/* s (rows, BLOCK_K) = the scores of n keys from j0 on. Finds their values, too. */
static void int4_scores(const fa_attention_args *a, const row_block *rows, int64_t j0, int64_t n, few_int4 *f, lane *s)
{
    f->fetches = !a->stats.second_pass;
    f->k = int4_rows(&a->k, rows, j0, n, a->head_dim, f->k_copy, &f->k_row);
    if (f->fetches) f->v = int4_rows(&a->v, rows, j0, n, a->head_dim_v, f->v_copy, &f->v_row);
    load_block_scales(f->k, f->k_row, n, f->blocks, f->scale);
#define SCORES(nr) int4_scores_of(nr, f, n, r, s)
    IN_FOURS_TWOS_ONES(rows, r, SCORES);
#undef SCORES
}

/* Loads the scales of n values; of rows that are not finite, which are listed, they become 0. */
static void int4_value_scales(int64_t n, const few_int4 *f, bad_rows *bad)
{
    if (load_block_scales(f->v, f->v_row, n, f->blocks_v, f->scale)) return;
    for (int64_t j = 0; j < n; j++) {
        lane zero = 0; /* becomes NaN */
        for (int64_t b = 0; b < f->blocks_v; b++) zero += f->scale[b * BLOCK_K + j] * 0;
        if (zero == 0) continue;
        bad->row[bad->n++] = j;
        for (int64_t b = 0; b < f->blocks_v; b++) f->scale[b * BLOCK_K + j] = 0;
    }
}

/* acc (rows, acc_row) = alpha acc + probs (rows, BLOCK_K) v, of the values whose scales are loaded. Keys of the next block are
 * fetched meanwhile. */
static void int4_values(const fa_attention_args *a, const row_block *rows, int64_t j0, int64_t n, const few_int4 *f,
                        const lane *probs, const lane *alpha, lane *acc, int64_t acc_row)
{
    const int64_t blocks = f->blocks_v, more = smaller(n, a->len_k - j0 - n);
    for (int64_t r = 0; r < rows->n; r++) /* all first: each waits for its largest one */
        for (int64_t b = 0; b < blocks; b++) int4_weights(f, r, b, probs + r * BLOCK_K, n);
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t part = more * b / blocks;
        prefetch_keys(&a->k, rows, j0 + n + part, more * (b + 1) / blocks - part, a->head_dim);
        UNROLL_FOR(int first = 0; first < I4_BLOCK / 2; first += LANES) {
#define VALUES(nr) int4_values_of(nr, f, n, b, first, r, alpha, acc, acc_row)
            IN_FOURS_TWOS_ONES(rows, r, VALUES);
#undef VALUES
        }
    }
}
#else /* double lanes: the tile kernel */
static void int4_scores(const fa_attention_args *a, const row_block *rows, int64_t j0, int64_t n, few_int4 *f, lane *s)
{
    (void)a, (void)rows, (void)j0, (void)n, (void)f, (void)s;
}

static void int4_value_scales(int64_t n, const few_int4 *f, bad_rows *bad) { (void)n, (void)f, (void)bad; }

static void int4_values(const fa_attention_args *a, const row_block *rows, int64_t j0, int64_t n, const few_int4 *f,
                        const lane *probs, const lane *alpha, lane *acc, int64_t acc_row)
{
    (void)a, (void)rows, (void)j0, (void)n, (void)f, (void)probs, (void)alpha, (void)acc, (void)acc_row;
}
#endif

/* What tile kernels work on: scratch, the state of tiles, and the operands as micro-kernels read them: queries
 * transposed, the additive tile, blocks of keys and values in place or copied.
 *
 * Literals  dtype: of q. form: what products multiply.
 * Exports   TASK_TILES, PART_K; tile_state, cut_tile; head_copy, cut_head_copy, begin_head; key_block, tile_scratch,
 *           cut_tile_scratch; transpose_rows, load_queries; load_additive, bias_in_place; load_block,
 *           is_dense, lies_well, rows_as_lanes, pair_values, rows_as_pairs, pair_rows, clear_paired_row, prefetch_block,
 *           prefetch_task. */
#pragma once
#include "modifiers.inc.h"
#if V_AMX
#include "tile_amx.inc.h"
#endif
#include "partial.inc.h"
#include "hadamard.inc.h"
#include "int8_products.inc.h"
#include "philox.inc.h"

#ifndef FORM_OF /* what products of a call multiply; the family `integers` has one answer */
#define FORM_OF(a) (tile_takes_pairs(a) ? OF_PAIRS : OF_LANES)
#endif

#define TASK_TILES 8 /* most tiles of a task */

/* After so many keys, at multiples of it, a tile's state becomes a partial and is merged into that of the keys before.
 * A sum is then of 64 keys within a block and of 64 blocks: for 4096 keys the fewest roundings in a row. Parts are merged
 * by two-sums. */
#define PART_K (64 * BLOCK_K)

typedef struct {
    row_block rows;
    row_lanes lanes;
    lane *qt, *ot;           /* Q^T (head_dim, BLOCK_Q), O^T (head_dim_v, BLOCK_Q) */
    lane *q_scale, *q_start; /* (BLOCK_Q), of bytes: outer_product's of_y, start */
    lane *row_max, *row_sum; /* (BLOCK_Q); in the second pass the rows' norm stands there */
    lane factor;             /* what row_max and top_score still have to be multiplied by (scaled_later) */
    lane *row_log;           /* (BLOCK_Q), or NULL */
    const char **bias;       /* (BLOCK_Q): where the bias of each row begins */
    lane *top_score;         /* (n_top, BLOCK_Q) */
    ilane *top_key;          /* (n_top, BLOCK_Q), counted from top_first, the first key of the part */
    int64_t top_first;
    philox_row *counters; /* (NV, PHILOX_PARTS), with dropout */
    int fresh;            /* no block yet: ot holds nothing */
    partial total;        /* the parts that are done, merged */
    int64_t parts;        /* their number; each is of at most PART_K keys */
} tile_state;

/* A block of keys and values, [first, first + n) of the sequence, as the tiles read it. */
typedef struct {
    int64_t first, n;
    const char *k, *v; /* row `first`; NULL until a tile asks */
    int64_t k_row, v_row;
    int checked; /* of lanes or pairs: `bad` is known, and `clean` holds the values without those rows */
    bad_rows bad;
} key_block;

/* Keys and values of a whole KV head, as the tiles read them: blocks are copied when a task first meets them, and serve
 * all tasks of the head that a thread takes. */
typedef struct {
    int64_t *head;   /* the first 8 bytes of a thread's scratch: the KV head, from 1 on, or 0 before the first task */
    uint8_t *blocks; /* whether each is copied */
    lane *k, *v;     /* (len_k, ...), whole blocks */
} head_copy;

typedef struct {
    tile_state tiles[TASK_TILES];
    key_block block;
    head_copy copy;          /* without `head`, each task copies into k and v below anew */
    fetched_rows ahead;      /* rows of a bias, or of keys and values, that are fetched meanwhile; NULL: none */
    const char **next;       /* (2 BLOCK_K): rows of keys and values that blocks name */
    lane *s, *add;           /* (BLOCK_K, BLOCK_Q): scores, then probabilities; the additive tile */
    lane *pairs;             /* (BLOCK_K / 2, BLOCK_Q): probabilities as pairs of bfloat16, or as bytes */
    lane *k_scale, *v_scale; /* of bytes, and k_scale of pairs, too: (BLOCK_K) the scales of the block */
    lane *share, *weight;    /* of byte_softmax */
    lane *by_row;            /* (BLOCK_Q, BLOCK_K): rows of the additive tile, to be transposed */
    lane *k, *v, *clean;     /* (BLOCK_K, head_dim), two (BLOCK_K, head_dim_v): copied keys and values */
    lane *listed; /* (BLOCK_K, head_dim_v), for products of pairs: values that blocks name, or integers in bfloat16 */
    lane *v_odd;  /* by tiles, the values of every other block: those of the last one may be read yet */
    int odd;
    value_product waiting; /* by tiles, the last product of probabilities with values, not yet computed ... */
    int waiting_nv;        /* ... and its `nv`; 0: none */
    lane *alpha;           /* (BLOCK_Q) */
    row_block later;       /* rows of the task that this thread may take next, or none */
    partial part;          /* of a tile, until it is merged into `total`; the first one is made in `total` */
    philox_key drop;
} tile_scratch;

static void cut_tile(arena *from, const fa_attention_args *a, tile_state *tile)
{
    CUT(from, tile->qt, padded_k(a->head_dim) * BLOCK_Q);
    CUT(from, tile->ot, padded_v(a->head_dim_v) * BLOCK_Q);
    CUT_LANES(from, BLOCK_Q, &tile->row_max, &tile->row_sum, &tile->q_scale, &tile->q_start);
    cut_row_lanes(from, &tile->lanes);
    tile->row_log = NULL;
    if (a->stats.entropy.data) CUT(from, tile->row_log, BLOCK_Q);
    CUT(from, tile->bias, BLOCK_Q);
    CUT(from, tile->top_score, a->stats.n_top * BLOCK_Q);
    CUT(from, tile->top_key, a->stats.n_top * BLOCK_Q);
    if (a->dropout > 0) CUT(from, tile->counters, NV * PHILOX_PARTS);
    cut_rows(from, BLOCK_Q, &tile->rows);
}

static int64_t cut_tile_scratch(arena *from, const fa_attention_args *a, int tiles, tile_scratch *scratch)
{
    CUT(from, scratch->s, (BLOCK_K + MR) * BLOCK_Q); /* block_outer ends with whole MR of bytes */
    CUT_LANES(from, BLOCK_K * BLOCK_Q, &scratch->add, &scratch->by_row);
    CUT_LANES(from, BLOCK_K / 2 * BLOCK_Q, &scratch->pairs);
    CUT_LANES(from, BLOCK_K * round_up(a->head_dim, LANES), &scratch->k);
    CUT_LANES(from, BLOCK_K * round_up(a->head_dim_v, LANES), &scratch->v, &scratch->clean);
    CUT(from, scratch->next, a->k.blocks ? 2 * BLOCK_K : 0);
    CUT(from, scratch->listed, a->v.blocks || FORM_OF(a) == OF_PAIRS ? BLOCK_K * a->head_dim_v : 0);
    CUT(from, scratch->v_odd, V_AMX ? BLOCK_K * round_up(a->head_dim_v, LANES) : 0);
    CUT_LANES(from, BLOCK_Q, &scratch->alpha, &scratch->share, &scratch->weight);
    CUT_LANES(from, BLOCK_K, &scratch->k_scale, &scratch->v_scale);
    scratch->copy.head = NULL;
    scratch->later.n = scratch->odd = 0;
    for (int i = 0; i < tiles; i++) cut_tile(from, a, scratch->tiles + i);
    return from->used;
}

/* Lanes of a row's copy in that of a head. */
INLINE int64_t copied_lanes(int form, int64_t width)
{
    return form == OF_BYTES ? ceil_div(width, 4) : round_up(width, LANES);
}

static void cut_head_copy(arena *from, const fa_attention_args *a, head_copy *copy)
{
    const int64_t blocks = ceil_div(a->len_k, BLOCK_K), keys = blocks * BLOCK_K;
    CUT(from, copy->blocks, blocks);
    CUT(from, copy->k,
        keys * copied_lanes(FORM_OF(a), a->head_dim) + MR * a->head_dim); /* as of s: more rows are read */
    CUT(from, copy->v, keys * copied_lanes(FORM_OF(a), a->head_dim_v));
}

/* Before a task of the KV head of `rows`: forgets the copy of another one. */
INLINE void begin_head(const fa_attention_args *a, const row_block *rows, const head_copy *copy)
{
    const int64_t head = 1 + rows->b * a->heads_kv + rows->h_kv;
    if (!copy->head || *copy->head == head) return;
    *copy->head = head;
    memset(copy->blocks, 0, ceil_div(a->len_k, BLOCK_K));
}

/* One vector of a query row, from lane d on, of which n lanes are left; with `bf16` lanes are pairs of bfloat16. */
INLINE v_t load_query(fa_dtype dtype, int bf16, const char *q, int64_t d, int64_t n, int64_t head_dim)
{
    if (!bf16) return v_load_as_part(dtype, q + d * dtype_size(dtype), n);
    const char *from = q + d * sizeof(lane);
    if (n > LANES || head_dim % 2 == 0) return v_load_part(from, n);
    lane part[LANES] = {0};
    memcpy(part, from, head_dim * 2 - d * sizeof(lane)); /* an odd last one is paired with 0 */
    return v_load(part);
}

/* to (width, `pitch`) = transpose(factor * rows), or with `bf16` pairs, unscaled. n_lanes, a multiple of LANES, are
 * written; those without a row, NULL, become 0. */
INLINE void transpose_rows_as(fa_dtype dtype, int bf16, const char *const *row, int64_t n_lanes, int64_t width,
                              lane factor, int64_t pitch, lane *to)
{
    const int64_t depth = bf16 ? ceil_div(width, 2) : width;
    for (int64_t r = 0; r < n_lanes; r += LANES)
        for (int64_t d = 0; d < depth; d += LANES) {
            const int64_t n = depth - d;
            v_t square[LANES];
            UNROLL_FOR(int i = 0; i < LANES; i++) {
                const char *from = row[r + i];
                const v_t x = from ? load_query(dtype, bf16, from, d, n, width) : v_splat(0);
                square[i] = bf16 ? x : x * v_splat(factor);
            }
            v_transpose(square);
            UNROLL_FOR(int i = 0; i < LANES; i++) {
                if (i >= n) break;
                v_store(to + (d + i) * pitch + r, square[i]);
            }
        }
}

static void transpose_rows(fa_dtype from, int bf16, const char *const *row, int64_t n_lanes, int64_t width, lane factor,
                           int64_t pitch, lane *to)
{
    if (bf16) transpose_rows_as(FA_BF16, 1, row, n_lanes, width, factor, pitch, to);
    else WITH_DTYPE(from, dtype, transpose_rows_as(dtype, 0, row, n_lanes, width, factor, pitch, to));
}

/* qt = transpose(factor * q): (head_dim, BLOCK_Q). With `bf16` pairs, unscaled: (padded_k / 2, BLOCK_Q), 0 past
 * head_dim. */
static void load_queries(const fa_attention_args *a, const row_block *rows, int bf16, lane factor, lane *qt)
{
    const char *q_row[BLOCK_Q] = {NULL};
    char *first = at_row(&a->q, rows, first_row(rows));
    EACH_ROW(rows, r, id) q_row[r] = at_nth_row(&a->q, rows, first, r, id);
    const int turned = a->hadamard || a->k.dtype == FA_I4, pairs = bf16 && !turned;
    transpose_rows(a->q.dtype, pairs, q_row, BLOCK_Q, a->head_dim, bf16 ? 1 : factor, BLOCK_Q, qt);
    if (turned) hadamard_columns(a->head_dim, BLOCK_Q, qt);
    if (!bf16) return;
    for (int64_t i = 0; !pairs && i < a->head_dim / 2 * BLOCK_Q; i += LANES) { /* head_dim is whole blocks of int4 */
        const lane *x = qt + i / BLOCK_Q * 2 * BLOCK_Q + i % BLOCK_Q;
        v_store(qt + i, v_pack_bf16(v_load(x), v_load(x + BLOCK_Q)));
    }
    const int64_t depth = ceil_div(a->head_dim, 2);
    memset(qt + depth * BLOCK_Q, 0, (padded_k(a->head_dim) / 2 - depth) * BLOCK_Q * sizeof(lane));
}

/* The same in bytes, (head_dim / 4, BLOCK_Q), over that in lanes; each row by a scale. */
static void load_byte_queries(const fa_attention_args *a, lane factor, tile_state *tile)
{
    const v_t magic = v_splat(EXP_ROUND), least = v_splat(LANE_MIN * 64); /* 127 / least is finite */
    load_queries(a, &tile->rows, OF_LANES, factor, tile->qt);
    for (int64_t r = 0; r < BLOCK_Q; r += LANES) {
        v_t most = least, zero = v_splat(0), sum = v_splat(0); /* zero becomes NaN, as in row_finite */
        for (int64_t d = 0; d < a->head_dim; d++) {
            const v_t x = v_load(tile->qt + d * BLOCK_Q + r);
            most = v_max(v_abs(x), most);
            zero += x * v_splat(0);
        }
        const v_t inverse = v_splat(127) / most;
        for (int64_t d = 0; d < a->head_dim; d += 4) {
            vi_t four = {0};
            for (int i = 0; i < 4 && d + i < a->head_dim; i++) {
                const v_t x = v_fma(v_load(tile->qt + (d + i) * BLOCK_Q + r), inverse, magic);
                sum += x - magic;
                four |= ((vi_t)x & 255) << (8 * i);
            }
            v_store(tile->qt + d / 4 * BLOCK_Q + r, (v_t)four);
        }
        v_store(tile->q_scale + r, v_select(zero != zero, zero, most * v_splat((lane)1 / 127)));
        v_store(tile->q_start + r, (v_t)(-V_I8_OFFSET * v_to_i(sum)));
    }
}

/* Whether the additive tile is the bias alone, whose rows lie in memory as lanes do. */
INLINE int bias_in_place(const fa_attention_args *a, const row_block *rows, block_kind mask)
{
    const int of_lanes = a->mods.bias.dtype == LANE_DTYPE && a->mods.bias.col == sizeof(lane);
    return a->mods.bias.data && of_lanes && mask == BLOCK_FULL && !rows->several;
}

/* Part of load_bias: `width` keys of LANES rows. */
INLINE void load_bias_square(const char *const *bias, int64_t first, int64_t width, v_t *low, vi_t *some, lane *add)
{
    const vi_t hidden = (vi_t)v_splat(-INFINITY);
    v_t square[LANES];
    UNROLL_FOR(int i = 0; i < LANES; i++) square[i] = v_load_part(bias[i] + first * (int64_t)sizeof(lane), width);
    v_transpose(square);
    UNROLL_FOR(int i = 0; i < LANES; i++) {
        if (i >= width) break;
        *low = v_min(square[i], *low); /* this way round a NaN is passed over */
        *some |= (vi_t)square[i] ^ hidden;
        v_store(add + i * BLOCK_Q, square[i]);
    }
}

/* add (n keys, nv) = the bias alone, transposed from where it is. */
INLINE block_kind load_bias(const tile_state *tile, int nv, int64_t j0, int64_t n, lane *add)
{
    v_t low = v_splat(INFINITY);
    vi_t some = {0};
    for (int64_t r = 0; r < nv * LANES; r += LANES) {
        int64_t j = 0;
        for (; j + LANES <= n; j += LANES)
            load_bias_square(tile->bias + r, j0 + j, LANES, &low, &some, add + j * BLOCK_Q + r);
        if (j < n) load_bias_square(tile->bias + r, j0 + j, n - j, &low, &some, add + j * BLOCK_Q + r);
    }
    return !v_any(some != 0) ? BLOCK_EMPTY : v_any(low == v_splat(-INFINITY)) ? BLOCK_MASKED : BLOCK_FULL;
}

/* What a run of keys is to the tile. Writes the additive tile, (n, BLOCK_Q), if there is anything to add and some row
 * attends some key. Where mask and bias do not depend on the query, one row serves all. */
INLINE block_kind load_additive(const fa_attention_args *a, const tile_state *tile, int nv, key_run run,
                                const tile_scratch *scratch)
{
    const row_block *rows = &tile->rows;
    const int64_t j0 = run.j0, n = run.n;
    const block_kind range = range_kind(rows, j0, n);
    if (run.mask == BLOCK_EMPTY || !adds(a, rows, run.mask)) return run.mask | range;
    const int shared = rows_share(rows, &a->masks.mask) && rows_share(rows, &a->mods.bias) &&
                       (!rows->several || rows->one_list);
    const int in_place = !shared && bias_in_place(a, rows, run.mask);
    const range_list *list = rows->several ? rows->lists : NULL;
    const block_kind kind = shared     ? additive_row(a, rows, first_row(rows), list, j0, n, scratch->by_row)
                            : in_place ? load_bias(tile, nv, j0, n, scratch->add)
                                       : additive_rows(a, rows, j0, n, scratch->by_row);
    if (kind == BLOCK_EMPTY) return kind;
    if (shared) {
        for (int64_t j = 0; j < n; j++)
            for (int u = 0; u < NV; u++) v_store(scratch->add + j * BLOCK_Q + u * LANES, v_splat(scratch->by_row[j]));
    } else if (!in_place) {
        transpose(scratch->by_row, BLOCK_K, rows->n, n, scratch->add, BLOCK_Q);
        for (int64_t r = round_up(rows->n, LANES); r < BLOCK_Q; r += LANES)
            for (int64_t j = 0; j < n; j++) v_store(scratch->add + j * BLOCK_Q + r, v_splat(0));
    }
    return kind | range | BLOCK_ADDS;
}

INLINE int is_dense(const fa_array *x, int64_t width) { return x->row == row_size(x->dtype, width); }

/* Whether n rows of `width` are read where they lie as fast as from a copy: if they are dense, or spread over the sets of
 * the first-level cache, which repeat after 4096 bytes and hold 8 lines at least. Of a short sequence, which few tiles
 * read, 16 rows in a set gain 7 to 40% on a Zen 3; 32 lose 6%, and of a whole block 64 lose 15%. */
INLINE int lies_well(const fa_array *x, int64_t width, int64_t n)
{
    const int64_t bytes = larger(1, row_size(x->dtype, width)), past = x->row & 4095, near = smaller(past, 4096 - past);
    /* Places in the sets: those that steps reach before they come round, if n rows drift over so many. */
    const int64_t reached = smaller(past ? 4096 / larger(64, past & -past) : 1, 1 + n * near / bytes);
    const int64_t places = smaller(4096 / bytes, reached);
    return is_dense(x, width) || n <= (n < BLOCK_K ? 16 : 8) * places;
}

/* Rows [first, first + n) of k or v as lanes: in place, or widened, scaled and gathered in `copy`, unless they are
 * `there`. */
INLINE const char *rows_as_lanes(const fa_array *x, const fa_array *scale, const row_block *rows, int64_t first,
                                 int64_t n, int64_t width, int there, lane *copy, int64_t *row_bytes)
{
    *row_bytes = x->row;
    const int in_place = lies_well(x, width, n) && in_a_row(x, first, n);
    if (dtype_size(x->dtype) == sizeof(lane) && in_place) return at_key(x, rows, first);
    *row_bytes = width * (int64_t)sizeof(lane);
    if (there) return (const char *)copy;
    EACH_KEY(x, rows, first, n, j, from)
    load_row(x->dtype, from, width, scale_of(scale, rows, first + j), copy + j * width);
    return (const char *)copy;
}

/* Pairs of rows: 2j and 2j + 1 of v become row j of pairs, `pitch` lanes apart; an odd last one is paired with 0. */
INLINE void pair_values(const char *v, int64_t v_row, int64_t n, int64_t width, int64_t pitch, lane *to)
{
    static const uint16_t zeros[2 * LANES];
    for (int64_t j = 0; j < n; j += 2, to += pitch) {
        const char *row0 = v + j * v_row, *row1 = row0 + v_row;
        int64_t d = 0;
        for (; d + 2 * LANES <= width; d += 2 * LANES)
            v_store_paired_bf16(to + d, row0 + d * 2, j + 1 < n ? row1 + d * 2 : (const char *)zeros);
        for (; d + LANES <= width; d += LANES)
            v_store(to + d, v_pair_bf16(row0 + d * 2, j + 1 < n ? row1 + d * 2 : (const char *)zeros));
        if (d < width) {
            uint16_t part[2][LANES] = {{0}};
            memcpy(part[0], row0 + d * 2, (width - d) * 2);
            if (j + 1 < n) memcpy(part[1], row1 + d * 2, (width - d) * 2);
            v_store_n(to + d, v_pair_bf16(part[0], part[1]), width - d);
        }
    }
}

/* The power of two of x, or one that leaves x as it is: int8 times it are exact in bfloat16, and sums of products with them
 * overflow no earlier than those with k. */
INLINE lane power_of(lane x)
{
    wlane bits;
    memcpy(&bits, &x, sizeof bits);
    bits = bits << 1 >> (MANTISSA_BITS + 1) << MANTISSA_BITS;
    memcpy(&x, &bits, sizeof bits);
    return x < LANE_MIN ? LANE_MIN : x <= LANE_MAX ? x : 1;
}

/* A row of int8 times `scale`, or of int4, in bfloat16. */
static void widen_to_bf16(fa_dtype dtype, const char *from, int64_t n, lane scale, char *to)
{
    const int64_t blocks = dtype == FA_I4 ? n / I4_BLOCK : 0;
    const lane factor = 1 + zero_i4(from, blocks);
    for (int64_t b = 0; b < blocks; b++, to += I4_BLOCK * 2) {
        lane x[I4_BLOCK];
        load_block_i4(from, blocks, b, factor, x);
        for (int d = 0; d < I4_BLOCK; d += LANES) v_store_as_part(FA_BF16, to + d * 2, v_load(x + d), LANES);
    }
    for (int64_t d = 0; d < n && !blocks; d += LANES)
        v_store_as_part(FA_BF16, to + d * 2, v_load_as_part(FA_I8, from + d, n - d) * v_splat(scale), n - d);
}

/* Rows [first, first + n) of bfloat16, of int8 times the powers of their scales, or of int4 as products of pairs read them: in
 * place; or copied, unless they are `there`, and filled up with 0 to whole steps, where they are integers, something would be
 * read past a row or past the last, or tiles would load them slowly. */
INLINE const char *rows_as_pairs(const fa_array *x, const fa_array *scale, const row_block *rows, int64_t first,
                                 int64_t n, int64_t width, int there, lane *copy, int64_t *row_bytes)
{
    const char *from = at_key(x, rows, first);
    const int64_t padded = padded_k(width), whole = V_AMX ? round_up(n, AMX_KEYS) : n;
    const int widens = x->dtype != FA_BF16, scales = x->dtype == FA_I8;
    int copies = padded > width || whole > n || !in_a_row(x, first, n) || widens;
    copies |= V_AMX ? !is_dense(x, width) : !lies_well(x, width, n);
#if V_AMX
    copies |= !amx_fit(from, x->row);
#endif
    *row_bytes = copies ? padded * 2 : x->row;
    if (!copies) return from;
    if (there) return (const char *)copy;
    EACH_KEY(x, rows, first, n, j, row)
    {
        char *to = (char *)copy + j * *row_bytes;
        const lane factor = scales ? power_of(scale_of(scale, rows, first + j)) : 1;
        if (widens) widen_to_bf16(x->dtype, row, width, factor, to);
        else memcpy(to, row, width * 2);
        memset(to + width * 2, 0, (padded - width) * 2);
    }
    memset((char *)copy + n * *row_bytes, 0, (whole - n) * *row_bytes);
    return (const char *)copy;
}

/* Values [first, first + n) in bfloat16: key_rows or, of integers, scaled and rounded. */
INLINE const char *values_in_bf16(const fa_attention_args *a, const row_block *rows, int64_t first, int64_t n,
                                  void *copy, int64_t *row_bytes)
{
    const int64_t width = a->head_dim_v;
    if (a->v.dtype == FA_BF16) return key_rows(&a->v, rows, first, n, width, copy, row_bytes);
    *row_bytes = width * 2;
    EACH_KEY(&a->v, rows, first, n, j, from)
    {
        const lane scale = a->v.dtype == FA_I8 ? scale_of(&a->v_scale, rows, first + j) : 1;
        widen_to_bf16(a->v.dtype, from, width, scale, (char *)copy + j * *row_bytes);
    }
    return copy;
}

/* Pairs of n rows of bfloat16 as sums over rows read them, padded_v(width) lanes each: by tiles transposed, of each
 * AMX_KEYS rows. */
INLINE void pair_rows(const char *x, int64_t x_row, int64_t n, int64_t width, lane *to)
{
#if V_AMX
    transpose_values(x, x_row, n, width, to);
#else
    pair_values(x, x_row, n, width, width, to);
#endif
}

/* A row of them becomes 0: one half of every pair. */
INLINE void clear_paired_row(int64_t row, int64_t width, lane *pairs)
{
    const int64_t step = key_step(1);
    char *half = (char *)(pairs + row / step * step / 2 * padded_v(width)) + row % step * 2;
    for (int64_t d = 0; d < width; d++) memset(half + d * step * 2, 0, 2);
}

/* The block's keys and values, copied where that is needed: a part of the head's copy is a whole block of the grid. */
INLINE void load_block(const fa_attention_args *a, const row_block *rows, int form, tile_scratch *scratch)
{
    key_block *block = &scratch->block;
    const int64_t width = a->head_dim, width_v = a->head_dim_v;
    int64_t first = block->first, n = block->n;
    scratch->odd = !scratch->odd; /* only here: a product that waits reads the other one */
    lane *k = scratch->k, *v = in_tiles(form) && scratch->odd ? scratch->v_odd : scratch->v;
    int there = 0;
    if (scratch->copy.head) {
        uint8_t *copied = scratch->copy.blocks + first / BLOCK_K;
        first = first / BLOCK_K * BLOCK_K, n = smaller(BLOCK_K, a->len_k - first);
        k = scratch->copy.k + first * copied_lanes(form, width);
        v = scratch->copy.v + first * copied_lanes(form, width_v);
        there = *copied, *copied = 1;
    }
    const int64_t skip = block->first - first;
    if (form == OF_BYTES) {
        block->k_row = round_up(width, 4), block->k = (const char *)k + skip * block->k_row;
        block->v_row = width_v * (int64_t)sizeof(lane), block->v = (const char *)v + skip / 4 * block->v_row;
        load_key_scales(&a->k_scale, rows, block->first, block->n, scratch->k_scale);
        load_value_scales(&a->v_scale, rows, block->first, block->n, scratch->v_scale, &block->bad);
        if (there) return;
        rows_as_bytes(&a->k, rows, first, n, width, (char *)k);
        if (!a->stats.second_pass) values_as_bytes(&a->v, rows, first, n, width_v, v);
        return;
    }
    if (form == OF_LANES) {
        block->k = rows_as_lanes(&a->k, &a->k_scale, rows, first, n, width, there, k, &block->k_row);
        block->k += skip * block->k_row;
        if (a->stats.second_pass) return;
        block->v = rows_as_lanes(&a->v, &a->v_scale, rows, first, n, width_v, there, v, &block->v_row);
        block->v += skip * block->v_row;
        return;
    }
    if (a->k.dtype == FA_I8) { /* what is not in the copy already */
        load_key_scales(&a->k_scale, rows, block->first, block->n, scratch->k_scale);
        for (int64_t j = 0; j < block->n; j++) scratch->k_scale[j] /= power_of(scratch->k_scale[j]);
    }
    block->k = rows_as_pairs(&a->k, &a->k_scale, rows, first, n, width, there, k, &block->k_row);
    block->k += skip * block->k_row;
    if (a->stats.second_pass) return;
    block->v_row = padded_v(width_v) * (int64_t)sizeof(lane), block->v = (const char *)v + skip / 2 * block->v_row;
    if (there) return;
    int64_t v_row;
    const char *values = values_in_bf16(a, rows, first, n, scratch->listed, &v_row);
    pair_rows(values, v_row, n, width_v, v);
}

/* Asks for part `i` of `parts` of what a task of `rows` reads first. Many sequences are each too short for the hardware's
 * prefetching to find anything to follow. */
INLINE void prefetch_task(const fa_attention_args *a, const row_block *rows, int i, int parts)
{
    row_block part = *rows;
    const int64_t keys = smaller(a->len_k, BLOCK_K), j0 = i * keys / parts, n = (i + 1) * keys / parts - j0;
    prefetch_keys(&a->k, rows, j0, n, a->head_dim);
    prefetch_keys(&a->v, rows, j0, n, a->head_dim_v);
    part.row0 += i * BLOCK_Q, part.n = smaller(part.n - i * BLOCK_Q, BLOCK_Q);
    EACH_ROW(&part, r, id) prefetch_rows(at_row(&a->q, &part, id), 0, 1, a->head_dim * dtype_size(a->q.dtype));
}

/* Asks for part `i` of `parts` of the block of keys and values from `first` on, where rows do not lie side by side:
 * there the hardware's prefetching finds nothing to follow. */
INLINE void prefetch_block(const fa_attention_args *a, const row_block *rows, const head_copy *copy, int64_t first,
                           int64_t last, int i, int parts)
{
    if (first >= last || (copy->head && copy->blocks[first / BLOCK_K])) return;
    const int64_t j0 = first + i * BLOCK_K / parts, n = smaller(first + (i + 1) * BLOCK_K / parts, last) - j0;
    if (n <= 0) return;
    if (!is_dense(&a->k, a->head_dim) || a->k.blocks) prefetch_keys(&a->k, rows, j0, n, a->head_dim);
    if ((!is_dense(&a->v, a->head_dim_v) || a->k.blocks) && !a->stats.second_pass)
        prefetch_keys(&a->v, rows, j0, n, a->head_dim_v);
}

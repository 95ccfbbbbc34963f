/* What tile kernels work on: scratch, the state of tiles, and the operands of queries as micro-kernels read them: queries
 * transposed, and the additive tile.
 *
 * Literals  dtype: of q. form: what products multiply.
 * Exports   TASK_TILES, PART_K; tile_state, cut_tile; head_copy, cut_head_copy, copied_lanes, begin_head; key_block,
 *           tile_scratch, cut_tile_scratch; transpose_rows, load_queries; load_additive, bias_in_place. */
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
    const int in_int4 = a->k.dtype == FA_I4;
    transpose_rows(a->q.dtype, bf16 && !in_int4, q_row, BLOCK_Q, a->head_dim, bf16 ? 1 : factor, BLOCK_Q, qt);
    if (a->hadamard || in_int4) hadamard_columns(a->head_dim, BLOCK_Q, qt);
    if (!bf16) return;
    for (int64_t i = 0; in_int4 && i < a->head_dim / 2 * BLOCK_Q; i += LANES) { /* rows 2p, 2p + 1 become row p */
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

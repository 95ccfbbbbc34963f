/* What the backward pass does with a tile of scores, element by element, keys on the lanes; and what it works on.
 *
 *     S = capped S, dropout's mask           other modifiers are as in the few-row kernel: modifiers.inc.h
 *     P = exp(S - lse), or sigmoids
 *     dS = P (dP - delta), or P (1 - P) dP       dP = dO V^T
 *     the gradients of the modifiers += dS
 *
 * Literals  bf16; hidden: whether some row does not attend some key; sigmoid.
 * Exports   BACK_Q, BACK_NV, BACK_KEYS, BACK_GROUPS; back_keys, back_rows, back_tile, cut_back_tile; column_group,
 *           column_groups; slope_rows, load_keep, drop_group, weigh_group, normalise_group, add_sums, clear_tail,
 *           scale_by_slope, add_modifiers. */
#pragma once
#include "interface/backward.h"
#include "attention.inc.h"

#define BACK_Q 64                                    /* queries of a tile */
#define BACK_NV (BLOCK_K / LANES % NV == 0 ? NV : 2) /* vectors of a row that a product takes at a time */
#define BACK_KEYS (BACK_NV * LANES)
#define BACK_GROUPS (BLOCK_K / BACK_KEYS)
_Static_assert(BLOCK_K % BACK_KEYS == 0 && BACK_Q % 2 == 0, "whole groups and pairs");
_Static_assert(BACK_Q <= BLOCK_K, "bad_rows holds as many");

/* A block of the grid of keys, as products read it, and its gradients; lanes behind its n keys hold 0. */
typedef struct {
    int64_t first, n;
    const char *source;      /* its first key, where it was given */
    lane *kt, *vt;           /* (head_dim, BLOCK_K), (head_dim_v, BLOCK_K); with bf16 in pairs of dimensions */
    lane *k;                 /* (BLOCK_K, width), 0 where a row is not finite; with bf16 in pairs of keys */
    lane *dkt, *dvt;         /* (head_dim, BLOCK_K), (head_dim_v, BLOCK_K); by tiles, whole vectors of dimensions */
    lane *dkt_sum, *dvt_sum; /* the same: of the queries up to the last time these were added up */
    int fresh, summed;       /* dkt and dvt hold nothing; the sums hold something */
} back_keys;

/* Queries of one head, as products read them. */
typedef struct {
    row_block rows;               /* `h_kv` is the head of q, `group` 1: what is asked is of queries alone */
    const char *q, *dout;         /* rows as the products with keys and values read them, q with the scores' factor */
    const char *q_sum, *dout_sum; /* and as sums over queries do: 0 where not finite, with bf16 in pairs of rows */
    int64_t q_row, dout_row, q_sum_row, dout_sum_row; /* strides in bytes */
    const lane *delta;                                /* of each row: sum(dO O) - dlse */
    const lane *norm;                                 /* with few queries: what its P is multiplied by */
    lane *base;                                       /* its lse, or Inf where it attends nothing */
    bad_rows bad;                                     /* rows of dO that are not finite */
} back_rows;

/* What a thread works on. */
typedef struct {
    lane *s, *ds, *add;       /* (BACK_Q, BLOCK_K): scores, then P; dO V^T, then dS; what is added to scores */
    lane *keep;               /* the same, with dropout: what P is multiplied by, 0 or 1 / (1 - dropout) */
    lane *slope, *by_own;     /* the same, with slopes: derivatives of v_slopes */
    lane *pairs;              /* (BACK_Q / 2, BLOCK_K): pairs of rows, with bf16; or (BACK_Q, BLOCK_K / 2): of keys */
    lane *dq;                 /* (BACK_Q, width), whole vectors */
    int64_t width;            /* head_dim, filled up to whole vectors */
    double sums[N_HEAD_SUMS]; /* what the tiles of a block of keys and a head add to head_sum's */
    lane *diagonals;          /* (len_q + len_k - 1): what they add to dbias_diagonals */
} back_tile;

static void cut_back_tile(arena *from, const fa_backward_args *call, back_tile *tile)
{
    const fa_attention_args *a = &call->attention;
    tile->width = round_up(a->head_dim, LANES);
    CUT_LANES(from, BACK_Q * BLOCK_K, &tile->s, &tile->ds, &tile->add, &tile->slope, &tile->by_own, &tile->pairs);
    CUT_LANES(from, a->dropout > 0 ? BACK_Q * BLOCK_K : 0, &tile->keep);
    CUT_LANES(from, BACK_Q * tile->width, &tile->dq);
    CUT_LANES(from, call->dbias_diagonals.data ? a->len_q + a->len_k : 0, &tile->diagonals);
}

/* Columns of a tile, and the rows that attend some of them. */
typedef struct {
    int64_t first, vectors, row0, row1;
} column_group;

/* The columns of a run of keys by groups; all are one where no row's range ends among them. */
static int64_t column_groups(const row_block *rows, key_run run, block_kind kind, int bf16, column_group *groups)
{
    const int64_t vectors = ceil_div(run.n, LANES);
    int64_t n = 0;
    if (!(kind & BLOCK_EDGE)) {
        groups[0] = (column_group){0, vectors, 0, rows->n};
        return 1;
    }
    for (int64_t u = 0; u < vectors; u += BACK_NV) {
        const int64_t j0 = run.j0 + u * LANES, j1 = smaller(j0 + BACK_KEYS, run.j0 + run.n);
        int64_t row0 = 0, row1 = rows->n;
        while (row0 < row1 && (rows->begin[row0] >= j1 || rows->end[row0] <= j0)) row0++;
        while (row0 < row1 && (rows->begin[row1 - 1] >= j1 || rows->end[row1 - 1] <= j0)) row1--;
        if (row0 == row1) continue;
        /* Products and sums take whole steps of rows, and store what comes of all: so those beside the group's belong to
         * it, hidden, or lie behind the last, where nobody reads. */
        row0 -= row0 % key_step(bf16);
        row1 = smaller(round_up(row1, key_step(bf16)), rows->n);
        groups[n++] = (column_group){u * LANES, smaller(BACK_NV, vectors - u), row0, row1};
    }
    return n;
}

/* What has slopes, of all scores: the other modifiers come after it. */
static void slope_rows(const modifiers *mods, int64_t n_rows, int64_t n, const back_tile *tile)
{
    for (int64_t r = 0; r < n_rows; r++)
        for (int64_t j = r * BLOCK_K; j < r * BLOCK_K + n; j += LANES) {
            const sloped_score sloped = v_slopes(mods, v_load(tile->s + j));
            v_store(tile->s + j, sloped.value);
            v_store(tile->slope + j, sloped.by_score);
            v_store(tile->by_own + j, sloped.by_own);
        }
}

/* P and dS of the group, whose first key is j0. Range's ends are compared with here, and not by modify_rows. What a mask
 * hides, the additive tile says, if there is one: the score of an attended key may be -Inf, too. */
INLINE void weigh_group_as(int hidden, int sigmoid, int bf16, const fa_attention_args *a, block_kind kind,
                           const back_rows *queries, const column_group *group, int64_t j0, const back_tile *tile)
{
    const lane *add = kind & BLOCK_ADDS ? tile->add + group->first : NULL;
    v_t index;
    for (int i = 0; i < LANES; i++) index[i] = i;
    for (int64_t r = group->row0; r < group->row1; r++) {
        const v_t base = v_splat(queries->base[r]), delta = v_splat(queries->delta[r]);
        const v_t begin = v_splat((lane)(queries->rows.begin[r] - j0)),
                  end = v_splat((lane)(queries->rows.end[r] - j0));
        lane *s = tile->s + r * BLOCK_K + group->first, *ds = tile->ds + r * BLOCK_K + group->first;
        for (int64_t j = 0; j < group->vectors * LANES; j += LANES) {
            const v_t score = v_load(s + j);
            v_t p, slope;
            if (sigmoid) {
                const v_t e = v_exp_prob(v_min(v_splat(SIGMOID_MAX), score + v_splat((lane)a->sigmoid_bias)));
                const v_t other = 1 / (1 + e); /* 1 - p, with all its digits */
                p = e * other;
                slope = p * other * v_load(ds + j);
            } else {
                p = bf16 ? v_exp_short(score - base) : v_exp_prob(score - base);
                slope = p * (v_load(ds + j) - delta);
            }
            if (hidden) {
                const v_t key = index + v_splat((lane)j);
                vi_t none = (key < begin) | (key >= end);
                if (add) none |= v_load(add + r * BLOCK_K + j) == v_splat(-INFINITY);
                p = v_select(none, v_splat(0), p), slope = v_select(none, v_splat(0), slope);
            }
            v_store(s + j, p);
            v_store(ds + j, slope);
        }
    }
}

NOINLINE void weigh_group(block_kind kind, int bf16, const fa_attention_args *a, const back_rows *queries,
                          const column_group *group, int64_t j0, const back_tile *tile)
{
    const int hidden = hides(kind);
    if (a->sigmoid) weigh_group_as(1, 1, 0, a, kind, queries, group, j0, tile);
    else if (hidden && bf16) weigh_group_as(1, 0, 1, a, kind, queries, group, j0, tile);
    else if (hidden) weigh_group_as(1, 0, 0, a, kind, queries, group, j0, tile);
    else if (bf16) weigh_group_as(0, 0, 1, a, kind, queries, group, j0, tile);
    else weigh_group_as(0, 0, 0, a, kind, queries, group, j0, tile);
}

/* P and dS of the group, normalised again. */
static void normalise_group(const back_rows *queries, const column_group *group, const back_tile *tile)
{
    for (int64_t r = group->row0; r < group->row1; r++)
        for (int64_t j = group->first; j < group->first + group->vectors * LANES; j += LANES) {
            const v_t norm = v_splat(queries->norm[r]);
            lane *s = tile->s + r * BLOCK_K + j, *ds = tile->ds + r * BLOCK_K + j;
            v_store(s, v_load(s) * norm);
            v_store(ds, v_load(ds) * norm);
        }
}

/* sums (rows) += those of P over n keys from j0 on, whose scores tile->s holds; as weigh_group makes it. */
static void add_sums(block_kind kind, const back_rows *queries, int64_t j0, int64_t n, const back_tile *tile,
                     double *sums)
{
    const lane *add = kind & BLOCK_ADDS ? tile->add : NULL;
    v_t index;
    for (int i = 0; i < LANES; i++) index[i] = i;
    for (int64_t r = 0; r < queries->rows.n; r++) {
        const v_t begin = v_splat((lane)(queries->rows.begin[r] - j0));
        const v_t end = v_splat((lane)smaller(n, queries->rows.end[r] - j0));
        v_t sum = v_splat(0);
        for (int64_t j = 0; j < n; j += LANES) {
            const v_t score = v_load(tile->s + r * BLOCK_K + j), key = index + v_splat((lane)j);
            vi_t none = (key < begin) | (key >= end);
            if (add) none |= v_load(add + r * BLOCK_K + j) == v_splat(-INFINITY);
            sum += v_select(none, v_splat(0), v_exp_prob(score - v_splat(queries->base[r])));
        }
        sums[r] += (double)v_sum(sum);
    }
}

/* keep (rows, n keys from keys->first + skip on) = what dropout makes of probabilities. */
static void load_keep(const fa_attention_args *a, const row_block *rows, int64_t first, int64_t skip, int64_t n,
                      const back_tile *tile)
{
    const philox_key drop = philox_key_of(a);
    const v_t factor = v_splat((lane)(1 / (1 - a->dropout)));
    for (int64_t r = 0; r < rows->n; r++) {
        const philox_row row = row_of_query(&drop, rows->row0 + r, rows->b * a->heads_q + rows->h_kv);
        vi_t keep[1][KEEP_KEYS / LANES];
        keep_of_keys(1, &drop, &row, first, keep);
        for (int64_t j = 0; j < n; j += LANES)
            v_store(tile->keep + r * BLOCK_K + j, v_select(keep[0][(skip + j) / LANES], factor, v_splat(0)));
    }
}

/* x (the group's rows and columns), dropped and scaled as probabilities are; NaN that is dropped is 0. */
static void drop_group(const column_group *group, const back_tile *tile, lane *x)
{
    for (int64_t r = group->row0; r < group->row1; r++)
        for (int64_t j = group->first; j < group->first + group->vectors * LANES; j += LANES) {
            const v_t keep = v_load(tile->keep + r * BLOCK_K + j), value = v_load(x + r * BLOCK_K + j);
            v_store(x + r * BLOCK_K + j, v_select(keep == 0, v_splat(0), value * keep));
        }
}

/* No gradient behind the group's n keys: the last vector may hold keys that are left out of the run. */
INLINE void clear_tail(const column_group *group, int64_t n, const back_tile *tile)
{
    const int64_t last = n - n % LANES;
    for (int64_t r = group->row0; n % LANES && r < group->row1; r++) {
        lane *s = tile->s + r * BLOCK_K + group->first + last, *ds = tile->ds + r * BLOCK_K + group->first + last;
        v_store(s, v_load_n(s, n % LANES));
        v_store(ds, v_load_n(ds, n % LANES));
    }
}

/* dS of the scores before what has slopes. Where it is 0, as it is where a score is hidden, 0 times anything is 0. */
INLINE void scale_by_slope(const column_group *group, int64_t n, const back_tile *tile)
{
    for (int64_t r = group->row0; r < group->row1; r++) {
        const lane *slope = tile->slope + r * BLOCK_K + group->first;
        lane *ds = tile->ds + r * BLOCK_K + group->first;
        for (int64_t j = 0; j < n; j += LANES) {
            const v_t x = v_load(ds + j);
            v_store(ds + j, v_select(x == 0, x, x * v_load(slope + j)));
        }
    }
}

/* What dS of the rows, (group->row1 - row0) x n keys from j0 on, adds to the gradients of the modifiers. */
static void add_modifiers(const fa_backward_args *call, const back_rows *queries, const column_group *group, int64_t j0,
                          int64_t n, back_tile *tile)
{
    const fa_attention_args *a = &call->attention;
    const row_block *rows = &queries->rows;
    const fa_modifier_gradients *dmods = &call->dmods;
    v_t sums[N_HEAD_SUMS], key;
    for (int i = 0; i < N_HEAD_SUMS; i++) sums[i] = v_splat(0);
    for (int i = 0; i < LANES; i++) key[i] = i;
    for (int64_t r = group->row0; r < group->row1; r++) {
        const lane *ds = tile->ds + r * BLOCK_K + group->first, *by_own = tile->by_own + r * BLOCK_K + group->first;
        const int64_t i = rows->row0 + r, diagonal = j0 - i + a->len_q - 1, col = call->dbias.col;
        char *bias = call->dbias.data ? at(&call->dbias, rows->b, rows->h_kv, i, j0) : NULL;
        lane distance = 0;
        if (wants_distances(dmods)) distance = (lane)(load_int(at(&a->mods.q_position, rows->b, 0, 0, 0)) + i - j0);
        for (int64_t j = 0; j < n; j += LANES) {
            const v_t x = v_load_part(ds + j, n - j); /* behind the last key may be anything */
            const v_t far = v_abs(v_splat(distance - (lane)j) - key);
            v_head_sums(dmods, x, far, by_own + j, sums);
            if (call->dbias_diagonals.data) {
                lane *to = tile->diagonals + diagonal + j;
                v_store_part(to, v_load_part(to, n - j) + x, n - j);
            }
            if (bias && col == sizeof(lane)) {
                char *to = bias + j * col;
                v_store_part(to, v_load_part(to, n - j) + x, n - j);
            }
        }
        for (int64_t j = 0; bias && col != sizeof(lane) && j < n; j++) *(lane_u *)(bias + j * col) += ds[j];
    }
    for (int i = 0; i < N_HEAD_SUMS; i++) tile->sums[i] += (double)v_sum(sums[i]);
}

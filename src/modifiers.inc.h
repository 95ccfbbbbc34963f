/* What is done to scores before softmax, and what gradients need of it. A modifier has constants in `modifiers`, which
 * modifiers_of and same_modifiers must know, and a formula in v_modify. If it has other values for other rows, `row_lanes`
 * and modify_rows hold them. Its own gradient is one of `head_sum`s. docs/dev/architecture.md says how to add one.
 *
 *     scale (a factor of q, or of the product) -> softcap -> bias -> ALiBi -> masks
 *
 * Exports   modifiers, modifiers_of, score_tile; row_lanes, cut_row_lanes, begin_row_lanes; modify_tile, mark_attending,
 *           mark_rows (queries on the lanes, for tile kernels); modify_rows, row_attends (keys on the lanes, for the
 *           few-row kernel). HAS_SLOPES, sloped_score, v_slopes, behind_slopes; N_HEAD_SUMS, head_sum, has_head_sums,
 *           add_head_sums; wants_distances, v_head_sums, has_row_sums, row_head_sums, add_slope_sum. */
#pragma once
#include "masks.inc.h"
#include "softmax.inc.h"

typedef struct {
    lane q_factor, s_factor; /* of q and of the product: scale, divided by a softcap */
    lane softcap;            /* or 0 */
    int alibi;
} modifiers;

/* Whether the slopes of scores by products are others than the scale: of fa_modifiers, and of the above. */
#define HAS_SLOPES(mods) ((mods).softcap != 0)

/* Whether scores are products times the scale. */
INLINE int only_scales(const fa_modifiers *mods)
{
    return !HAS_SLOPES(*mods) && !mods->bias.data && !mods->alibi_slopes.data;
}

/* Whether scores depend on distances. */
#define HAS_DISTANCES(mods) ((mods).alibi)

/* What follows v_slopes: none of what HAS_SLOPES. */
INLINE modifiers behind_slopes(const modifiers *mods)
{
    modifiers later = *mods;
    if (HAS_SLOPES(*mods)) later.s_factor = 1;
    later.softcap = 0;
    return later;
}

INLINE int same_modifiers(const modifiers *x, const modifiers *y)
{
    return x->s_factor == y->s_factor && x->softcap == y->softcap && x->alibi == y->alibi;
}

/* A factor above 1 multiplies the product: q times it might overflow where the product does not. `bf16`: the kernel
 * applies q_factor to the product in any case. */
static modifiers modifiers_of(const fa_attention_args *a, int bf16)
{
    const double exact = a->mods.softcap != 0 ? a->mods.scale / a->mods.softcap : a->mods.scale;
    const lane factor = (lane)fmax(-LANE_MAX, fmin(LANE_MAX, exact)); /* no Inf: that times 0 is NaN */
    const int fold = bf16 || (-1 <= factor && factor <= 1);
    return (modifiers){
        .q_factor = fold ? factor : 1,
        .s_factor = fold ? 1 : factor,
        .softcap = (lane)a->mods.softcap,
        .alibi = a->mods.alibi_slopes.data != NULL,
    };
}

/* Values of a tile's rows, one a lane: (BLOCK_Q) each. Lanes without a row have slope 0, and else the last row's. */
typedef struct {
    lane *slope;                  /* ALiBi's, 0 without */
    lane *position, *begin, *end; /* of the query, and its range, relative to j0, where they are small and exact */
} row_lanes;

static void cut_row_lanes(arena *from, row_lanes *lanes)
{
    CUT_LANES(from, BLOCK_Q, &lanes->slope, &lanes->position, &lanes->begin, &lanes->end);
}

INLINE void begin_row_lanes(const fa_attention_args *a, const row_block *rows, row_lanes *lanes)
{
    memset(lanes->slope, 0, BLOCK_Q * sizeof(lane));
    if (!a->mods.alibi_slopes.data) return;
    EACH_ROW(rows, r, id) lanes->slope[r] = *(const lane_u *)at(&a->mods.alibi_slopes, rows->b, id.head, 0, 0);
}

/* Scores of keys [j0, j0 + n), before and after modifiers: s and, with BLOCK_ADDS, the additive tile. The tile kernels
 * store both as (n, BLOCK_Q), the few-row kernel as (rows, BLOCK_K). */
typedef struct {
    const row_block *rows;
    const row_lanes *lanes; /* of the tile kernels */
    int64_t j0, n;
    block_kind kind;
    lane *s, *add;
} score_tile;

/* Whether v_modify does anything. */
INLINE int modifies(const modifiers *mods, block_kind kind)
{
    return kind != BLOCK_FULL || !same_modifiers(mods, &(modifiers){.s_factor = 1});
}

/* One vector of scores: `add` is of the additive tile, distance = |position of query - key|, `inside` the lanes within
 * their rows' ranges. A finite bias never masks: a sum that overflows to -inf is clamped, unless the score was -inf before.
 * With a softcap, q_factor or s_factor has divided by it: v_softcap(x, cap) is cap tanh(x). */
INLINE v_t v_modify(const modifiers *mods, block_kind kind, v_t s, v_t add, v_t slope, v_t distance, vi_t inside)
{
    const v_t hidden = v_splat(-INFINITY);
    const int adds = kind & BLOCK_ADDS;
    if (mods->s_factor != 1) s *= v_splat(mods->s_factor);
    if (mods->softcap != 0) s = v_softcap(s, v_splat(mods->softcap));
    const v_t least = adds ? v_min(v_splat(-LANE_MAX), s) : s;
    if (adds) s += add;
    if (mods->alibi) s = v_fma(-slope, distance, s);
    if (adds) s = v_max(least, s);
    if (kind & BLOCK_MASKED) s = v_select(add == hidden, hidden, s);
    if (kind & BLOCK_EDGE) s = v_select(inside, s, hidden);
    return s;
}

/* With HAS_SLOPES, a score before biases, as v_modify makes it, and its derivatives: by the product, but for the scale, and
 * by the modifier's own number. With t = tanh(x) these are 1 - t^2 and t - x (1 - t^2). From 400 on v_exp has made the slope
 * 0, and Inf must not make NaN. */
typedef struct {
    v_t value, by_score, by_own;
} sloped_score;

INLINE sloped_score v_slopes(const modifiers *mods, v_t s)
{
    const v_t most = v_splat(400), x = v_min(most, v_max(-most, s * v_splat(mods->s_factor)));
    v_t slope;
    const v_t t = v_tanh_slope(x, &slope);
    return (sloped_score){v_softcap(x, v_splat(mods->softcap)), slope, v_fma(-x, slope, t)};
}

/* The gradients of fa_modifier_gradients: sums over a head's rows of dS, the gradient of the modified scores, times what
 * depends on the distance, or times by_own. */
enum { BY_ALIBI, BY_CAP, N_HEAD_SUMS };

INLINE const fa_array *head_sum(const fa_modifier_gradients *to, int i)
{
    const fa_array *const all[] = {[BY_ALIBI] = &to->dalibi_slopes, [BY_CAP] = &to->dsoftcap};
    return all[i];
}

INLINE int has_head_sums(const fa_modifier_gradients *to)
{
    int some = 0;
    for (int i = 0; i < N_HEAD_SUMS; i++) some = some || head_sum(to, i)->data;
    return some;
}

INLINE void add_head_sums(const fa_modifier_gradients *to, int64_t b, int64_t h, const double *sums)
{
    for (int i = 0; i < N_HEAD_SUMS; i++)
        if (head_sum(to, i)->data) *(double *)at(head_sum(to, i), b, h, 0, 0) += sums[i];
}

INLINE int wants_distances(const fa_modifier_gradients *to) { return to->dalibi_slopes.data != NULL; }

/* sums (N_HEAD_SUMS) += what dS of some keys adds, at these distances; by_own is of v_slopes. */
INLINE void v_head_sums(const fa_modifier_gradients *to, v_t ds, v_t distance, const lane *by_own, v_t *sums)
{
    if (to->dalibi_slopes.data) sums[BY_ALIBI] = v_fma(-distance, ds, sums[BY_ALIBI]);
    if (to->dsoftcap.data) sums[BY_CAP] += v_select(ds == 0, ds, ds * v_load(by_own));
}

/* The same of one key, and whether there are such sums: all but those of by_own, which add_slope_sum adds. */
INLINE void row_head_sums(double ds, int64_t position, int64_t key, double *sums)
{
    sums[BY_ALIBI] -= ds * fabs((double)(position - key));
}

INLINE int has_row_sums(const fa_modifier_gradients *to)
{
    int some = 0;
    for (int i = 0; i < N_HEAD_SUMS; i++) some = some || (i != BY_CAP && head_sum(to, i)->data);
    return some;
}

INLINE void add_slope_sum(const fa_modifier_gradients *to, int64_t b, int64_t h, double sum)
{
    add_head_sums(to, b, h, (double[N_HEAD_SUMS]){[BY_CAP] = sum});
}

INLINE void modify_tile_as(int nv, const modifiers *mods, block_kind kind, const score_tile *scores)
{
    for (int64_t lanes = 0; lanes < nv * LANES; lanes += LANES) {
        const v_t begin = v_load(scores->lanes->begin + lanes), end = v_load(scores->lanes->end + lanes);
        const v_t slope = v_load(scores->lanes->slope + lanes), position = v_load(scores->lanes->position + lanes);
        for (int64_t j = 0; j < scores->n; j++) {
            lane *s = scores->s + j * BLOCK_Q + lanes;
            const v_t key = v_splat((lane)j);
            const v_t distance = HAS_DISTANCES(*mods) ? v_abs(position - key) : key;
            const v_t add = kind & BLOCK_ADDS ? v_load(scores->add + j * BLOCK_Q + lanes) : key;
            v_store(s, v_modify(mods, kind, v_load(s), add, slope, distance, (begin <= key) & (key < end)));
        }
    }
}

/* The ranges' ends alone, without modifiers: keys that every row attends are left as they are. */
INLINE void hide_edges(int nv, const score_tile *scores)
{
    const int64_t full = larger(0, smaller(scores->n, scores->rows->full_first - scores->j0));
    const int64_t last = larger(full, smaller(scores->n, scores->rows->full_last - scores->j0));
    for (int64_t lanes = 0; lanes < nv * LANES; lanes += LANES) {
        const v_t begin = v_load(scores->lanes->begin + lanes), end = v_load(scores->lanes->end + lanes);
        for (int64_t j = full ? 0 : last; j < scores->n; j = j + 1 == full ? last : j + 1) {
            lane *s = scores->s + j * BLOCK_Q + lanes;
            const v_t key = v_splat((lane)j);
            v_store(s, v_select((begin <= key) & (key < end), v_load(s), v_splat(-INFINITY)));
        }
    }
}

/* Modifiers and masks of a tile. Usual ones have loops of their own: a softcap or ALiBi alone where nothing is added or
 * hidden, edges alone, an additive tile alone. */
INLINE void modify_tile(const fa_attention_args *a, int nv, const modifiers *mods, const score_tile *scores)
{
    const row_block *rows = scores->rows;
    const row_lanes *lanes = scores->lanes;
    const block_kind kind = scores->kind;
    const modifiers unscaled = {.s_factor = 1}, cap = {.s_factor = 1, .softcap = mods->softcap};
    const modifiers alibi = {.s_factor = 1, .alibi = 1};
    if (!modifies(mods, kind)) return;
    const int64_t position = HAS_DISTANCES(*mods) ? load_int(at(&a->mods.q_position, rows->b, 0, 0, 0)) : 0;
    for (int64_t r = 0; r < BLOCK_Q; r++) {
        const int64_t row = smaller(r, rows->n - 1);
        lanes->begin[r] = (lane)(rows->begin[row] - scores->j0);
        lanes->end[r] = (lane)(rows->end[row] - scores->j0);
        if (HAS_DISTANCES(*mods)) lanes->position[r] = (lane)(position + (rows->row0 + row) / rows->group - scores->j0);
    }
    if (kind == BLOCK_FULL && same_modifiers(mods, &cap)) modify_tile_as(nv, &cap, BLOCK_FULL, scores);
    else if (kind == BLOCK_FULL && same_modifiers(mods, &alibi)) modify_tile_as(nv, &alibi, BLOCK_FULL, scores);
    else if (kind == BLOCK_EDGE && same_modifiers(mods, &unscaled)) hide_edges(nv, scores);
    else if (kind == BLOCK_ADDS && same_modifiers(mods, &unscaled)) modify_tile_as(nv, &unscaled, BLOCK_ADDS, scores);
    else modify_tile_as(nv, mods, kind, scores);
}

/* Turns the additive tile, free by now, into masks: which lanes attend which key. The scores do not tell it: one of
 * -inf may have been computed. */
INLINE void mark_attending(int nv, const score_tile *scores)
{
    for (int64_t j = 0; j < scores->n; j++)
        for (int64_t lanes = 0; lanes < nv * LANES; lanes += LANES) {
            lane *add = scores->add + j * BLOCK_Q + lanes;
            const v_t key = v_splat((lane)j);
            const vi_t inside = (v_load(scores->lanes->begin + lanes) <= key) &
                                (key < v_load(scores->lanes->end + lanes));
            const vi_t hidden = scores->kind & BLOCK_ADDS ? v_load(add) == v_splat(-INFINITY) : inside ^ inside;
            v_store(add, (v_t)(inside & ~hidden));
        }
}

/* A row that attends keys, and has met no score but -inf, must be told from a row that attends nothing: its maximum
 * becomes -LANE_MAX. `marked`: mark_attending has run. */
INLINE void mark_rows(int nv, const score_tile *scores, int marked, lane *row_max)
{
    const int some_hidden = hides(scores->kind);
    vi_t some = {0};
    for (int u = 0; u < nv; u++) some |= v_load(row_max + u * LANES) == v_splat(-INFINITY);
    if (!v_any(some)) return;
    if (some_hidden && !marked) mark_attending(nv, scores);
    for (int64_t lanes = 0; lanes < nv * LANES; lanes += LANES) {
        vi_t attends = {0};
        for (int64_t j = 0; some_hidden && j < scores->n; j++)
            attends |= (vi_t)v_load(scores->add + j * BLOCK_Q + lanes);
        for (int i = 0; i < LANES; i++)
            if (row_max[lanes + i] == -(lane)INFINITY && (!some_hidden || attends[i])) row_max[lanes + i] = -LANE_MAX;
    }
}

INLINE void modify_rows(const fa_attention_args *a, const modifiers *mods, const score_tile *scores)
{
    const row_block *rows = scores->rows;
    if (!modifies(mods, scores->kind)) return;
    v_t lane_index;
    for (int i = 0; i < LANES; i++) lane_index[i] = i;
    EACH_ROW(rows, r, id) {
        lane slope = 0, distance = 0;
        if (mods->alibi) slope = *(const lane_u *)at(&a->mods.alibi_slopes, rows->b, id.head, 0, 0);
        if (HAS_DISTANCES(*mods))
            distance = (lane)(load_int(at(&a->mods.q_position, rows->b, 0, 0, 0)) + id.query - scores->j0);
        const v_t begin = v_splat((lane)(rows->begin[r] - scores->j0));
        const v_t end = v_splat((lane)(rows->end[r] - scores->j0));
        for (int64_t j = 0; j < scores->n; j += LANES) {
            const v_t key = lane_index + v_splat((lane)j), add = v_load(scores->add + r * BLOCK_K + j);
            lane *s = scores->s + r * BLOCK_K + j;
            v_store(s, v_modify(mods, scores->kind, v_load(s), add, v_splat(slope), v_abs(v_splat(distance) - key),
                                (begin <= key) & (key < end)));
        }
    }
}

/* Whether row r of the few-row kernel attends key j0 + j. */
INLINE int row_attends(const score_tile *scores, int64_t r, int64_t j)
{
    const int64_t key = scores->j0 + j;
    const int hidden = scores->kind & BLOCK_ADDS && scores->add[r * BLOCK_K + j] == -(lane)INFINITY;
    return scores->rows->begin[r] <= key && key < scores->rows->end[r] && !hidden;
}

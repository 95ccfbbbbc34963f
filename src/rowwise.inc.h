/* Attention that needs all scores of a row at a time, because its normaliser does: sparsemax, entmax-1.5, the k
 * largest. And additive attention, whose score is no product. One task is a tile of query rows against all their keys:
 *
 *     for each block of keys that some row attends:
 *         S^T = scores, modifiers and masks            modifiers.inc.h; queries on the lanes
 *         keep the keys that may still matter to some row
 *     the threshold of every lane                      normalisers.inc.h; fewer keys with every pass
 *     for each block of the keys that are left:
 *         P^T = normaliser of S^T
 *         O^T = O^T + V^T P^T                          V gathered: rows that no query looks at are not read
 *     O = transpose(O^T) / sum of P
 *
 * Only the kept scores grow with the number of keys. A probability of 0 hides a key and its value as a mask does.
 *
 * Exports   rowwise_plan, rowwise_run; row_scratch, cut_row_scratch, rowwise_begin, find_support. */
#pragma once
#include "additive_scores.inc.h"
#include "talking.inc.h"

/* Here tile.s holds probabilities of a block, tile.v their values. */
typedef struct {
    tile_scratch tile;
    additive_scratch additive;
    kept_scores kept;
} row_scratch;

static int64_t cut_row_scratch(arena *from, const fa_rowwise_args *call, row_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    const int64_t n_keys = a->len_k + BLOCK_K; /* a block is scored whole */
    cut_tile_scratch(from, a, 1, &scratch->tile);
    if (call->kind == FA_ADDITIVE) {
        CUT_LANES(from, a->head_dim * BLOCK_Q, &scratch->additive.weight, &scratch->additive.exp_q);
        CUT_LANES(from, round_up(a->head_dim, LANES), &scratch->additive.exp_k);
    }
    CUT(from, scratch->kept.s, n_keys * BLOCK_Q);
    CUT(from, scratch->kept.key, n_keys);
    return from->used;
}

/* Scores a run of keys, behind those that are kept, and keeps those of it that may matter. */
static void score_run(const fa_rowwise_args *call, int nv, const modifiers *mods, key_run run, row_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    tile_state *tile = scratch->tile.tiles;
    kept_scores *kept = &scratch->kept;
    const block_kind kind = any_additive(a, tile, nv, run, &scratch->tile);
    lane *s = kept->s + kept->n * BLOCK_Q;
    const score_tile scores = {&tile->rows, &tile->lanes, run.j0, run.n, kind, s, scratch->tile.add};
    if (kind & BLOCK_EMPTY) return;
    outer_product product = {.y = tile->qt, .pitch = BLOCK_Q, .depth = a->head_dim, .out = s};
    product.x = rows_as_lanes(&a->k, &a->k_scale, &tile->rows, run.j0, run.n, a->head_dim, 0, scratch->tile.k,
                              &product.x_row);
    if (call->kind == FA_ADDITIVE) block_additive(nv, run.n, &product, &scratch->additive);
    else any_outer(nv, run.n, &product);
    any_modify(a, nv, mods, &scores);
    for (int64_t j = 0; j < run.n; j++) kept->key[kept->n + j] = run.j0 + j;
    for (int64_t u = 0; u < nv * LANES; u += LANES) {
        v_t max = v_load(tile->row_max + u);
        for (int64_t j = 0; j < run.n; j++) max = v_max(max, v_load(s + j * BLOCK_Q + u));
        v_store(tile->row_max + u, max);
    }
    mark_rows(nv, &scores, 0, tile->row_max);
    keep_near(nv, kept, kept->n, run.n, support_width(call->kind), tile->row_max);
}

/* ot (head_dim_v, nv) and row_sum of the kept keys. */
static void weigh_values(const fa_rowwise_args *call, int nv, const v_t *tau, row_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    tile_state *tile = scratch->tile.tiles;
    bad_rows bad;
    for (int64_t first = 0; first < scratch->kept.n; first += BLOCK_K) {
        if (first && first % ROWWISE_ASKS == 0 && given_up(a->watch)) return;
        const int64_t n = smaller(BLOCK_K, scratch->kept.n - first), *key = scratch->kept.key + first;
        const lane *z = scratch->kept.s + first * BLOCK_Q;
        lane *probs = scratch->tile.s, *attends = scratch->tile.alpha;
        normalise(call->kind, nv, z, n, tau, probs, tile->row_sum);
        gather_values(a, &tile->rows, key, n, scratch->tile.v, &bad);
        add_values(a, nv, tile, (const char *)scratch->tile.v, a->head_dim_v * (int64_t)sizeof(lane), n, probs);
        for (int64_t i = 0; i < bad.n; i++) {
            const int64_t row = bad.row[i] * BLOCK_Q;
            for (int u = 0; u < nv * LANES; u += LANES)
                v_store(attends + u, (v_t)selects(call->kind, v_load(z + row + u), v_load(probs + row + u)));
            add_bad_value(a, nv, 0, &tile->rows, key[bad.row[i]], probs + row, attends, tile->ot);
        }
    }
}

/* The kept keys, their relative scores and tau; 0: given up. */
NOINLINE int find_support(const fa_rowwise_args *call, int nv, const modifiers *mods, row_scratch *scratch, v_t *tau)
{
    const fa_attention_args *a = &call->attention;
    tile_state *tile = scratch->tile.tiles;
    key_walk walk = walk_begin(&tile->rows, 1, 0, a->masks.ranges != NULL, 1, a->len_k);
    while (walk_next(&walk)) {
        const key_run run = masked_run(a, &tile->rows, 1, walk.begin, walk.end - walk.begin);
        score_run(call, nv, mods, run, scratch);
        if (walk.grid / ROWWISE_ASKS != walk.next / ROWWISE_ASKS && given_up(a->watch)) return 0;
    }
    find_threshold(call, nv, tile->row_max, &scratch->kept, tau);
    return 1;
}

static void rowwise_tile(const fa_rowwise_args *call, int nv, const modifiers *mods, row_scratch *scratch)
{
    v_t tau[NV_MAX];
    if (find_support(call, nv, mods, scratch, tau)) weigh_values(call, nv, tau, scratch);
}

/* Queries, ranges and the empty state of the tile of a KV head's rows from row0 on. */
static modifiers rowwise_begin(const fa_rowwise_args *call, int64_t b, int64_t h_kv, int64_t row0, row_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    const int64_t group = a->heads_q / a->heads_kv;
    modifiers mods = modifiers_of(a, 0);
    tile_state *tile = scratch->tile.tiles;
    row_block *rows = &tile->rows;
    rows->b = b, rows->h_kv = h_kv, rows->group = group;
    rows->row0 = row0, rows->n = smaller(BLOCK_Q, group * a->len_q - row0);
    if (call->kind == FA_ADDITIVE)
        mods.s_factor *= mods.q_factor, mods.q_factor = 1; /* the query stands within the tanh */
    tile_begin(a, &mods, 0, 0, a->len_k, tile);
    if (call->kind == FA_ADDITIVE) additive_begin(call, rows, tile->qt, &scratch->additive);
    lane no_row[BLOCK_Q];
    for (int64_t i = 0; i < BLOCK_Q; i++) no_row[i] = i >= rows->n;
    for (int u = 0; u < NV; u++) scratch->kept.live[u] = v_load(no_row + u * LANES) == v_splat(0);
    scratch->kept.n = 0;
    return mods;
}

static void rowwise_run(const fa_rowwise_args *call, const fa_rowwise_plan *plan, int64_t task, void *memory)
{
    if (call->kind == FA_TALKING_HEADS) {
        talking_run(call, plan, task, memory);
        return;
    }
    const fa_attention_args *a = &call->attention;
    const int64_t group = a->heads_q / a->heads_kv, n_rows = group * a->len_q, blocks = ceil_div(n_rows, BLOCK_Q);
    const int64_t head = task / blocks, row0 = (blocks - 1 - task % blocks) * BLOCK_Q; /* causal: the longest first */
    row_scratch scratch;
    cut_row_scratch(&(arena){.memory = memory}, call, &scratch);
    tile_state *tile = scratch.tile.tiles;
    const modifiers mods = rowwise_begin(call, head / a->heads_kv, head % a->heads_kv, row0, &scratch);
    rowwise_tile(call, tile->rows.n <= LANES ? 1 : NV, &mods, &scratch);
    tile_finish(a, &scratch.tile, tile);
}

static void rowwise_plan(const fa_rowwise_args *call, fa_rowwise_plan *plan)
{
    const fa_attention_args *a = &call->attention;
    const double per_score = call->kind == FA_ADDITIVE ? 32.0 * a->head_dim : 2.0 * (a->head_dim + a->head_dim_v);
    plan->flops = per_score * a->batch * a->heads_q * a->len_q * a->len_k;
    if (call->kind == FA_TALKING_HEADS) {
        plan->n_tasks = a->batch * ceil_div(a->len_q, BLOCK_Q);
        plan->scratch_bytes = cut_talking_scratch(&(arena){0}, call, &(talking_scratch){0});
    } else {
        plan->n_tasks = a->batch * a->heads_kv * ceil_div(a->heads_q / a->heads_kv * a->len_q, BLOCK_Q);
        plan->scratch_bytes = cut_row_scratch(&(arena){0}, call, &(row_scratch){0});
    }
}

/* The gradients of attention: a call in tasks. Each is a block of keys of a KV head, and the queries that attend it:
 *
 *     row_sums = sums of P                             with few queries, in tasks before all others
 *
 *     K^T, V^T = transpose(K), transpose(V)            once a task
 *     for each head of the group, and each block of its queries:
 *         wait until the block of keys before has added to this dQ
 *         dV^T, dK^T, dQ += ...                        backward_tile.inc.h
 *     dK, dV = transpose(dK^T), transpose(dV^T)
 *
 * So every sum has one order, whatever the threads are, and nobody needs memory for a dQ of its own. A task waits for
 * tasks with lower numbers alone. Where there are many KV heads, a task is a whole one, and waits for none.
 *
 * Exports   backward_plan, backward_sums, backward_begin, backward_run, backward_end; await_turn. */
#pragma once
#include "backward_block.inc.h"

static void backward_plan(const fa_backward_args *call, int threads, fa_backward_plan *plan)
{
    const fa_attention_args *a = &call->attention;
    plan->n_heads = a->batch * a->heads_kv;
    plan->n_blocks = ceil_div(a->len_k, back_subs(a) * BLOCK_K);
    plan->few = few_queries(a);
    plan->whole_heads = plan->n_heads >= 4 * threads && !call->bias_shared && !call->dbias_diagonals.data;
    plan->n_tasks = plan->n_heads * (plan->whole_heads ? smaller(1, plan->n_blocks) : plan->n_blocks);
    plan->scratch_bytes = cut_back_scratch(&(arena){0}, call, &(back_scratch){0});
    plan->shared_bytes = cut_back_shared(&(arena){0}, call, &(back_shared){0});
    plan->flops = a->batch * a->heads_q * (6.0 * a->head_dim + 4.0 * a->head_dim_v) * a->len_q * a->len_k;
}

/* Whether query i of head h attends some key. */
static int attends_key(const fa_attention_args *a, int64_t b, int64_t h, int64_t i, back_scratch *scratch)
{
    row_block *rows = &scratch->queries.rows;
    head_rows(b, h, i, 1, rows);
    ranges_begin(a, rows, 0, a->len_k);
    key_walk walk = walk_begin(rows, 1, 0, a->masks.ranges != NULL, 1, a->len_k);
    while (walk_next(&walk)) {
        const key_run run = masked_run(a, rows, 1, walk.begin, walk.end - walk.begin);
        if (run.mask == BLOCK_EMPTY) continue;
        if (!adds(a, rows, run.mask)) return 1;
        if (additive_rows(a, rows, run.j0, run.n, scratch->tile.add) != BLOCK_EMPTY) return 1;
    }
    return 0;
}

#define LANE_EPS (LANE_BITS == 32 ? 0x1p-23 : 0x1p-52)

/* What normalises P of a row again, 1 / (its sum, with the sink's weight). Where that is off by more than an lse may be
 * by the contract, lse is not that of these keys alone, and stands. */
static double norm_of_row(const fa_backward_plan *plan, const fa_attention_args *a, const back_shared *shared,
                          int64_t row, double lse, double sum)
{
    const double most = fmin(0.5, 4 * LANE_EPS * fmax(1, fabs(lse))); /* a row that attends nothing has the sum 0 */
    for (int64_t block = 0; block < plan->n_blocks; block++)
        sum += shared->row_sums[block * a->batch * a->heads_q * a->len_q + row];
    return fabs(sum - 1) <= most ? 1 / sum : 1;
}

/* What stands before the first task of run(): delta of each row of a head of q, dsinks, and the states of its blocks. */
static void backward_begin(const fa_backward_args *call, const fa_backward_plan *plan, int64_t task, void *memory,
                           void *scratch_memory)
{
    const fa_attention_args *a = &call->attention;
    const int64_t b = a->first + task / a->heads_q, h = task % a->heads_q, blocks = query_blocks(a);
    back_shared shared;
    back_scratch scratch;
    bad_rows bad, bad_dout;
    double dsink = 0;
    cut_back_shared(&(arena){.memory = memory}, call, &shared);
    cut_back_scratch(&(arena){.memory = scratch_memory}, call, &scratch);
    row_block *rows = &scratch.queries.rows;
    const lane sink = a->sinks.data ? *(const lane_u *)at(&a->sinks, b, h, 0, 0) : 0;
    if (task == 0) *shared.folded = 0;
    for (int64_t i = 0; i < plan->n_blocks * blocks && task == 0 && call->bias_shared; i++) shared.bias_turns[i] = 0;
    for (int64_t i = 0; i < blocks; i++) {
        query_state *state = shared.states + task * blocks + i;
        if (i % 64 == 63 && given_up(a->watch)) return;
        head_rows(b, h, i * BACK_Q, smaller(BACK_Q, a->len_q - i * BACK_Q), rows);
        ranges_begin(a, rows, 0, a->len_k);
        *state = (query_state){.first = rows->first,
                               .last = rows->last,
                               .full_first = rows->full_first,
                               .full_last = rows->full_last,
                               .next = rows->first};
        state->turn = rows->first / (back_subs(a) * BLOCK_K);
        find_bad_rows_of(a->q.dtype, at_key(&a->q, rows, rows->row0), a->q.row, rows->n, a->head_dim, &bad);
        find_bad_rows_of(call->dout.dtype, at_key(&call->dout, rows, rows->row0), call->dout.row, rows->n,
                         a->head_dim_v, &bad_dout);
        state->plain = !bad.n && !bad_dout.n;
        for (int64_t r = i * BACK_Q; r < smaller((i + 1) * BACK_Q, a->len_q); r++) {
            const int64_t row = task * a->len_q + r;
            lane delta = 0;
            if (call->dq.data) {
                const int apart = call->dq.dtype != LANE_DTYPE;
                char *dq = apart ? (char *)(shared.dq + row * a->head_dim) : at(&call->dq, b, h, r, 0);
                memset(dq, 0, a->head_dim * sizeof(lane));
            }
            if (a->sigmoid) continue;
            const lane lse = *(const lane_u *)at(&a->lse, b, h, r, 0);
            delta = row_product(call->dout.dtype, at(&a->out, b, h, r, 0), at(&call->dout, b, h, r, 0), a->head_dim_v);
            if (delta != delta && call->dsinks.data && lse == sink && !attends_key(a, b, h, r, &scratch)) delta = 0;
            if (call->dlse.data) delta -= *(const lane_u *)at(&call->dlse, b, h, r, 0);
            shared.delta[row] = delta;
            if (!call->dsinks.data && !plan->few) continue;
            double weight = !a->sinks.data || lse == -(lane)INFINITY ? 0 : exp((double)sink - (double)lse);
            if (plan->few) {
                const double norm = norm_of_row(plan, a, &shared, row, (double)lse, weight);
                shared.norm[row] = (lane)norm, weight *= norm;
            }
            dsink -= weight == 0 ? 0 : weight * (double)delta; /* a sink of -inf takes no part */
        }
    }
    if (call->dsinks.data) *(double *)at(&call->dsinks, b, h, 0, 0) += dsink;
}

/* Waits until *turn is `mine`; whether it was worth waiting for, as nobody gave up. */
INLINE int await_turn(const fa_watch *watch, const int64_t *turn, int64_t mine)
{
    for (int64_t times = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != mine; times++) {
        if (given_up(watch)) return 0;
        if (watch && watch->pause) watch->pause(times);
    }
    return 1;
}

/* dQ of the tile's rows += factor * tile->dq. */
static void add_dq(const fa_backward_args *call, const back_shared *shared, const row_block *rows, int64_t head,
                   const back_tile *tile)
{
    const fa_attention_args *a = &call->attention;
    const v_t factor = v_splat((lane)call->dq_factor);
    const int apart = call->dq.dtype != LANE_DTYPE;
    for (int64_t r = 0; r < rows->n; r++) {
        const int64_t i = rows->row0 + r;
        char *dq = apart ? (char *)(shared->dq + (head * a->len_q + i) * a->head_dim)
                         : at(&call->dq, rows->b, rows->h_kv, i, 0);
        for (int64_t d = 0; d < a->head_dim; d += LANES) {
            lane *to = (lane *)dq + d;
            const v_t old = v_load_part(to, a->head_dim - d);
            v_store_part(to, v_fma(v_load(tile->dq + r * tile->width + d), factor, old), a->head_dim - d);
        }
    }
}

/* A block of queries, number i of head `head`, against block `block` of keys. */
INLINE void rows_gradients(const fa_backward_args *call, const modifiers *mods, int bf16, const back_shared *shared,
                           int64_t head, int64_t i, int64_t block, back_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    const int64_t subs = back_subs(a), j0 = block * subs * BLOCK_K, j1 = smaller(j0 + subs * BLOCK_K, a->len_k);
    query_state *state = shared->states + head * query_blocks(a) + i;
    row_block *rows = &scratch->queries.rows;
    int some = 0;
    if (a->masks.ranges && state->next >= j1) return;
    head_rows(a->first + head / a->heads_q, head % a->heads_q, i * BACK_Q, smaller(BACK_Q, a->len_q - i * BACK_Q),
              rows);
    if (!a->masks.ranges && state->full_first <= j0 && j1 <= state->full_last) {
        rows->first = rows->full_first = j0, rows->last = rows->full_last = j1, rows->several = 0;
        for (int64_t r = 0; r < rows->n; r++) rows->begin[r] = j0, rows->end[r] = j1;
    } else ranges_begin(a, rows, j0, a->masks.ranges ? a->len_k : j1);
    const int64_t row = head * a->len_q + rows->row0;
    load_back_rows(call, mods, bf16, state, shared->delta + row, few_queries(a) ? shared->norm + row : NULL, scratch);
    memset(scratch->tile.dq, 0, rows->n * scratch->tile.width * sizeof(lane));
    if (bf16) amx_begin();
    for (int64_t sub = 0; sub < subs && j0 + sub * BLOCK_K < j1; sub++) {
        back_keys *keys = scratch->keys + sub;
        if (a->masks.ranges) ranges_enter(rows, keys->first, keys->first + keys->n);
        some |= tile_gradients(call, mods, bf16, &scratch->queries, keys, &scratch->tile);
    }
    if (bf16) amx_end();
    if (a->masks.ranges) state->next = rows->next;
    if (some && call->dq.data) add_dq(call, shared, rows, head, &scratch->tile);
}

/* Adds the diagonals of a head and a block of keys from j0 on to the result, in the order of the tasks. */
static int fold_diagonals(const fa_backward_args *call, const back_shared *shared, int64_t head, int64_t j0, int64_t j1,
                          int64_t mine, const back_tile *tile)
{
    const fa_attention_args *a = &call->attention;
    if (!await_turn(a->watch, shared->folded, mine)) return 0;
    char *to = at(&call->dbias_diagonals, a->first + head / a->heads_q, head % a->heads_q, 0, 0);
    for (int64_t d = j0; d < j1 + a->len_q - 1; d++)
        *(lane_u *)(to + d * call->dbias_diagonals.col) += tile->diagonals[d];
    __atomic_store_n(shared->folded, mine + 1, __ATOMIC_RELEASE);
    return 1;
}

/* All queries of a KV head, number `kv` of all, against block `block` of its keys. */
INLINE void block_gradients(const fa_backward_args *call, const fa_backward_plan *plan, int bf16,
                            const back_shared *shared, int64_t kv, int64_t block, back_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    const modifiers mods = modifiers_of(a, bf16);
    const int64_t group = a->heads_q / a->heads_kv, blocks = query_blocks(a), most = back_subs(a) * BLOCK_K;
    const int64_t j0 = block * most, j1 = smaller(j0 + most, a->len_k), subs = ceil_div(j1 - j0, BLOCK_K);
    const row_block of_kv = {.b = a->first + kv / a->heads_kv, .h_kv = kv % a->heads_kv};
    int64_t met = 0;
    for (int64_t sub = 0; sub < subs; sub++)
        load_back_keys(a, bf16, &of_kv, j0 + sub * BLOCK_K, scratch, scratch->keys + sub);
    for (int64_t g = 0; g < group; g++) {
        const int64_t head = kv * group + g;
        back_tile *tile = &scratch->tile;
        for (int i = 0; i < N_HEAD_SUMS; i++) tile->sums[i] = 0;
        if (call->dbias_diagonals.data) memset(tile->diagonals + j0, 0, (j1 - j0 + a->len_q - 1) * sizeof(lane));
        for (int64_t i = 0; i < blocks; i++) {
            query_state *state = shared->states + head * blocks + i;
            int64_t *bias_turn = call->bias_shared ? shared->bias_turns + block * blocks + i : NULL;
            const int takes = state->first < j1 && j0 < state->last;
            if (takes && !await_turn(a->watch, &state->turn, block)) return;
            if (bias_turn && !await_turn(a->watch, bias_turn, head)) return;
            if (given_up(a->watch)) return;
            if (takes) {
                rows_gradients(call, &mods, bf16, shared, head, i, block, scratch);
                __atomic_store_n(&state->turn, block + 1, __ATOMIC_RELEASE);
                met++;
            }
            if (bias_turn) __atomic_store_n(bias_turn, head + 1, __ATOMIC_RELEASE);
            for (int64_t sub = 0; met == BACK_FOLD && sub < subs; sub++) fold_keys(a, scratch->keys + sub);
            met %= BACK_FOLD;
        }
        if (shared->sums && has_head_sums(&call->dmods))
            memcpy(shared->sums + N_HEAD_SUMS * (block * plan->n_heads * group + head), tile->sums, sizeof tile->sums);
        const int64_t mine = (block * plan->n_heads + kv) * group + g;
        if (call->dbias_diagonals.data && !fold_diagonals(call, shared, head, j0, j1, mine, tile)) return;
    }
    for (int64_t sub = 0; sub < subs; sub++) store_keys(call, &of_kv, scratch, scratch->keys + sub);
}

/* Of few queries: what each block of keys adds to the sums of P. */
static void block_sums(const fa_backward_args *call, const back_shared *shared, int64_t kv, int64_t block,
                       back_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    const modifiers mods = modifiers_of(a, 0);
    const int64_t group = a->heads_q / a->heads_kv, most = back_subs(a) * BLOCK_K;
    const int64_t j0 = block * most, j1 = smaller(j0 + most, a->len_k);
    const row_block of_kv = {.b = a->first + kv / a->heads_kv, .h_kv = kv % a->heads_kv};
    row_block *rows = &scratch->queries.rows;
    int64_t q_row;
    for (int64_t head = kv * group; head < (kv + 1) * group; head++) {
        double *sums = shared->row_sums + (block * a->batch * a->heads_q + head) * a->len_q;
        head_rows(a->first + head / a->heads_q, head % a->heads_q, 0, a->len_q, rows);
        ranges_begin(a, rows, j0, a->masks.ranges ? a->len_k : j1);
        load_scaled_rows(a, &mods, 0, scratch, &q_row);
        for (int64_t r = 0; r < rows->n; r++) sums[r] = 0;
        for (int64_t first = j0; first < j1; first += BLOCK_K) {
            name_back_keys(a, &of_kv, first, scratch->keys);
            if (a->masks.ranges) ranges_enter(rows, first, first + scratch->keys->n);
            tile_sums(a, &mods, &scratch->queries, scratch->keys, &scratch->tile, sums);
        }
    }
}

/* As backward_run, whose tasks these are. */
static void backward_sums(const fa_backward_args *call, const fa_backward_plan *plan, int64_t task, void *memory,
                          void *scratch_memory)
{
    const int64_t kv = task % plan->n_heads, first = plan->whole_heads ? 0 : task / plan->n_heads;
    const int64_t last = plan->whole_heads ? plan->n_blocks : first + 1;
    back_shared shared;
    back_scratch scratch;
    cut_back_shared(&(arena){.memory = memory}, call, &shared);
    cut_back_scratch(&(arena){.memory = scratch_memory}, call, &scratch);
    for (int64_t block = first; plan->few && block < last && !given_up(call->attention.watch); block++)
        block_sums(call, &shared, kv, block, &scratch);
}

static void backward_run(const fa_backward_args *call, const fa_backward_plan *plan, int64_t task, void *memory,
                         void *scratch_memory)
{
    const int64_t kv = task % plan->n_heads, first = plan->whole_heads ? 0 : task / plan->n_heads;
    const int64_t last = plan->whole_heads ? plan->n_blocks : first + 1;
    back_shared shared;
    back_scratch scratch;
    cut_back_shared(&(arena){.memory = memory}, call, &shared);
    cut_back_scratch(&(arena){.memory = scratch_memory}, call, &scratch);
    for (int64_t block = first; block < last && !given_up(call->attention.watch); block++) {
        if (takes_pairs(&call->attention)) block_gradients(call, plan, 1, &shared, kv, block, &scratch);
        else block_gradients(call, plan, 0, &shared, kv, block, &scratch);
    }
}

/* What stands behind the last task of run(), of a head of q: sums, and dq if it is not of lanes. */
static void backward_end(const fa_backward_args *call, const fa_backward_plan *plan, int64_t task, void *memory)
{
    const fa_attention_args *a = &call->attention;
    const int64_t b = a->first + task / a->heads_q, h = task % a->heads_q, heads = a->batch * a->heads_q;
    back_shared shared;
    cut_back_shared(&(arena){.memory = memory}, call, &shared);
    for (int64_t block = 0; block < plan->n_blocks; block++)
        add_head_sums(&call->dmods, b, h, shared.sums + N_HEAD_SUMS * (block * heads + task));
    for (int64_t i = 0; i < a->len_q && call->dq.data && call->dq.dtype != LANE_DTYPE; i++)
        store_row(call->dq.dtype, shared.dq + (task * a->len_q + i) * a->head_dim, a->head_dim, 1,
                  at(&call->dq, b, h, i, 0));
}

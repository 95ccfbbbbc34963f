/* A call of attention: how it is cut into tasks, and the tasks, as interface/attention.h says of fa_plan.
 *
 * Exports   attention_plan, attention_run, attention_splits, attention_run_split, attention_merge. */
#pragma once
#include "attention.inc.h"
#include "few_rows.inc.h"

#define SPLIT_K 512 /* keys of a split: enough to be worth a task (tens of microseconds), few enough for many cores */
_Static_assert(SPLIT_K % BLOCK_K == 0, "splits begin at block boundaries");

/* How many partials stand at the head of a thread's scratch: the one that is being made, and the states that it is
 * merged into. One state serves all tiles of a task in turn, if no tile needs one before its end. */
static int64_t n_partials(const fa_attention_args *a, const fa_plan *plan)
{
    return 1 + (!plan->split_k && a->len_k > PART_K ? plan->tiles : 1);
}

INLINE int64_t rows_per_head(const fa_attention_args *a) { return a->heads_q / a->heads_kv * a->len_q; }

/* Whether whole blocks of x, k or v, are read where they are. */
static int in_place(const fa_attention_args *a, const fa_plan *plan, const fa_array *x, int64_t width)
{
    if (plan->kind == FA_FEW_ROWS) return !x->blocks || x->block_size >= FEW_RUN;
    return grid_in_a_row(x) && lies_well(x, width, smaller(a->len_k, BLOCK_K));
}

/* A thread keeps the copy of a KV head's keys and values from task to task, if there is one (load_block), the head has
 * several tasks, and the copy fits beside what else is in a second-level cache. */
static int keeps_copy(const fa_attention_args *a, const fa_plan *plan)
{
    const int64_t bytes = a->len_k * (a->head_dim + a->head_dim_v) * (int64_t)sizeof(lane) / per_lane(FORM_OF(a));
    const int several = plan->n_tasks > a->batch * a->heads_kv;
    if ((plan->k_in_place && plan->v_in_place && a->k.dtype == LANE_DTYPE) || plan->kind != FA_TILE ||
        a->stats.second_pass || plan->split_k)
        return 0;
    return several && !keys_are_listed(a) && bytes <= fa_tuned.head_copy_bytes;
}

/* Whether tasks go through the heads in turn, in place of one head after the other. Under a causal mask the last
 * head's longest task would begin late: at (1, 8, 2048, 64) 64 cores would end 23% late, in turn 1%
 * (tools/threads_model.py). Where a thread gets four of a head's `tasks`, nothing is lost, and the head's keys stay in
 * its caches. */
static int in_turn(const fa_attention_args *a, const fa_plan *plan, int64_t tasks, int threads)
{
    return a->masks.row_end.data && tasks < 4 * threads && !plan->split_k && !plan->keep_copy;
}

/* The rows of `tiles` tiles of a KV head (numbered over the batch), from its tile number `tile` on. */
static row_block rows_of(const fa_attention_args *a, const fa_plan *plan, int64_t head, int64_t tile, int64_t tiles)
{
    row_block rows = {
        .b = a->first + head / a->heads_kv, .h_kv = head % a->heads_kv, .group = a->heads_q / a->heads_kv};
    rows.row0 = tile * plan->block_q;
    rows.n = smaller(rows_per_head(a) - rows.row0, tiles * plan->block_q);
    return rows;
}

/* Whether all rows of a KV head take the few-row kernel. A sequence with no more keys than queries attends itself, and is
 * padded to many rows beside longer ones: for the same bits it takes the tile kernel whatever else is in the batch. */
static int takes_few_rows(const fa_attention_args *a, const fa_plan *plan, const row_block *rows)
{
    if (FORM_OF(a) == OF_BYTES) return 0;
    if (plan->kind != FA_FEW_ROWS || !a->masks.row_end.data) return plan->kind == FA_FEW_ROWS;
    EACH_ROW(rows, r, id) {
        int64_t begin, end;
        row_range(a, rows, id, &begin, &end);
        if (begin < end && end > a->len_q) return 1;
    }
    return 0;
}

/* Scratch of the kernels, behind the partials. */
static int64_t kernel_scratch(const fa_attention_args *a, const fa_plan *plan)
{
    const int64_t for_tile = cut_tile_scratch(&(arena){0}, a, plan->tiles, &(tile_scratch){0});
    if (plan->kind != FA_FEW_ROWS) return for_tile;
    return larger(for_tile, cut_few_scratch(&(arena){0}, a, &(few_scratch){0}, &(row_block){0}));
}

INLINE int64_t most_tiles(void) { return smaller(fa_tuned.attention_tiles, TASK_TILES); }

/* A task is a run of keys: shorter where tasks would be few, but not below 128, where preparing queries would show. */
static void plan_second_pass(const fa_attention_args *a, int threads, fa_plan *plan)
{
    const int64_t owners = a->batch * (a->stats.mean_weights.data ? 1 : a->heads_kv);
    plan->tiles = plan->kind == FA_FEW_ROWS ? 1 : (int)smaller(ceil_div(rows_per_head(a), plan->block_q), most_tiles());
    plan->split_k = 0;
    plan->n_splits = 1;
    plan->run_k = 16 * BLOCK_K;
    while (plan->run_k > 2 * BLOCK_K && owners * ceil_div(a->len_k, plan->run_k) < 4 * threads) plan->run_k /= 2;
    plan->n_tasks = owners * ceil_div(a->len_k, plan->run_k);
    plan->scratch_bytes = kernel_scratch(a, plan);
    plan->flops = 2.0 * a->batch * a->heads_q * a->len_q * a->len_k * a->head_dim;
}

static void attention_plan(const fa_attention_args *a, int threads, fa_plan *plan)
{
    const int64_t n_rows = rows_per_head(a), heads = a->batch * a->heads_kv;
    const int tiles_alone = FORM_OF(a) == OF_BYTES || (LANE_BITS == 64 && a->k.dtype == FA_I4);
    plan->kind = !tiles_alone && n_rows <= FEW_ROWS && a->len_k > a->len_q ? FA_FEW_ROWS : FA_TILE;
    plan->block_q = plan->kind == FA_FEW_ROWS ? FEW_ROWS : BLOCK_Q;
    plan->block_k = BLOCK_K;
    plan->bf16_dot = plan->kind == FA_TILE && tile_takes_pairs(a);
    /* A tile whose keys fit one split is not split: tile_finish writes from the accumulators, a third faster at 32 tokens
     * of 32 dimensions. */
    const int split = n_rows <= plan->block_q && (plan->kind == FA_FEW_ROWS || a->len_k > SPLIT_K);
    plan->split_k = split ? SPLIT_K : 0;
    plan->n_splits = plan->split_k && a->len_k ? ceil_div(a->len_k, SPLIT_K) : 1;
    const int64_t tiles = ceil_div(n_rows, plan->block_q), wanted = threads * fa_tuned.attention_tasks;
    plan->tiles = tiles <= 1 ? 1 : (int)larger(1, smaller(heads * tiles / wanted, most_tiles()));
    if (keys_are_listed(a))
        plan->tiles = (int)larger(1, smaller(tiles, most_tiles())); /* they share copies of the rows */
    const int64_t row_bytes = row_size(a->k.dtype, a->head_dim) + row_size(a->v.dtype, a->head_dim_v);
    plan->ahead = heads * a->len_k * row_bytes > fa_tuned.far_bytes ? threads : 0;
    plan->n_tasks = heads * ceil_div(tiles, plan->tiles);
    plan->run_k = 0;
    plan->k_in_place = in_place(a, plan, &a->k, a->head_dim);
    plan->v_in_place = in_place(a, plan, &a->v, a->head_dim_v);
    plan->keep_copy = keeps_copy(a, plan);
    plan->in_turn = in_turn(a, plan, ceil_div(tiles, plan->tiles), threads);
    plan->partial_bytes = partial_at(a, plan->block_q, NULL, NULL);
    plan->scratch_bytes = n_partials(a, plan) * plan->partial_bytes + kernel_scratch(a, plan);
    arena copy = {.used = 64}; /* the first 8 bytes say whose it is */
    if (plan->keep_copy) cut_head_copy(&copy, a, &(head_copy){0}), plan->scratch_bytes += copy.used;
    plan->flops = 2.0 * a->batch * a->heads_q * a->len_q * a->len_k * (a->head_dim + a->head_dim_v);
    if (a->stats.second_pass) plan_second_pass(a, threads, plan);
}

/* Splits [*first, *last) of the KV head, at least one, hold all keys that its rows may attend; others cost nothing. */
static void attention_splits(const fa_attention_args *a, const fa_plan *plan, int64_t head, int64_t *first,
                             int64_t *last)
{
    const row_block rows = rows_of(a, plan, head, 0, 1);
    int64_t begin = a->len_k, end = 0;
    EACH_ROW(&rows, r, id) {
        int64_t row_begin, row_end;
        row_range(a, &rows, id, &row_begin, &row_end);
        if (row_begin >= row_end) continue;
        begin = smaller(begin, row_begin);
        end = larger(end, row_end);
    }
    *first = begin < end ? begin / plan->split_k : 0;
    *last = begin < end ? ceil_div(end, plan->split_k) : 1;
}

/* Adds the partial of `split` to the KV head's state. In order: the first replaces the state, the last finishes it. */
static void attention_merge(const fa_attention_args *a, const fa_plan *plan, int64_t head, int64_t split, void *state,
                            const void *split_partial)
{
    const row_block rows = rows_of(a, plan, head, 0, 1);
    int64_t first, last;
    partial into, from;
    attention_splits(a, plan, head, &first, &last);
    partial_at(a, plan->block_q, state, &into);
    partial_at(a, plan->block_q, (void *)split_partial, &from);
    if (split == first) { /* all but what sums have lost */
        const int64_t sums = into.low * (int64_t)sizeof(lane), rest = plan->partial_bytes - 2 * sums;
        memcpy(state, split_partial, sums);
        memcpy((char *)state + 2 * sums, (const char *)split_partial + 2 * sums, rest);
    }
    if (split == first + 1) partial_begin_merging(&into);
    if (split > first) partial_merge(a, &into, &from, rows.n);
    if (split < last - 1) return;
    if (split > first) partial_end_merging(&into, rows.n);
    partial_finish(a, &rows, &into);
}

/* All rows of a KV head against keys [begin, end), by the kernel that they take; `into` is NULL in the second pass. */
static void attend_rows(const fa_attention_args *a, const fa_plan *plan, row_block *rows, int64_t begin, int64_t end,
                        void *memory, const partial *into)
{
    if (takes_few_rows(a, plan, rows)) {
        few_scratch scratch;
        cut_few_scratch(&(arena){.memory = memory}, a, &scratch, rows);
        few_attend(a, rows, begin, end, &scratch, into);
        return;
    }
    tile_scratch scratch;
    cut_tile_scratch(&(arena){.memory = memory}, a, 1, &scratch);
    for (int64_t r = 0; r < rows->n; r += BLOCK_Q) { /* FEW_ROWS may be several tiles */
        row_block tile = *rows;
        tile.row0 += r;
        tile.n = smaller(rows->n - r, BLOCK_Q);
        if (into) scratch.tiles[0].total = partial_from(a, into, r);
        tile_attend(a, &tile, begin, end, &scratch);
        if (into) tile_end(a, &scratch, scratch.tiles);
    }
}

static void attention_run_split(const fa_attention_args *a, const fa_plan *plan, int64_t head, int64_t split,
                                void *split_partial, void *memory)
{
    row_block rows = rows_of(a, plan, head, 0, 1);
    const int64_t begin = split * plan->split_k;
    partial into;
    partial_at(a, plan->block_q, split_partial, &into);
    attend_rows(a, plan, &rows, begin, smaller(begin + plan->split_k, a->len_k), memory, &into);
}

/* The second pass: all rows against the task's keys, a few tiles after the other, and all heads if their mean is asked
 * for. */
static void run_second_pass(const fa_attention_args *a, const fa_plan *plan, int64_t task, void *memory)
{
    const int64_t runs = ceil_div(a->len_k, plan->run_k), heads = a->stats.mean_weights.data ? a->heads_kv : 1;
    const int64_t begin = task % runs * plan->run_k, end = smaller(begin + plan->run_k, a->len_k);
    const int64_t head0 = task / runs * heads;
    for (int64_t tile = 0; tile * plan->block_q < rows_per_head(a); tile += plan->tiles)
        for (int64_t head = head0; head < head0 + heads; head++) {
            row_block rows = rows_of(a, plan, head, tile, plan->tiles);
            if (!attends_some(a, &rows, begin, end)) continue;
            if (given_up(a->watch)) return;
            if (plan->kind == FA_FEW_ROWS) {
                attend_rows(a, plan, &rows, begin, end, memory, NULL);
                continue;
            }
            tile_scratch scratch;
            cut_tile_scratch(&(arena){.memory = memory}, a, plan->tiles, &scratch);
            tile_attend(a, &rows, begin, end, &scratch);
        }
}

/* The rows of a task. Of a KV head the last ones come first: under a causal mask they have the most keys. */
static row_block rows_of_task(const fa_attention_args *a, const fa_plan *plan, int64_t task)
{
    const int64_t heads = a->batch * a->heads_kv, tasks = plan->n_tasks / heads;
    const int64_t head = plan->in_turn ? task % heads : task / tasks;
    const int64_t later = plan->in_turn ? task / heads : task % tasks;
    return rows_of(a, plan, head, (tasks - 1 - later) * plan->tiles, plan->tiles);
}

static void attention_run(const fa_attention_args *a, const fa_plan *plan, int64_t task, void *memory)
{
    if (a->stats.second_pass) {
        run_second_pass(a, plan, task, memory);
        return;
    }
    arena copied = {.memory = memory, .used = 64};
    head_copy copy = {.head = memory};
    if (plan->keep_copy) cut_head_copy(&copied, a, &copy);
    else copied.used = 0, copy.head = NULL;
    char *made = copied.memory + copied.used, *state = made + plan->partial_bytes;
    char *rest = made + n_partials(a, plan) * plan->partial_bytes;
    if (plan->split_k) {
        int64_t first, last;
        attention_splits(a, plan, task, &first, &last);
        for (int64_t split = first; split < last; split++) {
            if (split > first && split * SPLIT_K % PART_K == 0 && given_up(a->watch)) return;
            attention_run_split(a, plan, task, split, made, rest);
            attention_merge(a, plan, task, split, state, made);
        }
        return;
    }
    const row_block rows = rows_of_task(a, plan, task);
    tile_scratch scratch;
    cut_tile_scratch(&(arena){.memory = rest}, a, plan->tiles, &scratch);
    scratch.copy = copy;
    if (plan->ahead && task + plan->ahead < plan->n_tasks) scratch.later = rows_of_task(a, plan, task + plan->ahead);
    partial_at(a, plan->block_q, made, &scratch.part);
    for (int i = 0; i < plan->tiles; i++)
        partial_at(a, plan->block_q, state + (a->len_k > PART_K ? i : 0) * plan->partial_bytes,
                   &scratch.tiles[i].total);
    tile_attend(a, &rows, 0, a->len_k, &scratch);
    for (int i = 0; i * plan->block_q < rows.n; i++) tile_finish(a, &scratch, scratch.tiles + i);
}

/* Which keys the rows of a task attend, as far as ranges say it: one half-open range of keys for each row, or a list of
 * such ranges. Every structural mask (causal, window, padding, documents ...) arrives in this form.
 *
 * Exports   row_block, row_id, range_list, EACH_ROW, first_row, next_row, cut_rows; at_row, at_nth_row, at_key,
 *           run_of_rows, in_a_row, grid_in_a_row, keys_are_listed, EACH_KEY, key_rows, prefetch_keys; ranges_begin,
 *           ranges_enter, row_range, attends_some, rows_share; block_kind, BLOCK_FULL, BLOCK_EDGE, BLOCK_MASKED, BLOCK_ADDS, BLOCK_EMPTY, hides,
 *           range_kind; key_walk, walk_begin, walk_next.
 *
 * Keys are visited in blocks of BLOCK_K, at multiples of BLOCK_K: the grid. A walk visits those blocks only that some
 * row attends. With lists, what lies between two ranges costs nothing; within a block a row has one range again, unless
 * several of its list lie in it (`several`): then the additive tile hides what is between them, masks.inc.h. */
#pragma once
#include "interface/attention.h"
#include "tile.inc.h"

/* A row of a KV head: its rows are (query, head in group) pairs, query-major. */
typedef struct {
    int64_t query, head;
} row_id;

/* A row's list: pairs (begin, end) up to `stop`, of which it attends what lies in [low, high). `pair` is the first one
 * that reaches past the block, `shown` the first one that reaches past the block's first key. */
typedef struct {
    const int64_t *pair, *stop, *shown;
    int64_t low, high;
} range_list;

/* Rows of a KV head, and what they attend: of all keys of the task (ranges_begin), or of a block (ranges_enter). */
typedef struct {
    int64_t b, h_kv, group, row0, n;
    int64_t *begin, *end;           /* of each row */
    int64_t first, last;            /* the union of their ranges */
    int64_t full_first, full_last;  /* the intersection */
    range_list *lists;              /* of each row */
    int64_t *pair_begin, *pair_end; /* what a row attends of list.pair; INT64_MAX where there is no further pair */
    int64_t *like;                  /* first row of the run of neighbours with this row's list */
    int one_list;                   /* all rows have the same list */
    int several;                    /* some row has several ranges in the block */
    int64_t next;                   /* the next key that some row attends, from the block's end on */
} row_block;

INLINE row_id first_row(const row_block *rows)
{
    return (row_id){rows->row0 / rows->group, rows->h_kv * rows->group + rows->row0 % rows->group};
}

INLINE row_id next_row(const row_block *rows, row_id id)
{
    const int last_of_group = id.head + 1 == (rows->h_kv + 1) * rows->group;
    return last_of_group ? (row_id){id.query + 1, rows->h_kv * rows->group} : (row_id){id.query, id.head + 1};
}

/* Where row `id` of x, (batch, heads_q, len_q, ...), is; where the row of key `key` is in k, v or a scale of theirs. */
INLINE char *at_row(const fa_array *x, const row_block *rows, row_id id)
{
    return at(x, rows->b, id.head, id.query, 0);
}
INLINE char *at_key(const fa_array *x, const row_block *rows, int64_t key)
{
    if (!x->blocks) return at(x, rows->b, rows->h_kv, key, 0);
    const int64_t size = x->block_size, block = size == 1 ? key : key / size;
    return at(x, rows->b, rows->h_kv, key - block * size, 0) + x->blocks[rows->b * x->blocks_row + block] * x->block;
}

/* How many of the n rows from `first` on are at one distance: those of its block, if blocks name them. */
INLINE int64_t run_of_rows(const fa_array *x, int64_t first, int64_t n)
{
    return !x->blocks ? n : x->block_size == 1 ? 1 : smaller(n, x->block_size - first % x->block_size);
}

/* Whether all are; whether those of every block of the grid are. */
INLINE int in_a_row(const fa_array *x, int64_t first, int64_t n) { return run_of_rows(x, first, n) == n; }
INLINE int grid_in_a_row(const fa_array *x) { return !x->blocks || x->block_size % BLOCK_K == 0; }

/* Whether blocks name the keys of a few queries: no other task has their copies, and no hardware finds them. */
INLINE int keys_are_listed(const fa_attention_args *a) { return a->k.blocks && !a->k.blocks_row; }

/* for each row `first` + j of n rows of k or v, at `from` */
#define EACH_KEY(x, rows, first, n, j, from)                                                                           \
    for (int64_t j = 0, run_end = 0; j < (n);)                                                                         \
        for (const char *from = (run_end = j + run_of_rows(x, (first) + j, (n) - j), at_key(x, rows, (first) + j));    \
             j < run_end; j++, from += (x)->row)

/* These rows, `row_bytes` apart: where they are if that is in a row, or else copied. */
INLINE const char *key_rows(const fa_array *x, const row_block *rows, int64_t first, int64_t n, int64_t width,
                            void *copy, int64_t *row_bytes)
{
    *row_bytes = x->row;
    if (in_a_row(x, first, n)) return at_key(x, rows, first);
    *row_bytes = row_size(x->dtype, width);
    EACH_KEY(x, rows, first, n, j, from) memcpy((char *)copy + j * *row_bytes, from, (size_t)*row_bytes);
    return copy;
}

/* Asks for these rows. */
INLINE void prefetch_keys(const fa_array *x, const row_block *rows, int64_t first, int64_t n, int64_t width)
{
    const int64_t bytes = row_size(x->dtype, width);
    for (int64_t j = 0, run; j < n; j += run) {
        run = run_of_rows(x, first + j, n - j);
        if (x->row == bytes)
            prefetch_rows(at_key(x, rows, first + j), 0, 1, run * bytes); /* lines that rows share, once */
        else prefetch_rows(at_key(x, rows, first + j), x->row, run, bytes);
    }
}

/* The same for row r of a block, if `first` is where row 0 is: rows of one head lie equally far apart. */
INLINE char *at_nth_row(const fa_array *x, const row_block *rows, char *first, int64_t r, row_id id)
{
    return rows->group == 1 ? first + r * x->row : at_row(x, rows, id);
}

/* for each row r of rows, `id` being its row_id */
#define EACH_ROW(rows, r, id)                                                                                          \
    row_id id = first_row(rows);                                                                                       \
    for (int64_t r = 0; r < (rows)->n; r++, id = next_row(rows, id))

INLINE void cut_rows(arena *from, int64_t n, row_block *rows)
{
    CUT(from, rows->begin, n);
    CUT(from, rows->end, n);
    CUT(from, rows->lists, n);
    CUT(from, rows->like, n);
    CUT(from, rows->pair_begin, n);
    CUT(from, rows->pair_end, n);
}

/* Whether every row has the same row of x. */
INLINE int rows_share(const row_block *rows, const fa_array *x)
{
    return !x->data || (x->row == 0 && (x->head == 0 || rows->group == 1));
}

/* The keys that a row attends, half-open: of its list, those that lie in this range. */
INLINE void row_range(const fa_attention_args *a, const row_block *rows, row_id id, int64_t *begin, int64_t *end)
{
    *begin = a->masks.row_begin.data ? load_int(at_row(&a->masks.row_begin, rows, id)) : 0;
    *end = a->masks.row_end.data ? load_int(at_row(&a->masks.row_end, rows, id)) : a->len_k;
}

/* A row's list from the first pair on that ends behind `low`, found by bisection, and clipped to [low, high). */
INLINE range_list row_list(const fa_attention_args *a, const row_block *rows, row_id id, int64_t low, int64_t high)
{
    const int64_t *pair = a->masks.ranges + 2 * load_int(at_row(&a->masks.range_first, rows, id));
    const int64_t *stop = a->masks.ranges + 2 * load_int(at_row(&a->masks.range_last, rows, id));
    for (int64_t n = (stop - pair) / 2; n > 0;) {
        const int64_t half = n / 2;
        if (pair[2 * half + 1] <= low) pair += 2 * (half + 1), n -= half + 1;
        else n = half;
    }
    return (range_list){pair, stop, pair, low, high};
}

/* What the row attends of list->pair. */
INLINE void read_pair(const range_list *list, int64_t *begin, int64_t *end)
{
    *begin = *end = INT64_MAX;
    if (list->pair == list->stop || list->pair[0] >= list->high) return;
    *begin = larger(list->pair[0], list->low);
    *end = smaller(list->pair[1], list->high);
}

/* Whether some row may attend some of keys [begin, end). */
static int attends_some(const fa_attention_args *a, const row_block *rows, int64_t begin, int64_t end)
{
    if (!a->masks.row_begin.data && !a->masks.row_end.data && !a->masks.ranges) return 1;
    EACH_ROW(rows, r, id) {
        int64_t first, last;
        row_range(a, rows, id, &first, &last);
        first = larger(first, begin), last = smaller(last, end);
        if (first >= last) continue;
        if (!a->masks.ranges) return 1;
        const range_list list = row_list(a, rows, id, first, last);
        if (list.pair < list.stop && list.pair[0] < last) return 1;
    }
    return 0;
}

/* Reads the ranges and lists of the rows, clipped to keys [key_begin, key_end): a split, or all of them. */
static void ranges_begin(const fa_attention_args *a, row_block *rows, int64_t key_begin, int64_t key_end)
{
    rows->first = rows->full_last = key_end;
    rows->last = rows->full_first = key_begin;
    rows->several = 0, rows->one_list = 1, rows->next = INT64_MAX;
    if (!a->masks.row_begin.data && !a->masks.row_end.data && !a->masks.ranges && key_begin < key_end) {
        for (int64_t r = 0; r < rows->n; r++) rows->begin[r] = key_begin, rows->end[r] = key_end;
        rows->first = rows->full_first = key_begin, rows->last = rows->full_last = key_end;
        return;
    }
    const fa_array *x = &a->masks.row_begin, *y = &a->masks.row_end;
    char *begin0 = x->data ? at_row(x, rows, first_row(rows)) : NULL;
    char *end0 = y->data ? at_row(y, rows, first_row(rows)) : NULL;
    EACH_ROW(rows, r, id) {
        int64_t begin = begin0 ? load_int(at_nth_row(x, rows, begin0, r, id)) : 0;
        int64_t end = end0 ? load_int(at_nth_row(y, rows, end0, r, id)) : a->len_k;
        begin = larger(begin, key_begin);
        end = smaller(end, key_end);
        if (begin >= end) begin = end = key_begin; /* attends nothing: no block is full, the union does not grow */
        else {
            rows->first = smaller(rows->first, begin);
            rows->last = larger(rows->last, end);
        }
        rows->full_first = larger(rows->full_first, begin);
        rows->full_last = smaller(rows->full_last, end);
        rows->begin[r] = begin;
        rows->end[r] = end;
        if (!a->masks.ranges) continue;
        rows->lists[r] = row_list(a, rows, id, begin, end);
        read_pair(rows->lists + r, rows->pair_begin + r, rows->pair_end + r);
        rows->next = smaller(rows->next, rows->pair_begin[r]);
        const int as_before = r && memcmp(rows->lists + r, rows->lists + r - 1, sizeof(range_list)) == 0;
        rows->like[r] = as_before ? rows->like[r - 1] : r;
        rows->one_list = rows->like[r] == 0;
    }
    if (a->masks.ranges) rows->first = smaller(rows->next, rows->last);
}

/* With lists: what the rows attend of keys [j0, j1), one block of the grid. Blocks are entered in order, and every
 * block must be entered of which some row attends some key. */
static void ranges_enter(row_block *rows, int64_t j0, int64_t j1)
{
    int64_t *restrict begin = rows->begin, *restrict end = rows->end;
    int64_t *restrict pair_begin = rows->pair_begin, *restrict pair_end = rows->pair_end;
    int64_t first = j1, last = j0, full_first = j0, full_last = j1, next = INT64_MAX;
    const int64_t n_rows = rows->one_list ? 1 : rows->n, *like = rows->like;
    rows->first = j1, rows->last = j0;
    if (rows->next >= j1) return;
    rows->several = 0;
    for (int64_t r = 0; r < n_rows; r++) {
        begin[r] = larger(pair_begin[r], j0);
        end[r] = smaller(pair_end[r], j1);
    }
    for (int64_t r = 0; r < n_rows; r++) {
        range_list *list = rows->lists + r;
        if (like[r] != r) { /* as heads of a group */
            *list = rows->lists[like[r]], begin[r] = begin[like[r]], end[r] = end[like[r]];
            pair_begin[r] = pair_begin[like[r]], pair_end[r] = pair_end[like[r]];
            continue;
        }
        list->shown = list->pair;
        while (pair_end[r] <= j1) {
            list->pair += 2;
            read_pair(list, pair_begin + r, pair_end + r);
            if (pair_begin[r] >= j1) break;
            end[r] = smaller(pair_end[r], j1);
            rows->several = 1;
        }
    }
    for (int64_t r = 0; r < n_rows; r++) {
        const int some = begin[r] < end[r];
        begin[r] = some ? begin[r] : j0; /* as in ranges_begin */
        end[r] = some ? end[r] : j0;
        first = smaller(first, some ? begin[r] : j1);
        last = larger(last, end[r]);
        full_first = larger(full_first, begin[r]);
        full_last = smaller(full_last, end[r]);
        next = smaller(next, larger(pair_begin[r], j1));
    }
    for (int64_t r = n_rows; r < rows->n; r++) begin[r] = begin[0], end[r] = end[0];
    rows->first = first, rows->last = last, rows->full_first = full_first, rows->full_last = full_last;
    rows->next = next;
}

/* What a block of keys is to the rows of a tile: a sum of the bits between EMPTY and FULL. */
typedef enum {
    BLOCK_FULL = 0,   /* every row attends every key, and nothing is added to the scores */
    BLOCK_EDGE = 1,   /* some row's range ends within the block: keys are compared with the ranges */
    BLOCK_MASKED = 2, /* some element of the additive tile is -inf, which hides a key */
    BLOCK_ADDS = 4,   /* there is an additive tile */
    BLOCK_EMPTY = 8,  /* no row attends any key: the block is skipped */
} block_kind;

/* Whether some row does not attend some key. */
INLINE int hides(block_kind kind) { return (kind & (BLOCK_EDGE | BLOCK_MASKED)) != 0; }

/* What keys [j0, j0 + n) are to the rows' ranges. */
INLINE block_kind range_kind(const row_block *rows, int64_t j0, int64_t n)
{
    return rows->full_first > j0 || rows->full_last < j0 + n ? BLOCK_EDGE : BLOCK_FULL;
}

/* A walk over the blocks of the grid of which some of several row blocks attend some key: walk_begin, then walk_next
 * until it is 0. At each step they attend at most keys [begin, end). With lists, their ranges are those of the step. */
typedef struct {
    row_block *rows; /* the first, and the others `stride` bytes apart */
    int64_t n_blocks, stride;
    int lists, step;
    int64_t key_end, first, last; /* of all row blocks */
    int64_t grid, next;           /* first keys of this block of the grid and of the next one */
    int64_t begin, end;
} key_walk;

INLINE row_block *walk_rows(const key_walk *walk, int64_t i)
{
    return (row_block *)((char *)walk->rows + i * walk->stride);
}

/* Ranges begin and, but for the last key of all, end at multiples of `step`. A key too many is masked. */
INLINE void walk_unite(key_walk *walk, int64_t *first, int64_t *last)
{
    for (int64_t i = 0; i < walk->n_blocks; i++) {
        row_block *rows = walk_rows(walk, i);
        rows->first -= rows->first % walk->step;
        rows->last = larger(rows->last, smaller(round_up(rows->last, walk->step), walk->key_end));
        *first = smaller(*first, rows->first);
        *last = larger(*last, rows->last);
    }
}

INLINE key_walk walk_begin(row_block *rows, int64_t n_blocks, int64_t stride, int lists, int step, int64_t key_end)
{
    key_walk walk = {.rows = rows, .n_blocks = n_blocks, .stride = stride, .lists = lists, .step = step};
    walk.first = walk.key_end = key_end;
    walk_unite(&walk, &walk.first, &walk.last);
    walk.next = walk.first / BLOCK_K * BLOCK_K;
    return walk;
}

/* With lists: what the row blocks attend of keys [grid, stop). */
static void walk_enter(key_walk *walk, int64_t stop)
{
    int64_t next = INT64_MAX;
    walk->begin = stop, walk->end = walk->grid;
    for (int64_t i = 0; i < walk->n_blocks; i++) {
        ranges_enter(walk_rows(walk, i), walk->grid, stop);
        next = smaller(next, walk_rows(walk, i)->next);
    }
    walk_unite(walk, &walk->begin, &walk->end);
    walk->next = next < walk->key_end ? next / BLOCK_K * BLOCK_K : walk->key_end;
}

INLINE int walk_next(key_walk *walk)
{
    walk->grid = walk->next;
    if (walk->grid >= walk->last) return 0;
    walk->begin = larger(walk->grid, walk->first);
    walk->end = smaller(walk->grid + BLOCK_K, walk->last);
    walk->next = walk->grid + BLOCK_K;
    if (walk->lists) walk_enter(walk, walk->end);
    return 1;
}

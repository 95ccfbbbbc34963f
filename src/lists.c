/* Lists of selected blocks of keys. Each query's blocks become a set of bits. Neighbouring queries are joined, two, four
 * and so on, where attention of all of them to the union of their blocks costs less than apart:
 *
 *     cost(queries) = min(keys of the union (GATHER + cost of the rows), cost(first half) + cost(other half))
 *
 * So queries that select the same keys share what is loaded and multiplied, and others do not pay for each other. It is
 * a function of the queries' own lists alone, and so are the bits of their results.
 *
 * A set has a second one, of its words that are not 0: what is done for a query costs O(n), and one bit for 4096 blocks.
 *
 * Exports   fa_lists_step, fa_lists_scratch_bytes, fa_lists_run. */
#include "lists.h"

#include <string.h>

#define ROWS_AT_ONCE 32 /* rows that are computed at once, by the widest vectors */
#define GATHER 22       /* the cost of a key and its value from afar, in that of one row's products with them */

#define SET_BYTES ((int64_t)4 << 20) /* of a thread's sets, where one query's do not take more: beside its caches */

typedef struct {
    uint64_t *words, *used; /* used: a bit for each word that is not 0 */
    int64_t size, least;    /* how many blocks; and those of the query with fewest */
    int64_t cost;           /* of its queries, joined where that is best */
    int joined;
} set;

static int64_t n_words(int64_t bits) { return (bits + 63) / 64; }
static int64_t n_blocks(const fa_lists_args *a) { return (a->len_k + a->block_size - 1) / a->block_size; }

static int64_t set_words(const fa_lists_args *a) { return n_words(n_blocks(a)) + n_words(n_words(n_blocks(a))); }

int64_t fa_lists_step(const fa_lists_args *a)
{
    const int64_t most = SET_BYTES / (2 * set_words(a) * (int64_t)sizeof(uint64_t) + 1);
    int64_t step = 1;
    while (2 * step * a->group <= FA_LIST_ROWS && step < a->queries && 2 * step <= most) step *= 2;
    return step;
}

int64_t fa_lists_scratch_bytes(const fa_lists_args *a)
{
    return 64 + 2 * fa_lists_step(a) * set_words(a) * (int64_t)sizeof(uint64_t);
}

static int64_t of_item(const fa_array *x, int64_t item, int64_t query, int64_t i)
{
    int64_t value;
    memcpy(&value, x->data + x->batch[item] + query * x->row + i * x->col, sizeof value);
    return value;
}

/* for each word of x that is not 0 */
#define EACH_WORD(x, words, w)                                                                                         \
    for (int64_t each = 0; each < n_words(words); each++)                                                              \
        for (uint64_t left = (x)->used[each]; left; left &= left - 1)                                                  \
            for (int64_t w = each * 64 + __builtin_ctzll(left), once = 1; once; once = 0)

/* What attention of `rows` rows to the set costs, as measured in float32 with 128 features: up to 8 rows have a kernel of
 * their own, up to 16 in one vector with AVX-512 take nearly the time of a whole tile, and hiding keys of the union
 * from some of the rows takes as long as the products. */
static int64_t cost_of(const fa_lists_args *a, const set *x, int64_t rows)
{
    const int64_t whole = rows <= 8 ? rows : rows <= 16 ? 29 : (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * ROWS_AT_ONCE;
    return x->size * a->block_size * (GATHER + (x->size > x->least ? 2 * whole : whole));
}

static void add_query(const fa_lists_args *a, int64_t item, int64_t query, int64_t place, int64_t words, set *x)
{
    const int64_t begin = a->row_begin.data ? of_item(&a->row_begin, item, query, 0) : 0;
    const int64_t end = a->row_end.data ? of_item(&a->row_end, item, query, 0) : a->len_k;
    const int64_t first = begin / a->block_size, last = (end + a->block_size - 1) / a->block_size;
    a->begin[place] = begin, a->end[place] = end; /* positions take their place */
    const char *from = a->selected.data + a->selected.batch[item] + query * a->selected.row;
    const int64_t n = begin < end ? a->n : 0, col = a->selected.col;
    uint64_t *const bits = x->words, *const used = x->used;
    for (int64_t i = 0; i < n; i++) {
        int64_t block;
        memcpy(&block, from + i * col, sizeof block);
        if (block < first || block >= last) continue;
        const uint64_t w = (uint64_t)block / 64;
        if (!bits[w]) used[w / 64] |= (uint64_t)1 << w % 64;
        bits[w] |= (uint64_t)1 << (uint64_t)block % 64;
    }
    x->size = 0, x->joined = 1;
    EACH_WORD(x, words, w) x->size += __builtin_popcountll(x->words[w]);
    x->least = x->size, x->cost = cost_of(a, x, a->group);
}

/* to = x and y, whose queries have that many rows. */
static void join(const fa_lists_args *a, const set *x, const set *y, int64_t words, int64_t rows, set *to)
{
    to->size = 0, to->least = x->least < y->least ? x->least : y->least;
    for (int64_t i = 0; i < n_words(words); i++) to->used[i] = x->used[i] | y->used[i];
    EACH_WORD(to, words, w)
    {
        to->words[w] = x->words[w] | y->words[w];
        to->size += __builtin_popcountll(to->words[w]);
    }
    const int64_t cost = cost_of(a, to, rows);
    to->joined = cost <= x->cost + y->cost;
    to->cost = to->joined ? cost : x->cost + y->cost;
}

/* Positions of the keys that the query of set x attends in the list of a unit: all, and one range after the other. */
static void write_query(const fa_lists_args *a, const set *x, const set *all, int64_t words, int64_t place,
                        int with_ranges)
{
    const int64_t size = a->block_size;
    int64_t *ranges = with_ranges ? a->ranges + 2 * a->n * place : NULL;
    int64_t at = 0, begin = -1, end = 0, first = 0, last = 0, count = 0; /* at: the place in the list */
    int open = 0;
    EACH_WORD(all, words, w)
    {
        uint64_t left_of = all->words[w];
        const uint64_t mine = x->words[w];
        if (mine == (open ? left_of : 0)) { /* nothing begins or ends here */
            at += __builtin_popcountll(left_of);
            if (open) end = at, last = w * 64 + 63 - __builtin_clzll(mine);
            continue;
        }
        for (; left_of; left_of &= left_of - 1, at++) {
            const int bit = __builtin_ctzll(left_of), has = mine >> bit & 1;
            if (has && begin < 0) begin = at, first = w * 64 + bit;
            if (ranges && has && !open) ranges[2 * count] = at * size;
            if (ranges && open && !has) ranges[2 * count++ + 1] = at * size;
            if (has) end = at + 1, last = w * 64 + bit;
            open = has;
        }
    }
    if (ranges && open) ranges[2 * count++ + 1] = at * size;
    /* Of the first block and the last the query may attend a part. */
    const int64_t before = a->begin[place] - first * size, behind = (last + 1) * size - a->end[place];
    begin = begin < 0 ? 0 : begin * size + (before > 0 ? before : 0);
    end = end ? end * size - (behind > 0 ? behind : 0) : 0;
    if (count) ranges[0] = begin, ranges[2 * count - 1] = end;
    a->begin[place] = begin, a->end[place] = end;
    a->range_first[place] = a->n * place, a->range_last[place] = a->n * place + count;
}

static void write_unit(const fa_lists_args *a, const set *leaves, const set *all, int64_t words, int64_t queries,
                       int64_t place)
{
    int32_t *blocks = a->blocks + place * a->n;
    int64_t n = 0;
    EACH_WORD(all, words, w)
    for (uint64_t bits = all->words[w]; bits; bits &= bits - 1) blocks[n++] = (int32_t)(w * 64 + __builtin_ctzll(bits));
    a->units[place] = queries;
    a->keys[place] = n * a->block_size;
    if (n && blocks[n - 1] == n_blocks(a) - 1) a->keys[place] -= n_blocks(a) * a->block_size - a->len_k;
    for (int64_t i = 0; i < queries; i++) write_query(a, leaves + i, all, words, place + i, queries > 1);
}

void fa_lists_run(const fa_lists_args *a, int64_t task, void *scratch)
{
    const int64_t step = fa_lists_step(a), tasks = (a->queries + step - 1) / step, words = n_words(n_blocks(a));
    const int64_t item = a->first_item + task / tasks, from = task % tasks * step;
    const int64_t count = a->queries - from < step ? a->queries - from : step;
    const int64_t place = task / tasks * a->queries + from;
    set sets[2 * FA_LIST_ROWS];
    int64_t level[10] = {0}, n = 0, levels = 0; /* where each level begins: leaves first */
    uint64_t *memory = (uint64_t *)((char *)scratch + 64);
    if (!*(int64_t *)scratch) memset(memory, 0, (size_t)(fa_lists_scratch_bytes(a) - 64));
    *(int64_t *)scratch = 1; /* and each task leaves them empty */
    for (int64_t i = 0; i < count; i++, n++) {
        sets[n].words = memory + n * set_words(a), sets[n].used = sets[n].words + words;
        if (a->watch && a->watch->gives_up(a->watch->caller)) return;
        add_query(a, item, a->first_query + from + i, place + i, words, sets + n);
    }
    for (int64_t width = 2; width < 2 * count; width *= 2) {
        const int64_t below = level[levels];
        level[++levels] = n;
        for (int64_t i = 0; i * width < count; i++) {
            const set *x = sets + below + 2 * i;
            const int64_t queries = count - i * width < width ? count - i * width : width;
            if (queries <= width / 2) { /* no other half */
                sets[n++] = *x;
                continue;
            }
            sets[n].words = memory + n * set_words(a), sets[n].used = sets[n].words + words;
            if (a->watch && a->watch->gives_up(a->watch->caller)) return;
            join(a, x, x + 1, words, queries * a->group, sets + n++);
        }
    }
    for (int64_t i = 0; i < count;) { /* the widest joined set that begins with query i */
        int64_t l = levels;
        while (i % ((int64_t)1 << l) || !sets[level[l] + (i >> l)].joined) l--;
        const int64_t width = (int64_t)1 << l, queries = count - i < width ? count - i : width;
        if (a->watch && a->watch->gives_up(a->watch->caller)) return;
        write_unit(a, sets + i, sets + level[l] + (i >> l), words, queries, place + i);
        i += queries;
    }
    for (int64_t i = 0; i < n; i++) {
        EACH_WORD(sets + i, words, w) sets[i].words[w] = 0;
        memset(sets[i].used, 0, (size_t)n_words(words) * sizeof(uint64_t));
    }
}

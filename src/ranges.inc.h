/* Which keys the rows of a task attend: a range of keys for each, or a list of ranges. */

/* A row of a KV head: its rows are (query, head in group) pairs, query-major. */
typedef struct {
    int64_t query, head;
} row_id;

/* A row's list: its pairs up to `stop`, of which the row attends what lies in [low, high). `pair` is the first that is
 * not over at the end of the block, `shown` that at its beginning. */
typedef struct {
    const int64_t *pair, *stop, *shown;
    int64_t low, high;
} range_list;

/* A task's rows, and once row_block_ranges has run, their ranges with the union [first, last) and the intersection
 * [full_first, full_last) of those; with lists, once row_block_enter has run, of what they attend of one block. */
typedef struct {
    int64_t b, h_kv, group, row0, rows;
    int64_t *begin, *end; /* one a row */
    int64_t first, last, full_first, full_last;
    range_list *lists;              /* one a row */
    int64_t *pair_begin, *pair_end; /* what a row attends of list.pair; INT64_MAX if there is none any more */
    int one_list;                   /* all rows have the same */
    int several;                    /* some row has several ranges in the block */
    int64_t next;                   /* the next key that some row attends, from the block's end on */
} row_block;

INLINE row_id first_row(const row_block *t)
{
    return (row_id){t->row0 / t->group, t->h_kv * t->group + t->row0 % t->group};
}

INLINE row_id next_row(const row_block *t, row_id id)
{
    const int last_of_group = id.head + 1 == (t->h_kv + 1) * t->group;
    return last_of_group ? (row_id){id.query + 1, t->h_kv * t->group} : (row_id){id.query, id.head + 1};
}

/* for each row r of t, `id` being its row_id */
#define EACH_ROW(t, r, id)                                                                                             \
    row_id id = first_row(t);                                                                                          \
    for (int64_t r = 0; r < (t)->rows; r++, id = next_row(t, id))

/* The keys that a row attends, half-open. */
INLINE void row_range(const fa_attention_args *a, const row_block *t, row_id id, int64_t *begin, int64_t *end)
{
    *begin = a->row_begin.data ? load_int(at(&a->row_begin, t->b, id.head, id.query, 0)) : 0;
    *end = a->row_end.data ? load_int(at(&a->row_end, t->b, id.head, id.query, 0)) : a->len_k;
}

/* Restricts the block to keys [key_begin, key_end), a split or everything. */
static void row_block_ranges(const fa_attention_args *a, row_block *t, int64_t key_begin, int64_t key_end)
{
    t->first = t->full_last = key_end;
    t->last = t->full_first = key_begin;
    EACH_ROW(t, r, id) {
        int64_t begin, end;
        row_range(a, t, id, &begin, &end);
        begin = begin > key_begin ? begin : key_begin;
        end = end < key_end ? end : key_end;
        if (begin >= end) begin = end = key_begin; /* attends nothing: no block is full, the union does not grow */
        else {
            t->first = begin < t->first ? begin : t->first;
            t->last = end > t->last ? end : t->last;
        }
        t->full_first = begin > t->full_first ? begin : t->full_first;
        t->full_last = end < t->full_last ? end : t->full_last;
        t->begin[r] = begin;
        t->end[r] = end;
    }
}

/* The first pair of [pairs, stop) that ends behind key. */
INLINE const int64_t *first_pair(const int64_t *pairs, const int64_t *stop, int64_t key)
{
    for (int64_t n = (stop - pairs) / 2; n > 0;) {
        const int64_t half = n / 2;
        if (pairs[2 * half + 1] <= key) pairs += 2 * (half + 1), n -= half + 1;
        else n = half;
    }
    return pairs;
}

/* What the row attends of list->pair. */
INLINE void read_pair(const range_list *list, int64_t *begin, int64_t *end)
{
    *begin = *end = INT64_MAX;
    if (list->pair == list->stop || list->pair[0] >= list->high) return;
    *begin = larger(list->pair[0], list->low);
    *end = smaller(list->pair[1], list->high);
}

/* Opens the lists of the rows, whose ranges are there; t->first becomes the first key that one attends. */
static void row_block_open_lists(const fa_attention_args *a, row_block *t)
{
    t->one_list = 1;
    t->next = INT64_MAX;
    EACH_ROW(t, r, id) {
        range_list *list = t->lists + r;
        const int64_t *first = a->ranges + 2 * load_int(at(&a->range_first, t->b, id.head, id.query, 0));
        const int64_t *stop = a->ranges + 2 * load_int(at(&a->range_last, t->b, id.head, id.query, 0));
        first = first_pair(first, stop, t->begin[r]);
        *list = (range_list){first, stop, first, t->begin[r], t->end[r]};
        read_pair(list, t->pair_begin + r, t->pair_end + r);
        t->next = smaller(t->next, t->pair_begin[r]);
        t->one_list &= memcmp(list, t->lists, sizeof *list) == 0;
    }
    t->first = smaller(t->next, t->last);
}

/* With lists: what the rows attend of keys [j0, j1), one block. Blocks come in order, and none is left out of which some
 * row attends some key. */
static void row_block_enter(row_block *t, int64_t j0, int64_t j1)
{
    int64_t *restrict begin = t->begin, *restrict end = t->end;
    int64_t *restrict pair_begin = t->pair_begin, *restrict pair_end = t->pair_end;
    int64_t first = j1, last = j0, full_first = j0, full_last = j1, next = INT64_MAX;
    const int64_t rows = t->one_list ? 1 : t->rows;
    t->first = j1, t->last = j0;
    if (t->next >= j1) return;
    t->several = 0;
    for (int64_t r = 0; r < rows; r++) {
        begin[r] = larger(pair_begin[r], j0);
        end[r] = smaller(pair_end[r], j1);
    }
    for (int64_t r = 0; r < rows; r++) {
        range_list *list = t->lists + r;
        list->shown = list->pair;
        while (pair_end[r] <= j1) {
            list->pair += 2;
            read_pair(list, pair_begin + r, pair_end + r);
            if (pair_begin[r] >= j1) break;
            end[r] = smaller(pair_end[r], j1);
            t->several = 1;
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        const int some = begin[r] < end[r];
        begin[r] = some ? begin[r] : j0; /* as in row_block_ranges */
        end[r] = some ? end[r] : j0;
        first = smaller(first, some ? begin[r] : j1);
        last = larger(last, end[r]);
        full_first = larger(full_first, begin[r]);
        full_last = smaller(full_last, end[r]);
        next = smaller(next, larger(pair_begin[r], j1));
    }
    for (int64_t r = rows; r < t->rows; r++) begin[r] = begin[0], end[r] = end[0];
    t->first = first, t->last = last, t->full_first = full_first, t->full_last = full_last;
    t->next = next;
}

/* Whether every row of the block has the same row of x. */
INLINE int rows_share(const row_block *t, const fa_array *x)
{
    return !x->data || (x->row == 0 && (x->head == 0 || t->group == 1));
}

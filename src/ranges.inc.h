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
    int64_t b, h_kv, group, row0, n;
    int64_t *begin, *end; /* one a row */
    int64_t first, last, full_first, full_last;
    range_list *lists;              /* one a row */
    int64_t *pair_begin, *pair_end; /* what a row attends of list.pair; INT64_MAX if there is none any more */
    int one_list;                   /* all rows have the same */
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

/* for each row r of t, `id` being its row_id */
#define EACH_ROW(rows, r, id)                                                                                          \
    row_id id = first_row(rows);                                                                                       \
    for (int64_t r = 0; r < (rows)->n; r++, id = next_row(rows, id))

/* The keys that a row attends, half-open. */
INLINE void row_range(const fa_attention_args *a, const row_block *rows, row_id id, int64_t *begin, int64_t *end)
{
    *begin = a->row_begin.data ? load_int(at(&a->row_begin, rows->b, id.head, id.query, 0)) : 0;
    *end = a->row_end.data ? load_int(at(&a->row_end, rows->b, id.head, id.query, 0)) : a->len_k;
}

/* Restricts the block to keys [key_begin, key_end), a split or everything. */
static void row_block_ranges(const fa_attention_args *a, row_block *rows, int64_t key_begin, int64_t key_end)
{
    rows->first = rows->full_last = key_end;
    rows->last = rows->full_first = key_begin;
    EACH_ROW(rows, r, id) {
        int64_t begin, end;
        row_range(a, rows, id, &begin, &end);
        begin = begin > key_begin ? begin : key_begin;
        end = end < key_end ? end : key_end;
        if (begin >= end) begin = end = key_begin; /* attends nothing: no block is full, the union does not grow */
        else {
            rows->first = begin < rows->first ? begin : rows->first;
            rows->last = end > rows->last ? end : rows->last;
        }
        rows->full_first = begin > rows->full_first ? begin : rows->full_first;
        rows->full_last = end < rows->full_last ? end : rows->full_last;
        rows->begin[r] = begin;
        rows->end[r] = end;
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
static void row_block_open_lists(const fa_attention_args *a, row_block *rows)
{
    rows->one_list = 1;
    rows->next = INT64_MAX;
    EACH_ROW(rows, r, id) {
        range_list *list = rows->lists + r;
        const int64_t *first = a->ranges + 2 * load_int(at(&a->range_first, rows->b, id.head, id.query, 0));
        const int64_t *stop = a->ranges + 2 * load_int(at(&a->range_last, rows->b, id.head, id.query, 0));
        first = first_pair(first, stop, rows->begin[r]);
        *list = (range_list){first, stop, first, rows->begin[r], rows->end[r]};
        read_pair(list, rows->pair_begin + r, rows->pair_end + r);
        rows->next = smaller(rows->next, rows->pair_begin[r]);
        rows->one_list &= memcmp(list, rows->lists, sizeof *list) == 0;
    }
    rows->first = smaller(rows->next, rows->last);
}

/* With lists: what the rows attend of keys [j0, j1), one block. Blocks come in order, and none is left out of which some
 * row attends some key. */
static void row_block_enter(row_block *rows, int64_t j0, int64_t j1)
{
    int64_t *restrict begin = rows->begin, *restrict end = rows->end;
    int64_t *restrict pair_begin = rows->pair_begin, *restrict pair_end = rows->pair_end;
    int64_t first = j1, last = j0, full_first = j0, full_last = j1, next = INT64_MAX;
    const int64_t n_rows = rows->one_list ? 1 : rows->n;
    rows->first = j1, rows->last = j0;
    if (rows->next >= j1) return;
    rows->several = 0;
    for (int64_t r = 0; r < n_rows; r++) {
        begin[r] = larger(pair_begin[r], j0);
        end[r] = smaller(pair_end[r], j1);
    }
    for (int64_t r = 0; r < n_rows; r++) {
        range_list *list = rows->lists + r;
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
        begin[r] = some ? begin[r] : j0; /* as in row_block_ranges */
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

/* Whether every row of the block has the same row of x. */
INLINE int rows_share(const row_block *rows, const fa_array *x)
{
    return !x->data || (x->row == 0 && (x->head == 0 || rows->group == 1));
}

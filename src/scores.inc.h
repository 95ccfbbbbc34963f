/* Which keys a row attends, and what is done to their scores: EVERY attention variant lives here.
 *
 * Structural masks are a half-open range of keys per row, or a list of such. A task walks the key blocks of the grid,
 * multiples of BLOCK_K, that the union of its rows' ranges touches; a block is empty (not touched), full (nothing extra
 * happens) or an edge. With lists it steps from block to block, row_block_enter: what lies between costs nothing, and
 * within a block a row has one range again, unless several of its list lie in it. A dense mask, a bias and what lies
 * between several ranges are one additive tile, -inf where it hides, and where that is all there is, the tile is not
 * touched either. Order, in one function, v_modify:
 *
 *     scale (a factor of q, or of the product) -> softcap -> bias -> ALiBi -> masks
 *
 * The two kernels differ only in what stands on the lanes: queries (tile) or keys (dot). */

/* Where item (batch b, head h, row i, column j) of an array is. */
INLINE char *at(const fa_array *x, int64_t b, int64_t h, int64_t i, int64_t j)
{
    return x->data + x->batch[b] + h * x->head + i * x->row + j * x->col;
}

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

INLINE int64_t load_int(const char *p)
{
    int64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

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

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

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

/* What a dense mask or a bias makes of a block: no row attends any key, some rows some keys, or all rows all keys. */
typedef enum { BLOCK_EMPTY, BLOCK_EDGE, BLOCK_FULL } block_kind;

/* Whether every row of the block has the same row of x. */
INLINE int rows_share(const row_block *t, const fa_array *x)
{
    return !x->data || (x->row == 0 && (x->head == 0 || t->group == 1));
}

/* Keys [*j0, *j0 + *n) under the dense mask, if there is one. Where all rows share it, as a padding mask is shared, the
 * keys are first trimmed to those attended, at multiples of `step` from the even *j0: often that leaves a full block. */
static block_kind mask_kind(const fa_attention_args *a, const row_block *t, int step, int64_t *j0, int64_t *n)
{
    const int64_t col = a->mask.col;
    int some = 0, all = 1;
    if (!a->mask.data) return BLOCK_FULL;
    if (rows_share(t, &a->mask)) {
        const char *m = at(&a->mask, t->b, first_row(t).head, first_row(t).query, *j0);
        int64_t first = 0, last = *n;
        while (first < last && !m[first * col]) first++;
        if (first == last) return BLOCK_EMPTY;
        while (!m[(last - 1) * col]) last--;
        first -= first % step;
        last += last % step && last < *n;
        *j0 += first;
        *n = last - first;
    }
    EACH_ROW(t, r, id) {
        const uint8_t *m = (const uint8_t *)at(&a->mask, t->b, id.head, id.query, *j0);
        uint8_t any = 0, none = 0;
        if (col == 1)
            for (int64_t j = 0; j < *n; j++) any |= m[j], none |= m[j] == 0;
        else
            for (int64_t j = 0; j < *n; j++) any |= m[j * col], none |= m[j * col] == 0;
        some |= any != 0;
        all &= !none;
        if ((some && !all) || rows_share(t, &a->mask)) break;
    }
    return !some ? BLOCK_EMPTY : all ? BLOCK_FULL : BLOCK_EDGE;
}

/* add (n) = the row's bias, -inf where bias or mask hides, and between the row's ranges if it has a list. */
static block_kind additive_row(const fa_attention_args *a, const row_block *t, row_id id, const range_list *list,
                               int64_t j0, int64_t n, lane *add)
{
    vi_t any = {0}, none = {0};
    if (a->bias.data) {
        const char *bias = at(&a->bias, t->b, id.head, id.query, j0);
        const int native = a->bias.dtype == (LANE_BITS == 64 ? FA_F64 : FA_F32) || dtype_size(a->bias.dtype) == 2;
        if (native && a->bias.col == dtype_size(a->bias.dtype)) load_row(a->bias.dtype, bias, n, 1, add);
        else
            for (int64_t j = 0; j < n; j++) add[j] = load_element(a->bias.dtype, bias + j * a->bias.col);
    } else memset(add, 0, n * sizeof(lane));
    if (a->mask.data) {
        const uint8_t *m = (const uint8_t *)at(&a->mask, t->b, id.head, id.query, j0);
        for (int64_t j = 0; j < n; j++) add[j] = m[j * a->mask.col] ? add[j] : -(lane)INFINITY;
    }
    for (const int64_t *p = list ? list->shown : NULL; p && p + 2 < list->stop && p[1] < j0 + n; p += 2)
        for (int64_t j = p[1] > j0 ? p[1] - j0 : 0; j < n && j < p[2] - j0; j++) add[j] = -(lane)INFINITY;
    for (int64_t j = n; j < round_up(n, LANES); j++) add[j] = add[0]; /* add holds BLOCK_K, a multiple of LANES */
    for (int64_t j = 0; j < n; j += LANES) {
        const vi_t hides = v_load(add + j) == v_splat(-INFINITY);
        none |= hides;
        any |= ~hides;
    }
    return !v_any(any) ? BLOCK_EMPTY : v_any(none) ? BLOCK_EDGE : BLOCK_FULL;
}

/* That for all rows of the block, BLOCK_K lanes apart. */
static block_kind additive_rows(const fa_attention_args *a, const row_block *t, int64_t j0, int64_t n, lane *add)
{
    block_kind kind = BLOCK_EMPTY;
    EACH_ROW(t, r, id) {
        const range_list *list = t->several ? t->lists + r : NULL;
        const block_kind row = additive_row(a, t, id, list, j0, n, add + r * BLOCK_K);
        kind = r == 0 || row == kind ? row : BLOCK_EDGE;
    }
    return kind;
}

/* Which modifiers a call has, and their constants. */
typedef struct {
    lane q_factor, s_factor; /* of q and of the product: scale, divided by a softcap */
    lane softcap;            /* or 0 */
    int additive;            /* what the additive tile is made of, a matter of the block */
    int alibi;
} modifiers;

enum { ADD_BIAS = 1, ADD_MASK = 2, ADD_LISTS = 4 };

/* Of a block of which mask_kind says `kind`. */
INLINE int additive_parts(const fa_attention_args *a, const row_block *t, block_kind kind)
{
    return (a->bias.data ? ADD_BIAS : 0) | (kind == BLOCK_EDGE ? ADD_MASK : 0) | (t->several ? ADD_LISTS : 0);
}

/* A factor above 1 is one of the product, for q times it may overflow where the product does not. `dot`: the kernel
 * applies q_factor to the product in any case. */
static modifiers modifiers_of(const fa_attention_args *a, int dot)
{
    const double exact = a->softcap != 0 ? a->scale / a->softcap : a->scale;
    const lane factor = (lane)fmax(-LANE_MAX, fmin(LANE_MAX, exact)); /* no Inf: that times 0 is NaN */
    const int fold = dot || (-1 <= factor && factor <= 1);
    return (modifiers){
        .q_factor = fold ? factor : 1,
        .s_factor = fold ? 1 : factor,
        .softcap = (lane)a->softcap,
        .alibi = a->alibi_slopes.data != NULL,
    };
}

/* Whether v_modify does anything. */
INLINE int modifies(const modifiers *m, int edge)
{
    return edge || m->additive || m->alibi || m->softcap != 0 || m->s_factor != 1;
}

/* One vector of scores: `add` from the additive tile, in which `hides` says that there may be -inf, distance = |position of
 * query - key|, `inside` the lanes within their rows' ranges, at an `edge`. A finite bias never becomes a mask: a sum that
 * overflows is clamped, if it was no -inf before. */
INLINE v_t v_modify(const modifiers *m, int edge, int hides, v_t s, v_t add, v_t slope, v_t distance, vi_t inside)
{
    const v_t hidden = v_splat(-INFINITY);
    if (m->s_factor != 1) s *= v_splat(m->s_factor);
    if (m->softcap != 0) s = v_softcap(s, v_splat(m->softcap));
    const v_t least = m->additive ? v_min(v_splat(-LANE_MAX), s) : s;
    if (m->additive) s += add;
    if (m->alibi) s = v_fma(-slope, distance, s);
    if (m->additive) s = v_max(least, s);
    if (m->additive && hides) s = v_select(add == hidden, hidden, s);
    if (edge) s = v_select(inside, s, hidden);
    return s;
}

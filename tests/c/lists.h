/* Lists of selected blocks: in its unit's list every query must find the keys that it has selected, and no others. One
 * function makes them for all instruction sets. */
#ifndef TESTS_LISTS_H
#define TESTS_LISTS_H

#include "../../src/lists.h"
#include "family.h"

static struct {
    fa_lists_args inputs;
    fa_array selected; /* (items, len_q, n) as heads and rows */
    int64_t items;
} lists_case;

/* Begins or ends of ranges, (items, 1, len_q). */
static fa_array new_bounds(int64_t len_q, int64_t most)
{
    fa_array x = new_array(8, lists_case.items, 1, len_q, 1, 0);
    FOR(b, lists_case.items) FOR(i, len_q) set_int(&x, b, 0, i, below(most + 1));
    return x;
}

static void make_lists(int number)
{
    seed = (uint64_t)number << 20 | 5;
    fa_lists_args *a = &lists_case.inputs;
    const int64_t len_q = 1 + below(number % 5 ? 20 : 300), alike = below(3);
    *a = (fa_lists_args){.n = below(30), .len_k = below(number % 7 ? 300 : 100000)};
    a->group = 1 + below(number % 2 ? 200 : 3), a->block_size = 1 + below(number % 3 ? 8 : 400);
    lists_case.items = 1 + below(3);
    const int64_t blocks = (a->len_k + a->block_size - 1) / a->block_size;
    fa_array *x = &lists_case.selected;
    *x = new_array(8, lists_case.items, len_q, a->n, 1, 0);
    FOR(b, lists_case.items) FOR(i, len_q) FOR(j, a->n)
    {
        const int common = i > 0 && alike && below(10) < (alike == 1 ? 9 : 10);
        set_int(x, b, i, j, common ? get_int(x, b, 0, j) : below(blocks + 1) - 1);
    }
    a->selected = *x, a->selected.row = x->head, a->selected.col = x->row;
    if (below(2)) a->row_begin = new_bounds(len_q, below(2) ? a->len_k : 0);
    if (below(2)) a->row_end = new_bounds(len_q, a->len_k);
    a->first_query = below(2) ? 0 : below(len_q), a->queries = len_q - a->first_query;
    a->first_item = below(lists_case.items);
}

/* How often the query at `place` finds key j in a unit's list; -1 if its ranges do not fit. */
static int found_in_list(const fa_lists_args *a, int64_t unit, int64_t place, int64_t j)
{
    const int several = a->units[unit] > 1;
    int found = 0;
    FOR(i, several ? a->range_last[place] - a->range_first[place] : 1)
    {
        const int64_t *pair = a->ranges + 2 * (a->range_first[place] + i);
        const int64_t begin = several ? pair[0] : a->begin[place], end = several ? pair[1] : a->end[place];
        if (end > a->keys[unit] || begin < a->begin[place] || end > a->end[place]) return -1;
        if (several && (begin >= end || (i > 0 && begin <= pair[-1]))) return -1;
        for (int64_t p = begin; p < end; p++)
            found += (int64_t)a->blocks[unit * a->n + p / a->block_size] * a->block_size + p % a->block_size == j;
    }
    return found;
}

static int selects(const fa_lists_args *a, int64_t b, int64_t query, int64_t j)
{
    int found = 0;
    FOR(i, a->n) found |= get_int(&lists_case.selected, b, query, i) == j / a->block_size;
    return found && !(a->row_begin.data && j < get_int(&a->row_begin, b, 0, query)) &&
           !(a->row_end.data && j >= get_int(&a->row_end, b, 0, query));
}

static const char *check_lists(const fa_kernels *kernels)
{
    (void)kernels;
    fa_lists_args call = lists_case.inputs, *a = &call;
    const int64_t places = (lists_case.items - a->first_item) * a->queries, step = fa_lists_step(a);
    int64_t **of_places[] = {&a->units, &a->keys, &a->begin, &a->end, &a->range_first, &a->range_last};
    FOR(i, 6) * of_places[i] = (int64_t *)allocate((size_t)places * 8);
    a->ranges = (int64_t *)allocate((size_t)(2 * a->n * places) * 8);
    a->blocks = (int32_t *)allocate((size_t)(a->n * places) * 4);
    char *scratch = allocate((size_t)fa_lists_scratch_bytes(a));
    memset(scratch, 0, 8);
    const int64_t tasks = (lists_case.items - a->first_item) * ((a->queries + step - 1) / step);
    FOR(task, tasks) fa_lists_run(a, tasks - 1 - task, scratch);
    for (int64_t unit = 0; unit < places; unit += a->units[unit]) {
        if (a->units[unit] < 1 || unit % a->queries + a->units[unit] > a->queries) return "a unit does not fit";
        FOR(i, a->units[unit])
        {
            const int64_t place = unit + i, b = a->first_item + place / a->queries;
            const int64_t query = a->first_query + place % a->queries;
            for (int64_t j = 0; j < a->len_k; j += 1 + a->len_k / 500) /* of very many keys some */
                if (found_in_list(a, unit, place, j) != selects(a, b, query, j)) return "a query finds other keys";
        }
    }
    return NULL;
}

FAMILY(lists, 1500, make_lists, FA_F32, NULL);

#endif

/* Blocks of keys that queries have selected, as lists that attention reads: lists.c. */
#ifndef FASTATTN_LISTS_H
#define FASTATTN_LISTS_H

#include "interface/arrays.h"
#include "interface/arrays.h"

/* For queries first_query .. first_query + queries - 1 of items first_item .. of the batch. Results are by place: of the
 * items counted from first_item, one after the other, their queries. A unit is some neighbouring queries that share a
 * list; its results stand at the place of its first query. Positions are those of keys in the list. */
#define FA_LIST_ROWS 256 /* of the queries of a unit; more are of one query */
typedef struct {
    fa_array selected;           /* (batch, 1, len_q, n), int64: blocks of keys, in any order; negative: none */
    fa_array row_begin, row_end; /* (batch, 1, len_q), int64, optional: a query attends keys begin <= j < end alone */
    int64_t len_k, n, block_size;
    int64_t group; /* rows of attention that a query has */
    int64_t first_item, first_query, queries;
    int64_t *units, *keys; /* of a unit its queries, and the keys of its list; not written elsewhere */
    int64_t *begin, *end;  /* of each query, positions: from the first key that it attends to the last */
    int64_t *range_first, *range_last;
    int64_t *ranges; /* n pairs (begin, end) a query, of positions; of a unit of one query not written */
    int32_t *blocks; /* n a query; those of a unit's list begin at its first query, ascending */
    const fa_watch *watch;
} fa_lists_args;

int64_t fa_lists_step(const fa_lists_args *); /* queries of a task, as far as there are: a power of two */
int64_t fa_lists_scratch_bytes(const fa_lists_args *);
void fa_lists_run(const fa_lists_args *, int64_t task, void *scratch); /* which begins with 8 bytes of 0 at first */

#endif

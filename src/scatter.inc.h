/* Sums of rows by where they go: the gradient of a table from which rows were taken. A row of the table is the work of
 * one task, which adds in order; a thousand rows that go to one place are summed in runs, so that rounding stays small.
 *
 * Exports   scatter_scratch_bytes, scatter_run. */
#pragma once
#include "interface/rows.h"
#include "tile.inc.h"

static int64_t scatter_scratch_bytes(int64_t n) { return n * (int64_t)sizeof(lane); }

/* Places [begin, end). */
static void scatter_run(const fa_scatter_args *a, int64_t begin, int64_t end, void *scratch)
{
    lane *sum = scratch;
    const int64_t asks = larger(1, (1 << 18) / larger(1, a->n));
    int64_t done = 0; /* rows, since it last asked */
    for (int64_t place = begin; place < end; place++) {
        char *out = a->out + a->places[place] * a->out_row;
        for (int64_t i = a->firsts[place]; i < a->firsts[place + 1]; i += MAX_DEPTH) {
            const int64_t stop = smaller(a->firsts[place + 1], i + MAX_DEPTH);
            if ((done += stop - i) > asks) {
                if (given_up(a->watch)) return;
                done = 0;
            }
            load_row(a->dtype, a->x + a->order[i] * a->x_row, a->n, 1, sum);
            for (int64_t j = i + 1; j < stop; j++) add_row(a->dtype, a->x + a->order[j] * a->x_row, a->n, sum);
            add_row(LANE_DTYPE, (const char *)sum, a->n, (lane *)out);
        }
    }
}

/* Rotary positions. */
#ifndef ROPE_H
#define ROPE_H

#include "results.h"

static const int64_t rope_pairs[] = {0, 1, 3, 4, 8, 15, 16, 17, 40};
enum { ROPE_CASES = 4 * 2 * COUNT(rope_pairs) * COUNT(floats) };

static struct {
    fa_rope_args args[2]; /* the second one with twins */
    int in_place, int8;
    fa_dtype to; /* of out, but for int8 */
} rope_now;

/* The second time row by row, the last one first. */
static int run_rope(const fa_kernels *kernels, int again, int wide)
{
    fa_rope_args call = rope_now.args[wide];
    const size_t size = (size_t)(call.head_dim * bytes_of(lane_of(call.x.dtype)));
    const int64_t rows = call.batch * call.length;
    char *scratch = allocate(size);
    call.out = results[0].got[again], call.scale = results[1].got[again];
    if (rope_now.in_place) {
        copy(&call.x, &call.out, call.batch, call.heads, call.length, call.head_dim);
        call.x = call.out;
    }
    if (!again) kernels->rows->rope_run(&call, 0, rows, scratch);
    for (int64_t i = rows; again && i-- > 0;) kernels->rows->rope_run(&call, i, i + 1, memset(scratch, 0x55, size));
    return 1;
}

static void make_rope(int number)
{
    fa_rope_args *a = rope_now.args, *w = a + 1;
    int i = number;
    seed = (uint64_t)number << 32 | 3;
    const fa_dtype dtype = floats[i % COUNT(floats)], lane = lane_of(dtype);
    i /= COUNT(floats);
    rope_now.in_place = i % 4 == 1, rope_now.int8 = i % 4 == 2;
    rope_now.to = i % 4 == 3 && dtype == FA_F32 ? below(2) ? FA_F16 : FA_BF16 : dtype, i /= 4;
    *a = (fa_rope_args){.batch = 2, .heads = 1 + below(3), .length = below(4), .interleaved = i % 2};
    a->pairs = rope_pairs[i / 2];
    a->head_dim = larger(1, 2 * a->pairs + (below(2) ? below(20) : 0));
    a->x = new_floats(dtype, a->batch, a->heads, a->length, a->head_dim, (int)below(8));
    const int share = (below(2) ? ONE_BATCH : 0) | (number % 3 == 0 ? ODD : 0);
    a->cos = new_floats(lane, a->batch, 1, a->length, a->pairs, share), a->sin = a->cos;
    a->sin.data = new_floats(lane, a->batch, 1, a->length, a->pairs, share).data;
    FOR(b, a->batch) FOR(t, a->length)
    {
        FOR(h, a->heads) FOR(d, a->head_dim) set(&a->x, b, h, t, d, uniform(-2, 2));
        FOR(j, a->pairs)
        {
            const double angle = uniform(-3, 3);
            set(&a->cos, b, 0, t, j, cos(angle));
            set(&a->sin, b, 0, t, j, sin(angle));
        }
    }
    *w = *a, n_results = 0;
    twins((fa_array *const[]){&w->x, &w->cos, &w->sin}, 3);
    result *out = add_result("out", 1, rope_now.int8 ? FA_I8 : rope_now.to, a->batch, a->heads, a->length, a->head_dim,
                             GAP | ROWS_FIRST);
    out->off = 1; /* of int8: where rounding decides */
    add_result("scale", rope_now.int8, lane, a->batch, a->heads, a->length, 1, ODD | GAP);
    if (rope_now.int8) expect_same(run_rope, lane);
    else expect_results(run_rope);
}

CHECK(rope, run_rope, 8)

FAMILY(rope, ROPE_CASES, make_rope, rope_now.args->x.dtype, NULL);

#endif

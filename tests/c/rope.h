/* Rotary positions, against plain C in double precision. */
#ifndef ROPE_H
#define ROPE_H

#include "rows.h"

static const int64_t rope_pairs[] = {0, 1, 3, 4, 8, 15, 16, 17, 40};
enum { ROPE_CASES = 4 * 2 * COUNT(rope_pairs) * COUNT(floats) };

static struct {
    fa_rope_args args;
    int in_place, int8;
    fa_dtype to; /* of out, but for int8 */
} rope_now;

static void make_rope(int number)
{
    fa_rope_args *a = &rope_now.args;
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
}

static near expect_rope(int64_t b, int64_t h, int64_t i, int64_t d)
{
    const fa_rope_args *a = &rope_now.args;
    const double x = get(&a->x, b, h, i, d);
    const fa_dtype to = rope_now.int8 ? lane_of(a->x.dtype) : rope_now.to;
    if (d >= 2 * a->pairs) return rope_now.to == a->x.dtype ? (near){x, 0} : stored((near){x, 0}, to);
    const int second = a->interleaved ? d % 2 : d >= a->pairs;
    const int64_t pair = a->interleaved ? d / 2 : d % a->pairs, step = a->interleaved ? 1 : a->pairs;
    const double other = get(&a->x, b, h, i, second ? d - step : d + step), turned = second ? other : -other;
    const double c = get(&a->cos, b, 0, i, pair), s = get(&a->sin, b, 0, i, pair);
    const double error = 2 * eps_of(lane_of(a->x.dtype)) * (fabs(x * c) + fabs(turned * s));
    return stored((near){x * c + turned * s, error}, to);
}

/* Checks rows in int8 and their scales, which must be the same bits in both calls. An element errs by half
 * of its row's scale, the row's largest by nothing. */
static const char *wrong_rounding(const fa_rope_args calls[2])
{
    const fa_rope_args *a = calls;
    const double eps = eps_of(lane_of(a->x.dtype));
    FOR(b, a->batch) FOR(h, a->heads) FOR(i, a->length)
    {
        const double scale = get(&a->scale, b, h, i, 0);
        double largest = 0, most = 0;
        if (get(&calls[1].scale, b, h, i, 0) != scale) return "other scales in other company";
        FOR(d, a->head_dim)
        {
            const double code = get(&a->out, b, h, i, d);
            const near x = expect_rope(b, h, i, d);
            if (get(&calls[1].out, b, h, i, d) != code) return "other integers in other company";
            if (!(fabs(code * scale - x.value) <= scale * (0.5 + 256 * eps) + 2 * x.error)) return "too far from x";
            largest = fmax(largest, fabs(x.value) + x.error), most = fmax(most, fabs(code));
        }
        if (most != (largest == 0 ? 0 : 127) || scale * 127 > largest * (1 + 4 * eps)) return "not the largest / 127";
    }
    return NULL;
}

/* Computes twice, the second time row by row, the last one first. */
static const char *check_rope(const fa_kernels *kernels)
{
    const fa_rope_args *a = &rope_now.args;
    const size_t size = (size_t)(a->head_dim * bytes_of(lane_of(a->x.dtype)));
    fa_rope_args calls[2] = {*a, *a};
    char *scratch = allocate(size);
    const char *wrong = NULL;
    FOR(again, 2)
    {
        fa_rope_args *call = calls + again;
        call->out = new_floats(rope_now.int8 ? FA_I8 : rope_now.to, a->batch, a->heads, a->length, a->head_dim,
                               again ? GAP | ROWS_FIRST : 0);
        if (rope_now.int8)
            call->scale = new_floats(lane_of(a->x.dtype), a->batch, a->heads, a->length, 1, again ? ODD | GAP : 0);
        if (rope_now.in_place) {
            FOR(b, a->batch)
            FOR(h, a->heads) FOR(i, a->length) FOR(d, a->head_dim) set(&call->out, b, h, i, d, get(&a->x, b, h, i, d));
            call->x = call->out;
        }
        const int64_t rows = a->batch * a->length;
        if (!again) kernels->rope_run(call, 0, rows, scratch);
        else
            for (int64_t i = rows - 1; i >= 0; i--) kernels->rope_run(call, i, i + 1, memset(scratch, 0x55, size));
    }
    if (rope_now.int8) wrong = wrong_rounding(calls);
    FOR(b, a->batch)
    FOR(h, a->heads)
    FOR(i, a->length)
    FOR(d, a->head_dim)
    if (!wrong && !rope_now.int8)
        wrong = differs("out", &calls[0].out, &calls[1].out, b, h, i, d, expect_rope(b, h, i, d));
    if (wrong || only_rows(&calls[1].out, a->batch, a->heads, a->length, a->head_dim)) return wrong;
    return BETWEEN_ROWS;
}

FAMILY(rope, ROPE_CASES, make_rope, rope_now.args.x.dtype, NULL, drop_nothing);

#endif

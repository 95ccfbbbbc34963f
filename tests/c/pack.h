/* Packing of weights, bit by bit against the definitions of fastattn/_args/packed.py. Sources end where a page ends, or
 * lie in any strides. */
#ifndef PACK_H
#define PACK_H

#include "linear.h"
#include "rows.h"

static const int64_t pack_k[] = {0, 1, 7, 31, 32, 33, 65, 300, 1025, 4200, 9000}, pack_n[] = {1, 15, 17, 32, 33, 70};
enum { PACK_CASES = COUNT(linear_weights) * COUNT(pack_k) * COUNT(pack_n) };

typedef struct {
    fa_pack_rows rows[4];
    fa_pack_args args;
    int64_t n; /* output features of a map */
} pack_case;

static pack_case pack_now;

static int64_t pack_width(void) { return pack_now.args.weight == FA_F64 ? 16 : 32; }

static int64_t pack_each(void) { return features_of_step(pack_now.args.weight); }

/* Steps of a panel. */
static int64_t pack_steps(void)
{
    const int64_t whole = has_blocks(pack_now.args.weight) ? 32 : pack_each();
    return (pack_now.args.k + whole - 1) / whole * whole / pack_each();
}

static int64_t pack_panels(void) { return pack_now.args.maps * ((pack_now.n + pack_width() - 1) / pack_width()); }

/* Bytes of scales. */
static int64_t pack_scale_bytes(void)
{
    const int64_t columns = pack_panels() * pack_width();
    return pack_now.args.weight == FA_I8      ? columns * 4
           : has_blocks(pack_now.args.weight) ? columns * (pack_steps() * pack_each() / 32) * 2
                                              : 0;
}

/* One or two blocks of rows for each map, of any type and strides; some rows may belong to none. Numbers are of all
 * sizes; some rows are 0, some have two numbers of the largest magnitude and either sign. */
static void make_pack(int number)
{
    fa_pack_args *a = &pack_now.args;
    int i = number;
    seed = (uint64_t)number << 32 | 7;
    memset(&pack_now, 0, sizeof pack_now);
    a->weight = linear_weights[i % COUNT(linear_weights)], i /= COUNT(linear_weights);
    a->k = pack_k[i % COUNT(pack_k)], i /= COUNT(pack_k);
    pack_now.n = pack_n[i], a->maps = 1 + (int)below(2);
    a->blocks = pack_now.rows;
    for (int map = 0; map < a->maps; map++)
        for (int64_t begin = 0, end; begin < pack_now.n; begin = end + below(2) * below(20)) {
            if (a->n_blocks == 2 * (map + 1)) break;
            fa_pack_rows *rows = &pack_now.rows[a->n_blocks++];
            end = below(2) ? pack_now.n : begin + 1 + below(pack_now.n - begin);
            rows->dtype = (fa_dtype[]){FA_F32, FA_F16, FA_BF16, FA_F64}[below(4)];
            rows->begin = begin, rows->end = end, rows->map = map;
            const int turned = below(4) == 0;
            const int64_t n = end - begin;
            const fa_array x = new_floats(rows->dtype, 1, 1, turned ? a->k : n, turned ? n : a->k,
                                          (int)below(16) & ~ROWS_FIRST);
            rows->data = x.data, rows->row = turned ? x.col : x.row, rows->col = turned ? x.row : x.col;
            FOR(r, n)
            {
                const int zero = below(8) == 0;
                const double scale = ldexp(1, (int)below(9) - 4), tie = scale * uniform(0.5, 1);
                FOR(d, a->k)
                {
                    const double value = below(40) == 0 ? (below(2) ? tie : -tie) : uniform(-scale, scale) / 2;
                    set(&x, 0, 0, turned ? d : r, turned ? r : d, zero ? 0 : value);
                }
            }
        }
    a->beyond = a->weight == FA_F64 ? INFINITY : 0x1p127;
    a->unit = 1, a->block = 32;
    if (a->weight == FA_I4) {
        float *codes = (float *)allocate(16 * sizeof *codes);
        FOR(code, 16) codes[code] = (float)(below(255) - 127);
        a->codes = codes, a->unit = 1.0 / 127;
        float *middles = (float *)allocate(16 * sizeof *middles);
        FOR(code, 16) middles[code] = code < 15 ? (float)(code - 7.5 + uniform(0, 0.4)) : INFINITY;
        a->extreme = below(2) ? -8 : 0;
        FOR(code, 15) middles[code] /= a->extreme == 0 ? 8 : 1;
        a->middles = middles;
    }
}

/* The weight as a float, or a double: 0 where no block has it. */
static double pack_source(int64_t map, int64_t feature, int64_t d)
{
    FOR(i, pack_now.args.n_blocks)
    {
        const fa_pack_rows *rows = &pack_now.rows[i];
        fa_array x = {.data = (char *)rows->data, .batch = (int64_t[]){0}, .row = rows->row, .col = rows->col};
        x.dtype = rows->dtype;
        if (rows->map != map || feature < rows->begin || feature >= rows->end || d >= pack_now.args.k) continue;
        const double value = get(&x, 0, 0, feature - rows->begin, d);
        return pack_now.args.weight == FA_F64 ? value : (double)(float)value;
    }
    return 0;
}

/* The scale of features [first, first + n) of a row, as it is stored; *first_largest has the sign of the largest. */
static double pack_scale(int64_t map, int64_t feature, int64_t first, int64_t n)
{
    float largest = 0;
    FOR(d, n)
    {
        const float x = (float)pack_source(map, feature, first + d);
        if (fabsf(x) > fabsf(largest)) largest = x;
    }
    if (pack_now.args.weight == FA_I8) return fabsf(largest) / 127;
    const float scale = pack_now.args.weight == FA_Q8 ? fabsf(largest) / 127
                        : pack_now.args.extreme == 0  ? fabsf(largest)
                                                      : largest / (float)pack_now.args.extreme;
    return from_half(half_of(FA_F16), to_half(half_of(FA_F16), scale));
}

/* The value that a panel must hold of input feature d; the code where it has 4 bits. */
static double pack_wanted(int64_t map, int64_t feature, int64_t d, double scale)
{
    const double x = pack_source(map, feature, d);
    const half_format bf16 = half_of(FA_BF16);
    if (pack_now.args.weight == FA_BF16) return from_half(bf16, to_half(bf16, x));
    if (pack_now.args.weight == FA_Q8)
        return fmaxf(-127, fminf(127, rintf((float)x / (scale == 0 ? 1 : (float)scale))));
    if (pack_now.args.weight == FA_I8) return rintf((float)x / (scale == 0 ? 1 : (float)scale));
    if (pack_now.args.weight != FA_I4) return x;
    int code = 0;
    for (; code < 15 && ((const float *)pack_now.args.middles)[code] < (scale == 0 ? 0 : (float)x / (float)scale);)
        code++;
    return code;
}

/* Says what is wrong with one output feature of the panels. */
static const char *check_packed(const fa_pack_args *a, int64_t map, int64_t feature)
{
    static char wrong[120];
    const int64_t width = pack_width(), each = pack_each(), steps = pack_steps(),
                  per_scale = has_blocks(a->weight) ? 32 : a->k;
    const int64_t panel = feature / width * a->maps + map, column = feature % width, whole = steps * each;
    double scale = 0, stored_scale = 0, sum = 0;
    float block_sum = 0; /* of weights in blocks */
    if (a->weight == FA_I8) {
        scale = pack_scale(map, feature, 0, a->k), stored_scale = (double)((float *)a->scales)[panel * width + column];
        if (scale != stored_scale) return "a scale of int8 is wrong";
    }
    FOR(d, whole)
    {
        const char *step = a->panels + ((panel * steps + d / each) * width + column) * (128 / width);
        fa_array one = {.data = (char *)step + d % each * (128 / width / each), .batch = (int64_t[]){0}};
        one.dtype = a->weight;
        if (has_blocks(a->weight) && d % per_scale == 0) {
            scale = pack_scale(map, feature, d, 32);
            const int64_t at = (panel * (whole / 32) + d / 32) * width + column;
            stored_scale = from_half(half_of(FA_F16), ((uint16_t *)a->scales)[at]);
            if (scale != stored_scale) return "a scale of a block is wrong";
        }
        const double want = pack_wanted(map, feature, d, scale);
        const uint8_t byte = (uint8_t)(a->weight == FA_I4 ? step[d % 4] : *one.data);
        const int bytes = a->weight == FA_I8 || a->weight == FA_Q8;
        const double got = a->weight == FA_I4 ? (d % 8 < 4 ? byte & 15 : byte >> 4)
                           : bytes            ? (double)(int8_t)byte
                                              : get(&one, 0, 0, 0, 0);
        if (a->weight == FA_I8) sum += got * scale;
        if (has_blocks(a->weight)) {
            if (d % 32 == 0) block_sum = 0;
            if (d < a->k) block_sum += (float)(bytes ? got : ((const float *)a->codes)[(int)got]);
            if (d % 32 == 31) sum += (double)block_sum * scale;
        }
        if (got == want) continue;
        snprintf(wrong, sizeof wrong, "feature (%d, %d) of map %d is %.9g, not %.9g", (int)feature, (int)d, (int)map,
                 got, want);
        return wrong;
    }
    if ((a->weight == FA_I8 || has_blocks(a->weight)) &&
        ((float *)a->sums)[panel * width + column] != (float)(sum * a->unit))
        return "the sum of an output feature's weights is wrong";
    return NULL;
}

/* Packs all at once, and again panel by panel from the last one on, where one number is too large. */
static const char *check_pack(const fa_kernels *kernels)
{
    fa_pack_args calls[2] = {pack_now.args, pack_now.args};
    const int64_t panels = pack_panels(), bytes = panels * pack_steps() * 128, scale_bytes = pack_scale_bytes();
    const size_t scratch_bytes = (size_t)kernels->pack_scratch_bytes(calls), sum_bytes = (size_t)panels * 128;
    FOR(again, 2)
    {
        fa_pack_args *a = calls + again;
        a->panels = allocate((size_t)bytes), a->scales = allocate((size_t)scale_bytes);
        a->sums = memset(allocate(sum_bytes), 0, sum_bytes);
        a->bad = (unsigned char *)memset(allocate(4), 0, 4);
        if (a->k == 0) memset(a->scales, 0, (size_t)scale_bytes); /* nothing is written where nothing is read */
        char *scratch = allocate(scratch_bytes);
        if (!again) kernels->pack_run(a, 0, panels, scratch);
        else
            for (int64_t i = panels - 1; i >= 0; i--)
                kernels->pack_run(a, i, i + 1, memset(scratch, 0x55, scratch_bytes));
        FOR(i, a->n_blocks) if (a->bad[i]) return "finite numbers are called bad";
    }
    if (memcmp(calls[0].panels, calls[1].panels, (size_t)bytes) != 0) return "panels differ the second time";
    if (memcmp(calls[0].scales, calls[1].scales, (size_t)scale_bytes) != 0) return "scales differ the second time";
    if (memcmp(calls[0].sums, calls[1].sums, sum_bytes) != 0) return "sums differ the second time";
    FOR(map, calls[0].maps) FOR(feature, (pack_now.n + pack_width() - 1) / pack_width() * pack_width())
    {
        const char *wrong = check_packed(calls, map, feature);
        if (wrong) return wrong;
    }
    calls[0].beyond = 0x1p-140; /* now what is not 0 is too large, of each block by itself */
    kernels->pack_run(calls, 0, panels, allocate(scratch_bytes));
    FOR(i, calls[0].n_blocks)
    {
        const fa_pack_rows *rows = &pack_now.rows[i];
        int some = 0;
        FOR(r, rows->end - rows->begin) FOR(d, pack_now.args.k) some |= pack_source(rows->map, rows->begin + r, d) != 0;
        if (calls[0].bad[i] != some) return "a block with a number that is too large is not found";
    }
    return NULL;
}

FAMILY(pack, PACK_CASES, make_pack, pack_now.args.weight == FA_F64 ? FA_F64 : FA_F32, NULL, drop_nothing);

#endif

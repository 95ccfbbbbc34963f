/* Packing of weights, whose bits are those of the generic kernels. Sources end where a page ends, or
 * lie in any strides. */
#ifndef PACK_H
#define PACK_H

#include "linear.h"

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

static fa_dtype pack_lane(void) { return pack_now.args.weight == FA_F64 ? FA_F64 : FA_F32; }

/* The second time panel by panel from the last one on. Then one number is too large: each block is `bad` by itself. */
static int run_pack(const fa_kernels *kernels, int again, int wide)
{
    fa_pack_args a = pack_now.args;
    const int64_t panels = pack_panels();
    const size_t scratch_bytes = (size_t)kernels->pack->scratch_bytes(&a);
    char *scratch = allocate(scratch_bytes), *bad = results[3].got[again].data;
    a.panels = results[0].got[again].data, a.scales = results[1].got[again].data, a.sums = results[2].got[again].data;
    a.bad = (unsigned char *)bad;
    if (!again) kernels->pack->run(&a, 0, panels, scratch);
    for (int64_t i = panels; again && i-- > 0;) kernels->pack->run(&a, i, i + 1, memset(scratch, 0x55, scratch_bytes));
    a.bad = (unsigned char *)bad + 4, a.beyond = 0x1p-140;
    kernels->pack->run(&a, 0, panels, scratch);
    return !wide;
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
    a->by_magnitude = 1, a->extreme = 127;
    if (a->weight == FA_I4) {
        float *codes = (float *)allocate(16 * sizeof *codes);
        FOR(code, 16) codes[code] = (float)(below(255) - 127);
        a->codes = codes, a->unit = 1.0 / 127;
        float *middles = (float *)allocate(16 * sizeof *middles);
        FOR(code, 16) middles[code] = code < 15 ? (float)(code - 7.5 + uniform(0, 0.4)) : INFINITY;
        a->by_magnitude = below(2), a->extreme = a->by_magnitude ? 1 : -8;
        FOR(code, 15) middles[code] /= a->by_magnitude ? 8 : 1;
        a->middles = middles;
    }
    n_results = 0;
    add_bytes("panels", 1, pack_panels() * pack_steps() * 128);
    add_bytes("scales", 1, pack_scale_bytes());
    add_bytes("sums", 1, pack_panels() * 128)->zero = 1;
    add_bytes("bad", 1, 8)->zero = 1;
    expect_same(run_pack, pack_lane());
}

CHECK(pack, run_pack, 0)

FAMILY(pack, PACK_CASES, make_pack, pack_lane(), NULL);

#endif

/* Packing of blocks of files, by random layouts. Rows end where a page ends. */
#ifndef FILE_BLOCKS_H
#define FILE_BLOCKS_H

#include "pack.h"

static const int64_t file_k[] = {0, 1, 3, 8, 13, 56, 264}, file_n[] = {1, 17, 32, 70}; /* k: blocks of 32 */
enum { FILE_CASES = 8 * COUNT(file_k) * COUNT(file_n) };

typedef struct {
    fa_layout layouts[4];
    int8_t tables[4][16];
} file_case;

static file_case file_now;

/* Integers of at most `most` bits; count of them lie in `bytes` bytes, `run` at a time. */
static fa_bits random_integers(int most, int run, int bytes, int in_order)
{
    fa_bits bits = {.add = (int)below(40) - 32};
    bits.width = in_order || below(3) ? (most > 4 ? 4 : most) : 2;
    if (most == 8 && !in_order && below(3) == 0) bits.width = 8;
    else if (bits.width < most) bits.high_width = in_order ? 1 : (int)below(2 < most - bits.width ? 3 : 2);
    FOR(i, 16)
    {
        bits.at[i] = (uint8_t)below(bytes - run + 1), bits.shift[i] = (uint8_t)below(9 - bits.width);
        bits.high_at[i] = (uint8_t)below(bytes - (in_order ? 2 : run) + 1);
        bits.high_shift[i] = (uint8_t)below(9 - bits.high_width);
    }
    return bits;
}

static fa_layout random_layout(int most, int64_t k)
{
    fa_layout f = {.minimum = -1};
    f.features = k % 256 == 0 && below(2) ? 256 : 32, f.shared = f.features == 32 || below(2) ? 32 : 16;
    f.bytes = f.features == 32 ? 18 + (int)below(20) : 84 + 2 * (int)below(64);
    f.exponent = f.features == 32 && below(3) == 0, f.in_order = most > 4 && below(3) == 0;
    f.codes = random_integers(most, 16, f.bytes, f.in_order), f.codes.add = 0;
    f.unit = 2 * (int)below(f.bytes / 2);
    if (below(2)) f.minimum = f.unit ? 0 : 2;
    if (f.features == 32) return f;
    f.window = (int)below(f.bytes - 15);
    f.scales = random_integers(below(2) ? 8 : 6, 1, 16, 0);
    if (f.minimum >= 0) f.minima = random_integers(6, 1, 16, 0);
    return f;
}

static void put_half(char *to, double x)
{
    const uint16_t half = to_half(half_of(FA_F16), x);
    memcpy(to, &half, sizeof half);
}

/* One panel or two at a time, the second time one. */
static int run_file_blocks(const fa_kernels *kernels, int again, int wide)
{
    fa_pack_args a = pack_now.args;
    const size_t scratch_bytes = (size_t)kernels->pack->scratch_bytes(&a);
    const int64_t step = 2 - again;
    char *scratch = allocate(scratch_bytes);
    a.panels = results[0].got[again].data, a.scales = results[1].got[again].data, a.sums = results[2].got[again].data;
    a.bad = (unsigned char *)results[3].got[again].data, a.minima = results[4].got[again].data;
    for (int64_t end = pack_panels(); end > 0; end -= step)
        kernels->pack->run(&a, larger(0, end - step), end, memset(scratch, 0xff, scratch_bytes));
    FOR(i, a.n_blocks)
    FOR(n, a.bad[i] ? n_results : 0) /* then nobody asks for the rest */
    if (n != 3 && results[n].there) memset(results[n].got[again].data, 0, (size_t)results[n].cols);
    return !wide;
}

static void make_file_blocks(int number)
{
    fa_pack_args *a = &pack_now.args;
    int i = number;
    seed = (uint64_t)number << 32 | 11;
    memset(&pack_now, 0, sizeof pack_now), memset(&file_now, 0, sizeof file_now);
    a->weight = i % 2 ? FA_Q8 : FA_I4, a->block = i / 2 % 2 ? 16 : 32, a->maps = 1 + i / 4 % 2, i /= 8;
    a->k = file_k[i % COUNT(file_k)] * 32, pack_now.n = file_n[i / COUNT(file_k)];
    a->blocks = pack_now.rows, a->unit = 1, a->beyond = 0x1p16, a->zero = (int)below(16);
    for (int map = 0; map < a->maps; map++)
        for (int64_t begin = 0, end; begin < pack_now.n; begin = end + below(2) * below(20)) {
            if (a->n_blocks == 2 * (map + 1)) break;
            const int64_t number_of = a->n_blocks++;
            fa_pack_rows *rows = &pack_now.rows[number_of];
            fa_layout *f = &file_now.layouts[number_of];
            end = below(2) ? pack_now.n : begin + 1 + below(pack_now.n - begin);
            do *f = random_layout(a->weight == FA_I4 ? 4 : 8, a->k);
            while (f->shared < a->block);
            const int bits = f->codes.width + f->codes.high_width;
            const int64_t bytes = a->k / f->features * f->bytes, gap = below(2) * below(40);
            rows->begin = begin, rows->end = end, rows->map = map, rows->dtype = FA_I8, rows->layout = f;
            rows->row = bytes + gap, rows->col = 1;
            rows->add = a->weight == FA_I4 ? (int)below(17 - (1 << bits)) : bits < 8 ? -(int)below(1 << bits) : 0;
            FOR(j, 16) file_now.tables[number_of][j] = (int8_t)(a->weight == FA_I4 ? below(16) : below(256) - 128);
            if (bits <= 4 && below(2)) rows->table = file_now.tables[number_of], rows->add = 0;
            char *data = allocate((size_t)((end - begin) * rows->row - gap));
            FOR(r, end - begin)
            FOR(d, bytes / f->bytes)
            {
                char *block = data + r * rows->row + d * f->bytes;
                FOR(j, f->bytes) block[j] = (char)below(256);
                if (f->exponent) block[f->unit] = (char)(below(4) ? 110 + below(20) : below(144));
                else put_half(block + f->unit, uniform(-1, 1) / (f->scales.width == 8 ? 64 : 8));
                if (f->minimum >= 0) put_half(block + f->minimum, uniform(-1, 1));
            }
            if (a->k && below(4) == 0) { /* NaN or an infinity in one block, which may have been so already */
                char *block = data + below(end - begin) * rows->row + below(bytes / f->bytes) * f->bytes;
                if (f->exponent) block[f->unit] = (char)below(256);
                else put_half(block + (f->minimum >= 0 && below(2) ? f->minimum : f->unit), below(2) ? INFINITY : NAN);
            }
            rows->data = data;
        }
    float *codes = (float *)allocate(16 * sizeof *codes);
    FOR(code, 16) codes[code] = (float)(below(256) - 128);
    a->codes = codes;
    const int64_t panels = pack_panels(), shared = panels * 32 * (a->k / a->block) * 2;
    int needs_minima = a->k / 32 % 3 == 2;
    FOR(n, a->n_blocks) needs_minima |= file_now.layouts[n].minimum >= 0;
    n_results = 0;
    add_bytes("panels", 1, panels * pack_steps() * 128), add_bytes("scales", 1, shared);
    add_bytes("sums", 1, panels * 128), add_bytes("bad", 1, 4)->zero = 1, add_bytes("minima", needs_minima, shared);
    expect_same(run_file_blocks, FA_F32);
}

CHECK(file_blocks, run_file_blocks, 0)

FAMILY(file_blocks, FILE_CASES, make_file_blocks, FA_F32, NULL);

#endif

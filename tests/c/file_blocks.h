/* Packing of blocks of files, by random layouts: what is stored against what each bit of a block means. Rows end where a
 * page ends. */
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

static double half_in(const char *from)
{
    uint16_t half;
    return memcpy(&half, from, sizeof half), from_half(half_of(FA_F16), half);
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
}

/* Integer i of a block; `run` of them lie in bytes that follow one another. */
static int integer_in(const fa_bits *bits, const char *from, int64_t i, int64_t run, int in_order)
{
    const uint8_t *bytes = (const uint8_t *)from;
    const int64_t first = i / run, j = i % run;
    int x = bytes[bits->at[first] + j] >> bits->shift[first] & ((1 << bits->width) - 1), high = 0;
    if (bits->width == 8) x = (int8_t)x;
    if (in_order) high = bytes[bits->high_at[first] + j / 8] >> j % 8 & 1;
    else if (bits->high_width)
        high = bytes[bits->high_at[first] + j] >> bits->high_shift[first] & ((1 << bits->high_width) - 1);
    return (x | high << bits->width) + bits->add;
}

static const fa_pack_rows *rows_of(int64_t map, int64_t feature)
{
    FOR(i, pack_now.args.n_blocks)
    {
        const fa_pack_rows *rows = &pack_now.rows[i];
        if (rows->map == map && rows->begin <= feature && feature < rows->end) return rows;
    }
    return NULL;
}

/* The block of a file that has feature d of a row. */
static const char *block_of(const fa_pack_rows *rows, int64_t feature, int64_t d)
{
    return rows->data + (feature - rows->begin) * rows->row + d / rows->layout->features * rows->layout->bytes;
}

static double file_scale(const fa_pack_rows *rows, int64_t feature, int64_t d)
{
    if (!rows) return 0;
    const fa_layout *f = rows->layout;
    const char *block = block_of(rows, feature, d);
    float unit = (float)(f->exponent ? ldexp(1, (uint8_t)block[f->unit] - 128) : half_in(block + f->unit));
    const int64_t i = d % f->features / f->shared;
    if (f->scales.width) unit *= (float)integer_in(&f->scales, block + f->window, i, 1, 0);
    return from_half(half_of(FA_F16), to_half(half_of(FA_F16), unit));
}

static double file_minimum(const fa_pack_rows *rows, int64_t feature, int64_t d)
{
    if (!rows || !pack_now.args.minima) return 0;
    const fa_layout *f = rows->layout;
    const char *block = block_of(rows, feature, d);
    const int64_t i = d % f->features / f->shared;
    float minimum = 0;
    if (f->minimum >= 0) minimum = (float)half_in(block + f->minimum);
    else if (pack_now.args.weight == FA_I4) minimum = (float)(-8 * file_scale(rows, feature, d));
    if (f->minima.width) minimum = -(minimum * (float)integer_in(&f->minima, block + f->window, i, 1, 0));
    return from_half(half_of(FA_F16), to_half(half_of(FA_F16), minimum));
}

/* What is stored of feature d. */
static int file_code(const fa_pack_rows *rows, int64_t feature, int64_t d)
{
    if (!rows) return pack_now.args.weight == FA_I4 ? pack_now.args.zero : 0;
    const fa_layout *f = rows->layout;
    const int x = integer_in(&f->codes, block_of(rows, feature, d), d % f->features, 16, f->in_order);
    return rows->table ? rows->table[x] : (int8_t)(x + rows->add);
}

/* Says what is wrong with one output feature of the panels. */
static const char *check_file_row(const fa_pack_args *a, int64_t map, int64_t feature)
{
    const int64_t panel = feature / 32 * a->maps + map, column = feature % 32, each = pack_each();
    const fa_pack_rows *rows = rows_of(map, feature);
    double sum = 0;
    FOR(b, a->k / a->block)
    {
        const int64_t place = (panel * (a->k / a->block) + b) * 32 + column;
        const double scale = file_scale(rows, feature, b * a->block),
                     minimum = file_minimum(rows, feature, b * a->block);
        int64_t codes = 0;
        if (half_in((char *)a->scales + 2 * place) != scale) return "a scale is wrong";
        if (a->minima && half_in((char *)a->minima + 2 * place) != minimum) return "a minimum is wrong";
        for (int64_t d = b * a->block; d < (b + 1) * a->block; d++) {
            const char *word = a->panels + ((panel * pack_steps() + d / each) * 32 + column) * 4;
            const int code = file_code(rows, feature, d);
            const int got = a->weight == FA_Q8 ? (int8_t)word[d % 4]
                            : d % 8 < 4        ? word[d % 4] & 15
                                               : (uint8_t)word[d % 4] >> 4;
            if (got != code) return "a code is wrong";
            codes += a->weight == FA_Q8 ? code : (int64_t)((const float *)a->codes)[code];
        }
        if (rows) sum += (double)codes * scale + (double)a->block * minimum;
    }
    if (a->k && ((float *)a->sums)[panel * 32 + column] != (float)sum) return "a sum is wrong";
    return NULL;
}

/* Whether a number of some rows is not finite. */
static int file_is_bad(const fa_pack_rows *rows)
{
    int bad = 0;
    for (int64_t feature = rows->begin; feature < rows->end; feature++)
        for (int64_t d = 0; d < pack_now.args.k; d += 16)
            bad |= !isfinite(file_scale(rows, feature, d)) || !isfinite(file_minimum(rows, feature, d));
    return bad;
}

static const char *check_file_blocks(const fa_kernels *kernels)
{
    fa_pack_args *a = &pack_now.args;
    const int64_t panels = pack_panels(), shared = panels * 32 * (a->k / a->block) * 2;
    const size_t bytes = (size_t)(panels * pack_steps() * 128);
    const size_t scratch_bytes = (size_t)kernels->pack_scratch_bytes(a);
    int needs_minima = a->k / 32 % 3 == 2, any_bad = 0;
    FOR(i, a->n_blocks) needs_minima |= file_now.layouts[i].minimum >= 0;
    a->panels = allocate(bytes), a->scales = allocate((size_t)shared);
    a->minima = needs_minima ? allocate((size_t)shared) : NULL;
    a->sums = allocate((size_t)panels * 128), a->bad = (unsigned char *)memset(allocate(4), 0, 4);
    char *scratch = allocate(scratch_bytes);
    for (int64_t i = panels - 1; i >= 0; i -= 2) /* one panel or two at a time */
        kernels->pack_run(a, i > 0 ? i - 1 : 0, i + 1, memset(scratch, 0xff, scratch_bytes));
    FOR(i, a->n_blocks)
    {
        const int bad = file_is_bad(&a->blocks[i]);
        if (a->bad[i] != bad) return bad ? "what is not finite is not found" : "finite numbers are called bad";
        any_bad |= bad;
    }
    if (any_bad) return NULL;
    FOR(map, a->maps) FOR(feature, (pack_now.n + 31) / 32 * 32)
    {
        const char *wrong = check_file_row(a, map, feature);
        if (wrong) return wrong;
    }
    return NULL;
}

FAMILY(file_blocks, FILE_CASES, make_file_blocks, pack_now.args.weight == FA_F64 ? FA_F64 : FA_F32, NULL, drop_nothing);

#endif

/* Memory that nobody can overrun unnoticed, and strided arrays of any dtype in it. */
#ifndef ARRAYS_H
#define ARRAYS_H

#include "fastattn.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define COUNT(array) (int)(sizeof(array) / sizeof(array)[0])
#define FOR(i, n) for (int64_t i = 0; i < (n); i++)

/* Memory whose end is the end of a page, with none after it; filled with 0xff, which is NaN in every dtype. */
typedef struct {
    char *base;
    size_t used, size; /* before that page; of it, what was asked for */
} mapping;
static mapping mappings[256];
static int n_mappings;

static size_t page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static char *allocate(size_t size)
{
    const size_t page = page_size(), used = (size + page - 1) / page * page;
    char *base = mmap(NULL, used + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || mprotect(base + used, page, PROT_NONE) != 0 || n_mappings == COUNT(mappings)) {
        fputs("driver: no memory\n", stderr);
        exit(2);
    }
    mappings[n_mappings++] = (mapping){base, used, size};
    return memset(base, 0xff, used) + used - size;
}

/* Makes all that has been allocated read-only. */
static void protect(void) { FOR(i, n_mappings) mprotect(mappings[i].base, mappings[i].used, PROT_READ); }

/* The mapping that `inside` points into, or to the end of, or NULL. */
static const mapping *mapping_of(const void *inside)
{
    const char *p = inside;
    for (const mapping *m = mappings + n_mappings; m-- > mappings;)
        if (m->base <= p && p <= m->base + m->used) return m;
    return NULL;
}

/* Whether the mapping that `inside` points into holds what allocate() put there. */
static int is_blank(const char *inside)
{
    const mapping *m = mapping_of(inside);
    for (size_t i = 0; i < m->used; i++)
        if (m->base[i] != (char)0xff) return 0;
    return 1;
}

/* Takes all back but the first `n` mappings. */
static void release(int n)
{
    while (n_mappings > n) {
        n_mappings--;
        munmap(mappings[n_mappings].base, mappings[n_mappings].used + page_size());
    }
}

static int64_t bytes_of(fa_dtype dtype) { return dtype == FA_F64 ? 8 : dtype == FA_F32 ? 4 : dtype >= FA_I8 ? 1 : 2; }

/* The type that accumulates; lse, slopes and sinks have it. */
static fa_dtype lane_of(fa_dtype q) { return q == FA_F64 ? FA_F64 : FA_F32; }

/* Layouts: heads within rows; room between rows; rows from the last to the first; every other column; broadcast; not
 * aligned to the elements' size, as what is in lanes may lie in memory (simd.h: lane_u). */
enum { ROWS_FIRST = 1, GAP = 2, REVERSED = 4, STEP = 8, ONE_BATCH = 16, ONE_HEAD = 32, ONE_ROW = 64, ODD = 128 };

/* An array (batch, heads, rows, cols) of elements of `size` bytes. */
static fa_array new_array(int64_t size, int64_t batch, int64_t heads, int64_t rows, int64_t cols, int layout)
{
    if (layout & ONE_HEAD) heads = 1;
    if (layout & ONE_ROW) rows = 1;
    const int64_t gap = layout & GAP ? 3 * size : 0, col = layout & STEP ? 2 * size : size, pitch = cols * col + gap;
    const int64_t item = heads * rows * pitch, items = layout & ONE_BATCH ? 1 : batch;
    const int64_t bytes = items * item - gap - (col - size); /* nothing after the last element */
    fa_array x = {.col = col};
    x.head = heads == 1 ? 0 : layout & ROWS_FIRST ? pitch : rows * pitch;
    x.row = rows == 1 ? 0 : layout & ROWS_FIRST ? heads * pitch : pitch;
    int64_t *offsets = (int64_t *)allocate((size_t)batch * sizeof *offsets);
    FOR(b, batch) offsets[b] = items == 1 ? 0 : b * item;
    x.batch = offsets;
    x.data = allocate((bytes > 0 ? (size_t)bytes : 0) + (layout & ODD ? 1 : 0));
    if (layout & REVERSED) {
        x.data += (rows - 1) * x.row;
        x.row = -x.row;
    }
    return x;
}

static fa_array new_floats(fa_dtype dtype, int64_t batch, int64_t heads, int64_t rows, int64_t cols, int layout)
{
    fa_array x = new_array(bytes_of(dtype), batch, heads, rows, cols, layout);
    x.dtype = dtype;
    return x;
}

static char *at(const fa_array *x, int64_t b, int64_t h, int64_t i, int64_t j)
{
    return x->data + x->batch[b] + h * x->head + i * x->row + j * x->col;
}

/* A 16-bit dtype: binary digits of the significand, and the largest exponent field, which is Inf and NaN. */
typedef struct {
    int digits, special;
} half_format;

static half_format half_of(fa_dtype dtype) { return dtype == FA_BF16 ? (half_format){8, 255} : (half_format){11, 31}; }

static double from_half(half_format f, uint16_t u)
{
    const int one = 1 << (f.digits - 1), exponent = u / one & f.special, fraction = u % one;
    const int scale = (exponent ? exponent : 1) - f.special / 2 - f.digits + 1;
    double x = ldexp(exponent ? one + fraction : fraction, scale);
    if (exponent == f.special) x = fraction ? NAN : INFINITY;
    return u & 0x8000 ? -x : x;
}

/* Rounded to nearest even; a carry out of the significand lands in the exponent, where it belongs. */
static uint16_t to_half(half_format f, double x)
{
    const int least = 2 - f.special / 2, inf = f.special << (f.digits - 1);
    int e = least, u = inf;
    if (x != 0) frexp(x, &e);
    if (e < least) e = least;
    if (isfinite(x)) u = ((e - least) << (f.digits - 1)) + (int)rint(ldexp(fabs(x), f.digits - e));
    if (u > inf) u = inf;
    return (uint16_t)(u | (isnan(x) ? 1 << (f.digits - 2) : 0) | (signbit(x) ? 0x8000 : 0));
}

static double get(const fa_array *x, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const char *p = at(x, b, h, i, j);
    double d;
    float f;
    uint16_t u;
    if (x->dtype == FA_F64) return memcpy(&d, p, sizeof d), d;
    if (x->dtype == FA_F32) return memcpy(&f, p, sizeof f), (double)f;
    if (x->dtype == FA_I8) return *(const int8_t *)p;
    return memcpy(&u, p, sizeof u), from_half(half_of(x->dtype), u);
}

static void set(const fa_array *x, int64_t b, int64_t h, int64_t i, int64_t j, double value)
{
    char *p = at(x, b, h, i, j);
    if (x->dtype == FA_F64) memcpy(p, &value, sizeof value);
    else if (x->dtype == FA_F32) memcpy(p, &(float){(float)value}, sizeof(float));
    else if (x->dtype == FA_I8) *(int8_t *)p = (int8_t)value;
    else memcpy(p, &(uint16_t){to_half(half_of(x->dtype), value)}, sizeof(uint16_t));
}

static int64_t get_int(const fa_array *x, int64_t b, int64_t h, int64_t i)
{
    int64_t value;
    return memcpy(&value, at(x, b, h, i, 0), sizeof value), value;
}

static void set_int(const fa_array *x, int64_t b, int64_t h, int64_t i, int64_t value)
{
    memcpy(at(x, b, h, i, 0), &value, sizeof value);
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

#endif

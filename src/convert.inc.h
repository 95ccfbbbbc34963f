/* Rows of any dtype to and from lanes.
 *
 * Literals  dtype, in INLINE functions alone: the lane type, FA_I8 or, with float lanes, FA_F16 or FA_BF16.
 * Exports   dtype_size, row_size, WITH_DTYPE; v_load_part, v_store_part, v_load_as, v_load_as_n, v_load_as_part, v_store_as_part,
 *           v_store_two_as_part, v_store_pairs_as_part; load_element, load_row, add_row, store_row, store_row_pairs, round_row, round_row_as, row_finite,
 *           prefetch_rows. */
#pragma once
#include "int4.inc.h"

INLINE int64_t dtype_size(fa_dtype dtype) { return dtype == FA_F64 ? 8 : dtype == FA_F32 ? 4 : dtype == FA_I8 ? 1 : 2; }

/* Bytes of n numbers in a row; of FA_I4, whole blocks. */
INLINE int64_t row_size(fa_dtype dtype, int64_t n)
{
    return dtype == FA_I4 ? n / I4_BLOCK * I4_BYTES : n * dtype_size(dtype);
}

/* WITH_DTYPE(dtype, name, call): the call, in which `name` is dtype as a literal. */
#define WITH_DTYPE(dtype, name, ...)                                                                                   \
    do {                                                                                                               \
        if (LANE_BITS == 32 && (dtype) == FA_F16) WITH_LITERAL(name, FA_F16, __VA_ARGS__)                              \
        else if (LANE_BITS == 32 && (dtype) == FA_BF16) WITH_LITERAL(name, FA_BF16, __VA_ARGS__)                       \
        else WITH_LITERAL(name, LANE_DTYPE, __VA_ARGS__)                                                               \
    } while (0)

/* The next vector of a row that has n lanes left. Of fewer than LANES, the other lanes are 0, or not written. */
INLINE v_t v_load_part(const void *from, int64_t n) { return n < LANES ? v_load_n(from, n) : v_load(from); }

INLINE void v_store_part(void *to, v_t x, int64_t n)
{
    if (n < LANES) v_store_n(to, x, n);
    else v_store(to, x);
}

INLINE v_t v_load_as(fa_dtype dtype, const void *from)
{
#if LANE_BITS == 32
    if (dtype == FA_F16) return v_load_f16(from);
    if (dtype == FA_BF16) return v_load_bf16(from);
#endif
    return dtype == FA_I8 ? v_load_i8(from) : v_load(from);
}

/* The first n < LANES elements. Nothing behind them is read; the other lanes are 0. */
INLINE v_t v_load_as_n(fa_dtype dtype, const void *from, int64_t n)
{
#if LANE_BITS == 32
    if (dtype == FA_F16 || dtype == FA_BF16) {
        uint16_t part[LANES] = {0};
        memcpy(part, from, n * sizeof part[0]);
        return v_load_as(dtype, part);
    }
#endif
    if (dtype == FA_I8) {
        int8_t part[LANES] = {0};
        memcpy(part, from, n);
        return v_load_i8(part);
    }
    return v_load_n(from, n);
}

/* The next vector of a row that has n elements left. */
INLINE v_t v_load_as_part(fa_dtype dtype, const void *from, int64_t n)
{
    return n < LANES ? v_load_as_n(dtype, from, n) : v_load_as(dtype, from);
}

INLINE void v_store_as_part(fa_dtype dtype, void *to, v_t x, int64_t n)
{
#if LANE_BITS == 32
    if (dtype == FA_F16 || dtype == FA_BF16) {
        uint16_t part[LANES];
        char *whole = n < LANES ? (char *)part : to;
        if (dtype == FA_F16) v_store_f16(whole, x);
        else v_store_bf16(whole, x);
        if (n < LANES) memcpy(to, part, n * sizeof part[0]);
        return;
    }
#endif
    (void)dtype;
    v_store_part(to, x, n);
}

/* The next two vectors of a row that has n elements left. */
INLINE void v_store_two_as_part(fa_dtype dtype, void *to, v_t x, v_t next, int64_t n)
{
#if LANE_BITS == 32
    if (dtype == FA_BF16 && n >= 2 * LANES) {
        v_store_two_bf16(to, x, next);
        return;
    }
#endif
    v_store_as_part(dtype, to, x, n);
    if (n > LANES) v_store_as_part(dtype, (char *)to + LANES * dtype_size(dtype), next, n - LANES);
}

#if LANE_BITS == 32
/* The same in bfloat16; denormal numbers may become 0, as they do in pairs of the dot product. */
INLINE void v_store_pairs_as_part(void *to, v_t x, v_t next, int64_t n)
{
    uint16_t part[2 * LANES];
    v_store_pairs_bf16(n < 2 * LANES ? (void *)part : to, x, next);
    if (n < 2 * LANES) memcpy(to, part, n * sizeof part[0]);
}
#else
INLINE void v_store_pairs_as_part(void *to, v_t x, v_t next, int64_t n) { (void)to, (void)x, (void)next, (void)n; }
#endif

/* dst (n) = factor * src (n), both contiguous. */
INLINE void load_row_as(fa_dtype dtype, const char *src, int64_t n, lane factor, lane *dst)
{
    const int64_t size = dtype_size(dtype);
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES) v_store(dst + j, v_load_as(dtype, src + j * size) * v_splat(factor));
    if (j < n) v_store_n(dst + j, v_load_as_n(dtype, src + j * size, n - j) * v_splat(factor), n - j);
}

static void load_row(fa_dtype dtype, const char *src, int64_t n, lane factor, lane *dst)
{
    switch (dtype) {
    case FA_F16: load_row_as(FA_F16, src, n, factor, dst); break;
    case FA_BF16: load_row_as(FA_BF16, src, n, factor, dst); break;
    case FA_I8: load_row_as(FA_I8, src, n, factor, dst); break;
    case FA_I4: load_row_i4(src, n, factor, dst); break;
    default: load_row_as(LANE_DTYPE, src, n, factor, dst);
    }
}

/* dst (n) += src (n) */
static void add_row(fa_dtype dtype, const char *src, int64_t n, lane *dst)
{
    for (int64_t j = 0; j < n; j += LANES) {
        const v_t x = v_load_as_part(dtype, src + j * dtype_size(dtype), n - j);
        v_store_part(dst + j, v_load_part(dst + j, n - j) + x, n - j);
    }
}

/* One element: of rows that are not contiguous, and of float32 beside double lanes. */
static lane load_element(fa_dtype dtype, const char *from)
{
    float f;
    double d;
    switch (dtype) {
    case FA_F64: memcpy(&d, from, sizeof d); return (lane)d;
    case FA_F32: memcpy(&f, from, sizeof f); return f;
    default: return v_load_as_n(dtype, from, 1)[0];
    }
}

/* dst (n), of `dtype`, = factor * src (n) */
static void store_row(fa_dtype dtype, const lane *src, int64_t n, lane factor, char *dst)
{
    for (int64_t j = 0; j < n; j += LANES)
        v_store_as_part(dtype, dst + j * dtype_size(dtype), v_load_part(src + j, n - j) * v_splat(factor), n - j);
}

/* The same in bfloat16; denormal numbers may become 0. */
static void store_row_pairs(const lane *src, int64_t n, lane factor, char *dst)
{
    for (int64_t j = 0; j < n; j += 2 * LANES) {
        const int64_t rest = n - j - LANES;
        const v_t next = rest > 0 ? v_load_part(src + j + LANES, rest) * v_splat(factor) : v_splat(0);
        v_store_pairs_as_part(dst + j * 2, v_load_part(src + j, n - j) * v_splat(factor), next, n - j);
    }
}

/* dst (n), bfloat16, = src (n). The dot product takes pairs: behind an odd n stands a 0. Its instruction takes denormal
 * numbers for 0, and so may this. */
INLINE void round_row_as(fa_dtype dtype, const char *src, int64_t n, char *dst)
{
    const int64_t size = dtype_size(dtype);
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES)
        v_store_pairs_bf16(dst + j * 2, v_load_as(dtype, src + j * size), v_load_as(dtype, src + (j + LANES) * size));
    for (; j < n; j += LANES)
        v_store_as_part(FA_BF16, dst + j * 2, v_load_as_part(dtype, src + j * size, n - j), n - j);
    if (n % 2) memset(dst + n * 2, 0, 2);
}

static void round_row(fa_dtype dtype, const char *src, int64_t n, char *dst)
{
    switch (dtype) {
    case FA_F16: round_row_as(FA_F16, src, n, dst); break;
    case FA_BF16: memcpy(dst, src, n * 2), memset(dst + n * 2, 0, n % 2 * 2); break;
    default: round_row_as(LANE_DTYPE, src, n, dst);
    }
}

INLINE int row_finite(fa_dtype dtype, const char *src, int64_t n)
{
    v_t sum = v_splat(0); /* x * 0 is NaN where x is infinite or NaN, and so is every sum with it */
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES) sum += v_load_as(dtype, src + j * dtype_size(dtype)) * v_splat(0);
    if (j < n) sum += v_load_as_n(dtype, src + j * dtype_size(dtype), n - j) * v_splat(0);
    return !v_any(sum != sum);
}

/* Asks for the lines of n rows of `size` bytes, `row` bytes apart; they arrive in the second-level cache. */
INLINE void prefetch_rows(const char *first, int64_t row, int64_t n, int64_t size)
{
    for (int64_t j = 0; j < n; j++, first += row)
        for (const char *line = first - (uintptr_t)first % 64; line < first + size; line += 64)
            __builtin_prefetch(line, 0, 2);
}

/* Rows of any dtype to and from lanes. `dtype` is a literal in the inner kernels, so that the switches fold away. */

INLINE int64_t dtype_size(fa_dtype dtype) { return dtype == FA_F64 ? 8 : dtype == FA_F32 ? 4 : 2; }

/* LANES elements of `dtype`, which is the lane type or, with float lanes, a 16-bit one. */
INLINE v_t v_load_as(fa_dtype dtype, const void *p)
{
#if LANE_BITS == 32
    if (dtype == FA_F16) return v_load_f16(p);
    if (dtype == FA_BF16) return v_load_bf16(p);
#endif
    (void)dtype;
    return v_load(p);
}

/* The first n; nothing past them is read. */
INLINE v_t v_load_as_n(fa_dtype dtype, const void *p, int64_t n)
{
#if LANE_BITS == 32
    if (dtype == FA_F16 || dtype == FA_BF16) {
        uint16_t part[LANES] = {0};
        memcpy(part, p, n * sizeof part[0]);
        return v_load_as(dtype, part);
    }
#endif
    (void)dtype;
    return v_load_n(p, n);
}

/* dst (n) = factor * src (n), contiguous, with `dtype` as in v_load_as */
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
    default: load_row_as(LANE_BITS == 64 ? FA_F64 : FA_F32, src, n, factor, dst);
    }
}

/* dst (n) += src (n) */
static void add_row(fa_dtype dtype, const char *src, int64_t n, lane *dst)
{
    for (int64_t j = 0; j < n; j += LANES) {
        const int64_t count = n - j < LANES ? n - j : LANES;
        const char *from = src + j * dtype_size(dtype);
        if (count == LANES) v_store(dst + j, v_load(dst + j) + v_load_as(dtype, from));
        else v_store_n(dst + j, v_load_n(dst + j, count) + v_load_as_n(dtype, from, count), count);
    }
}

/* One element of any dtype: for strided rows, and for float32 beside double lanes. */
static lane load_element(fa_dtype dtype, const char *p)
{
    float f;
    double d;
    switch (dtype) {
    case FA_F64: memcpy(&d, p, sizeof d); return (lane)d;
    case FA_F32: memcpy(&f, p, sizeof f); return f;
    default: return v_load_as_n(dtype, p, 1)[0];
    }
}

/* dst (n) = factor * src (n), with `dtype` the lane type or, with float lanes, a 16-bit one */
static void store_row(fa_dtype dtype, const lane *src, int64_t n, lane factor, char *dst)
{
    for (int64_t j = 0; j < n; j += LANES) {
        const int64_t count = n - j < LANES ? n - j : LANES;
        const v_t a = (count == LANES ? v_load(src + j) : v_load_n(src + j, count)) * v_splat(factor);
#if LANE_BITS == 32
        if (dtype == FA_F16 || dtype == FA_BF16) {
            uint16_t part[LANES];
            if (dtype == FA_F16) v_store_f16(part, a);
            else v_store_bf16(part, a);
            memcpy(dst + j * 2, part, count * sizeof part[0]);
            continue;
        }
#endif
        (void)dtype;
        if (count == LANES) v_store(dst + j * sizeof(lane), a);
        else v_store_n(dst + j * sizeof(lane), a, count);
    }
}

/* dst (n), bfloat16, = src (n), with a 0 behind an odd n: pairs for the dot product */
static void round_row(fa_dtype dtype, const char *src, int64_t n, char *dst)
{
    const uint16_t zero = 0;
    lane part[4 * LANES];
    for (int64_t j = 0; j < n; j += 4 * LANES) {
        const int64_t count = n - j < 4 * LANES ? n - j : 4 * LANES;
        load_row(dtype, src + j * dtype_size(dtype), count, 1, part);
        store_row(FA_BF16, part, count, 1, dst + j * 2);
    }
    if (n % 2) memcpy(dst + n * 2, &zero, sizeof zero);
}

/* Whether all of a row is finite. */
INLINE int row_finite(fa_dtype dtype, const char *src, int64_t n)
{
    v_t sum = v_splat(0); /* x * 0 is NaN where x is not finite */
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES) sum += v_load_as(dtype, src + j * dtype_size(dtype)) * v_splat(0);
    if (j < n) sum += v_load_as_n(dtype, src + j * dtype_size(dtype), n - j) * v_splat(0);
    return !v_any(sum != sum);
}

/* Asks for the lines of n rows of `size` bytes, into the second-level cache. */
INLINE void prefetch_rows(const char *p, int64_t row, int64_t n, int64_t size)
{
    for (int64_t j = 0; j < n; j++)
        for (int64_t c = 0; c < size; c += 64) __builtin_prefetch(p + j * row + c, 0, 2);
}

/* The tiles of Intel's AMX: eight registers of up to 16 rows of 64 bytes. A part of simd.h, which includes it where
 * V_AMX is 1. With FA_EMULATE_TILES they are spelled out, to the bit; where the compiler has no AVX-512,
 * vectors are, too, and softmax may differ in its last bit (docs/dev/intel.md).
 *
 *   amx_shapes(lo, hi, bytes) starts the use of tiles, all 0, for products of rows of so many bytes, up to AMX_BYTES.
 *                            0, 1, 4 have lo rows; 2, 3, 5 hi; 4 and 5 of `bytes`; 6, 7 have bytes / 4
 *   AMX_END()                ends it: a task that begins does end; between them no other code has tiles
 *   AMX_LOAD(t, p, row)      rows from memory, `row` bytes apart         AMX_STORE(t, p, row)
 *   AMX_ZERO(t)
 *   AMX_DOT_BF16(c, a, b)    c (rows, 16 floats) += a (rows, 16 pairs) b (16, 16 pairs), pairs of bfloat16. Denormal
 *                            numbers are 0. The sums of first and of second halves begin at 0, are fused multiply-adds
 *                            in order, and are added; then c is
 *   AMX_DOT_I8(c, a, b)      the same of four int8, in integers that wrap
 *   AMX_AWAKE()              a product that nobody reads, which overwrites 3: without any for a few hundred ns the
 *                            multipliers of tiles sleep, and the next product waits 300 ns for them (docs/dev/intel.md)
 *
 * Rows that lie in two cache lines take several times as long to load, and NumPy's large arrays begin 16 bytes beside
 * one. So operands are copied unless amx_fit.
 *
 * Tiles are numbered by literals. Why not the compiler's intrinsics: gcc 12's loads do not say that they read memory,
 * and its configuration says that it reads 8 of 64 bytes. */
typedef struct {
    uint8_t palette, start, none[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} amx_config;
_Static_assert(sizeof(amx_config) == 64, "as the instruction reads it");

#define AMX_ROWS 16
#define AMX_BYTES 64 /* of a row */

#ifndef FA_EMULATE_TILES
#define AMX_BEGIN(config) __asm__ volatile("ldtilecfg %0" ::"m"(*(config)) : "memory")
#define AMX_END() __asm__ volatile("tilerelease" ::: "memory")
#define AMX_LOAD(t, p, row)                                                                                            \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"((const void *)(p)), "r"((int64_t)(row)) : "memory")
#define AMX_STORE(t, p, row)                                                                                           \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"((void *)(p)), "r"((int64_t)(row)) : "memory")
#define AMX_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define AMX_DOT_BF16(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#define AMX_DOT_I8(c, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#define AMX_AWAKE() AMX_DOT_BF16(3, 5, 7)
#else
#include <xmmintrin.h>
typedef struct {
    uint8_t row[AMX_ROWS][AMX_BYTES];
} amx_data;
static __thread amx_config amx_shape;
static __thread amx_data amx_of[8];

NOINLINE void emulated_begin(const amx_config *config)
{
    amx_shape = *config;
    memset(amx_of, 0, sizeof amx_of);
}

NOINLINE void emulated_load(int t, const char *p, int64_t row)
{
    memset(&amx_of[t], 0, sizeof amx_of[t]);
    for (int r = 0; r < amx_shape.rows[t]; r++) memcpy(amx_of[t].row[r], p + r * row, amx_shape.row_bytes[t]);
}

NOINLINE void emulated_store(int t, char *p, int64_t row)
{
    for (int r = 0; r < amx_shape.rows[t]; r++) memcpy(p + r * row, amx_of[t].row[r], amx_shape.row_bytes[t]);
}

typedef uint32_t eight __attribute__((vector_size(32), aligned(1), may_alias)); /* floats, by their bits */

/* c += a b. As volatile assembly: under another MXCSR, nothing may move. */
INLINE void emulated_fma(eight a, eight b, eight *c)
{
    __asm__ volatile("vfmadd231ps %2, %1, %0" : "+x"(*c) : "x"(a), "x"(b));
}

INLINE void emulated_add(eight a, eight *c) { __asm__ volatile("vaddps %1, %0, %0" : "+x"(*c) : "x"(a)); }

NOINLINE void emulated_dot_bf16(int c, int a, int b)
{
    const unsigned before = _mm_getcsr();
    amx_data out = amx_of[c];
    _mm_setcsr(0x9fc0); /* denormals are 0, in and out; nearest even; no exceptions */
    for (int m = 0; m < amx_shape.rows[c]; m++)
        for (int64_t n = 0; n < amx_shape.row_bytes[c]; n += sizeof(eight)) {
            eight first = {0}, second = {0}, *const sum = (eight *)(out.row[m] + n);
            for (int k = 0; k < amx_shape.row_bytes[a] / 4; k++) {
                uint32_t pair;
                memcpy(&pair, amx_of[a].row[m] + 4 * k, sizeof pair);
                const eight w = *(const eight *)(amx_of[b].row[k] + n);
                emulated_fma((eight){0} + (pair << 16), w << 16, &first);
                emulated_fma((eight){0} + (pair & 0xffff0000u), w & 0xffff0000u, &second);
            }
            emulated_add(second, &first);
            emulated_add(first, sum);
        }
    __asm__ volatile("" ::: "memory");
    _mm_setcsr(before);
    amx_of[c] = out;
}

NOINLINE void emulated_dot_i8(int c, int a, int b)
{
    amx_data out = amx_of[c];
    for (int m = 0; m < amx_shape.rows[c]; m++)
        for (int n = 0; n < amx_shape.row_bytes[c]; n += 4) {
            uint32_t sum;
            memcpy(&sum, out.row[m] + n, sizeof sum);
            for (int k = 0; k < amx_shape.row_bytes[a]; k++)
                sum += (uint32_t)((int8_t)amx_of[a].row[m][k] * (int8_t)amx_of[b].row[k / 4][n + k % 4]);
            memcpy(out.row[m] + n, &sum, sizeof sum);
        }
    amx_of[c] = out;
}

#define AMX_BEGIN(config) emulated_begin(config)
#define AMX_END() ((void)0)
#define AMX_LOAD(t, p, row) emulated_load(t, (const char *)(p), row)
#define AMX_STORE(t, p, row) emulated_store(t, (char *)(p), row)
#define AMX_ZERO(t) memset(&amx_of[t], 0, sizeof amx_of[t])
#define AMX_DOT_BF16(c, a, b) emulated_dot_bf16(c, a, b)
#define AMX_DOT_I8(c, a, b) emulated_dot_i8(c, a, b)
#define AMX_AWAKE() ((void)0)
#endif

/* What softmax takes beside tiles. y - floor(y), below 1; of -infinity 0. */
INLINE v_t v_above_whole(v_t y)
{
#if defined V_AVX512
    return _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF);
#else
    UNROLL_FOR(int i = 0; i < LANES; i++) y[i] = y[i] < -LANE_MAX ? 0 : y[i] - floorf(y[i]);
    return v_min(v_splat(0x1.fffffep-1f), y);
#endif
}

/* x 2^floor(y), where x is 1 to 2 and y at most a little above 0; 0 where that is not normal. */
INLINE v_t v_times_power(v_t x, v_t y)
{
#if defined V_AVX512 /* beside _MM_FLUSH_ZERO_ON */
    return _mm512_scalef_ps(x, y);
#else
    UNROLL_FOR(int i = 0; i < LANES; i++) x[i] *= y[i] >= -126 ? ldexpf(1, (int)floorf(y[i])) : 0;
    return x;
#endif
}

/* Whether rows lie as tiles load them fast. */
INLINE int amx_fit(const void *x, int64_t row) { return ((intptr_t)x | row) % AMX_BYTES == 0; }

INLINE void amx_shapes(int64_t lo, int64_t hi, int bytes)
{
    amx_config config = {.palette = 1};
    for (int t = 0; t < 8; t++) config.row_bytes[t] = AMX_BYTES;
    config.row_bytes[4] = config.row_bytes[5] = (uint16_t)bytes;
    config.rows[0] = config.rows[1] = config.rows[4] = (uint8_t)lo;
    config.rows[2] = config.rows[3] = config.rows[5] = (uint8_t)(hi ? hi : 1);
    config.rows[6] = config.rows[7] = (uint8_t)(bytes / 4);
    AMX_BEGIN(&config);
}

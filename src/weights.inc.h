/* Types of packed weights that are narrower than lanes: what C knows of each, from pack to the passes of a product.
 * Whoever asks for more than that finds it by these answers. fastattn/_args/weight_types.py has the same for NumPy.
 *
 *   FA_BF16  two features in a word
 *   FA_I8    four, times a scale of their output feature
 *   FA_Q8    four, times a scale of their block, plus its minimum
 *   FA_I4    eight, the same: places in a table of sixteen values. A byte holds one of features 0 .. 3 and, above, one of
 *            4 .. 7, so that both halves are four bytes for the integer dot product
 *
 * Literals  weight, but in functions of pack.
 * Exports   WITH_NARROW, WITH_INTEGERS; features_per_step, in_blocks, by_row, by_table; v_value, v_widen, v_places,
 *           v_code_bytes; v_rounded_bytes, v_store_code, code_bytes, join_codes. */
#pragma once
#include "convert.inc.h"

/* WITH_NARROW(weight, name, call): the call, in which `name` is the type as a literal. WITH_INTEGERS: of those in blocks
 * that multiply int8. */
#define WITH_NARROW(weight, name, ...)                                                                                 \
    do {                                                                                                               \
        if ((weight) == FA_BF16) WITH_LITERAL(name, FA_BF16, __VA_ARGS__)                                              \
        else if ((weight) == FA_I8) WITH_LITERAL(name, FA_I8, __VA_ARGS__)                                             \
        else if ((weight) == FA_Q8) WITH_LITERAL(name, FA_Q8, __VA_ARGS__)                                             \
        else if ((weight) == FA_I4) WITH_LITERAL(name, FA_I4, __VA_ARGS__)                                             \
    } while (0)
#define WITH_INTEGERS(weight, name, ...)                                                                               \
    do {                                                                                                               \
        if ((weight) == FA_Q8) WITH_LITERAL(name, FA_Q8, __VA_ARGS__)                                                  \
        else if ((weight) == FA_I4) WITH_LITERAL(name, FA_I4, __VA_ARGS__)                                             \
    } while (0)

/* Input features of a panel's step. */
INLINE int64_t features_per_step(fa_dtype weight)
{
    return weight == FA_I4 ? 8 : weight == FA_I8 || weight == FA_Q8 ? 4 : weight == FA_BF16 ? 2 : 1;
}

/* Whether each block of input features has a scale, and whether each output feature has one. */
INLINE int in_blocks(fa_dtype weight) { return weight == FA_I4 || weight == FA_Q8; }
INLINE int by_row(fa_dtype weight) { return weight == FA_I8; }

/* Whether codes are places in a table of sixteen. */
INLINE int by_table(fa_dtype weight) { return weight == FA_I4; }

#if LANE_BITS == 32
/* Feature f of each step, before it is scaled. */
INLINE v_t v_value(fa_dtype weight, int f, vi_t bits, const lane *table)
{
    if (weight == FA_BF16) return (v_t)(f ? bits & (ilane)0xffff0000 : bits << 16);
    if (weight == FA_I8 || weight == FA_Q8) return __builtin_convertvector(bits << (24 - 8 * f) >> 24, v_t);
    if (weight == FA_I4) return v_lookup(table, (vi_t)((vw_t)bits >> (f < 4 ? 8 * f : 8 * f - 28)));
    return (v_t)bits;
}

/* The places of codes, 0 to 15, of features 0 .. 3 (0) or 4 .. 7 (1) of a step of FA_I4, as bytes. */
INLINE vi_t v_places(int half, v_t step)
{
    const vi_t bits = (vi_t)step;
    return (half ? bits >> 4 : bits) & (ilane)0x0f0f0f0f;
}

/* The integers that multiply int8, of the same features of a step, as bytes; `table` is v_table_i8 of those of FA_I4. */
INLINE vi_t v_code_bytes(fa_dtype weight, int half, vi_t table, v_t step)
{
    return by_table(weight) ? v_lookup_i8(table, v_places(half, step)) : (vi_t)step;
}

/* to = quotients, rounded to nearest even, which it returns, too. By a scale that is coarse they may exceed 127. */
INLINE v_t v_rounded_bytes(v_t quotients, char *to)
{
    const v_t most = v_splat(127), magic = v_splat(0x1.8p23f); /* adding it rounds, into the lowest bits */
    const v_t rounded = v_min(most, v_max(-most, quotients)) + magic;
    v_store_i8(to, (vi_t)rounded);
    return rounded - magic;
}

/* How many of the fifteen numbers `middles` are less than x. */
INLINE vi_t v_place(const lane *middles, v_t x)
{
    vi_t place = {0};
    UNROLL_FOR(int step = 8; step; step /= 2) place += (v_lookup(middles, place + (step - 1)) < x) & step;
    return place;
}

/* to = codes of x, which is scaled; returns the integers that multiply int8. `middles` and `integers` are those of
 * FA_I4's table. */
INLINE v_t v_store_code(fa_dtype weight, const lane *middles, const lane *integers, v_t x, char *to)
{
    if (weight == FA_BF16) return v_store_bf16(to, x), x;
    if (weight != FA_I4) return v_rounded_bytes(x, to);
    const vi_t place = v_place(middles, x);
    v_store_i8(to, place);
    return v_lookup(integers, place);
}

/* Bytes of a code that v_store_code writes. */
INLINE int64_t code_bytes(fa_dtype weight) { return weight == FA_BF16 ? 2 : 1; }

/* to = n codes of FA_I4, eight in a word: four in the lower halves of its bytes, the next ones in the upper. */
static void join_codes(const uint8_t *codes, int64_t n, char *to)
{
    typedef uint64_t eight_u __attribute__((aligned(1), may_alias));
    typedef uint32_t word_u __attribute__((aligned(1), may_alias));
    const eight_u *restrict eights = (const eight_u *)codes;
    word_u *restrict words = (word_u *)to;
    for (int64_t j = 0; j < n / 8; j++) words[j] = (uint32_t)(eights[j] | eights[j] >> 28);
}
#else
INLINE v_t v_value(fa_dtype weight, int f, vi_t bits, const lane *table)
{
    return (void)weight, (void)f, (void)table, (v_t)bits;
}
#endif

/* Feature f of each step, widened. */
INLINE v_t v_widen(fa_dtype weight, int f, v_t step, const lane *table, v_t scale, v_t minimum)
{
    const v_t value = v_value(weight, f, (vi_t)step, table);
    return in_blocks(weight) ? v_fma(value, scale, minimum) : value;
}

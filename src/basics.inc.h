/* Small things that every file uses: integers, elements of strided arrays, scratch memory, when to give up.
 *
 * Exports   smaller, larger, round_up, ceil_div; load_int, at; WITH_LITERAL, WITH_FLAG; arena, cut, CUT, CUT_LANES; given_up. */
#pragma once
#include "simd.h"

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
INLINE int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

INLINE int64_t load_int(const char *from)
{
    int64_t x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* Where item (batch b, head h, row i, column j) of an array is. */
INLINE char *at(const fa_array *x, int64_t b, int64_t h, int64_t i, int64_t j)
{
    return x->data + x->batch[b] + h * x->head + i * x->row + j * x->col;
}

/* WITH_LITERAL(name, value, call): the call, in which `name` is the value as a literal. So a kernel's switches on it fold
 * away. */
#define WITH_LITERAL(name, value, ...)                                                                                 \
    {                                                                                                                  \
        const int name = value;                                                                                        \
        __VA_ARGS__;                                                                                                   \
    }

/* WITH_FLAG(flag, name, call): the call, in which `name` is whether `flag`, as a literal. */
#define WITH_FLAG(flag, name, ...)                                                                                     \
    do {                                                                                                               \
        if (flag) WITH_LITERAL(name, 1, __VA_ARGS__)                                                                   \
        else WITH_LITERAL(name, 0, __VA_ARGS__)                                                                        \
    } while (0)

/* Memory that is cut into arrays, each at a cache line. From NULL nothing is cut, but `used` is counted all the same:
 * so a plan learns how much a kernel needs. Functions that cut a kernel's scratch return the bytes used. */
typedef struct {
    char *memory;
    int64_t used;
} arena;

INLINE void *cut(arena *from, int64_t bytes)
{
    char *piece = from->memory ? from->memory + from->used : NULL;
    from->used += round_up(bytes, 64);
    return piece;
}

/* array = n elements of its type */
#define CUT(from, array, n) ((array) = cut(from, (n) * (int64_t)sizeof *(array)))

/* Several arrays of n lanes; their addresses are given. */
#define CUT_LANES(from, n, ...)                                                                                        \
    do {                                                                                                               \
        lane **const each[] = {__VA_ARGS__};                                                                           \
        for (size_t i = 0; i < sizeof each / sizeof each[0]; i++) CUT(from, *each[i], n);                              \
    } while (0)

/* Whether a task is to end where it is. It asks about every millisecond: the answer may take a look at the clock. */
INLINE int given_up(const fa_watch *watch) { return watch && watch->gives_up(watch->caller); }

/* A number as it must be, and whether it is that. */
#ifndef COMPARE_H
#define COMPARE_H

#include "arrays.h"

#include <float.h>

/* A number, and how far off it another may be. INFINITY: any number will do, and NaN. */
typedef struct {
    double value, error;
} near;

static double eps_of(fa_dtype dtype)
{
    return dtype == FA_F64 ? DBL_EPSILON : dtype == FA_F32 ? FLT_EPSILON : dtype == FA_F16 ? 0x1p-10 : 0x1p-7;
}

/* x, accumulated in the lane type, as an element of `dtype` stores it. */
static near stored(near x, fa_dtype dtype)
{
    x.error += eps_of(dtype) / 2 * (fabs(x.value) + x.error) + (dtype == FA_F16 ? 0x1p-25 : FLT_MIN);
    return x;
}

/* Says what is wrong with element (b, h, i, j) of an array that was computed twice, or NULL. */
static const char *differs(const char *name, const fa_array *out, const fa_array *other, int64_t b, int64_t h,
                           int64_t i, int64_t j, near want)
{
    static char wrong[200];
    const double got = get(out, b, h, i, j), again = get(other, b, h, i, j);
    const int near_enough = got == want.value || fabs(got - want.value) <= want.error || isinf(want.error);
    const int right = isnan(want.value) ? isnan(got) : near_enough;
    const int same = isnan(got) ? isnan(again) : memcmp(&got, &again, sizeof got) == 0;
    if (right && same) return NULL;
    const int at = snprintf(wrong, sizeof wrong, "%s[%d, %d, %d, %d] is ", name, (int)b, (int)h, (int)i, (int)j);
    if (!right) snprintf(wrong + at, sizeof wrong - at, "%.9g, not %.9g within %.3g", got, want.value, want.error);
    else snprintf(wrong + at, sizeof wrong - at, "%.17g, and %.17g the second time", got, again);
    return wrong;
}

#define BETWEEN_ROWS "something was written between the rows of out"
#define UNALIGNED "scratch sizes that do not keep memory aligned"

#endif

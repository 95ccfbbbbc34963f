/* The numbers of the largest of many scores, in ascending order: by bisection between the least and the largest score.
 * Equal scores are listed in their order. NaN is larger than all.
 *
 * Exports   largest_scratch, cut_largest, list_largest. */
#pragma once
#include "normalisers.inc.h"

typedef struct {
    ilane *order, *narrow; /* as many as there are scores, and a vector more */
} largest_scratch;

static void cut_largest(arena *from, int64_t n, largest_scratch *scratch)
{
    CUT(from, scratch->order, round_up(n, LANES) + LANES);
    CUT(from, scratch->narrow, round_up(n, LANES) + LANES);
}

/* Scores as integers in the same order, NaN above all, -0 as 0; and the least and the largest of them. Behind the n, up to
 * a whole vector, stands what is below all. */
static void order_scores(const lane *s, int64_t n, ilane *order, ilane *low, ilane *high)
{
    const ilane most = (ilane)((wlane)-1 >> 1);
    const vi_t nan = (vi_t){0} + most, none = (vi_t){0} - most - 1;
    vi_t least = nan, largest = none, lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    for (int64_t j = 0; j < n; j += LANES) {
        const v_t x = v_load_part(s + j, n - j) + v_splat(0);
        const vi_t there = lanes < (vi_t){0} + (ilane)smaller(n - j, LANES);
        const vi_t bits = (vi_t)v_select(x != x, (v_t)nan, (v_t)ordered((vi_t)x));
        const vi_t seen = (vi_t)v_select(there, (v_t)bits, (v_t)none);
        v_store(order + j, (v_t)seen);
        largest = v_max_i(largest, seen);
        least = ~v_max_i(~least, ~(vi_t)v_select(there, (v_t)bits, (v_t)nan));
    }
    *low = most, *high = -most - 1;
    for (int i = 0; i < LANES; i++) {
        if (least[i] < *low) *low = least[i];
        if (largest[i] > *high) *high = largest[i];
    }
}

/* How many of n are above `limit`; what stands behind them is not. */
static int64_t count_above(const ilane *order, int64_t n, ilane limit)
{
    const vi_t than = (vi_t){0} + limit;
    vi_t count[4] = {{0}};
    int64_t j = 0, sum = 0;
    for (; j + 4 * LANES <= n; j += 4 * LANES)
        UNROLL_FOR(int i = 0; i < 4; i++) count[i] -= (vi_t)v_load(order + j + i * LANES) > than;
    for (; j < n; j += LANES) count[0] -= (vi_t)v_load(order + j) > than;
    count[0] += count[1] + count[2] + count[3];
    for (int i = 0; i < LANES; i++) sum += count[0][i];
    return sum;
}

/* Of n those above `low` and up to `high`, in order, and a vector of what is below all; their number. */
static int64_t narrow_to(const ilane *order, int64_t n, ilane low, ilane high, ilane *to)
{
    const vi_t below = (vi_t){0} + low, above = (vi_t){0} + high;
    int64_t kept = 0;
    for (int64_t j = 0; j < n; j += LANES) {
        const vi_t x = (vi_t)v_load(order + j);
        kept += v_pack_lanes(to + kept, (x > below) & ~(x > above), x);
    }
    v_store(to + kept, (v_t)((vi_t){0} - (ilane)((wlane)-1 >> 1) - 1));
    return kept;
}

/* The k-th largest of n, which lie in [low, high], or the least integer that as many are at least: by bisection, in at
 * most as many passes as a lane has bits. Passes get shorter: those that are known to lie outside are dropped. */
static ilane nth_largest(const fa_watch *watch, const ilane *order, int64_t n, int64_t k, ilane low, ilane high,
                         ilane *narrow)
{
    int64_t from_low = n, above_high = 0;
    while (low < high) {
        const ilane middle = (ilane)((wlane)low + ((wlane)high - (wlane)low) / 2);
        const int64_t above = count_above(order, n, middle);
        if (above >= k) low = middle + 1, from_low = above;
        else high = middle, above_high = above;
        if (above == k || (n > PART_K && given_up(watch))) break;
        if (2 * (from_low - above_high) > n) continue;
        n = from_low = narrow_to(order, n, low - 1, high, narrow);
        order = narrow, k -= above_high, above_high = 0;
    }
    return low;
}

/* The numbers of those of order [j, end) that are above `limit`, counted from `base`; their number. */
static int64_t list_above(const ilane *order, int64_t j, int64_t end, ilane limit, int64_t base, ilane *list,
                          int64_u *to)
{
    const vi_t than = (vi_t){0} + limit;
    vi_t lanes;
    int64_t listed = 0;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    while (j < end) {
        const int64_t first = j, stop = smaller(j + PART_K, end);
        int64_t n = 0;
        for (; j < stop; j += LANES) {
            const vi_t there = lanes < (vi_t){0} + (ilane)smaller(stop - j, LANES);
            const vi_t takes = ((vi_t)v_load(order + j) > than) & there;
            n += v_pack_lanes(list + n, takes, lanes + (ilane)(j - first));
        }
        for (int64_t i = 0; i < n; i++) to[listed + i] = base + first + list[i];
        listed += n, j = stop;
    }
    return listed;
}

/* Which place the n-th of those that are `same` has. */
static int64_t place_of_nth(const ilane *order, int64_t n, ilane same)
{
    const vi_t x = (vi_t){0} + same;
    for (int64_t j = 0;; j += LANES) {
        const vi_t equal = (vi_t)v_load(order + j) == x;
        int64_t some = 0;
        for (int i = 0; i < LANES; i++) some -= equal[i];
        if (some < n) {
            n -= some;
            continue;
        }
        for (int i = 0;; i++)
            if (equal[i] && !--n) return j + i;
    }
}

/* The numbers of the k largest of n scores, 1 <= k < n, in ascending order, counted from `base`. */
static void list_largest(const fa_watch *watch, const lane *s, int64_t n, int64_t k, int64_t base,
                         largest_scratch *scratch, int64_u *to)
{
    ilane low, high;
    order_scores(s, n, scratch->order, &low, &high);
    const ilane limit = nth_largest(watch, scratch->order, n, k, low, high, scratch->narrow);
    if (n > PART_K && given_up(watch)) return;
    const int64_t ties = k - count_above(scratch->order, n, limit);
    const int64_t last = ties ? place_of_nth(scratch->order, ties, limit) + 1 : 0;
    const int64_t listed = list_above(scratch->order, 0, last, limit - 1, base, scratch->narrow, to);
    list_above(scratch->order, last, n, limit, base, scratch->narrow, to + listed);
}

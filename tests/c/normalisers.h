/* Sparsemax, entmax-1.5 and the softmax of the k largest, by sorting, in double precision. */
#ifndef NORMALISERS_H
#define NORMALISERS_H

#include "reference.h"

/* Whether a key has a probability, and so whether its value reaches the result: no, perhaps or surely. */
typedef enum { SURELY_NOT, PERHAPS, SURELY } support;

static int descending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* The scores that are attended, in falling order, relative to the largest; returns how many. */
static int64_t sorted_scores(const fa_attention_args *a, const score *s, double *sorted)
{
    int64_t n = 0;
    FOR(j, a->len_k)
    if (s[j].size != -1) sorted[n++] = s[j].value;
    qsort(sorted, (size_t)n, sizeof *sorted, descending);
    for (int64_t j = n - 1; j >= 0; j--) sorted[j] -= sorted[0];
    return n;
}

/* The threshold below the largest score: Martins and Astudillo 2016, algorithm 1. */
static double sparsemax_threshold(const double *z, int64_t n)
{
    double sum = 0, tau = -1;
    FOR(j, n)
    {
        sum += z[j];
        if (1 + (double)(j + 1) * z[j] > sum) tau = (sum - 1) / (double)(j + 1);
    }
    return tau;
}

/* The threshold of halved scores for entmax-1.5: Peters, Niculae and Martins 2019, algorithm 2. */
static double entmax15_threshold(const double *z, int64_t n)
{
    double sum = 0, squares = 0, tau = -1;
    FOR(j, n)
    {
        const double half = z[j] / 2, count = (double)(j + 1);
        sum += half, squares += half * half;
        const double mean = sum / count, spread = squares - count * mean * mean, rest = (1 - spread) / count;
        const double next = mean - sqrt(fmax(rest, 0));
        if (next <= half) tau = next;
    }
    return tau;
}

/* The probabilities p (len_k) of a row, and which keys have one. A threshold is off by no more than scores are. Near
 * the threshold, an error of a score may make a probability of 0 positive. */
static void sparse_probabilities(const fa_attention_args *a, int squared, const score *s, near *p, support *has)
{
    const double eps = eps_of(lane_of(a->q.dtype));
    double *sorted = calloc((size_t)a->len_k + 1, sizeof *sorted), max = -INFINITY, size = 0;
    const int64_t n = sorted_scores(a, s, sorted);
    const double tau = squared ? entmax15_threshold(sorted, n) : sparsemax_threshold(sorted, n);
    FOR(j, a->len_k) max = fmax(max, s[j].value), size = fmax(size, s[j].size);
    const double error = eps * (4 * size + steps_of(a));
    FOR(j, a->len_k)
    {
        const double z = s[j].size == -1 ? -INFINITY : (s[j].value - max) / (1 + squared), above = fmax(0, z - tau);
        p[j] = (near){above, z > tau - error ? error : 0};
        if (squared) p[j] = (near){above * above, p[j].error * (2 * above + error)};
        p[j].error += eps * steps_of(a) * p[j].value;
        has[j] = z > tau + error ? SURELY : z < tau - error ? SURELY_NOT : PERHAPS;
    }
    free(sorted);
}

/* Whether key j is among the k best of the row, of which the first of equal ones count; `perhaps` where rounding may
 * decide. `least` is the k-th best score. */
static support among_best(const fa_attention_args *a, int64_t k, double least, const score *s, int64_t j)
{
    const double eps = eps_of(lane_of(a->q.dtype)), from_least = s[j].value - least;
    int64_t before = 0, perhaps = 0;
    if (fabs(from_least) > 1e-3 * (1 + s[j].size)) return from_least > 0 ? SURELY : SURELY_NOT;
    FOR(i, a->len_k)
    {
        if (i == j || s[i].size == -1) continue;
        const double gap = s[i].value - s[j].value, margin = 4 * eps * (s[i].size + s[j].size + 1);
        if (gap == 0) before += i < j;
        else if (fabs(gap) <= margin) perhaps++;
        else before += gap > 0;
    }
    return before >= k ? SURELY_NOT : before + perhaps < k ? SURELY : PERHAPS;
}

/* As above for the k largest. Keys that are only perhaps among them have nearly equal scores; each of them has that
 * probability, or 0. */
static void best_probabilities(const fa_attention_args *a, int64_t k, const score *s, near *p, support *has)
{
    softmax_row r = {.max = -INFINITY};
    int64_t left = k;
    double *sorted = calloc((size_t)a->len_k + 1, sizeof *sorted);
    const int64_t n = sorted_scores(a, s, sorted);
    FOR(j, a->len_k) r.max = fmax(r.max, s[j].value);
    FOR(j, a->len_k)
    {
        has[j] = s[j].size == -1 ? SURELY_NOT : n <= k ? SURELY : among_best(a, k, r.max + sorted[k - 1], s, j);
        left -= has[j] == SURELY;
    }
    free(sorted);
    FOR(j, a->len_k)
    {
        if (has[j] == SURELY_NOT || (has[j] == PERHAPS && left-- <= 0)) continue;
        r.sum += exp(s[j].value - r.max);
        r.size = fmax(r.size, s[j].size);
    }
    FOR(j, a->len_k)
    {
        p[j] = has[j] == SURELY_NOT ? (near){0, 0} : probability(a, &r, s[j]);
        if (has[j] == PERHAPS) p[j] = (near){p[j].value / 2, p[j].value / 2 + p[j].error};
    }
}

/* out (head_dim_v) of a row. The values of keys without a probability do not reach it. */
static void weigh_supported(const fa_attention_args *a, const near *p, const support *has, const double *v,
                            expected *out)
{
    FOR(j, a->len_k) FOR(d, has[j] == SURELY_NOT ? 0 : a->head_dim_v)
    {
        const double value = v[j * a->head_dim_v + d];
        if (isnan(value) && has[j] == PERHAPS) {
            out[d].tolerance = INFINITY;
            continue;
        }
        out[d].value += p[j].value * value;
        out[d].tolerance += p[j].error * fabs(value);
    }
    round_out(a, out);
}

#endif

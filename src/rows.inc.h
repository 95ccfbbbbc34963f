/* One pass over rows: norms, softmax, activations. A row is read into lanes (x, + residual), which stay in the
 * first-level cache for the passes over it, and written once. */

/* The sum of f(z[j]) over a row: four accumulators, since one would wait for itself. */
typedef enum { SUM, SUM_SQUARES } sum_kind;

INLINE lane row_sum_of(sum_kind kind, const lane *z, int64_t n, lane center)
{
    v_t sum[4] = {v_splat(0), v_splat(0), v_splat(0), v_splat(0)};
    int64_t j = 0;
#define ADD(s, value)                                                                                                  \
    do {                                                                                                               \
        const v_t y = (value)-v_splat(center);                                                                         \
        s = kind == SUM ? s + y : v_fma(y, y, s);                                                                      \
    } while (0)
    for (; j + 4 * LANES <= n; j += 4 * LANES) UNROLL for (int u = 0; u < 4; u++) ADD(sum[u], v_load(z + j + u * LANES));
    for (; j + LANES <= n; j += LANES) ADD(sum[0], v_load(z + j));
#undef ADD
    lane rest = v_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; j < n; j++) rest += kind == SUM ? z[j] - center : (z[j] - center) * (z[j] - center);
    return rest;
}

/* y = (z - mean) / sqrt(variance + eps) weight + bias; z and y may be one. */
INLINE void norm_row(const fa_rows_args *a, const lane *z, lane *y)
{
    const lane *weight = (const lane *)a->weight, *bias = (const lane *)a->bias;
    const int64_t n = a->n;
    const lane mean = a->kind == FA_LAYER_NORM ? row_sum_of(SUM, z, n, 0) / (lane)n : 0;
    const lane factor = 1 / LANE_SQRT(row_sum_of(SUM_SQUARES, z, n, mean) / (lane)n + (lane)a->eps);
    for (int64_t j = 0; j < n; j += LANES) {
        const int64_t count = n - j < LANES ? n - j : LANES;
#define AT(p) (count == LANES ? v_load((p) + j) : v_load_n((p) + j, count))
        v_t x = (AT(z) - v_splat(mean)) * v_splat(factor);
        if (weight) x = x * AT(weight);
        if (bias) x = x + AT(bias);
#undef AT
        if (count == LANES) v_store(y + j, x);
        else v_store_n(y + j, x, count);
    }
}

/* y = softmax(z); nothing but -inf gives 0. z is padded to whole vectors with -inf. */
INLINE void softmax_row(lane *z, int64_t n)
{
    v_t max = v_splat(-INFINITY), sum = v_splat(0);
    for (int64_t j = 0; j < n; j += LANES) max = v_max(max, v_load(z + j));
    const lane most = v_max_lanes(max);
    const v_t base = v_splat(most == -INFINITY ? 0 : most);
    for (int64_t j = 0; j < n; j += LANES) {
        const v_t p = v_exp(v_load(z + j) - base);
        sum += p;
        v_store(z + j, p);
    }
    const lane total = v_sum(sum);
    const v_t factor = v_splat(total == 0 ? 0 : 1 / total);
    for (int64_t j = 0; j < n; j += LANES) v_store(z + j, v_load(z + j) * factor);
}

INLINE void activate_row(fa_activation activation, lane *z, int64_t n)
{
    for (int64_t j = 0; j < n; j += LANES) v_store(z + j, v_activate(activation, v_load(z + j)));
}

/* Bytes of scratch for rows of n: two of lanes, padded to whole vectors. */
static int64_t rows_scratch_bytes(int64_t n)
{
    return 2 * (round_up(n, LANES) * (int64_t)sizeof(lane));
}

static void rows_run(const fa_rows_args *a, int64_t begin, int64_t end, void *scratch)
{
    const int64_t n = a->n, padded = round_up(n, LANES);
    lane *z = scratch, *up = z + padded;
    if (!n) return;
    for (int64_t r = begin; r < end; r++) {
        if (padded != n) v_store(z + padded - LANES, v_splat(a->kind == FA_SOFTMAX ? -INFINITY : 0));
        load_row(a->dtype, a->x + r * a->x_row, n, 1, z);
        if (a->residual) add_row(a->dtype, a->residual + r * a->residual_row, n, z);
        if (a->total) store_row(a->dtype, z, n, 1, a->total + r * a->total_row);
        switch (a->kind) {
        case FA_SOFTMAX: softmax_row(z, n); break;
        case FA_ACTIVATE:
#define ACTIVATE(activation)                                                                                           \
    case activation: activate_row(activation, z, padded); break;
            switch (a->activation) {
                ACTIVATE(FA_NONE) ACTIVATE(FA_RELU) ACTIVATE(FA_GELU) ACTIVATE(FA_GELU_TANH) ACTIVATE(FA_SILU)
                ACTIVATE(FA_SIGMOID)
            }
#undef ACTIVATE
            if (!a->up) break;
            load_row(a->dtype, a->up + r * a->up_row, n, 1, up);
            for (int64_t j = 0; j < padded; j += LANES) v_store(z + j, v_load(z + j) * v_load(up + j));
            break;
        default: norm_row(a, z, z);
        }
        store_row(a->dtype, z, n, 1, a->out + r * a->out_row);
    }
}

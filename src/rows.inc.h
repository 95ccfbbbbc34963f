/* One pass over rows: norms, softmax, activations. A row is read into lanes (x, + residual), which stay in the
 * first-level cache for the passes over it, and written once. */

/* Elements of a row between two looks at the clock: a fraction of a millisecond. */
#define ROW_ASKS (1 << 18)
_Static_assert(ROW_ASKS % (4 * LANES) == 0, "blocks of a row are whole rounds of row_sum_of");

/* for blocks [begin, end) of n elements, until the call is given up; what comes after is then of no use to anybody */
#define EACH_BLOCK(watch, n, begin, end)                                                                               \
    for (int64_t begin = 0, end = smaller(n, ROW_ASKS); begin < (n) && !(begin && given_up(watch));                    \
         begin = end, end = smaller(n, end + ROW_ASKS))

/* The sum of f(z[j]) over a row: four accumulators, since one would wait for itself. */
typedef enum { SUM, SUM_SQUARES } sum_kind;

INLINE lane row_sum_of(const fa_watch *watch, sum_kind kind, const lane *z, int64_t n, lane center)
{
    v_t sum[4] = {v_splat(0), v_splat(0), v_splat(0), v_splat(0)};
    int64_t j = 0;
#define ADD(s, value)                                                                                                  \
    do {                                                                                                               \
        const v_t y = (value) - v_splat(center);                                                                       \
        s = kind == SUM ? s + y : v_fma(y, y, s);                                                                      \
    } while (0)
    EACH_BLOCK(watch, n, begin, end)
        for (; j + 4 * LANES <= end; j += 4 * LANES)
            UNROLL_FOR(int u = 0; u < 4; u++) ADD(sum[u], v_load(z + j + u * LANES));
    if (n - j >= 4 * LANES) return 0; /* given up */
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
    const lane mean = a->kind == FA_LAYER_NORM ? row_sum_of(a->watch, SUM, z, n, 0) / (lane)n : 0;
    const lane factor = 1 / LANE_SQRT(row_sum_of(a->watch, SUM_SQUARES, z, n, mean) / (lane)n + (lane)a->eps);
    EACH_BLOCK(a->watch, n, begin, end)
        for (int64_t j = begin; j < end; j += LANES) {
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
INLINE void softmax_row(const fa_watch *watch, lane *z, int64_t n)
{
    v_t max = v_splat(-INFINITY), sum = v_splat(0);
    EACH_BLOCK(watch, n, begin, end)
        for (int64_t j = begin; j < end; j += LANES) max = v_max(max, v_load(z + j));
    const lane most = v_max_lanes(max);
    const v_t base = v_splat(most == -INFINITY ? 0 : most);
    EACH_BLOCK(watch, n, begin, end)
        for (int64_t j = begin; j < end; j += LANES) {
            const v_t p = v_exp(v_load(z + j) - base);
            sum += p;
            v_store(z + j, p);
        }
    const lane total = v_sum(sum);
    const v_t factor = v_splat(total == 0 ? 0 : 1 / total);
    EACH_BLOCK(watch, n, begin, end)
        for (int64_t j = begin; j < end; j += LANES) v_store(z + j, v_load(z + j) * factor);
}

INLINE void activate_row(const fa_watch *watch, fa_activation activation, lane *z, int64_t n)
{
    EACH_BLOCK(watch, n, begin, end)
        for (int64_t j = begin; j < end; j += LANES) v_store(z + j, v_activate(activation, v_load(z + j)));
}

/* Bytes of scratch for rows of n: two of lanes, padded to whole vectors. */
static int64_t rows_scratch_bytes(int64_t n) { return 2 * (round_up(n, LANES) * (int64_t)sizeof(lane)); }

static void rows_run(const fa_rows_args *a, int64_t begin, int64_t end, void *scratch)
{
    const int64_t n = a->n, padded = round_up(n, LANES);
    lane *z = scratch, *up = z + padded;
    if (!n) return;
    for (int64_t r = begin; r < end; r++) {
        if (padded != n) v_store(z + padded - LANES, v_splat(a->kind == FA_SOFTMAX ? -INFINITY : 0));
        EACH_BLOCK(a->watch, n, j, stop) {
            const int64_t at = j * dtype_size(a->dtype), count = stop - j;
            load_row(a->dtype, a->x + r * a->x_row + at, count, 1, z + j);
            if (a->residual) add_row(a->dtype, a->residual + r * a->residual_row + at, count, z + j);
            if (a->total) store_row(a->dtype, z + j, count, 1, a->total + r * a->total_row + at);
        }
        switch (a->kind) {
        case FA_SOFTMAX: softmax_row(a->watch, z, n); break;
        case FA_ACTIVATE:
#define ACTIVATE(activation)                                                                                           \
    case activation: activate_row(a->watch, activation, z, padded); break;
            switch (a->activation) {
                ACTIVATE(FA_NONE)
                ACTIVATE(FA_RELU) ACTIVATE(FA_GELU) ACTIVATE(FA_GELU_TANH) ACTIVATE(FA_SILU) ACTIVATE(FA_SIGMOID)
            }
#undef ACTIVATE
            if (!a->up) break;
            EACH_BLOCK(a->watch, n, j, stop) {
                load_row(a->dtype, a->up + r * a->up_row + j * dtype_size(a->dtype), stop - j, 1, up + j);
                for (int64_t i = j; i < stop; i += LANES) v_store(z + i, v_load(z + i) * v_load(up + i));
            }
            break;
        default: norm_row(a, z, z);
        }
        EACH_BLOCK(a->watch, n, j, stop)
            store_row(a->dtype, z + j, stop - j, 1, a->out + r * a->out_row + j * dtype_size(a->dtype));
    }
}

/* Partial results over some of the keys: their layout, their merge in order, and the last step of every row.
 *
 * A partial of R rows is row_max (R), row_sum (R), acc (R, acc_row): the unnormalised state of the online softmax, the
 * associative form of Rabe & Staats 2021. acc_row is head_dim_v rounded up to whole vectors. */
typedef struct {
    lane *row_max, *row_sum, *acc;
    int64_t acc_row;
} partial;

/* Lanes of a partial; rows are rounded up to whole vectors too. */
static int64_t partial_lanes(int64_t rows, int64_t head_dim_v)
{
    return round_up((2 + round_up(head_dim_v, LANES)) * round_up(rows, LANES), 64 / sizeof(lane));
}

static partial partial_at(void *memory, int64_t rows, int64_t head_dim_v)
{
    const int64_t padded = round_up(rows, LANES);
    lane *p = memory;
    return (partial){p, p + padded, p + 2 * padded, round_up(head_dim_v, LANES)};
}

/* into = into + from, over disjoint keys. A partial of no keys changes nothing. */
static void partial_merge(const partial *into, const partial *from, int64_t rows)
{
    for (int64_t r = 0; r < rows; r++) {
        const lane a = into->row_max[r], b = from->row_max[r];
        const lane max = a > b ? a : b; /* NaN on either side is in the sums already */
        if (max == -INFINITY) {
            into->row_sum[r] += from->row_sum[r]; /* 0, or NaN from a row with nothing but NaN */
            continue;
        }
        const lane scale_a = lane_exp(a - max), scale_b = lane_exp(b - max);
        into->row_max[r] = max;
        into->row_sum[r] = into->row_sum[r] * scale_a + from->row_sum[r] * scale_b;
        lane *x = into->acc + r * into->acc_row;
        const lane *y = from->acc + r * from->acc_row;
        for (int64_t d = 0; d < into->acc_row; d += LANES)
            v_store(x + d, v_fma(v_load(y + d), v_splat(scale_b), v_load(x + d) * v_splat(scale_a)));
    }
}

/* Sinks, normalisation, conversion: writes out and lse of the block's rows. */
static void partial_finish(const fa_attention_args *a, const row_block *t, const partial *p)
{
    EACH_ROW(t, r, id)
    {
        lane max = p->row_max[r], sum = p->row_sum[r], *acc = p->acc + r * p->acc_row, sink = -INFINITY;
        if (a->sinks.data) memcpy(&sink, at(&a->sinks, t->b, id.head, 0, 0), sizeof sink);
        lane scale = 1;
        if (sink != -INFINITY) { /* enters the denominator only */
            const lane m = max > sink ? max : sink;
            scale = max == -INFINITY ? 0 : lane_exp(max - m);
            sum = sum * scale + lane_exp(sink - m);
            max = m;
        }
        if (sum == 0) sum = row_attends(a, t, id) ? NAN : 0;
        const lane factor = sum == 0 ? 0 : scale / sum;
        store_row(a->out.dtype, acc, a->head_dim_v, factor, at(&a->out, t->b, id.head, id.query, 0));
        if (a->lse.data) {
            const lane lse = sum == 0 ? -(lane)INFINITY : (lane)(max + log((double)sum));
            memcpy(at(&a->lse, t->b, id.head, id.query, 0), &lse, sizeof lse);
        }
    }
}

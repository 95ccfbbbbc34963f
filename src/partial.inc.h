/* Partial results, over some of the keys: their layout, their merge in order, and the last step of every row.
 *
 * A partial of R rows is row_max (R), row_sum (R), acc (R, acc_row): the state of the online softmax before
 * normalisation, the associative form of Rabe & Staats 2021. row_max is -inf where the row has met no key that it
 * attends, and -LANE_MAX where it has, and every score was -inf. The sum is 0 in both cases; the result is 0 in the
 * first and NaN in the second. acc_row is head_dim_v rounded up to whole vectors. Behind these lies as much memory
 * again, `low`, for what sums of several partials lose to rounding: so the error of a result does not grow with their
 * number. The last fields are there if statistics are asked for.
 *
 * Requires  ranges.inc.h, softmax.inc.h, statistics.inc.h.
 * Exports   partial, partial_at, partial_from, row_top; partial_begin_merging, partial_merge, partial_end_merging;
 *           partial_finish. */
typedef struct {
    lane *row_max, *row_sum, *acc;
    int64_t acc_row, low; /* x[i + low] is what x[i] has lost, where x is row_sum or acc */
    lane *row_log;        /* (R), softmax.inc.h; or NULL */
    top_list top;         /* of row 0; those of the others follow */
} partial;

/* Lays out a partial of `n_rows` rows in `memory`, and writes where its arrays are to `part`. Returns the bytes that it
 * takes: to ask for these alone, pass NULL for both. */
static int64_t partial_at(const fa_attention_args *a, int64_t n_rows, void *memory, partial *part)
{
    arena from = {.memory = memory};
    partial made = {.acc_row = round_up(a->head_dim_v, LANES)};
    n_rows = round_up(n_rows, LANES);
    CUT(&from, made.row_max, n_rows);
    CUT(&from, made.row_sum, n_rows);
    CUT(&from, made.acc, n_rows * made.acc_row);
    made.low = from.used / (int64_t)sizeof(lane);
    cut(&from, from.used);
    if (a->stats.entropy.data) CUT(&from, made.row_log, n_rows);
    CUT(&from, made.top.score, n_rows * a->stats.n_top);
    CUT(&from, made.top.key, n_rows * a->stats.n_top);
    if (part) *part = made;
    return from.used;
}

/* The largest scores of row r. */
INLINE top_list row_top(const fa_attention_args *a, const partial *part, int64_t r)
{
    return (top_list){part->top.score + r * a->stats.n_top, part->top.key + r * a->stats.n_top};
}

/* The same partial from row r on. */
INLINE partial partial_from(const fa_attention_args *a, const partial *part, int64_t r)
{
    partial rest = *part;
    rest.row_max += r, rest.row_sum += r, rest.acc += r * part->acc_row;
    if (part->row_log) rest.row_log += r;
    rest.top = row_top(a, part, r);
    return rest;
}

/* Nothing is lost yet: called between the first partial and the second. */
static void partial_begin_merging(const partial *part)
{
    memset(part->row_max + part->low, 0, part->low * sizeof(lane));
}

/* sum = sum * scale + x, and low = low * scale + what that addition rounds away: Knuth's two-sum. Nothing where the sum
 * is Inf or NaN. */
INLINE void add_exactly(lane *sum, lane *low, v_t scale, v_t x)
{
    const v_t old = v_load(sum) * scale, new = old + x, added = new - old;
    const v_t lost = (old - (new - added)) + (x - added);
    v_store(sum, new);
    v_store(low, v_fma(v_load(low), scale, v_select(lost == lost, lost, v_splat(0))));
}

/* into = into + from, over disjoint keys. A partial of no keys changes nothing. */
static void partial_merge(const fa_attention_args *a, const partial *into, const partial *from, int64_t n_rows)
{
    for (int64_t r = 0; a->stats.n_top && r < n_rows; r++)
        top_merge(a->stats.n_top, row_top(a, into, r), row_top(a, from, r));
    for (int64_t r0 = 0; r0 < n_rows; r0 += LANES) {
        const v_t max_a = v_load(into->row_max + r0), max_b = v_load(from->row_max + r0);
        const v_t max = v_select(max_a > max_b, max_a, max_b); /* NaN on either side is in the sums already */
        const v_t base = v_base(max);
        const v_t scale_a = v_exp(max_a - base), scale_b = v_exp(max_b - base);
        lane *sum = into->row_sum + r0;
        if (into->row_log) {
            const v_t down_a = v_log_weight(max_a - base), down_b = v_log_weight(max_b - base);
            const v_t log_a = v_fma(v_load(sum), down_a, v_load(into->row_log + r0));
            const v_t log_b = v_fma(v_load(from->row_sum + r0), down_b, v_load(from->row_log + r0));
            v_store(into->row_log + r0, v_fma(scale_a, log_a, scale_b * log_b));
        }
        v_store(into->row_max + r0, max);
        add_exactly(sum, sum + into->low, scale_a, v_load(from->row_sum + r0) * scale_b);
        for (int64_t r = r0; r < n_rows && r < r0 + LANES; r++) {
            const v_t mine = v_splat(scale_a[r - r0]), other = v_splat(scale_b[r - r0]);
            lane *x = into->acc + r * into->acc_row;
            const lane *y = from->acc + r * from->acc_row;
            for (int64_t d = 0; d < into->acc_row; d += LANES)
                add_exactly(x + d, x + d + into->low, mine, v_load(y + d) * other);
        }
    }
}

/* Gives back what the sums lost. */
static void partial_end_merging(const partial *part, int64_t n_rows)
{
    for (int64_t i = 0; i < n_rows; i++) part->row_sum[i] += part->row_sum[i + part->low];
    for (int64_t i = 0; i < n_rows * part->acc_row; i += LANES) {
        lane *x = part->acc + i;
        v_store(x, v_load(x) + v_load(x + part->low));
    }
}

/* Sinks, normalisation, conversion: writes out, lse and statistics of the block's rows. */
static void partial_finish(const fa_attention_args *a, const row_block *rows, const partial *part)
{
    EACH_ROW(rows, r, id) {
        lane max = part->row_max[r], sum = part->row_sum[r], *acc = part->acc + r * part->acc_row, sink = -INFINITY;
        if (a->sigmoid) {
            store_row(a->out.dtype, acc, a->head_dim_v, 1, at_row(&a->out, rows, id));
            continue;
        }
        if (a->sinks.data) memcpy(&sink, at(&a->sinks, rows->b, id.head, 0, 0), sizeof sink);
        lane scale = 1;
        if (sink != -INFINITY) { /* enters the denominator only */
            const lane most = max > sink ? max : sink;
            scale = max == -INFINITY ? 0 : lane_exp(max - most);
            sum = sum * scale + lane_exp(sink - most);
            max = most;
        }
        if (sum == 0 && max != -INFINITY) sum = NAN; /* it attends keys, and their every score is -inf */
        const lane factor = sum == 0 ? 0 : scale / sum;
        store_row(a->out.dtype, acc, a->head_dim_v, factor, at_row(&a->out, rows, id));
        if (a->lse.data) {
            const lane lse = sum == 0 ? -(lane)INFINITY : (lane)(max + log((double)sum));
            memcpy(at_row(&a->lse, rows, id), &lse, sizeof lse);
        }
        if (a->stats.norm.data || a->stats.row_max.data || a->stats.entropy.data || a->stats.n_top) {
            const row_sums row = {
                part->row_max[r], part->row_sum[r], part->row_log ? part->row_log[r] : 0, scale, max, sum};
            write_statistics(a, rows->b, id, &row, row_top(a, part, r));
        }
    }
}

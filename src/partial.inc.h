/* Partial results, over some of the keys: their layout, their merge in order, and the last step of every row.
 *
 * A partial of R rows is row_max (R), row_sum (R), acc (R, acc_row): the state of the online softmax before
 * normalisation, the associative form of Rabe & Staats 2021. row_max is -inf where the row has met no key that it
 * attends, and -LANE_MAX where it has, and every score was -inf. The sum is 0 in both cases; the result is 0 in the
 * first and NaN in the second. acc_row is head_dim_v rounded up to whole vectors. Behind these lies as much memory
 * again, `low`, for what sums of several partials lose to rounding: so the error of a result does not grow with their
 * number. The last fields are there if statistics are asked for.
 *
 * Exports   partial, partial_at, partial_from, row_top; partial_begin_merging, partial_merge, partial_end_merging;
 *           takes_pairs, tile_takes_pairs, partial_finish, transposed_finish. */
#pragma once
#include "statistics.inc.h"
#include "hadamard.inc.h"

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

/* What the accumulators of LANES rows are multiplied by at the end, from row r0 of the block on, which is `id`. Writes
 * lse and statistics of these rows. */
static v_t finish_sums(const fa_attention_args *a, const row_block *rows, row_id id, int64_t r0, const partial *part)
{
    v_t max = v_load(part->row_max + r0), sum = v_load(part->row_sum + r0), scale = v_splat(1);
    if (a->sigmoid) return scale;
    const int64_t n = smaller(rows->n - r0, LANES);
    if (a->sinks.data) { /* enters the denominator only */
        row_id of = id;
        v_t sink = v_splat(-INFINITY);
        for (int i = 0; i < n; i++, of = next_row(rows, of))
            sink[i] = *(const lane_u *)at(&a->sinks, rows->b, of.head, 0, 0);
        const vi_t counts = sink != v_splat(-INFINITY), none = max == v_splat(-INFINITY);
        const v_t most = v_select(max > sink, max, sink);
        scale = v_select(counts, v_select(none, v_splat(0), v_exp(max - most)), scale);
        sum = v_select(counts, sum * scale + v_exp(sink - most), sum);
        max = v_select(counts, most, max);
    }
    const vi_t attends = max != v_splat(-INFINITY); /* if so, and the sum is 0, its every score is -inf */
    sum = v_select((sum == v_splat(0)) & attends, v_splat(NAN), sum);
    const int counted = a->stats.norm.data || a->stats.row_max.data || a->stats.entropy.data || a->stats.n_top;
    for (int i = 0; (a->lse.data || counted) && i < n; i++, id = next_row(rows, id)) {
        const int64_t r = r0 + i;
        const lane lse = sum[i] == 0 ? -(lane)INFINITY : (lane)(max[i] + log((double)sum[i]));
        const row_sums row = {part->row_max[r], part->row_sum[r], part->row_log ? part->row_log[r] : 0,
                              scale[i],         max[i],           sum[i]};
        if (a->lse.data) memcpy(at_row(&a->lse, rows, id), &lse, sizeof lse);
        if (counted) write_statistics(a, rows->b, id, &row, row_top(a, part, r));
    }
    const v_t factor = v_select(sum == v_splat(0), v_splat(0), scale / sum);
    return a->dropout > 0 ? factor * v_splat((lane)(1 / (1 - a->dropout))) : factor;
}

/* Whether products of q and k are of bfloat16 pairs. */
INLINE int takes_pairs(const fa_attention_args *a)
{
    return V_BF16_DOT && a->q.dtype == FA_BF16 && a->k.dtype == FA_BF16;
}

/* Whether products of the tile kernel are: of int8, too, whose integers bfloat16 holds exactly, and of int4, rounded. */
INLINE int tile_takes_pairs(const fa_attention_args *a)
{
    return takes_pairs(a) || (V_BF16_DOT && a->q.dtype == FA_BF16 && (a->k.dtype == FA_I8 || a->k.dtype == FA_I4));
}

/* Sinks, normalisation, conversion: writes out, lse and statistics of the block's rows. */
static void partial_finish(const fa_attention_args *a, const row_block *rows, const partial *part)
{
    const int pairs = tile_takes_pairs(a) && a->out.dtype == FA_BF16;
    v_t factor = v_splat(0);
    EACH_ROW(rows, r, id) {
        if (r % LANES == 0) factor = finish_sums(a, rows, id, r, part);
        lane *acc = part->acc + r * part->acc_row;
        if (a->v.dtype == FA_I4) hadamard_row(a->head_dim_v, acc);
        char *out = at_row(&a->out, rows, id);
        if (pairs) store_row_pairs(acc, a->head_dim_v, factor[r % LANES], out); /* as store_square rounds */
        else store_row(a->out.dtype, acc, a->head_dim_v, factor[r % LANES], out);
    }
}

/* Rows of out, from dimension d on: ot (head_dim_v, BLOCK_Q) times `factor`, transposed. No row is at NULL. In
 * bfloat16, pairs of dimensions are transposed. */
INLINE void store_square(fa_dtype dtype, const lane *ot, int64_t d, int64_t head_dim_v, v_t factor, char *const *out)
{
    const int pairs = dtype == FA_BF16, each = pairs ? 2 : 1;
    const int64_t rest = head_dim_v - d, n = smaller(ceil_div(rest, each), LANES);
    v_t square[LANES];
    UNROLL_FOR(int i = 0; i < LANES; i++) {
        const lane *from = ot + (d + i * each) * BLOCK_Q;
        square[i] = i < n ? v_load(from) * factor : v_splat(0);
        if (pairs) square[i] = v_pack_bf16(square[i], i * 2 + 1 < rest ? v_load(from + BLOCK_Q) * factor : v_splat(0));
    }
    v_transpose(square);
    UNROLL_FOR(int i = 0; i < LANES; i++) {
        char *to = out[i] + d * dtype_size(dtype);
        if (!out[i]) break;
        if (pairs && rest < 2 * LANES && rest % 2) memcpy(to, square + i, rest * 2);
        else if (pairs) v_store_part(to, square[i], n);
        else v_store_as_part(dtype, to, square[i], n);
    }
}

/* As partial_finish, of a tile whose accumulators are still transposed: ot (head_dim_v, BLOCK_Q). All lines of
 * out are prefetched first. */
INLINE void tile_finish_as(fa_dtype dtype, const fa_attention_args *a, const row_block *rows, const partial *part,
                           const lane *ot)
{
    const int64_t step = dtype == FA_BF16 ? 2 * LANES : LANES;
    char *first = at_row(&a->out, rows, first_row(rows));
    EACH_ROW(rows, written, of) {
        const char *to = at_nth_row(&a->out, rows, first, written, of);
        for (int64_t byte = 0; byte < a->head_dim_v * dtype_size(dtype); byte += 64) __builtin_prefetch(to + byte, 1);
    }
    char *out[LANES];
    v_t factor = v_splat(0);
    EACH_ROW(rows, r, id) {
        if (r % LANES == 0) factor = finish_sums(a, rows, id, r, part);
        out[r % LANES] = at_nth_row(&a->out, rows, first, r, id);
        if (r + 1 == rows->n && (r + 1) % LANES) out[(r + 1) % LANES] = NULL;
        if (r + 1 != rows->n && (r + 1) % LANES) continue;
        for (int64_t d = 0; d < a->head_dim_v; d += step)
            store_square(dtype, ot + r / LANES * LANES, d, a->head_dim_v, factor, out);
    }
}

static void transposed_finish(const fa_attention_args *a, const row_block *rows, const partial *part, const lane *ot)
{
    WITH_DTYPE(a->out.dtype, dtype, tile_finish_as(dtype, a, rows, part, ot));
}

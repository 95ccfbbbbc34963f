/* Linear attention, a chunk of tokens at a time. For each chunk, with tokens counted from its first:
 *
 *     carry (i) = a_0 ... a_i, between (i, j) = a_{j+1} ... a_i     products: at most 1, and a_t = 0 does no harm
 *     writes = -b (k k^T o between)                                strictly lower triangular; of the delta rule
 *     u = v, or (1 - writes)^-1 b (v - carry k S)                  delta rule: forward substitution, no inverse
 *     scores = q k^T o between                                     lower triangular
 *     out = scores u + carry q S
 *     S = carry (last) S + (k between (last))^T u
 *
 * (Yang et al. 2024, arXiv:2312.06635, 2406.06484, 2412.06464.) Where a call is not causal, every chunk of k and v comes
 * first, and then q reads the last state: out = q S.
 *
 * Scalar and vector decays differ in two places only. With a scalar decay, q k^T is a matrix product, which is
 * multiplied by `between` afterwards; a vector decay is different in each term of a score's sum, so there the keys are
 * multiplied on the way: vector_scores(). And chunks with vector decays are shorter.
 *
 * Requires  recurrent_task.inc.h, linear.inc.h (multiply), tile.inc.h (transpose).
 * Exports   CHUNK, GATED_CHUNK, chunk_scratch, take_chunk_scratch, load_state, store_state, write_chunk, read_chunk,
 *           update_state. */

/* Tokens of a chunk. On AVX-512, 64 is 3 to 15% slower, 128 another 10 to 25%: the scores grow with it. Chunks with
 * vector decays are shorter yet (32 is 3 to 13% slower), since their scores are no matrix product. */
#define CHUNK 32
#define GATED_CHUNK 16

/* Operands that are broadcast have rows of R_LANES. That is a constant, for then one register addresses all rows of a
 * pass; and an odd number of lines, so that the rows do not meet in the same sets of the cache. Longer rows are cut into
 * blocks of R_DEPTH dimensions, and blocks are R_BLOCK lanes apart. */
#define R_DEPTH 128
#define R_LANES (R_DEPTH + 64 / (int64_t)sizeof(lane))
#define R_ROW (R_LANES * (int64_t)sizeof(lane))
#define R_BLOCK (CHUNK * R_LANES)
_Static_assert(GATED_CHUNK <= CHUNK && CHUNK <= R_DEPTH && R_ROW / 64 % 2, "rows of any matrix hold a chunk");
_Static_assert(CHUNK % GROUP == 0 && GATED_CHUNK % LANES == 0 && PANEL % GROUP == 0, "whole vectors");

#define SOLVE_ROWS 8 /* rows solved one by one; they reach the rows behind them by a product */

typedef struct {
    lane *q, *keys;      /* (blocks of R_DEPTH dimensions, CHUNK, R_LANES); read_chunk() multiplies q by carry */
    lane *carried_keys;  /* so: keys times carry, where the delta rule has decays */
    lane *keys_t;        /* (head_dim, R_LANES): keys, transposed; before update_state() faded to the chunk's end */
    lane *gate, *carry;  /* (CHUNK or GATED_CHUNK, decay_row): a_i and carry (i); dimension d at d * decay_step */
    lane *between;       /* (CHUNK, R_LANES): of scalar decays */
    lane *scores;        /* (CHUNK, R_LANES) */
    lane *writes, *beta; /* (CHUNK, R_LANES), (CHUNK): of the delta rule; beta is -b */
    lane *divisor;       /* (CHUNK): what rows of out are divided by */
    lane *norm;          /* (head_dim): the sum of the keys */
    lane *u, *out;       /* (panels, CHUNK, PANEL), (CHUNK, PANEL) */
    lane *state;         /* (panels, head_dim, PANEL) */
    int64_t head_dim, decay_row, decay_step;
} chunk_scratch;

static int64_t take_chunk_scratch(arena *from, const fa_recurrent_args *a, int64_t panels, chunk_scratch *scratch)
{
    const int64_t dims = round_up(a->head_dim, LANES), rows = ceil_div(a->head_dim, R_DEPTH) * R_BLOCK;
    scratch->head_dim = a->head_dim;
    scratch->decay_row = a->gated ? dims : LANES;
    scratch->decay_step = a->gated ? 1 : 0;
    CUT(from, scratch->q, rows);
    CUT(from, scratch->keys, rows);
    CUT(from, scratch->carried_keys, a->beta.data && a->log_decay.data ? rows : 0);
    CUT(from, scratch->keys_t, dims * R_LANES);
    CUT(from, scratch->gate, CHUNK * scratch->decay_row);
    CUT(from, scratch->carry, CHUNK * scratch->decay_row);
    CUT(from, scratch->between, R_BLOCK);
    CUT(from, scratch->scores, R_BLOCK);
    CUT(from, scratch->writes, R_BLOCK);
    CUT(from, scratch->beta, CHUNK);
    CUT(from, scratch->divisor, CHUNK);
    CUT(from, scratch->norm, dims);
    CUT(from, scratch->u, panels * CHUNK * PANEL);
    CUT(from, scratch->out, CHUNK * PANEL);
    CUT(from, scratch->state, panels * a->head_dim * PANEL);
    return from->used;
}

/* acc (rows, PANEL) = or += x (rows, depth) y (depth, PANEL), rows of x being R_LANES apart. See multiply(). */
static void panel_product(int more, int triangular, const lane *x, int64_t rows, const lane *y, int64_t depth,
                          lane *acc)
{
    const outer_product product = {
        .x = (const char *)x,
        .x_row = R_ROW,
        .y = y,
        .pitch = PANEL,
        .depth = depth,
        .factor = 1,
        .more = more,
        .out = acc,
    };
    multiply(PANEL, 0, triangular, rows, &product);
}

/* acc (rows, PANEL) = or += x (rows, head_dim) y (head_dim, PANEL), x being in blocks of dimensions. */
static void deep_product(int more, const lane *x, int64_t rows, const lane *y, int64_t head_dim, lane *acc)
{
    for (int64_t d = 0; d < head_dim; d += R_DEPTH, x += R_BLOCK)
        panel_product(more || d, 0, x, rows, y + d * PANEL, smaller(head_dim - d, R_DEPTH), acc);
}

/* first, first + 1, ... */
INLINE vi_t lane_numbers(int64_t first)
{
    vi_t i;
    UNROLL_FOR(int u = 0; u < LANES; u++) i[u] = (ilane)(first + u);
    return i;
}

/* to = factor * n rows of x from `from` on, in blocks of dimensions. */
static void load_rows(const fa_array *x, const char *from, int64_t n, int64_t head_dim, lane factor, lane *to)
{
    for (int64_t d = 0; d < head_dim; d += R_DEPTH, to += R_BLOCK, from += R_DEPTH * dtype_size(x->dtype))
        for (int64_t i = 0; i < n; i++)
            load_row(x->dtype, from + i * x->row, smaller(head_dim - d, R_DEPTH), factor, to + i * R_LANES);
}

static void transpose_keys(const lane *keys, int64_t n, int64_t head_dim, lane *keys_t)
{
    for (int64_t d = 0; d < head_dim; d += R_DEPTH, keys += R_BLOCK)
        transpose(keys, R_LANES, n, smaller(head_dim - d, R_DEPTH), keys_t + d * R_LANES, R_LANES);
}

/* gate and carry of n tokens from `first` on; between, if decays are scalar. */
static void load_decays(const fa_recurrent_args *a, const recurrent_task *task, int64_t first, int64_t n,
                        chunk_scratch *scratch)
{
    const int64_t row = scratch->decay_row;
    for (int64_t i = 0; i < n; i++) {
        const char *log_decay = at(&a->log_decay, task->b, task->h, first + i, 0);
        lane *gate = scratch->gate + i * row, *carry = scratch->carry + i * row;
        for (int64_t d = 0; d < row; d += LANES) {
            const v_t decay = decay_at(a, log_decay, d);
            v_store(gate + d, decay);
            v_store(carry + d, i ? v_flush(v_load(carry - row + d) * decay) : decay);
        }
        for (int64_t j = 0; !a->gated && j <= i; j += LANES) {
            lane *to = scratch->between + i * R_LANES + j;
            const v_t product = j < i ? v_flush(v_load(to - R_LANES) * v_load(gate)) : v_splat(1);
            v_store(to, v_select(lane_numbers(j) < (ilane)i, product, v_splat(1)));
        }
    }
}

/* to = carry * rows: what is asked of the state that was before the chunk. `to` may be `rows`. */
static void carry_rows(const chunk_scratch *scratch, const lane *rows, int64_t n, lane *to)
{
    for (int64_t block = 0; block < scratch->head_dim; block += R_DEPTH, rows += R_BLOCK, to += R_BLOCK)
        for (int64_t i = 0; i < n; i++)
            for (int64_t d = 0; d < smaller(scratch->head_dim - block, R_DEPTH); d += LANES) {
                const lane *carry = scratch->carry + i * scratch->decay_row + (block + d) * scratch->decay_step;
                v_store(to + i * R_LANES + d, v_load(rows + i * R_LANES + d) * v_load(carry));
            }
}

/* scores (n, n) = x k^T on and below the diagonal. */
static void plain_scores(const chunk_scratch *scratch, const lane *x, int64_t n, lane *scores)
{
    for (int64_t d = 0; d < scratch->head_dim; d += R_DEPTH, x += R_BLOCK)
        for (int64_t c = 0; c < n; c += GROUP) {
            const outer_product product = {
                .x = (const char *)(x + c * R_LANES),
                .x_row = R_ROW,
                .y = scratch->keys_t + d * R_LANES + c,
                .pitch = R_LANES,
                .depth = smaller(scratch->head_dim - d, R_DEPTH),
                .factor = 1,
                .more = d > 0,
                .out = scores + c * R_LANES + c,
            };
            multiply(GROUP, 0, 0, n - c, &product);
        }
}

/* The same, times vector decays. Before row i, keys_t is multiplied by the decays of token i, so that every key has those
 * between its own token and i. In the end, keys_t is the keys faded to the chunk's end, as update_state() needs it. */
static void vector_scores(const chunk_scratch *scratch, const lane *x, int64_t n, lane *keys_t, lane *scores)
{
    transpose_keys(scratch->keys, n, scratch->head_dim, keys_t);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j <= i; j += LANES) {
            const vi_t before = lane_numbers(j) < (ilane)i;
            v_t sum[4] = {v_splat(0), v_splat(0), v_splat(0), v_splat(0)};
            const lane *gate = scratch->gate + i * scratch->decay_row;
            for (int64_t d = 0; d < scratch->head_dim; d += 4)
                UNROLL_FOR(int64_t e = 0; e < 4; e++) {
                    if (d + e >= scratch->head_dim) break;
                    lane *keys = keys_t + (d + e) * R_LANES + j;
                    const v_t faded = v_load(keys) * v_select(before, v_splat(gate[d + e]), v_splat(1));
                    const lane *of = x + (d + e) / R_DEPTH * R_BLOCK + i * R_LANES + (d + e) % R_DEPTH;
                    v_store(keys, faded);
                    sum[e] = v_fma(v_splat(*of), faded, sum[e]);
                }
            v_store(scores + i * R_LANES + j, (sum[0] + sum[1]) + (sum[2] + sum[3]));
        }
}

/* scores (n, n) = factor_i (x k^T o between) for j < i + inclusive, else 0, whatever the product is there, NaN included.
 * `factor` may be NULL. */
static void decayed_scores(const fa_recurrent_args *a, chunk_scratch *scratch, const lane *x, int64_t n,
                           const lane *factor, int inclusive, lane *scores)
{
    if (a->gated) vector_scores(scratch, x, n, scratch->keys_t, scores);
    else plain_scores(scratch, x, n, scores);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j += LANES) {
            lane *to = scores + i * R_LANES + j;
            v_t score = v_splat(0);
            if (j <= i) {
                score = v_load(to);
                if (a->log_decay.data && !a->gated) score = score * v_load(scratch->between + i * R_LANES + j);
                if (factor) score = score * v_splat(factor[i]);
                score = v_select(lane_numbers(j) < (ilane)(i + inclusive), score, v_splat(0));
            }
            v_store(to, score);
        }
}

/* u (n, PANEL) = (1 - writes)^-1 u */
static void solve(const lane *writes, int64_t n, lane *u)
{
    for (int64_t r = 0; r < n; r += SOLVE_ROWS) {
        const int64_t end = smaller(n, r + SOLVE_ROWS);
        if (r) panel_product(1, 0, writes + r * R_LANES, end - r, u, r, u + r * PANEL);
        for (int64_t i = r + 1; i < end; i++) {
            v_t sum[PANEL / LANES];
            UNROLL_FOR(int c = 0; c < PANEL / LANES; c++) sum[c] = v_load(u + i * PANEL + c * LANES);
            for (int64_t j = r; j < i; j++) {
                const v_t factor = v_splat(writes[i * R_LANES + j]);
                UNROLL_FOR(int c = 0; c < PANEL / LANES; c++)
                    sum[c] = v_fma(factor, v_load(u + j * PANEL + c * LANES), sum[c]);
            }
            UNROLL_FOR(int c = 0; c < PANEL / LANES; c++) v_store(u + i * PANEL + c * LANES, sum[c]);
        }
    }
}

/* u, which is v, becomes what the delta rule writes. */
static void apply_delta_rule(const fa_recurrent_args *a, const recurrent_task *task, int64_t first, int64_t n,
                             chunk_scratch *scratch)
{
    const lane *keys = scratch->keys;
    for (int64_t i = 0; i < n; i++) scratch->beta[i] = -*(const lane_u *)at(&a->beta, task->b, task->h, first + i, 0);
    decayed_scores(a, scratch, keys, n, scratch->beta, 0, scratch->writes);
    if (a->log_decay.data) {
        carry_rows(scratch, keys, n, scratch->carried_keys);
        keys = scratch->carried_keys;
    }
    for (int64_t panel = 0; panel < task->panels; panel++) {
        lane *u = scratch->u + panel * CHUNK * PANEL;
        deep_product(0, keys, n, scratch->state + panel * a->head_dim * PANEL, a->head_dim, scratch->out);
        for (int64_t i = 0; i < n; i++)
            for (int64_t c = i * PANEL; c < (i + 1) * PANEL; c += LANES)
                v_store(u + c, (v_load(scratch->out + c) - v_load(u + c)) * v_splat(scratch->beta[i]));
        solve(scratch->writes, n, u);
    }
}

/* What n tokens from `first` on write: keys, decays and u. */
static void write_chunk(const fa_recurrent_args *a, const recurrent_task *task, int64_t first, int64_t n,
                        chunk_scratch *scratch)
{
    const int64_t panel_bytes = PANEL * dtype_size(a->v.dtype);
    load_rows(&a->k, at(&a->k, task->b, task->head_k, first, 0), n, a->head_dim, 1, scratch->keys);
    if (!a->gated) transpose_keys(scratch->keys, n, a->head_dim, scratch->keys_t);
    if (a->log_decay.data) load_decays(a, task, first, n, scratch);
    for (int64_t panel = 0; panel < task->panels; panel++)
        for (int64_t i = 0; i < n; i++) {
            const int64_t width = panel_width(a, task, panel);
            lane *u = scratch->u + (panel * CHUNK + i) * PANEL;
            load_row(a->v.dtype, value_at(a, task, first + i) + panel * panel_bytes, width, 1, u);
            if (width < PANEL) memset(u + width, 0, (PANEL - width) * sizeof(lane));
        }
    if (a->beta.data) apply_delta_rule(a, task, first, n, scratch);
}

/* divisor (n) = q norm + eps, and in causal calls the sums of scores. */
static void load_divisors(const fa_recurrent_args *a, int64_t n, chunk_scratch *scratch)
{
    for (int64_t i = 0; i < n; i++) {
        v_t sum = v_splat(0);
        for (int64_t j = 0; a->causal && j <= i; j += LANES) sum += v_load(scratch->scores + i * R_LANES + j);
        for (int64_t d = 0; d < a->head_dim; d += LANES) {
            const lane *q = scratch->q + d / R_DEPTH * R_BLOCK + i * R_LANES + d % R_DEPTH;
            sum = v_fma(v_load_part(q, a->head_dim - d), v_load(scratch->norm + d), sum);
        }
        scratch->divisor[i] = v_sum(sum) + (lane)a->eps;
    }
}

/* What n tokens from `first` on read, by all heads of q. */
static void read_chunk(const fa_recurrent_args *a, const recurrent_task *task, int64_t first, int64_t n,
                       chunk_scratch *scratch)
{
    const int64_t panel_bytes = PANEL * dtype_size(a->out.dtype);
    for (int64_t g = 0; g < task->group; g++) {
        load_rows(&a->q, query_at(a, task, g, first), n, a->head_dim, (lane)a->scale, scratch->q);
        if (a->causal) decayed_scores(a, scratch, scratch->q, n, NULL, 1, scratch->scores);
        if (a->log_decay.data) carry_rows(scratch, scratch->q, n, scratch->q);
        if (a->norm_out.data) load_divisors(a, n, scratch);
        for (int64_t panel = 0; panel < task->panels; panel++) {
            const lane *u = scratch->u + panel * CHUNK * PANEL;
            /* If a u is not finite, rows go one by one: a score of 0 would not keep it from rows before its own. */
            const int64_t rows = a->causal && row_finite(LANE_DTYPE, (const char *)u, n * PANEL) ? n : 1;
            for (int64_t i = 0; a->causal && i < n; i += rows)
                panel_product(0, 1, scratch->scores + i * R_LANES, rows, u, i, scratch->out + i * PANEL);
            deep_product(a->causal, scratch->q, n, scratch->state + panel * a->head_dim * PANEL, a->head_dim,
                         scratch->out);
            for (int64_t i = 0; i < n; i++)
                store_row(a->out.dtype, scratch->out + i * PANEL, panel_width(a, task, panel),
                          a->norm_out.data ? 1 / scratch->divisor[i] : 1,
                          out_at(a, task, g, first + i) + panel * panel_bytes);
        }
    }
}

/* S = carry (last) S + faded keys^T u. The sum of the keys is a column of S whose u are all 1. */
static void update_state(const fa_recurrent_args *a, const recurrent_task *task, int64_t n, chunk_scratch *scratch)
{
    const lane *carry = a->log_decay.data ? scratch->carry + (n - 1) * scratch->decay_row : NULL;
    if (carry && !a->gated) /* vector_scores() has faded them already: calls with decays are causal */
        for (int64_t d = 0; d < a->head_dim; d++)
            for (int64_t j = 0; j < n; j += LANES) {
                lane *keys = scratch->keys_t + d * R_LANES + j;
                v_store(keys, v_load(keys) * v_load(scratch->between + (n - 1) * R_LANES + j));
            }
    for (int64_t panel = 0; panel < task->panels; panel++) {
        lane *state = scratch->state + panel * a->head_dim * PANEL;
        for (int64_t d = 0; carry && d < a->head_dim; d++)
            for (int64_t c = d * PANEL; c < (d + 1) * PANEL; c += LANES)
                v_store(state + c, v_flush(v_load(state + c) * v_splat(carry[d * scratch->decay_step])));
        panel_product(1, 0, scratch->keys_t, a->head_dim, scratch->u + panel * CHUNK * PANEL, n, state);
    }
    for (int64_t d = 0; a->norm_out.data && d < a->head_dim; d++) {
        v_t sum = v_splat(0);
        for (int64_t j = 0; j < n; j += LANES) sum += v_load_part(scratch->keys_t + d * R_LANES + j, n - j);
        scratch->norm[d] = scratch->norm[d] * (carry ? carry[d * scratch->decay_step] : 1) + v_sum(sum);
    }
}

/* The task's columns of the state to and from scratch. */
static void load_state(const fa_recurrent_args *a, const recurrent_task *task, chunk_scratch *scratch)
{
    const char *from = state_at(task, &a->state);
    lane *to = scratch->state;
    for (int64_t panel = 0; panel < task->panels; panel++)
        for (int64_t d = 0; d < a->head_dim; d++, to += PANEL) {
            const int64_t bytes = from ? panel_width(a, task, panel) * sizeof(lane) : 0;
            if (from) memcpy(to, from + d * a->state.row + panel * FA_PANEL_BYTES, bytes);
            memset((char *)to + bytes, 0, FA_PANEL_BYTES - bytes);
        }
}

static void store_state(const fa_recurrent_args *a, const recurrent_task *task, const chunk_scratch *scratch)
{
    char *to = state_at(task, &a->state_out);
    for (int64_t panel = 0; panel < task->panels; panel++)
        for (int64_t d = 0; d < a->head_dim; d++)
            memcpy(to + d * a->state_out.row + panel * FA_PANEL_BYTES,
                   scratch->state + (panel * a->head_dim + d) * PANEL, panel_width(a, task, panel) * sizeof(lane));
}

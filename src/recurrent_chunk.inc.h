/* Linear attention with a carried state S (head_dim, head_dim_v): S_t = A_t S_{t-1} + k_t u_t^T, out_t = S_t^T q_t,
 *
 *     A_t = 1, a_t or diag(a_t)                     log_decay: none, one number a token, or one for every dimension
 *     u_t = v_t, or b_t (v_t - (A_t S_{t-1})^T k_t)    beta: none, or the delta rule
 *
 * A task is one state and some panels of its value columns, which do not meet; the lanes are value columns:
 *
 *   for each chunk of tokens
 *     decay (i, j) = a_{j+1} ... a_i, carry (i) = a_0 ... a_i       products: never more than 1, a_t = 0 included
 *     writes = -b (k k^T o decay), scores = q k^T o decay           strictly lower and lower triangular
 *     u = v, or (1 - writes)^-1 b (v - carry k S)                   delta rule: forward substitution, no inverse
 *     out = scores u + carry q S
 *     S = carry (last) S + (k decay (last))^T u
 *
 * (Yang et al. 2024, arXiv:2312.06635, 2406.06484, 2412.06464.) A decay for every dimension does not leave k k^T and
 * q k^T; there the tokens' decays are multiplied into the keys one token at a time: gated_scores(). The bits of a
 * column do not depend on the other columns of its task. */

/* Tokens of a chunk. On AVX-512, 64 is 3 to 15% behind, 128 another 10 to 25%: the scores grow with it. Gated chunks
 * are shorter yet (32 is 3 to 13% behind), since their scores are no matrix product. */
#define CHUNK 32
#define GATED_CHUNK 16

/* Rows of every operand that is broadcast are a constant apart, for then one register addresses all rows of a pass, and
 * an odd number of lines, so that they do not meet in the same sets of the cache. */
#define R_DEPTH 128
#define R_LANES (R_DEPTH + 64 / (int64_t)sizeof(lane))
#define R_ROW (R_LANES * (int64_t)sizeof(lane))
#define R_BLOCK (CHUNK * R_LANES) /* R_DEPTH dimensions of a chunk's rows */
_Static_assert(CHUNK <= R_DEPTH && R_ROW / 64 % 2, "rows hold a chunk");
_Static_assert(CHUNK % GROUP == 0 && GATED_CHUNK % LANES == 0 && PANEL % GROUP == 0, "whole vectors");

/* Rows solved one by one before the next ones are reached by a product. */
#define SOLVE_ROWS 8

typedef struct {
    lane *q, *k;                   /* (ceil(head_dim / R_DEPTH), CHUNK, R_LANES) */
    lane *kt;                      /* (head_dim, R_LANES), transposed; in the end with decays to the chunk's end */
    lane *scores, *writes, *decay; /* (CHUNK, R_LANES) */
    lane *gate, *carry;            /* (CHUNK), gated (GATED_CHUNK, head_dim): a_t, and a_0 ... a_t */
    lane *beta, *sum;              /* (CHUNK): write strength; what divides a row of out */
    lane *norm;                    /* (head_dim): the sum of the keys */
    lane *u, *out;                 /* (panels, CHUNK, PANEL), (CHUNK, PANEL) */
    lane *state;                   /* (panels, head_dim, PANEL) */
    int64_t width;                 /* of a row of gate and carry */
} recurrent_scratch;

static int64_t recurrent_scratch_at(const fa_recurrent_args *a, int64_t panels, void *memory, recurrent_scratch *w)
{
    char *at = memory;
#define TAKE(name, lanes)                                                                                              \
    w->name = (lane *)at;                                                                                              \
    at += round_up((lanes) * (int64_t)sizeof(lane), 64)
    const int64_t blocks = (a->head_dim + R_DEPTH - 1) / R_DEPTH;
    w->width = a->gated ? round_up(a->head_dim, LANES) : 1;
    TAKE(q, blocks * R_BLOCK);
    TAKE(k, blocks * R_BLOCK);
    TAKE(kt, round_up(a->head_dim, LANES) * R_LANES);
    TAKE(scores, R_BLOCK);
    TAKE(writes, R_BLOCK);
    TAKE(decay, R_BLOCK);
    TAKE(gate, a->gated ? GATED_CHUNK * w->width : CHUNK);
    TAKE(carry, a->gated ? GATED_CHUNK * w->width : CHUNK);
    TAKE(beta, CHUNK);
    TAKE(sum, CHUNK);
    TAKE(norm, round_up(a->head_dim, LANES));
    TAKE(u, panels * CHUNK * PANEL);
    TAKE(out, CHUNK * PANEL);
    TAKE(state, panels * a->head_dim * PANEL);
#undef TAKE
    return at - (char *)memory;
}

/* acc (rows, GROUP) = or += x (rows, depth) y (depth, GROUP); rows of y and acc are `pitch` lanes apart. See multiply(). */
INLINE void product(int64_t pitch, int more, int triangular, const lane *x, int64_t rows, const lane *y, int64_t depth,
                    lane *acc)
{
    const outer_product whole = {.x = (const char *)x,
                                 .x_row = R_ROW,
                                 .y = y,
                                 .pitch = pitch,
                                 .depth = depth,
                                 .factor = 1,
                                 .more = more,
                                 .out = acc};
    multiply(GROUP, 0, triangular, rows, &whole);
}

static void panel_product(int more, int triangular, const lane *x, int64_t rows, const lane *y, int64_t depth,
                          lane *acc)
{
    for (int64_t c = 0; c < PANEL; c += GROUP) product(PANEL, more, triangular, x, rows, y + c, depth, acc + c);
}

/* acc (rows, PANEL) = or += x (rows, head_dim) y (head_dim, PANEL), x in blocks of R_DEPTH */
static void deep_product(int more, const lane *x, int64_t rows, const lane *y, int64_t head_dim, lane *acc)
{
    for (int64_t d = 0; d < head_dim; d += R_DEPTH, x += R_BLOCK)
        panel_product(more || d, 0, x, rows, y + d * PANEL, head_dim - d < R_DEPTH ? head_dim - d : R_DEPTH, acc);
}

/* x (n, head_dim) kt (head_dim, n), on and below the diagonal */
static void chunk_scores(const lane *x, int64_t n, const lane *kt, int64_t head_dim, lane *scores)
{
    for (int64_t d = 0; d < head_dim; d += R_DEPTH, x += R_BLOCK, kt += R_DEPTH * R_LANES) {
        const int64_t depth = head_dim - d < R_DEPTH ? head_dim - d : R_DEPTH;
        for (int64_t c = 0; c < n; c += GROUP)
            product(R_LANES, d > 0, 0, x + c * R_LANES, n - c, kt + c, depth, scores + c * R_LANES + c);
    }
}

/* 0 for what is smaller than any normal number: arithmetic on such numbers takes a hundred times as long, and a state
 * that decays stays among them for ever. NaN stays NaN. */
INLINE v_t v_flush(v_t x) { return v_select(v_abs(x) < v_splat(LANE_MIN), v_splat(0), x); }

INLINE vi_t lane_numbers(int64_t first)
{
    vi_t i;
    UNROLL_FOR(int u = 0; u < LANES; u++) i[u] = (ilane)(first + u);
    return i;
}

/* Rows of q, k or log_decay as lanes, in blocks of R_DEPTH. */
static void load_chunk(const fa_array *x, const char *from, int64_t n, int64_t head_dim, lane factor, lane *to)
{
    const int64_t size = dtype_size(x->dtype);
    for (int64_t d = 0; d < head_dim; d += R_DEPTH, to += R_BLOCK)
        for (int64_t i = 0; i < n; i++)
            load_row(x->dtype, from + i * x->row + d * size, head_dim - d < R_DEPTH ? head_dim - d : R_DEPTH, factor,
                     to + i * R_LANES);
}

static void transpose_keys(const recurrent_scratch *w, int64_t n, int64_t head_dim)
{
    for (int64_t d = 0; d < head_dim; d += R_DEPTH)
        transpose(w->k + d / R_DEPTH * R_BLOCK, R_LANES, n, head_dim - d < R_DEPTH ? head_dim - d : R_DEPTH,
                  w->kt + d * R_LANES, R_LANES);
}

/* Row i of a chunk's x (head_dim), multiplied by the decay since the chunk's start. */
static void carry_rows(const recurrent_scratch *w, int64_t n, int64_t head_dim, lane *x)
{
    for (int64_t d = 0; d < head_dim; d += R_DEPTH, x += R_BLOCK)
        for (int64_t i = 0; i < n; i++) {
            const int64_t end = head_dim - d < R_DEPTH ? head_dim - d : R_DEPTH;
            const lane *carry = w->carry + i * w->width;
            for (int64_t c = 0; c < end; c += LANES) {
                lane *at = x + i * R_LANES + c;
                v_store(at, v_load(at) * (w->width == 1 ? v_splat(*carry) : v_load(carry + d + c)));
            }
        }
}

/* gate, carry and, of one decay a token, the triangle of products (n, n). */
static void chunk_decays(const fa_recurrent_args *a, const char *log_decay, int64_t n, const recurrent_scratch *w)
{
    const int64_t width = w->width;
    for (int64_t i = 0; i < n; i++, log_decay += a->log_decay.row) {
        lane *gate = w->gate + i * width, *carry = w->carry + i * width;
        if (width == 1) {
            *gate = lane_exp(*(const lane_u *)log_decay);
            *carry = i ? v_flush(v_splat(*gate * carry[-1]))[0] : *gate;
            continue;
        }
        for (int64_t d = 0; d < a->head_dim; d += LANES) {
            const int64_t left = a->head_dim - d;
            const char *from = log_decay + d * (int64_t)sizeof(lane);
            const v_t g = v_exp(left < LANES ? v_load_n(from, left) : v_load(from));
            v_store(gate + d, g);
            v_store(carry + d, i ? v_flush(v_load(carry - width + d) * g) : g);
        }
    }
}

/* decay (n, n), on and below the diagonal, from gate, one a token. */
static void decay_triangle(const lane *gate, int64_t n, lane *decay)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j <= i; j += LANES) {
            lane *at = decay + i * R_LANES + j;
            v_t d = v_splat(1);
            if (j < i) d = v_flush(v_load(at - R_LANES) * v_splat(gate[i]));
            v_store(at, v_select(lane_numbers(j) < (ilane)i, d, v_splat(1)));
        }
}

/* scores_i = x_i kt, where kt has every token's decay from its own time to i: in the end, to n. */
static void gated_scores(const recurrent_scratch *w, const lane *x, int64_t n, int64_t head_dim, lane *scores)
{
    transpose_keys(w, n, head_dim);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j <= i; j += LANES) {
            const vi_t before = lane_numbers(j) < (ilane)i;
            v_t sum[4] = {v_splat(0), v_splat(0), v_splat(0), v_splat(0)};
            const lane *gate = w->gate + i * w->width;
            for (int64_t d = 0; d < head_dim; d += 4)
                UNROLL_FOR(int64_t e = 0; e < 4; e++) {
                    if (d + e >= head_dim) break;
                    lane *at = w->kt + (d + e) * R_LANES + j;
                    const v_t key = v_load(at) * v_select(before, v_splat(gate[d + e]), v_splat(1));
                    const lane *of = x + (d + e) / R_DEPTH * R_BLOCK + i * R_LANES + (d + e) % R_DEPTH;
                    v_store(at, key);
                    sum[e] = v_fma(v_splat(*of), key, sum[e]);
                }
            v_store(scores + i * R_LANES + j, (sum[0] + sum[1]) + (sum[2] + sum[3]));
        }
}

/* scores (n, n) = factor_i scores o decay for j < i + inclusive, else 0: whatever stands there, NaN included. */
static void mask_scores(const lane *decay, const lane *factor, int inclusive, int64_t n, lane *scores)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j += LANES) {
            lane *at = scores + i * R_LANES + j;
            v_t s = v_splat(0);
            if (j <= i) {
                s = v_load(at);
                if (decay) s = s * v_load(decay + i * R_LANES + j);
                if (factor) s = s * v_splat(factor[i]);
                s = v_select(lane_numbers(j) < (ilane)(i + inclusive), s, v_splat(0));
            }
            v_store(at, s);
        }
}

/* u (n, PANEL) = (1 - writes)^-1 u */
static void solve(const lane *writes, int64_t n, lane *u)
{
    for (int64_t r = 0; r < n; r += SOLVE_ROWS) {
        const int64_t end = n - r < SOLVE_ROWS ? n : r + SOLVE_ROWS;
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

/* Where head h of `heads` states finds itself in x, which has n heads; and token i there. */
INLINE char *token_at(const fa_array *x, int64_t b, int64_t h, int64_t heads, int64_t n, int64_t i)
{
    return x->data + x->batch[b] + h / (heads / n) * x->head + i * x->row;
}

/* One task: state h of batch item b, `panels` of its columns from `first` on. */
typedef struct {
    int64_t b, h, first, panels, group; /* group: heads of q that read the state */
} recurrent_task;

INLINE int64_t panel_width(const fa_recurrent_args *a, int64_t panel)
{
    return a->head_dim_v - panel * PANEL < PANEL ? a->head_dim_v - panel * PANEL : PANEL;
}

INLINE const char *query_at(const fa_recurrent_args *a, const recurrent_task *t, int64_t g, int64_t i)
{
    if (t->group > 1) return a->q.data + a->q.batch[t->b] + (t->h * t->group + g) * a->q.head + i * a->q.row;
    return token_at(&a->q, t->b, t->h, a->heads, a->heads_q, i);
}

INLINE char *out_at(const fa_recurrent_args *a, const recurrent_task *t, int64_t g, int64_t i)
{
    return a->out.data + a->out.batch[t->b] + (t->h * t->group + g) * a->out.head + i * a->out.row;
}

/* The task's columns of one of the states; NULL where it is not given. */
INLINE char *state_at(const recurrent_task *t, const fa_array *x)
{
    return x->data ? x->data + x->batch[t->b] + t->h * x->head + t->first * PANEL * (int64_t)sizeof(lane) : NULL;
}

/* The task's columns of the state to and from scratch. */
static void load_state(const fa_recurrent_args *a, const recurrent_task *t, const recurrent_scratch *w)
{
    const char *from = state_at(t, &a->state);
    for (int64_t p = 0; p < t->panels; p++)
        for (int64_t d = 0; d < a->head_dim; d++) {
            lane *state = w->state + (p * a->head_dim + d) * PANEL;
            memset(state, 0, PANEL * sizeof(lane));
            if (from)
                memcpy(state, from + d * a->state.row + p * FA_PANEL_BYTES,
                       panel_width(a, t->first + p) * sizeof(lane));
        }
}

static void store_state(const fa_recurrent_args *a, const recurrent_task *t, const recurrent_scratch *w)
{
    char *to = state_at(t, &a->state_out);
    for (int64_t p = 0; p < t->panels; p++)
        for (int64_t d = 0; d < a->head_dim; d++)
            memcpy(to + d * a->state_out.row + p * FA_PANEL_BYTES, w->state + (p * a->head_dim + d) * PANEL,
                   panel_width(a, t->first + p) * sizeof(lane));
}

/* The sum of the keys to and from scratch. All tasks of a state have it, that of its first columns writes it. */
static void load_norm(const fa_recurrent_args *a, const recurrent_task *t, const recurrent_scratch *w)
{
    memset(w->norm, 0, round_up(a->head_dim, LANES) * sizeof(lane));
    if (a->norm.data)
        memcpy(w->norm, a->norm.data + a->norm.batch[t->b] + t->h * a->norm.head, a->head_dim * sizeof(lane));
}

static void store_norm(const fa_recurrent_args *a, const recurrent_task *t, const recurrent_scratch *w)
{
    if (a->norm_out.data && t->first == 0)
        memcpy(a->norm_out.data + a->norm_out.batch[t->b] + t->h * a->norm_out.head, w->norm,
               a->head_dim * sizeof(lane));
}

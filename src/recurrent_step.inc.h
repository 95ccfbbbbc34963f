/* Linear attention, a token at a time: decoding reads and writes the state and does little else. For each token
 *
 *     u = v, or b (v - (A S)^T k)              delta rule: S is read once more, from the cache
 *     S = A S + k u^T, out = S^T q             for more heads of q, S is read again, from the cache
 *
 * in place in state_out, a few vectors of columns after the other. */

/* Up to so many tokens go this way. */
#define STEPS 4

/* Load and store of vector c, of which n lanes are there. */
#define STEP_LOAD(p, n) ((n) == LANES ? v_load(p) : v_load_n(p, n))

/* sum (n) = x (head_dim) S (head_dim, n), of nv vectors */
INLINE void step_read(int nv, int64_t n, const char *state, int64_t row, const lane *x, int64_t head_dim, v_t *sum)
{
    UNROLL_FOR(int c = 0; c < nv; c++) sum[c] = v_splat(0);
    for (int64_t d = 0; d < head_dim; d++, state += row)
        UNROLL_FOR(int c = 0; c < nv; c++) sum[c] = v_fma(v_splat(x[d]), STEP_LOAD(state + c * V_BYTES, n), sum[c]);
}

/* to (head_dim, n) = gate from + k u; sum (n) = q to. `from` NULL is 0. */
INLINE void step_write(int nv, int64_t n, const char *from, int64_t from_row, char *to, int64_t row, const lane *gate,
                       const lane *k, const lane *q, int64_t head_dim, const v_t *u, v_t *sum)
{
    UNROLL_FOR(int c = 0; c < nv; c++) sum[c] = v_splat(0);
    for (int64_t d = 0; d < head_dim; d++, to += row) {
        UNROLL_FOR(int c = 0; c < nv; c++) {
            v_t s = from ? v_flush(STEP_LOAD(from + d * from_row + c * V_BYTES, n) * v_splat(gate[d])) : v_splat(0);
            s = v_fma(v_splat(k[d]), u[c], s);
            if (n == LANES) v_store(to + c * V_BYTES, s);
            else v_store_n(to + c * V_BYTES, s, n);
            sum[c] = v_fma(v_splat(q[d]), s, sum[c]);
        }
    }
}

/* What a step knows: rows of lanes, and the state's columns of the task before and after. */
typedef struct {
    const lane *gate, *decayed; /* (head_dim): a, and a k */
    const lane *k, *q;
    const char *from;
    char *to;
    int64_t from_row, row, head_dim;
    const lane_u *beta; /* NULL without the delta rule */
    int write;          /* else only read: the other heads of q */
} step;

/* out (nv vectors, or n < LANES of the only one) of columns from `column` on; u is v, and becomes what is written. */
INLINE void step_columns(const step *s, int nv, int64_t n, int64_t column, const lane *v, lane *out)
{
    const int64_t offset = column * (int64_t)sizeof(lane);
    v_t u[STEP_NV], sum[STEP_NV];
    if (s->write) {
        UNROLL_FOR(int c = 0; c < nv; c++) u[c] = v_load(v + column + c * LANES);
        if (s->beta) {
            UNROLL_FOR(int c = 0; c < nv; c++) sum[c] = v_splat(0);
            if (s->from) step_read(nv, n, s->from + offset, s->from_row, s->decayed, s->head_dim, sum);
            UNROLL_FOR(int c = 0; c < nv; c++) u[c] = v_splat(*s->beta) * (u[c] - sum[c]);
        }
        step_write(nv, n, s->from ? s->from + offset : NULL, s->from_row, s->to + offset, s->row, s->gate, s->k, s->q,
                   s->head_dim, u, sum);
    } else step_read(nv, n, s->to + offset, s->row, s->q, s->head_dim, sum);
    UNROLL_FOR(int c = 0; c < nv; c++) v_store(out + column + c * LANES, sum[c]);
}

/* gate (head_dim) of a token: 1 without decay. */
static void step_gate(const fa_recurrent_args *a, const char *log_decay, lane *gate)
{
    for (int64_t d = 0; d < a->head_dim; d += LANES) {
        const int64_t left = a->head_dim - d < LANES ? a->head_dim - d : LANES;
        v_t g = v_splat(1);
        if (a->gated) g = v_exp(v_load_n(log_decay + d * (int64_t)sizeof(lane), left));
        else if (a->log_decay.data) g = v_exp(v_splat(*(const lane_u *)log_decay));
        v_store(gate + d, g);
    }
}

static void recurrent_steps(const fa_recurrent_args *a, const recurrent_task *t, const recurrent_scratch *w)
{
    const int64_t head_dim = a->head_dim, first = t->first * PANEL, size = dtype_size(a->out.dtype);
    const int64_t columns = a->head_dim_v - first < t->panels * PANEL ? a->head_dim_v - first : t->panels * PANEL;
    const int64_t width = round_up(head_dim, LANES);
    lane *gate = w->kt, *decayed = gate + width, *k = decayed + width, *q = k + width;
    lane *v = w->u, *out = v + t->panels * PANEL;
    step s = {
        .gate = gate,
        .decayed = decayed,
        .k = k,
        .q = q,
        .from = state_at(t, &a->state),
        .from_row = a->state.row,
        .to = state_at(t, &a->state_out),
        .row = a->state_out.row,
        .head_dim = head_dim,
    };
    load_norm(a, t, w);
    for (int64_t i = 0; i < a->len_q; i++, s.from = s.to, s.from_row = s.row) {
        const fa_array *log_decay = &a->log_decay, *beta = &a->beta;
        step_gate(a, log_decay->data ? token_at(log_decay, t->b, t->h, 1, 1, i) : NULL, gate);
        load_row(a->k.dtype, token_at(&a->k, t->b, t->h, a->heads, a->heads_k, i), head_dim, 1, k);
        load_row(a->v.dtype, token_at(&a->v, t->b, t->h, a->heads, a->heads_v, i) + first * dtype_size(a->v.dtype),
                 columns, 1, v);
        for (int64_t d = 0; d < head_dim; d++) decayed[d] = gate[d] * k[d];
        for (int64_t d = 0; a->norm_out.data && d < head_dim; d++) w->norm[d] = gate[d] * w->norm[d] + k[d];
        if (beta->data) s.beta = (const lane_u *)token_at(beta, t->b, t->h, 1, 1, i);
        for (int64_t g = 0; g < t->group; g++) {
            int64_t c = 0;
            lane sum = (lane)a->eps;
            s.write = g == 0;
            load_row(a->q.dtype, query_at(a, t, g, i), head_dim, (lane)a->scale, q);
            for (; c + STEP_NV * LANES <= columns; c += STEP_NV * LANES) step_columns(&s, STEP_NV, LANES, c, v, out);
            for (; c + LANES <= columns; c += LANES) step_columns(&s, 1, LANES, c, v, out);
            if (c < columns) step_columns(&s, 1, columns - c, c, v, out);
            for (int64_t d = 0; a->norm_out.data && d < head_dim; d++) sum += q[d] * w->norm[d];
            store_row(a->out.dtype, out, columns, a->norm_out.data ? 1 / sum : 1, out_at(a, t, g, i) + first * size);
        }
    }
    store_norm(a, t, w);
}

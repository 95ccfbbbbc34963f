/* Linear attention: tasks of chunks, or of steps where there are few tokens. See recurrent_chunk.inc.h. */

/* out of n tokens from i on, of q head g: w->q has the decays that reach back to the state, w->sum what divides. */
static void chunk_out(const fa_recurrent_args *a, const recurrent_task *t, const recurrent_scratch *w, int64_t g,
                      int64_t i, int64_t n, int within)
{
    const int64_t size = dtype_size(a->out.dtype);
    for (int64_t p = 0; p < t->panels; p++) {
        const lane *u = w->u + p * CHUNK * PANEL;
        /* One by one where a score of 0 does not hide what is not finite from the rows before it. */
        const int64_t rows = within && row_finite(LANE_DTYPE, (const char *)u, n * PANEL) ? n : 1;
        for (int64_t r = 0; within && r < n; r += rows)
            panel_product(0, 1, w->scores + r * R_LANES, rows, u, r, w->out + r * PANEL);
        deep_product(within, w->q, n, w->state + p * a->head_dim * PANEL, a->head_dim, w->out);
        char *out = out_at(a, t, g, i) + (t->first + p) * PANEL * size;
        for (int64_t r = 0; r < n; r++, out += a->out.row)
            store_row(a->out.dtype, w->out + r * PANEL, panel_width(a, t->first + p),
                      a->norm_out.data ? 1 / w->sum[r] : 1, out);
    }
}

/* w->sum (n) = (scores 1 +) q norm + eps */
static void chunk_sums(const fa_recurrent_args *a, const recurrent_scratch *w, int64_t n, int within)
{
    for (int64_t i = 0; i < n; i++) {
        v_t sum = v_splat(0);
        if (within)
            for (int64_t j = 0; j <= i; j += LANES) sum += v_load(w->scores + i * R_LANES + j);
        for (int64_t d = 0; d < a->head_dim; d += LANES) {
            const lane *q = w->q + d / R_DEPTH * R_BLOCK + i * R_LANES + d % R_DEPTH;
            sum = v_fma(v_load_n(q, a->head_dim - d < LANES ? a->head_dim - d : LANES), v_load(w->norm + d), sum);
        }
        w->sum[i] = v_sum(sum) + (lane)a->eps;
    }
}

/* S = carry S + kt u, and the same of the sum of keys, where every u is 1. */
static void update_state(const fa_recurrent_args *a, const recurrent_task *t, const recurrent_scratch *w, int64_t n)
{
    const lane *carry = a->log_decay.data ? w->carry + (n - 1) * w->width : NULL;
    for (int64_t p = 0; p < t->panels; p++) {
        lane *state = w->state + p * a->head_dim * PANEL;
        if (carry)
            for (int64_t d = 0; d < a->head_dim; d++)
                for (int64_t c = 0; c < PANEL; c += LANES) {
                    lane *at = state + d * PANEL + c;
                    v_store(at, v_flush(v_load(at) * v_splat(carry[w->width == 1 ? 0 : d])));
                }
        panel_product(1, 0, w->kt, a->head_dim, w->u + p * CHUNK * PANEL, n, state);
    }
    if (!a->norm_out.data) return;
    for (int64_t d = 0; d < a->head_dim; d++) {
        v_t sum = v_splat(0);
        for (int64_t j = 0; j < n; j += LANES) sum += v_load_n(w->kt + d * R_LANES + j, n - j < LANES ? n - j : LANES);
        w->norm[d] = w->norm[d] * (carry ? carry[w->width == 1 ? 0 : d] : 1) + v_sum(sum);
    }
}

/* By what scores must still be multiplied. */
INLINE const lane *decay_of(const fa_recurrent_args *a, const recurrent_scratch *w)
{
    return a->log_decay.data && !a->gated ? w->decay : NULL;
}

/* What a chunk of n tokens from i on writes: w->k and kt, decays, and u. */
static void chunk_writes(const fa_recurrent_args *a, const recurrent_task *t, const recurrent_scratch *w, int64_t i,
                         int64_t n)
{
    const char *v = token_at(&a->v, t->b, t->h, a->heads, a->heads_v, i);
    load_chunk(&a->k, token_at(&a->k, t->b, t->h, a->heads, a->heads_k, i), n, a->head_dim, 1, w->k);
    if (!a->gated) transpose_keys(w, n, a->head_dim);
    if (a->log_decay.data) {
        chunk_decays(a, a->log_decay.data + a->log_decay.batch[t->b] + t->h * a->log_decay.head + i * a->log_decay.row,
                     n, w);
        if (!a->gated) decay_triangle(w->gate, n, w->decay);
    }
    for (int64_t p = 0; p < t->panels; p++)
        for (int64_t r = 0; r < n; r++) {
            const int64_t width = panel_width(a, t->first + p);
            lane *u = w->u + (p * CHUNK + r) * PANEL;
            load_row(a->v.dtype, v + r * a->v.row + (t->first + p) * PANEL * dtype_size(a->v.dtype), width, 1, u);
            if (width < PANEL) memset(u + width, 0, (PANEL - width) * sizeof(lane));
        }
    if (!a->beta.data) return;
    const char *beta = a->beta.data + a->beta.batch[t->b] + t->h * a->beta.head + i * a->beta.row;
    for (int64_t r = 0; r < n; r++) w->beta[r] = -*(const lane_u *)(beta + r * a->beta.row);
    if (a->gated) gated_scores(w, w->k, n, a->head_dim, w->writes);
    else chunk_scores(w->k, n, w->kt, a->head_dim, w->writes);
    mask_scores(decay_of(a, w), w->beta, 0, n, w->writes);
    lane *k = w->k;
    if (a->log_decay.data) {
        if (a->gated) { /* where they are transposed once more */
            k = w->q;
            for (int64_t d = 0; d < a->head_dim; d += R_DEPTH)
                memcpy(k + d / R_DEPTH * R_BLOCK, w->k + d / R_DEPTH * R_BLOCK, n * R_ROW);
        }
        carry_rows(w, n, a->head_dim, k);
    }
    for (int64_t p = 0; p < t->panels; p++) {
        lane *u = w->u + p * CHUNK * PANEL;
        deep_product(0, k, n, w->state + p * a->head_dim * PANEL, a->head_dim, w->out);
        for (int64_t r = 0; r < n; r++)
            for (int64_t c = 0; c < PANEL; c += LANES) {
                lane *at = u + r * PANEL + c;
                v_store(at, (v_load(w->out + r * PANEL + c) - v_load(at)) * v_splat(w->beta[r]));
            }
        solve(w->writes, n, u);
    }
}

/* What n tokens of all heads of q read. */
static void chunk_reads(const fa_recurrent_args *a, const recurrent_task *t, const recurrent_scratch *w, int64_t i,
                        int64_t n)
{
    for (int64_t g = 0; g < t->group; g++) {
        load_chunk(&a->q, query_at(a, t, g, i), n, a->head_dim, (lane)a->scale, w->q);
        if (a->causal) {
            if (a->gated) gated_scores(w, w->q, n, a->head_dim, w->scores);
            else chunk_scores(w->q, n, w->kt, a->head_dim, w->scores);
            mask_scores(decay_of(a, w), NULL, 1, n, w->scores);
            if (a->log_decay.data) carry_rows(w, n, a->head_dim, w->q);
        }
        if (a->norm_out.data) chunk_sums(a, w, n, a->causal);
        chunk_out(a, t, w, g, i, n, a->causal);
    }
}

/* Multiplications of chunks between the questions whether to give up: no more than milliseconds. */
#define RECURRENT_ASKS (1 << 24)

static void recurrent_run(const fa_recurrent_args *a, const fa_recurrent_plan *p, int64_t task, void *scratch)
{
    const int64_t panels = (a->head_dim_v + PANEL - 1) / PANEL, parts = (panels + p->panels - 1) / p->panels;
    const int64_t state = task / parts, first = task % parts * p->panels, chunk = a->gated ? GATED_CHUNK : CHUNK;
    const recurrent_task t = {
        .b = state / a->heads,
        .h = state % a->heads,
        .first = first,
        .panels = panels - first < p->panels ? panels - first : p->panels,
        .group = a->heads_q > a->heads ? a->heads_q / a->heads : 1,
    };
    recurrent_scratch w;
    recurrent_scratch_at(a, p->panels, scratch, &w);
    if (p->steps) {
        recurrent_steps(a, &t, &w);
        return;
    }
    load_state(a, &t, &w);
    load_norm(a, &t, &w);
    const int64_t work = t.group * chunk * a->head_dim * (t.panels * PANEL + chunk);
    const int64_t between = larger(1, RECURRENT_ASKS / larger(1, work)) * chunk;
#define EACH_CHUNK(len, n) for (int64_t i = 0, n; n = len - i < chunk ? len - i : chunk, i < len; i += n)
    EACH_CHUNK(a->len_k, n)
    {
        if (i && i % between == 0 && given_up(a->watch)) return;
        chunk_writes(a, &t, &w, i, n);
        if (a->causal) chunk_reads(a, &t, &w, i, n);
        if (a->log_decay.data && !a->gated) /* gated_scores() has left the keys so */
            for (int64_t d = 0; d < a->head_dim; d++)
                for (int64_t j = 0; j < n; j += LANES) {
                    lane *at = w.kt + d * R_LANES + j;
                    v_store(at, v_load(at) * v_load(w.decay + (n - 1) * R_LANES + j));
                }
        update_state(a, &t, &w, n);
    }
    if (!a->causal) EACH_CHUNK(a->len_q, n)
        {
            if (i && i % between == 0 && given_up(a->watch)) return;
            chunk_reads(a, &t, &w, i, n);
        }
#undef EACH_CHUNK
    store_state(a, &t, &w);
    store_norm(a, &t, &w);
}

/* As many parts of a state's columns as end first: a part more is scores computed once more. */
static void recurrent_plan(const fa_recurrent_args *a, int threads, fa_recurrent_plan *p)
{
    recurrent_scratch w;
    const int64_t panels = (a->head_dim_v + PANEL - 1) / PANEL, states = a->batch * a->heads;
    const double chunk = a->gated ? GATED_CHUNK : CHUNK, group = a->heads_q > a->heads ? a->heads_q / a->heads : 1;
    const double shared = (group + !!a->beta.data) * a->head_dim * chunk / 2 * (a->gated ? 8 : 1);
    const double each = PANEL * (1 + group + !!a->beta.data) * (a->head_dim + chunk / 2);
    double least = 0;
    for (int64_t n = panels; n; n--) {
        const int64_t tasks = states * ((panels + n - 1) / n);
        const double time = (double)((tasks + threads - 1) / threads) * (shared + (double)n * each);
        if (n < panels && time >= least) continue;
        least = time;
        p->panels = (int)n;
        p->n_tasks = tasks;
    }
    p->steps = a->causal && a->len_q && a->len_q <= STEPS;
    p->scratch_bytes = round_up(recurrent_scratch_at(a, p->panels, NULL, &w), 64);
    p->flops = 2.0 * (double)states * (double)(a->len_k) * (shared + (double)panels * each);
}

/* The gradients of attention with another normaliser, another score, or heads that mix, by their definition. Twice, the
 * second time with other garbage in the memory; tasks in order, since they wait for one another. */
#ifndef ROWWISE_BACKWARD_H
#define ROWWISE_BACKWARD_H

#include "backward.h"
#include "rowwise.h"

enum { ROWWISE_BACKWARD_CASES = ROWWISE_KINDS * COUNT(shapes) * 2 }; /* each in two of the dtypes */

static const char *const rowwise_gradient_names[] = {
    "dq", "dk", "dv", "dbias", "dbias_diagonals", "dalibi_slopes", "dsoftcap", "dweight", "dpre", "dpost"};

static fa_array douts_now;

/* One row's arrays, (len_k): scores, probabilities, what they multiply, and their gradients. */
typedef struct {
    score *s;
    near *p, *d, *ds;
    support *has;
} row_of_keys;

static row_of_keys new_row_of_keys(int64_t n)
{
    return (row_of_keys){calloc((size_t)n + 1, sizeof(score)), calloc((size_t)n + 1, sizeof(near)),
                         calloc((size_t)n + 1, sizeof(near)), calloc((size_t)n + 1, sizeof(near)),
                         calloc((size_t)n + 1, sizeof(support))};
}

static void drop_row_of_keys(row_of_keys *row)
{
    free(row->s), free(row->p), free(row->d), free(row->ds), free(row->has);
}

static near times(near x, near y)
{
    return (near){x.value * y.value, fabs(x.value) * y.error + fabs(y.value) * x.error + x.error * y.error};
}

/* dout of the row times v of a key. */
static near value_gradient(const fa_attention_args *a, int64_t b, int64_t h, int64_t i, const double *v)
{
    near d = {0, 0};
    double size = 0;
    FOR(c, a->head_dim_v)
    {
        d.value += get(&douts_now, b, h, i, c) * v[c], size += fabs(get(&douts_now, b, h, i, c) * v[c]);
    }
    d.error = 2 * eps_of(lane_of(a->q.dtype)) * (2 + sqrt((double)a->head_dim_v)) * size;
    return d;
}

/* ds = w (d - mean of d by w), with weights w of the probabilities p. */
static void weigh_differences(const fa_rowwise_args *r, row_of_keys *row)
{
    const fa_attention_args *a = &r->attention;
    const double eps = eps_of(lane_of(a->q.dtype));
    double sum = 0, mean = 0, off = 0, size = 0;
    FOR(pass, 2) FOR(j, a->len_k)
    {
        near w = row->p[j];
        row->ds[j] = (near){0, 0};
        if (row->has[j] == SURELY_NOT || (w.value == 0 && w.error == 0)) continue;
        if (r->kind == FA_SPARSEMAX) w = (near){1, 0};
        if (r->kind == FA_ENTMAX15) w = (near){sqrt(w.value), w.error / sqrt(w.value) + eps};
        if (row->has[j] == PERHAPS) w.error = INFINITY; /* rounding decides whether it counts */
        if (pass == 0) {
            sum += w.value, mean += w.value * row->d[j].value, size += w.value * fabs(row->d[j].value);
            off += w.value * row->d[j].error + w.error * fabs(row->d[j].value);
            continue;
        }
        const double spread = (off + eps * steps_of(a) * size) / sum + eps * steps_of(a) * fabs(mean / sum);
        near inner = {row->d[j].value - mean / sum, row->d[j].error + 2 * spread + eps * fabs(row->d[j].value)};
        row->ds[j] = times(w, inner);
        if (isinf(w.error) || isinf(spread)) row->ds[j].error = INFINITY;
    }
}

/* Adds a row's share of dS, where scores are products of q and k or additive. */
static void add_row_gradients(const fa_rowwise_args *r, const operands *x, int64_t b, int64_t h, int64_t i,
                              row_of_keys *row)
{
    const fa_attention_args *a = &r->attention;
    const int64_t hk = h / (a->heads_q / a->heads_kv), first = first_key(a, b, h), width = a->head_dim;
    const double *q = query_of(a, x, b, h, i), eps = eps_of(lane_of(a->q.dtype));
    FOR(j, a->len_k)
    {
        const double *k = x->k + (first + j) * width;
        if (row->s[j].size == -1) continue;
        FOR(d, a->head_dim_v) add_term(DV, b, hk, j, d, row->p[j], get(&douts_now, b, h, i, d));
        const score raw = r->kind == FA_ADDITIVE ? additive_product(r, h, q, k) : product_of(width, q, k);
        near ds = through_modifiers(a, b, h, i, j, raw, row->ds[j]);
        ds.value *= a->mods.scale, ds.error *= a->mods.scale;
        FOR(d, width)
        {
            near of_q = ds, of_k = ds;
            double times_q = k[d], times_k = q[d];
            if (r->kind == FA_ADDITIVE) {
                const double tangent = tanh(q[d] + k[d]), slope = 1 - tangent * tangent;
                const double off = eps * (4 + fabs(q[d]) + fabs(k[d]));
                of_q = of_k = times(ds, (near){slope, off});
                times_q = times_k = entry(r->weight, width, h, d);
                add_term(DWEIGHT, b, h, 0, d, times(ds, (near){tangent, off}), 1);
            }
            add_term(DQ, b, h, i, d, of_q, times_q), add_term(DK, b, hk, j, d, of_k, times_k);
        }
    }
}

static void expect_gradients_by_scores(const fa_rowwise_args *r, const operands *x)
{
    const fa_attention_args *a = &r->attention;
    row_of_keys row = new_row_of_keys(a->len_k);
    FOR(b, a->batch) FOR(h, a->heads_q) FOR(i, a->len_q)
    {
        const double *q = query_of(a, x, b, h, i), *k = x->k + first_key(a, b, h) * a->head_dim;
        FOR(j, a->len_k)
        {
            const double *key = k + j * a->head_dim;
            row.s[j] = modified(a, b, h, i, j,
                                r->kind == FA_ADDITIVE ? additive_product(r, h, q, key)
                                                       : product_of(a->head_dim, q, key));
            row.d[j] = value_gradient(a, b, h, i, x->v + (first_key(a, b, h) + j) * a->head_dim_v);
        }
        if (r->kind == FA_SPARSEMAX || r->kind == FA_ENTMAX15)
            sparse_probabilities(a, r->kind == FA_ENTMAX15, row.s, row.p, row.has);
        else best_probabilities(a, r->kind == FA_TOP_K ? r->k_keys : a->len_k, row.s, row.p, row.has);
        weigh_differences(r, &row);
        add_row_gradients(r, x, b, h, i, &row);
    }
    drop_row_of_keys(&row);
}

/* A row of all heads. */
static void expect_mixed_gradients(const fa_rowwise_args *r, const operands *x, int64_t b, int64_t i, row_of_keys *rows)
{
    const fa_attention_args *a = &r->attention;
    const int64_t heads = a->heads_q, keys = a->len_k, n = heads * keys + 1;
    const double eps = 4 * eps_of(lane_of(a->q.dtype));
    score *products = calloc((size_t)n, sizeof *products), *mixed = calloc((size_t)keys + 1, sizeof *mixed);
    near *values = calloc((size_t)n, sizeof *values); /* dout times v */
    FOR(h, heads) FOR(j, keys)
    {
        const int64_t key = first_key(a, b, h) + j;
        products[h * keys + j] = product_of(a->head_dim, query_of(a, x, b, h, i), x->k + key * a->head_dim);
        values[h * keys + j] = value_gradient(a, b, h, i, x->v + key * a->head_dim_v);
    }
    FOR(g, heads)
    {
        row_of_keys *row = rows + g;
        FOR(j, keys)
        {
            mixed[j] = (score){0, 0}, row->d[j] = (near){0, 0};
            FOR(h, heads)
            {
                const score s = products[h * keys + j];
                const near d = values[h * keys + j];
                const double pre = r->pre ? entry(r->pre, heads, h, g) : 1;
                const double post = r->post ? entry(r->post, heads, g, h) : 1;
                if (r->pre || h == g) mixed[j].value += pre * s.value, mixed[j].size += 2 * fabs(pre) * s.size;
                if (!r->post && h != g) continue;
                row->d[j].value += post * d.value, row->d[j].error += fabs(post) * (2 * d.error + eps * fabs(d.value));
            }
            row->s[j] = modified(a, b, g, i, j, mixed[j]);
        }
        const softmax_row sums = softmax_of(a, b, g, row->s);
        FOR(j, keys)
        {
            row->has[j] = row->s[j].size == -1 ? SURELY_NOT : SURELY;
            row->p[j] = row->has[j] == SURELY ? probability(a, &sums, row->s[j]) : (near){0, 0};
        }
        weigh_differences(r, row);
        FOR(j, keys)
        {
            if (row->has[j] == SURELY_NOT) continue;
            near dm = through_modifiers(a, b, g, i, j, mixed[j], row->ds[j]);
            dm.value *= a->mods.scale, dm.error *= a->mods.scale;
            FOR(h, heads)
            {
                const int64_t hk = h / (heads / a->heads_kv);
                const double *k = x->k + (first_key(a, b, h) + j) * a->head_dim, *q = query_of(a, x, b, h, i);
                const double pre = r->pre ? entry(r->pre, heads, h, g) : 1;
                const double post = r->post ? entry(r->post, heads, g, h) : 1;
                const score s = products[h * keys + j];
                if (r->pre) add_term(DPRE, b, 0, h, g, times(dm, (near){s.value, eps * s.size}), 1);
                if (r->post) add_term(DPOST, b, 0, g, h, times(row->p[j], values[h * keys + j]), 1);
                if (r->pre || h == g) FOR(d, a->head_dim)
                add_term(DQ, b, h, i, d, dm, pre * k[d]), add_term(DK, b, hk, j, d, dm, pre * q[d]);
                if (r->post || h == g)
                    FOR(d, a->head_dim_v) add_term(DV, b, hk, j, d, row->p[j], post * get(&douts_now, b, h, i, d));
            }
        }
    }
    free(products), free(mixed), free(values);
}

static void make_rowwise_backward(int number)
{
    const int i = number / 2;
    const fa_dtype dtype = floats[2 * (number % 2) + i / ROWWISE_KINDS % 2], lane = lane_of(dtype);
    test_case c = {.number = number, .q = dtype, .kv = dtype};
    fa_rowwise_args *r = &rowwise_now.args;
    fa_attention_args *a = &r->attention;
    seed = (uint64_t)number << 32 | 12;
    *r = (fa_rowwise_args){.kind = (fa_rowwise_kind)(i % ROWWISE_KINDS)};
    c.s = small_shape(i / ROWWISE_KINDS);
    c.s.batch = c.s.batch > 2 ? 2 : c.s.batch;
    if (r->kind == FA_TALKING_HEADS) c.s.len_q = c.s.len_q > 17 ? 17 : c.s.len_q; /* every head meets every other */
    c.options = (random_options() | (below(4) ? 0 : LISTS) | NO_LSE) & ~(SINKS | DROPOUT | NAN_KEYS | NAN_VALUES);
    c.out_layout = c.options & LAYOUT ? (int)below(8) : 0;
    backward_now.c = rowwise_now.c = c;
    *a = new_inputs(&c);
    if (r->kind == FA_TOP_K) r->k_keys = below(3) ? 1 + below(8) : larger(1, a->len_k - below(3));
    if (r->kind == FA_ADDITIVE) r->weight = new_matrix(lane, a->heads_q, a->head_dim, -1, 1);
    if (r->kind == FA_TALKING_HEADS) {
        if (below(4)) r->pre = new_matrix(lane, a->heads_q, a->heads_q, -0.7, 1);
        if (below(4)) r->post = new_matrix(lane, a->heads_q, a->heads_q, -0.7, 1);
    }
    douts_now = new_floats(dtype, a->batch, a->heads_q, a->len_q, a->head_dim_v, c.out_layout);
    EACH(a->heads_q, a->len_q, a->head_dim_v) set(&douts_now, b, h, i, j, uniform(-1, 1));
    const int64_t heads = a->heads_q, has_bias = a->mods.bias.data != NULL;
    const gradient_shape each[] = {{below(2) ? dtype : lane, heads, a->len_q, a->head_dim},
                                   {lane, a->heads_kv, a->len_k, a->head_dim},
                                   {lane, a->heads_kv, a->len_k, a->head_dim_v},
                                   {lane, heads, a->len_q, a->len_k},
                                   {lane, heads, 1, a->len_q + a->len_k - 1},
                                   {FA_F64, heads, 1, 1},
                                   {FA_F64, heads, 1, 1},
                                   {FA_F64, heads, 1, a->head_dim},
                                   {FA_F64, 1, heads, heads},
                                   {FA_F64, 1, heads, heads}};
    const int there[] = {below(8) != 0,        below(8) != 0,        below(8) != 0,
                         has_bias && below(4), has_bias && below(2), a->mods.alibi_slopes.data != NULL,
                         a->mods.softcap != 0, r->weight != NULL,    r->pre != NULL,
                         r->post != NULL};
    backward_now.shared = there[DBIAS] && below(2);
    FOR(which, N_GRADIENTS_OF_ROWS)
    {
        const gradient_shape *s = each + which;
        const size_t n = (size_t)(a->batch * s->heads * s->rows * larger(s->cols, 0)) + 1;
        backward_now.shapes[which] = *s;
        backward_now.want[which] = there[which] ? calloc(n, sizeof(total)) : NULL;
    }
    rowwise_now.x = operands_of(a);
    if (r->kind != FA_TALKING_HEADS) {
        expect_gradients_by_scores(r, &rowwise_now.x);
        return;
    }
    row_of_keys rows[MOST_HEADS];
    FOR(g, heads) rows[g] = new_row_of_keys(a->len_k);
    FOR(b, a->batch) FOR(row, a->len_q) expect_mixed_gradients(r, &rowwise_now.x, b, row, rows);
    FOR(g, heads) drop_row_of_keys(rows + g);
}

static const char *check_rowwise_backward(int isa, const fa_kernels *kernels)
{
    const fa_attention_args *a = &rowwise_now.args.attention;
    const double eps = eps_of(lane_of(a->q.dtype));
    fa_array got[2][N_GRADIENTS_OF_ROWS] = {{{0}}};
    (void)isa;
    if (a->len_q == 0) return NULL; /* there is nothing to run */
    FOR(again, 2)
    {
        fa_rowwise_backward_args call = {.forward = rowwise_now.args, .dout = douts_now, .dq_factor = a->mods.scale};
        fa_rowwise_backward_plan p;
        fa_array *x = got[again];
        FOR(which, N_GRADIENTS_OF_ROWS)
        {
            const gradient_shape *s = backward_now.shapes + which;
            const int share = which == DBIAS && backward_now.shared ? ONE_BATCH | ONE_HEAD : 0;
            if (!backward_now.want[which]) continue;
            x[which] = new_floats(s->dtype, a->batch, s->heads, s->rows, s->cols,
                                  which < DBIAS ? backward_now.c.out_layout : share);
            if (which != DQ) EACH(s->heads, s->rows, s->cols) set(x + which, b, h, i, j, 0);
        }
        call.dq = x[DQ], call.dk = x[DK], call.dv = x[DV], call.dbias = x[DBIAS];
        call.dbias_diagonals = x[DDIAGONALS];
        if (call.dbias_diagonals.data) /* its elements are rows */
            call.dbias_diagonals.row = call.dbias_diagonals.col, call.dbias_diagonals.col = 0;
        call.dalibi_slopes = (double *)x[DSLOPES].data, call.dsoftcap = (double *)x[DSOFTCAP].data;
        call.dweight = (double *)x[DWEIGHT].data;
        call.dpre = (double *)x[DPRE].data, call.dpost = (double *)x[DPOST].data;
        call.batch_shares = backward_now.shared && a->batch > 1,
        call.heads_share = backward_now.shared && a->heads_kv > 1;
        kernels->rowwise->backward_plan(&call, &p);
        if (p.scratch_bytes % 64) return UNALIGNED;
        const int mark = n_mappings;
        char *scratch = allocate((size_t)p.scratch_bytes);
        call.turns = (int64_t *)allocate((size_t)p.n_turns * sizeof(int64_t));
        memset(call.turns, 0, (size_t)p.n_turns * sizeof(int64_t));
        if (again) memset(scratch, 0x55, (size_t)p.scratch_bytes);
        FOR(task, p.n_tasks) kernels->rowwise->backward_run(&call, &p, task, scratch);
        release(mark);
    }
    FOR(which, N_GRADIENTS_OF_ROWS)
    {
        const gradient_shape *s = backward_now.shapes + which;
        const int share = which == DBIAS && backward_now.shared;
        if (!got[0][which].data) continue;
        FOR(b, share ? 1 : a->batch) FOR(h, share ? 1 : s->heads) FOR(i, s->rows) FOR(j, s->cols)
        {
            const total *want = backward_place((int)which, b, h, i, j);
            const double steps = 8 + sqrt((double)(a->len_q * a->heads_q + a->len_k));
            const near one = {want->value, 2 * want->error + steps * eps * want->size};
            const char *wrong = differs(rowwise_gradient_names[which], got[0] + which, got[1] + which, b, h, i, j,
                                        stored(one, s->dtype));
            if (wrong) return wrong;
        }
        if (!only_rows(got[1] + which, share ? 1 : a->batch, share ? 1 : s->heads, s->rows, s->cols))
            return BETWEEN_ROWS;
    }
    return NULL;
}

static void drop_rowwise_backward(void)
{
    FOR(which, N_GRADIENTS_OF_ROWS) free(backward_now.want[which]);
    drop_operands(&rowwise_now.x);
}

FAMILY(rowwise_backward, ROWWISE_BACKWARD_CASES, make_rowwise_backward, rowwise_now.c.q, describe_rowwise,
       drop_rowwise_backward);

#endif

/* The gradients of attention by their definition, in double precision. Every call runs twice and must give the same
 * bits, the second time planned for more threads, with heads in another order and other garbage in the memory. */
#ifndef BACKWARD_H
#define BACKWARD_H

#include "attention.h"
#include "linear.h"

enum { BACKWARD_CASES = 3 * COUNT(shapes) * COUNT(floats) };
enum { DQ, DK, DV, DBIAS, DDIAGONALS, DSLOPES, DSOFTCAP, DSINKS, N_BACKWARD };
enum { DWEIGHT = DSINKS, DPRE, DPOST, N_GRADIENTS_OF_ROWS }; /* of other normalisers and scores: rowwise_backward.h */

static const char *const backward_names[] = {"dq",       "dk",    "dv", "dbias", "dbias_diagonals", "dalibi_slopes",
                                             "dsoftcap", "dsinks"};

/* A sum, how far off it may be, and the sum of its terms' sizes. */
typedef struct {
    double value, error, size;
} total;

typedef struct {
    fa_dtype dtype;
    int64_t heads, rows, cols;
} gradient_shape;

static struct {
    test_case c;
    fa_backward_args args;
    gradient_shape shapes[N_GRADIENTS_OF_ROWS];
    total *want[N_GRADIENTS_OF_ROWS]; /* NULL: not asked for */
    int shared;
} backward_now;

static fa_array *backward_array(fa_backward_args *call, int i)
{
    fa_array *const all[] = {
        &call->dq,       &call->dk,    &call->dv, &call->dbias, &call->dbias_diagonals, &call->dalibi_slopes,
        &call->dsoftcap, &call->dsinks};
    return all[i];
}

static total *backward_place(int which, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const gradient_shape *s = backward_now.shapes + which;
    return backward_now.want[which] + ((b * s->heads + h) * s->rows + i) * s->cols + j;
}

/* The place += x y, of which x is off by its error, and y by nothing. */
static void add_term(int which, int64_t b, int64_t h, int64_t i, int64_t j, near x, double y)
{
    if (!backward_now.want[which]) return;
    total *to = backward_place(which, b, h, i, j);
    to->value += x.value * y;
    to->error += x.error * fabs(y);
    to->size += fabs(x.value * y);
}

/* Adds dS of a score to the gradients of its modifiers; returns dS of what the softcap is applied to, of which `raw` is
 * the product without the scale. */
static near through_modifiers(const fa_attention_args *a, int64_t b, int64_t h, int64_t i, int64_t j, score raw,
                              near ds)
{
    const double eps = eps_of(lane_of(a->q.dtype)), cap = a->mods.softcap;
    if (backward_now.want[DBIAS] && isfinite(get(&a->mods.bias, b, h, i, j)))
        add_term(DBIAS, backward_now.shared ? 0 : b, backward_now.shared ? 0 : h, i, j, ds, 1);
    add_term(DDIAGONALS, b, h, 0, j - i + a->len_q - 1, ds, 1);
    if (a->mods.alibi_slopes.data)
        add_term(DSLOPES, b, h, 0, 0, ds, -fabs((double)(get_int(&a->mods.q_position, b, 0, 0) + i - j)));
    if (cap == 0) return ds;
    const double u = raw.value * a->mods.scale / cap, tanh_u = tanh(u), slope = 1 - tanh_u * tanh_u;
    const double far = eps * (16 + 4 * raw.size * a->mods.scale / cap);
    add_term(DSOFTCAP, b, h, 0, 0, ds, tanh_u - u * slope);
    if (backward_now.want[DSOFTCAP])
        backward_place(DSOFTCAP, b, h, 0, 0)->error += fabs(ds.value) * far * (1 + fabs(u)) * 5;
    return (near){ds.value * slope, ds.error * slope + fabs(ds.value) * far};
}

/* Adds one row's share to all gradients; lse is the given one. */
static void expect_row_gradients(const operands *x, int64_t b, int64_t h, int64_t i, score *s)
{
    const fa_backward_args *call = &backward_now.args;
    const fa_attention_args *a = &call->attention;
    const int64_t first = first_key(a, b, h), hk = h / (a->heads_q / a->heads_kv), width = a->head_dim;
    const double eps = eps_of(lane_of(a->q.dtype)), *q = query_of(a, x, b, h, i);
    double delta = 0, size = 0, lse = 0;
    FOR(d, a->head_dim_v)
    {
        const double term = get(&call->dout, b, h, i, d) * get(&a->out, b, h, i, d);
        delta += a->sigmoid ? 0 : term, size += a->sigmoid ? 0 : fabs(term);
    }
    if (call->dlse.data) delta -= get(&call->dlse, b, h, i, 0), size += fabs(get(&call->dlse, b, h, i, 0));
    if (!a->sigmoid) lse = get(&a->lse, b, h, i, 0);
    if (a->sinks.data && lse != -INFINITY && get(&a->sinks, b, h, 0, 0) != -INFINITY) {
        const double weight = exp(get(&a->sinks, b, h, 0, 0) - lse);
        add_term(DSINKS, b, h, 0, 0, (near){-weight, 0}, delta);
        backward_place(DSINKS, b, h, 0, 0)->error += 4 * steps_of(a) * eps * weight * size;
    }
    score_row(a, b, h, i, q, x->k + first * width, s);
    FOR(j, a->len_k)
    {
        if (s[j].size == -1) continue;
        const double *k = x->k + (first + j) * width, *v = x->v + (first + j) * a->head_dim_v;
        near p = {exp(s[j].value - lse), 0};
        p.error = p.value * eps * (2 * s[j].size + fabs(lse) + steps_of(a)) + cut_of(a->q.dtype);
        if (a->sigmoid) p = sigmoid_of(a, s[j]);
        double dp = 0, dp_size = 0;
        FOR(d, a->head_dim_v)
        {
            const double dout = get(&call->dout, b, h, i, d);
            dp += dout * v[d], dp_size += fabs(dout * v[d]);
            add_term(DV, b, hk, j, d, dropped(a, b, h, i, j, p), dout);
        }
        const near kept = dropped(a, b, h, i, j, (near){dp, 0}); /* the mask times its factor */
        const double inner = kept.value - delta, off = 4 * eps * steps_of(a) * (dp_size * 3 + size);
        near ds = {p.value * inner, p.error * fabs(inner) + p.value * off};
        if (a->sigmoid) ds = (near){p.value * (1 - p.value) * dp, 3 * p.error * fabs(dp) + p.value * off};
        ds = through_modifiers(a, b, h, i, j, product_of(width, q, k), ds);
        ds.value *= a->mods.scale, ds.error *= a->mods.scale;
        FOR(d, width) add_term(DQ, b, h, i, d, ds, k[d]), add_term(DK, b, hk, j, d, ds, q[d]);
    }
}

/* Fills out and lse with what the forward pass gives, rounded. */
static void fill_results(fa_attention_args *a, const operands *x)
{
    expected *all = expect(a, x), *e = all;
    FOR(b, a->batch) FOR(h, a->heads_q) FOR(i, a->len_q)
    {
        FOR(d, a->head_dim_v) set(&a->out, b, h, i, d, e[d].value);
        if (a->lse.data) set(&a->lse, b, h, i, 0, e[a->head_dim_v].value);
        e += a->head_dim_v + 1;
    }
    free(all);
}

static void make_backward(int number)
{
    const int i = number / COUNT(floats);
    const fa_dtype dtype = floats[number % COUNT(floats)], lane = lane_of(dtype);
    test_case c = {.number = number, .q = dtype, .kv = dtype};
    fa_backward_args *call = &backward_now.args;
    fa_attention_args *a = &call->attention;
    seed = (uint64_t)number << 32 | 11;
    c.s = small_shape(i % COUNT(shapes));
    c.s.batch = c.s.batch > 3 ? 3 : c.s.batch;
    c.options = (random_options() | (below(4) ? 0 : LISTS) | (below(6) ? 0 : SIGMOID)) & ~(NAN_KEYS | NAN_VALUES);
    if (c.options & SIGMOID) c.options &= ~(SINKS | DROPOUT);
    c.out_layout = c.options & LAYOUT ? (int)below(8) : 0;
    backward_now.c = c;
    *call = (fa_backward_args){.attention = new_inputs(&c)};
    call->dq_factor = a->mods.scale;
    call->dout = new_floats(dtype, a->batch, a->heads_q, a->len_q, a->head_dim_v, c.out_layout);
    a->out = new_floats(dtype, a->batch, a->heads_q, a->len_q, a->head_dim_v, c.out_layout);
    EACH(a->heads_q, a->len_q, a->head_dim_v) set(&call->dout, b, h, i, j, uniform(-1, 1));
    if (!a->sigmoid) a->lse = new_floats(lane, a->batch, a->heads_q, a->len_q, 1, c.out_layout);
    if (!a->sigmoid && below(2)) {
        call->dlse = new_floats(lane, a->batch, a->heads_q, a->len_q, 1, 0);
        EACH(a->heads_q, a->len_q, 1) set(&call->dlse, b, h, i, j, uniform(-1, 1));
    }
    operands x = operands_of(a);
    fill_results(a, &x);
    const int64_t rows = a->len_q, heads = a->heads_q;
    const gradient_shape each[] = {{dtype, heads, rows, a->head_dim},
                                   {dtype, a->heads_kv, a->len_k, a->head_dim},
                                   {dtype, a->heads_kv, a->len_k, a->head_dim_v},
                                   {lane, heads, rows, a->len_k},
                                   {lane, heads, 1, rows + a->len_k - 1},
                                   {FA_F64, heads, 1, 1},
                                   {FA_F64, heads, 1, 1},
                                   {FA_F64, heads, 1, 1}};
    const int there[] = {below(8) != 0,
                         below(8) != 0,
                         below(8) != 0,
                         a->mods.bias.data && below(4),
                         a->mods.bias.data && below(2),
                         a->mods.alibi_slopes.data != NULL,
                         a->mods.softcap != 0,
                         a->sinks.data != NULL};
    backward_now.shared = a->mods.bias.data && below(2);
    FOR(which, N_BACKWARD)
    {
        const gradient_shape *s = each + which;
        backward_now.shapes[which] = *s;
        if (which < DBIAS && below(2)) backward_now.shapes[which].dtype = lane;
        backward_now.want[which] = there[which]
                                       ? calloc((size_t)(a->batch * s->heads * s->rows * s->cols) + 1, sizeof(total))
                                       : NULL;
    }
    score *s = calloc((size_t)a->len_k + 1, sizeof *s);
    FOR(b, a->batch) FOR(h, heads) FOR(row, rows) expect_row_gradients(&x, b, h, row, s);
    free(s);
    drop_operands(&x);
}

/* Runs all tasks; `again`, heads come in the opposite order where they may. */
static int run_backward(const fa_kernels *kernels, const fa_backward_args *call, int again)
{
    const fa_attention_args *a = &call->attention;
    const int64_t heads = a->batch * a->heads_q;
    const int in_order = call->bias_shared || call->dbias_diagonals.data != NULL; /* a head waits for the one before */
    fa_backward_plan p;
    kernels->backward->plan(call, again ? 64 : 1, &p);
    const int mark = n_mappings;
    char *scratch = allocate((size_t)p.scratch_bytes), *shared = allocate((size_t)p.shared_bytes);
    if (again) memset(scratch, 0x55, (size_t)p.scratch_bytes), memset(shared, 0x55, (size_t)p.shared_bytes);
    FOR(task, p.few ? p.n_tasks : 0)
    kernels->backward->sums(call, &p, again ? p.n_tasks - 1 - task : task, shared, scratch);
    FOR(task, heads) kernels->backward->begin(call, &p, again ? heads - 1 - task : task, shared, scratch);
    FOR(task, p.n_tasks)
    {
        const int64_t head = task % p.n_heads, turned = task - head + p.n_heads - 1 - head;
        kernels->backward->run(call, &p, again && !in_order ? turned : task, shared, scratch);
    }
    FOR(task, heads) kernels->backward->end(call, &p, again ? heads - 1 - task : task, shared);
    release(mark);
    return p.scratch_bytes % 64 == 0 && p.shared_bytes % 64 == 0;
}

static const char *check_backward(int isa, const fa_kernels *kernels)
{
    fa_backward_args calls[2];
    const fa_attention_args *a = &backward_now.args.attention;
    const double eps = eps_of(lane_of(a->q.dtype));
    const double blur = a->q.dtype == FA_BF16 && kernels->linear->between() == FA_BF16 ? 0x1p-7 : 0;
    if (a->len_q == 0) return NULL; /* there is nothing to run */
    FOR(again, 2)
    {
        calls[again] = backward_now.args;
        FOR(which, N_BACKWARD)
        {
            const gradient_shape *s = backward_now.shapes + which;
            const int share = which == DBIAS && backward_now.shared ? ONE_BATCH | ONE_HEAD : 0;
            fa_array *to = backward_array(calls + again, (int)which);
            if (!backward_now.want[which]) continue;
            *to = new_floats(s->dtype, a->batch, s->heads, s->rows, s->cols,
                             which < DBIAS ? backward_now.c.out_layout : share);
            if (which >= DBIAS) EACH(s->heads, s->rows, s->cols) set(to, b, h, i, j, 0);
            if (share) calls[again].bias_shared = a->batch * a->heads_q > 1;
        }
        if (!run_backward(kernels, calls + again, (int)again)) return UNALIGNED;
    }
    FOR(which, N_BACKWARD)
    {
        const gradient_shape *s = backward_now.shapes + which;
        const int share = which == DBIAS && backward_now.shared;
        const fa_array *x = backward_array(calls, (int)which), *other = backward_array(calls + 1, (int)which);
        if (!x->data) continue;
        FOR(b, share ? 1 : a->batch) FOR(h, share ? 1 : s->heads) FOR(i, s->rows) FOR(j, s->cols)
        {
            const total *want = backward_place((int)which, b, h, i, j);
            const double steps = 8 + sqrt((double)(a->len_q * a->heads_q + a->len_k));
            const near one = {want->value, want->error + (steps * eps + blur) * want->size};
            const char *wrong = differs(backward_names[which], x, other, b, h, i, j, stored(one, s->dtype));
            if (wrong) return wrong;
        }
        if (!only_rows(other, share ? 1 : a->batch, share ? 1 : s->heads, s->rows, s->cols)) return BETWEEN_ROWS;
    }
    return NULL;
}

static void describe_backward(void)
{
    printf("%s%s", backward_now.args.dlse.data ? "dlse, " : "", backward_now.shared ? "dbias shared, " : "");
    describe(&backward_now.c);
}

static void drop_backward(void) { FOR(which, N_BACKWARD) free(backward_now.want[which]); }

FAMILY(backward, BACKWARD_CASES, make_backward, backward_now.c.q, describe_backward, drop_backward);

#endif

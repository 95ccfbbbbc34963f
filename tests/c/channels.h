/* Tests of causal convolution and of the selective scan, with their gradients, against their definitions token by token
 * in double precision. */
#ifndef CHANNELS_H
#define CHANNELS_H

#include "gradients.h"
#include "recurrent.h"

/* Channels near the ends of vectors, of a scan's tasks and of a convolution's pieces. Tokens near the ends of what is
 * computed at once, of one block and of two. */
static const int64_t channel_counts[] = {1, 7, 16, 17, 64, 70, 128, 130, 256, 259};
static const int64_t channel_lens[] = {0, 0, 1, 2, 7, 8, 9, 31, 32, 33, 40, 65};
static const int64_t scan_states[] = {1, 3, 8, 16, 17, 33};

enum { MOST_SEQUENCES = 4, MOST_STATES = 33 };
enum { CONV_CASES = COUNT(floats) * COUNT(channel_counts) * FA_MOST_WIDTH };
enum { SCAN_CASES = COUNT(floats) * COUNT(channel_counts) * COUNT(scan_states) };

/* Sequences of a case. Their arrays lie end to end; or `apart`, each with NaN behind it if another one is longer. */
static struct {
    fa_dtype dtype;
    int64_t n, channels, longest, tokens, *begins;
    int64_t step; /* tokens of a task of the second run */
    int apart, layout, spoiled;
} sequences_now;

static int64_t length_of(int64_t s) { return sequences_now.begins[s + 1] - sequences_now.begins[s]; }

#define EACH_TOKEN(cols) FOR(s, sequences_now.n) FOR(t, length_of(s)) FOR(j, cols)
#define EACH_STATE(rows, cols) FOR(s, sequences_now.n) FOR(i, rows) FOR(j, cols)

static void make_sequences(int number)
{
    const int64_t n = below(12) ? 1 + below(MOST_SEQUENCES) : 0;
    int64_t *begins = (int64_t *)allocate((size_t)(n + 1) * sizeof *begins);
    sequences_now.dtype = floats[number % COUNT(floats)];
    sequences_now.channels = channel_counts[number / COUNT(floats) % COUNT(channel_counts)];
    sequences_now.n = n, sequences_now.begins = begins, sequences_now.longest = begins[0] = 0;
    FOR(s, n)
    {
        begins[s + 1] = begins[s] + PICK(channel_lens);
        sequences_now.longest = larger(sequences_now.longest, begins[s + 1] - begins[s]);
    }
    sequences_now.tokens = begins[n], sequences_now.step = 1 + below(below(2) ? 12 : 80);
    sequences_now.apart = (int)below(2), sequences_now.layout = (int)below(8) & (GAP | REVERSED);
    sequences_now.spoiled = below(3) == 0;
}

/* Rows of `cols` numbers for each token. */
static fa_array new_rows(fa_dtype dtype, int64_t cols, int layout)
{
    const int64_t n = sequences_now.n;
    if (sequences_now.apart) return new_floats(dtype, n, 1, sequences_now.longest, cols, layout);
    fa_array x = new_floats(dtype, 1, 1, sequences_now.tokens, cols, layout);
    int64_t *offsets = (int64_t *)allocate((size_t)n * sizeof *offsets);
    FOR(s, n) offsets[s] = sequences_now.begins[s] * x.row;
    x.batch = offsets;
    return x;
}

static fa_array random_rows(int64_t cols, double low, double high)
{
    const fa_array x = new_rows(sequences_now.dtype, cols, (int)below(8) & (GAP | REVERSED));
    EACH_TOKEN(cols) set(&x, s, 0, t, j, uniform(low, high));
    return x;
}

/* Rows for each sequence, such as states. All sequences may read the same. */
static fa_array random_states(fa_dtype dtype, int64_t rows, int64_t cols)
{
    const fa_array x = new_floats(dtype, sequences_now.n, 1, rows, cols,
                                  ((int)below(8) & (GAP | REVERSED)) | (below(4) ? 0 : ONE_BATCH));
    EACH_STATE(rows, cols) set(&x, s, 0, i, j, uniform(-1, 1));
    return x;
}

/* Numbers of the lane type that all tokens share; `data` becomes NULL if they are not there. */
static fa_array shared_lanes(int there, int64_t n, double low, double high, const void **data)
{
    const fa_array x = there ? new_floats(lane_of(sequences_now.dtype), 1, 1, 1, n, 0) : (fa_array){0};
    FOR(j, there ? n : 0) set(&x, 0, 0, 0, j, uniform(low, high));
    *data = x.data;
    return x;
}

/* Puts NaN in one row of the longest sequence: it must show where it goes, and nowhere else. */
static void spoil_row(const fa_array *x, int64_t cols)
{
    const int64_t n = sequences_now.longest;
    int64_t s = 0;
    while (n && length_of(s) != n) s++;
    if (n) set(x, s, 0, below(2) ? below(n) : n - 1, below(cols), NAN);
}

/* Says what is wrong with rows of tokens that were computed twice, or with what is written beside them; or NULL. */
static const char *wrong_rows(const char *name, const fa_array x[2], int64_t cols, const near *want)
{
    EACH_TOKEN(cols)
    {
        const char *wrong = differs(name, x, x + 1, s, 0, t, j, stored(*want++, x->dtype));
        if (wrong) return wrong;
    }
    FOR(again, 2)
    {
        EACH_TOKEN(1) memset(at(x + again, s, 0, t, j), 0xff, (size_t)(cols * bytes_of(x->dtype)));
        if (sequences_now.tokens && !is_blank(x[again].data)) return BETWEEN_ROWS;
    }
    return NULL;
}

/* The same of rows of sequences. */
static const char *wrong_states(const char *name, const fa_array x[2], int64_t rows, int64_t cols, const near *want)
{
    EACH_STATE(rows, cols)
    {
        const char *wrong = differs(name, x, x + 1, s, 0, i, j, stored(*want++, x->dtype));
        if (wrong) return wrong;
    }
    FOR(again, 2)
    if (!only_rows(x + again, sequences_now.n, 1, rows, cols)) return BETWEEN_ROWS;
    return NULL;
}

static near exact(double x) { return (near){x, 0}; }

/* One more term of a sum, in any order. */
static void add_to(near *sum, near x, double eps)
{
    sum->value += x.value;
    sum->error += x.error + eps * (fabs(sum->value) + fabs(x.value));
}

static near *new_nears(int64_t n) { return calloc((size_t)n + 1, sizeof(near)); }

static void describe_sequences(void)
{
    printf("dtype %d, channels %d, lengths", sequences_now.dtype, (int)sequences_now.channels);
    FOR(s, sequences_now.n) printf(" %d", (int)length_of(s));
    printf("%s, layout %d, step %d%s", sequences_now.apart ? " apart" : "", sequences_now.layout,
           (int)sequences_now.step, sequences_now.spoiled ? ", NaN" : "");
}

/* Convolution. */
static struct {
    fa_conv_grad_args args;
    fa_array weight, bias;
    int sums;
    near *out, *dx, *dstate; /* (tokens, channels) twice, (sequences, width - 1, channels) */
    near *dweight;           /* (width + 1, channels), dbias being the last row */
} conv_now;

static double tap(int64_t j, int64_t w) { return get(&conv_now.weight, 0, 0, 0, j * conv_now.args.forward.width + w); }

/* The input of a token, or of one before the first. */
static double conv_input(int64_t s, int64_t t, int64_t j)
{
    const fa_conv_args *a = &conv_now.args.forward;
    if (t >= 0) return get(&a->x, s, 0, t, j);
    return a->state.data ? get(&a->state, s, 0, a->width - 1 + t, j) : 0;
}

/* What the activation is applied to. */
static near conv_sum(int64_t s, int64_t t, int64_t j, double eps)
{
    const fa_conv_args *a = &conv_now.args.forward;
    near sum = exact(a->bias ? get(&conv_now.bias, 0, 0, 0, j) : 0);
    FOR(w, a->width) add_to(&sum, exact(tap(j, w) * conv_input(s, t - a->width + 1 + w, j)), eps);
    return sum;
}

/* dout times the slope; the second derivatives are below 2. Near 0, relu's slope may be either one. */
static near conv_slope(const fa_conv_args *a, double dout, near pre, double eps)
{
    if (a->activation == FA_NONE) return exact(dout);
    const double slope = isnan(pre.value) ? NAN : slope_of(a->activation, pre.value);
    const int either = a->activation == FA_RELU && fabs(pre.value) <= pre.error;
    const double error = either ? 1 : 16 * eps * (1 + fabs(pre.value)) + 1e-9 + 2 * pre.error;
    return (near){dout * slope, fabs(dout) * error};
}

static void expect_conv(void)
{
    const fa_conv_grad_args *g = &conv_now.args;
    const fa_conv_args *a = &g->forward;
    const double eps = eps_of(lane_of(a->x.dtype));
    const int64_t n = a->channels;
    EACH_TOKEN(n)
    {
        const int64_t row = sequences_now.begins[s] + t;
        const near pre = conv_sum(s, t, j, eps), dpre = conv_slope(a, get(&g->dout, s, 0, t, j), pre, eps);
        conv_now.out[row * n + j] = activated(a->activation, pre, eps);
        add_to(&conv_now.dweight[a->width * n + j], dpre, eps);
        FOR(w, a->width)
        {
            const int64_t from = t - a->width + 1 + w, state = s * (a->width - 1) + a->width - 1 + from;
            const int there = from >= 0 || a->state.data;
            near *to = from < 0 ? conv_now.dstate + state * n + j : conv_now.dx + (row - t + from) * n + j;
            if (there) add_to(&conv_now.dweight[w * n + j], product(dpre, exact(conv_input(s, from, j)), eps), eps);
            add_to(to, product(dpre, exact(tap(j, w)), eps), eps);
        }
    }
    EACH_STATE(a->width - 1, n) /* blank, as nothing is written */
    if (!length_of(s)) conv_now.dstate[(s * (a->width - 1) + i) * n + j] = exact(NAN);
}

static void make_conv(int number)
{
    fa_conv_grad_args *g = &conv_now.args;
    fa_conv_args *a = &g->forward;
    seed = (uint64_t)number << 32 | 13;
    make_sequences(number);
    const int64_t n = sequences_now.channels, width = number / (CONV_CASES / FA_MOST_WIDTH) + 1;
    *g = (fa_conv_grad_args){.forward = {.begins = sequences_now.begins,
                                         .sequences = sequences_now.n,
                                         .channels = n,
                                         .width = (int)width,
                                         .activation = (fa_activation)below(FA_N_ACTIVATIONS)}};
    a->x = random_rows(n, -2, 2);
    if (below(2)) a->state = random_states(sequences_now.dtype, width - 1, n);
    g->dout = random_rows(n, -1, 1);
    conv_now.weight = shared_lanes(1, n * width, -1, 1, &a->weight);
    conv_now.bias = shared_lanes((int)below(2), n, -1, 1, &a->bias);
    conv_now.sums = below(4) != 0;
    if (sequences_now.spoiled) spoil_row(below(3) ? &a->x : &g->dout, n);
    conv_now.out = new_nears(sequences_now.tokens * n), conv_now.dx = new_nears(sequences_now.tokens * n);
    conv_now.dstate = new_nears(sequences_now.n * (width - 1) * n), conv_now.dweight = new_nears((width + 1) * n);
    expect_conv();
}

/* Computes twice, the second time in tasks of some tokens, the last one first. */
static const char *check_conv(int isa, const fa_kernels *kernels)
{
    fa_conv_args a = conv_now.args.forward;
    const int64_t tokens = sequences_now.tokens, step = sequences_now.step;
    const size_t size = (size_t)kernels->channels->conv_scratch_bytes(&a);
    char *scratch = allocate(size);
    fa_array out[2];
    (void)isa;
    if (size % 64) return UNALIGNED;
    FOR(again, 2)
    {
        a.out = out[again] = new_rows(a.x.dtype, a.channels, again ? sequences_now.layout : GAP);
        if (!again) kernels->channels->conv_run(&a, 0, tokens, scratch);
        for (int64_t end = tokens; again && end > 0; end -= step)
            kernels->channels->conv_run(&a, larger(0, end - step), end, memset(scratch, 0x55, size));
    }
    return wrong_rows("out", out, a.channels, conv_now.out);
}

/* The same, with sums for each task; some cases without some of the results. */
static const char *check_conv_grad(int isa, const fa_kernels *kernels)
{
    fa_conv_grad_args g = conv_now.args;
    const fa_conv_args *a = &g.forward;
    const fa_dtype lane = lane_of(a->x.dtype);
    const int64_t n = (a->width + 1) * a->channels, tokens = sequences_now.tokens;
    const size_t size = (size_t)kernels->channels->conv_grad_scratch_bytes(&g);
    char *scratch = allocate(size);
    fa_array dx[2] = {{0}}, dstate[2] = {{0}}, total[2];
    const char *wrong = NULL;
    (void)isa;
    if (size % 64) return UNALIGNED;
    FOR(again, 2)
    {
        const int64_t step = again ? sequences_now.step : larger(1, tokens), tasks = (tokens + step - 1) / step;
        char *sums = conv_now.sums ? allocate((size_t)(tasks * n * bytes_of(lane))) : NULL;
        total[again] = new_floats(lane, 1, 1, a->width + 1, a->channels, 0);
        if (sequences_now.step % 4) dx[again] = new_rows(a->x.dtype, a->channels, again ? sequences_now.layout : GAP);
        if (sequences_now.step % 3)
            dstate[again] = new_floats(a->x.dtype, a->sequences, 1, a->width - 1, a->channels, again ? REVERSED : GAP);
        g.dx = dx[again], g.dstate = dstate[again];
        for (int64_t task = tasks - 1; task >= 0; task--)
            kernels->channels->conv_grad_run(&g, task * step, smaller(tokens, task * step + step),
                                             sums ? sums + task * n * bytes_of(lane) : NULL,
                                             memset(scratch, 0x55, size));
        if (sums) kernels->rows->grad_add(sums, tasks, n, n, total[again].data);
    }
    if (dx->data) wrong = wrong_rows("dx", dx, a->channels, conv_now.dx);
    if (!wrong && dstate->data) wrong = wrong_states("dstate", dstate, a->width - 1, a->channels, conv_now.dstate);
    FOR(again, 2)
    FOR(i, conv_now.sums ? a->width + 1 : 0)
    FOR(j, a->channels) if (!wrong)
    {
        const near want = stored(conv_now.dweight[i * a->channels + j], lane);
        wrong = differs("dweight and dbias", total + again, total + again, 0, 0, i, j, want);
    }
    return wrong;
}

static void describe_conv(void)
{
    const fa_conv_args *a = &conv_now.args.forward;
    describe_sequences();
    printf(", width %d, activation %d%s%s", a->width, a->activation, a->state.data ? ", state" : "",
           a->bias ? ", bias" : "");
}

static void drop_conv(void) { free(conv_now.out), free(conv_now.dx), free(conv_now.dstate), free(conv_now.dweight); }

FAMILY(conv, CONV_CASES, make_conv, sequences_now.dtype, describe_conv, drop_conv);

FAMILY(conv_grad, CONV_CASES, make_conv, sequences_now.dtype, describe_conv, drop_conv);

/* The scan. Results: of tokens, of states, of channels; then db and dc, which are sums over channels. */
enum { OUT, DX, DDT, STATE_OUT, DSTATE, DRATES, DSKIP, DDT_BIAS, DB, DC, N_SCAN_RESULTS };
static const char *const scan_names[] = {"out",    "dx",    "ddt",   "state_out", "dstate",
                                         "drates", "dskip", "dbias", "db",        "dc"};

static struct {
    fa_scan_grad_args args;
    fa_array rates, skip, dt_bias;
    uint64_t without; /* bits of gradients */
    near *want[N_SCAN_RESULTS];
} scan_now;

/* Rows of a result for each token or sequence, and numbers in each. */
static int64_t scan_rows(int result)
{
    return result < STATE_OUT || result >= DB ? sequences_now.tokens
           : result < DSKIP                   ? sequences_now.n * sequences_now.channels
                                              : sequences_now.n;
}

static int64_t scan_cols(int result)
{
    return result < STATE_OUT || (result >= DSKIP && result < DB) ? sequences_now.channels
                                                                  : scan_now.args.forward.states;
}

static near *scan_want(int result, int64_t row, int64_t col)
{
    return scan_now.want[result] + row * scan_cols(result) + col;
}

/* A channel of a sequence; of each token, and h before the first, too. */
typedef struct {
    int64_t s, j;
    double eps;
    near *h, *decay;    /* (states) of a token */
    near *step, *slope; /* the latter of softplus */
} scan_channel;

static near shared_lane(const fa_array *x, int64_t j) { return exact(x->data ? get(x, 0, 0, 0, j) : 0); }

static near token_rate(const scan_channel *c, int64_t d)
{
    return exact(get(&scan_now.rates, 0, 0, 0, c->j * scan_now.args.forward.states + d));
}

/* Token t of the forward pass. A softplus, a sigmoid and an exponential err by some units in the last place, and in
 * proportion to the error of what they are applied to. */
static void token_forth(scan_channel *c, int64_t t)
{
    const fa_scan_args *a = &scan_now.args.forward;
    const double eps = c->eps, raw = get(&a->dt, c->s, 0, t, c->j) + shared_lane(&scan_now.dt_bias, c->j).value;
    const double x = get(&a->x, c->s, 0, t, c->j), softplus = fmax(0, raw) + log1p(exp(-fabs(raw)));
    const double step = a->softplus ? softplus : raw, slope = a->softplus ? 1 / (1 + exp(-raw)) : 1;
    const near written = product((near){step, 4 * eps * (1 + fabs(raw)) * fabs(step)}, exact(x), eps);
    near *h = c->h + t * a->states, *decay = c->decay + t * a->states;
    near *out = scan_want(OUT, sequences_now.begins[c->s] + t, c->j);
    c->step[t] = (near){step, 4 * eps * (1 + fabs(raw)) * fabs(step)};
    c->slope[t] = (near){slope, a->softplus ? 4 * eps * (1 + fabs(raw)) * slope : 0};
    *out = product(shared_lane(&scan_now.skip, c->j), exact(x), eps);
    FOR(d, a->states)
    {
        const near power = product(c->step[t], token_rate(c, d), eps);
        near *next = h + a->states + d;
        decay[d] = (near){exp(power.value), exp(power.value) * (power.error + 4 * eps) + FLT_MIN};
        *next = product(decay[d], h[d], eps);
        add_to(next, product(written, exact(get(&a->b, c->s, 0, t, d)), eps), eps);
        next->error += FLT_MIN; /* smaller numbers become 0 */
        add_to(out, product(*next, exact(get(&a->c, c->s, 0, t, d)), eps), eps);
    }
}

/* And of the backward pass. dh (states) is that of the state after the token, and becomes that of the one before. */
static void token_back_through(const scan_channel *c, int64_t t, near *dh)
{
    const fa_scan_args *a = &scan_now.args.forward;
    const double eps = c->eps;
    const int64_t token = sequences_now.begins[c->s] + t, row = c->s * a->channels + c->j;
    const near x = exact(get(&a->x, c->s, 0, t, c->j)), dout = exact(get(&scan_now.args.dout, c->s, 0, t, c->j));
    const near *before = c->h + t * a->states, *decay = c->decay + t * a->states;
    near of_written = exact(0), of_decays = exact(0);
    FOR(d, a->states)
    {
        const near b_t = exact(get(&a->b, c->s, 0, t, d)), c_t = exact(get(&a->c, c->s, 0, t, d));
        add_to(dh + d, product(dout, c_t, eps), eps);
        add_to(scan_want(DC, token, d), product(dout, before[a->states + d], eps), eps);
        add_to(scan_want(DB, token, d), product(dh[d], product(c->step[t], x, eps), eps), eps);
        add_to(&of_written, product(dh[d], b_t, eps), eps);
        dh[d] = product(dh[d], decay[d], eps);
        dh[d].error += FLT_MIN;
        const near of_decay = product(dh[d], before[d], eps);
        add_to(&of_decays, product(of_decay, token_rate(c, d), eps), eps);
        add_to(scan_want(DRATES, row, d), product(of_decay, c->step[t], eps), eps);
    }
    near *dx = scan_want(DX, token, c->j);
    *dx = product(shared_lane(&scan_now.skip, c->j), dout, eps);
    add_to(dx, product(c->step[t], of_written, eps), eps);
    add_to(&of_decays, product(x, of_written, eps), eps);
    const near ddt = *scan_want(DDT, token, c->j) = product(of_decays, c->slope[t], eps);
    add_to(scan_want(DDT_BIAS, c->s, c->j), ddt, eps);
    add_to(scan_want(DSKIP, c->s, c->j), product(dout, x, eps), eps);
}

static void expect_scan(int64_t s, int64_t j, near *memory)
{
    const fa_scan_grad_args *g = &scan_now.args;
    const fa_scan_args *a = &g->forward;
    const int64_t n = a->states, length = length_of(s), row = s * a->channels + j;
    near dh[MOST_STATES];
    scan_channel c = {.s = s, .j = j, .eps = eps_of(lane_of(a->x.dtype)), .h = memory};
    c.decay = c.h + (length + 1) * n, c.step = c.decay + length * n, c.slope = c.step + length;
    FOR(d, n) c.h[d] = exact(a->state.data ? get(&a->state, s, 0, j, d) : 0);
    FOR(d, n) dh[d] = exact(g->dstate_out.data ? get(&g->dstate_out, s, 0, j, d) : 0);
    FOR(t, length) token_forth(&c, t);
    for (int64_t t = length - 1; t >= 0; t--) token_back_through(&c, t, dh);
    FOR(d, n) * scan_want(STATE_OUT, row, d) = c.h[length * n + d], *scan_want(DSTATE, row, d) = dh[d];
}

static void make_scan(int number)
{
    fa_scan_grad_args *g = &scan_now.args;
    fa_scan_args *a = &g->forward;
    seed = (uint64_t)number << 32 | 14;
    make_sequences(number);
    const fa_dtype lane = lane_of(sequences_now.dtype);
    const int64_t n = sequences_now.channels, states = scan_states[number / (SCAN_CASES / COUNT(scan_states))];
    *g = (fa_scan_grad_args){.forward = {.begins = sequences_now.begins,
                                         .sequences = sequences_now.n,
                                         .channels = n,
                                         .states = states,
                                         .longest = sequences_now.longest,
                                         .softplus = (int)below(2)}};
    a->x = random_rows(n, -2, 2), a->b = random_rows(states, -1, 1), a->c = random_rows(states, -1, 1);
    a->dt = random_rows(n, a->softplus ? -6 : 0, a->softplus ? 3 : 0.5);
    if (below(2)) a->state = random_states(lane, n, states);
    g->dout = random_rows(n, -1, 1);
    if (below(2)) g->dstate_out = random_states(lane, n, states);
    scan_now.rates = shared_lanes(1, n * states, below(4) ? -2 : -40, 0, &a->rates);
    scan_now.skip = shared_lanes((int)below(2), n, -1, 1, &a->skip);
    scan_now.dt_bias = shared_lanes((int)below(2), n, 0, 0.5, &a->dt_bias);
    scan_now.without = below(2) ? random_bits() : 0;
    const fa_array *tokens[] = {&a->x, &a->dt, &a->b, &a->c, &g->dout};
    const int64_t which = below(COUNT(tokens));
    if (sequences_now.spoiled) spoil_row(tokens[which], which == 2 || which == 3 ? states : n);
    FOR(i, N_SCAN_RESULTS) scan_now.want[i] = new_nears(scan_rows((int)i) * scan_cols((int)i));
    near *memory = new_nears((sequences_now.longest + 1) * 2 * (states + 1));
    FOR(s, sequences_now.n) FOR(j, n) expect_scan(s, j, memory);
    free(memory);
}

/* Computes twice, the second time the last task first and with the state in place. */
static const char *check_scan(int isa, const fa_kernels *kernels)
{
    fa_scan_args a = scan_now.args.forward;
    const fa_dtype lane = lane_of(a.x.dtype);
    const int64_t n = a.channels, tasks = kernels->channels->scan_tasks(&a);
    const size_t size = (size_t)kernels->channels->scan_scratch_bytes(&a);
    char *scratch = allocate(size);
    fa_array out[2], state[2];
    (void)isa;
    if (size % 64) return UNALIGNED;
    FOR(again, 2)
    {
        a.out = out[again] = new_rows(a.x.dtype, n, again ? sequences_now.layout : GAP);
        a.state_out = state[again] = new_floats(lane, a.sequences, 1, n, a.states, again ? sequences_now.layout : GAP);
        if (again && a.state.data) copy(&a.state, &a.state_out, a.sequences, 1, n, a.states), a.state = a.state_out;
        FOR(task, tasks)
        { /* the first 8 bytes are 0 before a thread's first task, or once more */
            if (again || !task) memset(memset(scratch, 0x55, size), 0, 8);
            kernels->channels->scan_run(&a, again ? tasks - 1 - task : task, scratch);
        }
    }
    const char *wrong = wrong_rows("out", out, n, scan_now.want[OUT]);
    return wrong ? wrong : wrong_states("state_out", state, n, a.states, scan_now.want[STATE_OUT]);
}

/* The sums over blocks of channels of what tasks leave for each, (blocks, tokens, states). */
static fa_array sum_of_blocks(const fa_array *x, int64_t blocks, int64_t states)
{
    const fa_array sums = new_floats(FA_F64, 1, 1, sequences_now.tokens, states, 0);
    FOR(t, sequences_now.tokens)
    FOR(d, states)
    {
        double sum = 0;
        FOR(block, blocks) sum += get(x, 0, block, t, d);
        set(&sums, 0, 0, t, d, sum);
    }
    return sums;
}

/* Likewise; some cases without some of the results. */
static const char *check_scan_grad(int isa, const fa_kernels *kernels)
{
    fa_scan_grad_args g = scan_now.args;
    const fa_scan_args *a = &g.forward;
    const fa_dtype lane = lane_of(a->x.dtype);
    const int64_t n = a->channels, tasks = kernels->channels->scan_tasks(a), blocks = tasks / larger(1, a->sequences);
    const size_t size = (size_t)kernels->channels->scan_grad_scratch_bytes(&g);
    char *scratch = allocate(size);
    fa_array x[N_SCAN_RESULTS][2] = {{{0}}};
    const char *wrong = NULL;
    (void)isa;
    if (size % 64) return UNALIGNED;
    FOR(again, 2)
    {
        const int layout = again ? sequences_now.layout : GAP;
        for (int i = DX; i < N_SCAN_RESULTS; i++) {
            const int64_t rows = i < DSKIP ? n : 1;
            if (i == STATE_OUT || scan_now.without >> i & 1) continue;
            x[i][again] = i < STATE_OUT ? new_rows(a->x.dtype, n, layout)
                          : i < DB      ? new_floats(lane, a->sequences, 1, rows, scan_cols(i), layout & GAP)
                                        : new_floats(lane, 1, blocks, sequences_now.tokens, a->states, 0);
        }
        g.dx = x[DX][again], g.ddt = x[DDT][again], g.dstate = x[DSTATE][again], g.drates = x[DRATES][again];
        g.dskip = x[DSKIP][again], g.dbias = x[DDT_BIAS][again], g.db = x[DB][again].data, g.dc = x[DC][again].data;
        FOR(task, tasks)
        kernels->channels->scan_grad_run(&g, again ? tasks - 1 - task : task, memset(scratch, 0x55, size));
        for (int i = DB; i <= DC; i++)
            if (x[i][again].data) x[i][again] = sum_of_blocks(&x[i][again], blocks, a->states);
    }
    for (int i = DX; i < N_SCAN_RESULTS && !wrong; i++) {
        const near *want = scan_now.want[i];
        if (!x[i]->data) continue;
        if (i < STATE_OUT) wrong = wrong_rows(scan_names[i], x[i], n, want);
        else if (i < DB) wrong = wrong_states(scan_names[i], x[i], i < DSKIP ? n : 1, scan_cols(i), want);
        FOR(t, i < DB ? 0 : sequences_now.tokens)
        FOR(d, a->states)
        if (!wrong) wrong = differs(scan_names[i], x[i], x[i] + 1, 0, 0, t, d, stored(*want++, lane));
    }
    return wrong;
}

static void describe_scan(void)
{
    const fa_scan_grad_args *g = &scan_now.args;
    const fa_scan_args *a = &g->forward;
    describe_sequences();
    printf(", states %d%s%s%s%s%s", (int)a->states, a->softplus ? ", softplus" : "", a->state.data ? ", state" : "",
           a->skip ? ", skip" : "", a->dt_bias ? ", dt_bias" : "", g->dstate_out.data ? ", dstate_out" : "");
}

static void drop_scan(void) { FOR(i, N_SCAN_RESULTS) free(scan_now.want[i]); }

FAMILY(scan, SCAN_CASES, make_scan, sequences_now.dtype, describe_scan, drop_scan);

FAMILY(scan_grad, SCAN_CASES, make_scan, sequences_now.dtype, describe_scan, drop_scan);

#endif

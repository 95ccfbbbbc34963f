/* Tests of causal convolution and of the selective scan, with their gradients. */
#ifndef CHANNELS_H
#define CHANNELS_H

#include "activations.h"
#include "results.h"

/* Channels near the ends of vectors, of a scan's tasks and of a convolution's pieces. Tokens near the ends of what is
 * computed at once, of one block and of two. */
static const int64_t channel_counts[] = {1, 7, 16, 17, 64, 70, 128, 130, 256, 259};
static const int64_t channel_lens[] = {0, 0, 1, 2, 7, 8, 9, 31, 32, 33, 40, 65};
static const int64_t scan_states[] = {1, 3, 8, 16, 17, 33};

enum { MOST_SEQUENCES = 4 };
enum { CONV_CASES = COUNT(floats) * COUNT(channel_counts) * FA_MOST_WIDTH };
enum { SCAN_CASES = COUNT(floats) * COUNT(channel_counts) * COUNT(scan_states) };

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
    n_results = 0;
}

static fa_array random_rows(int64_t cols, double low, double high)
{
    const fa_array x = new_rows(sequences_now.dtype, cols, (int)below(8) & (GAP | REVERSED));
    FOR(s, sequences_now.n) FOR(t, length_of(s)) FOR(j, cols) set(&x, s, 0, t, j, uniform(low, high));
    return x;
}

/* Rows for each sequence, such as states. All sequences may read the same. */
static fa_array random_states(fa_dtype dtype, int64_t rows, int64_t cols)
{
    const fa_array x = new_floats(dtype, sequences_now.n, 1, rows, cols,
                                  ((int)below(8) & (GAP | REVERSED)) | (below(4) ? 0 : ONE_BATCH));
    FOR(s, sequences_now.n) FOR(i, rows) FOR(j, cols) set(&x, s, 0, i, j, uniform(-1, 1));
    return x;
}

/* Numbers of the lane type that all tokens share, in both calls, or NULL. */
static void shared_lanes(int there, int64_t n, double low, double high, const void **data, const void **wide)
{
    if (!there) return;
    *data = new_matrix(lane_of(sequences_now.dtype), 1, n, low, high);
    *wide = twin_of_lanes(*data, lane_of(sequences_now.dtype));
}

/* Puts NaN in one row of the longest sequence: it must show where it goes, and nowhere else. */
static void spoil_row(const fa_array *x, int64_t cols)
{
    const int64_t n = sequences_now.longest;
    int64_t s = 0;
    while (n && length_of(s) != n) s++;
    if (n) set(x, s, 0, below(2) ? below(n) : n - 1, below(cols), NAN);
}

/* Convolution. */
static fa_conv_grad_args conv_now[2]; /* the second one with twins */

static void draw_conv(int number, int activation)
{
    fa_conv_grad_args *g = conv_now, *wide = conv_now + 1;
    fa_conv_args *a = &g->forward;
    seed = (uint64_t)number << 32 | 13;
    make_sequences(number);
    const int64_t n = sequences_now.channels, width = number / (CONV_CASES / FA_MOST_WIDTH) + 1;
    *g = (fa_conv_grad_args){.forward = {.begins = sequences_now.begins,
                                         .sequences = sequences_now.n,
                                         .channels = n,
                                         .width = (int)width,
                                         .activation = (fa_activation)activation}};
    a->x = random_rows(n, -2, 2);
    if (below(2)) a->state = random_states(sequences_now.dtype, width - 1, n);
    g->dout = random_rows(n, -1, 1);
    if (sequences_now.spoiled) spoil_row(below(3) ? &a->x : &g->dout, n);
    *wide = *g;
    twins((fa_array *const[]){&wide->forward.x, &wide->forward.state, &wide->dout}, 3);
    shared_lanes(1, n * width, -1, 1, &a->weight, &wide->forward.weight);
    shared_lanes((int)below(2), n, -1, 1, &a->bias, &wide->forward.bias);
}

/* The second time in tasks of some tokens, the last one first. */
static int run_conv(const fa_kernels *kernels, int again, int wide)
{
    fa_conv_args a = conv_now[wide].forward;
    const int64_t tokens = sequences_now.tokens, step = again ? sequences_now.step : larger(1, tokens);
    const size_t size = (size_t)kernels->channels->conv_scratch_bytes(&a);
    char *scratch = allocate(size);
    a.out = results->got[again];
    for (int64_t end = tokens; end > 0; end -= step)
        kernels->channels->conv_run(&a, larger(0, end - step), end, memset(scratch, 0x55, size));
    return size % 64 == 0;
}

static void make_conv(int number)
{
    draw_conv(number, number % FA_N_ACTIVATIONS);
    add_rows("out", 1, sequences_now.channels);
    expect_results(run_conv);
}

CHECK(conv, run_conv, 400)

/* The same, with sums for each task; some cases without some of the results. */
static int run_conv_grad(const fa_kernels *kernels, int again, int wide)
{
    fa_conv_grad_args g = conv_now[wide];
    const fa_conv_args *a = &g.forward;
    const int64_t lane = bytes_of(lane_of(a->x.dtype)), n = (a->width + 1) * a->channels, tokens = sequences_now.tokens;
    const int64_t step = again ? sequences_now.step : larger(1, tokens), tasks = (tokens + step - 1) / step;
    const size_t size = (size_t)kernels->channels->conv_grad_scratch_bytes(&g);
    char *scratch = allocate(size), *sums = results[2].there ? allocate((size_t)(tasks * n * lane)) : NULL;
    g.dx = results[0].got[again], g.dstate = results[1].got[again];
    for (int64_t task = tasks - 1; task >= 0; task--)
        kernels->channels->conv_grad_run(&g, task * step, smaller(tokens, task * step + step),
                                         sums ? sums + task * n * lane : NULL, memset(scratch, 0x55, size));
    if (sums) kernels->rows->grad_add(sums, tasks, n, n, results[2].got[again].data);
    return size % 64 == 0;
}

static void make_conv_grad(int number)
{
    const int activation = number % FA_N_ACTIVATIONS; /* relu's slope is rounding's at 0 */
    draw_conv(number, activation == FA_RELU ? FA_NONE : activation);
    const fa_conv_args *a = &conv_now->forward;
    const int64_t step = sequences_now.step, n = a->channels;
    add_rows("dx", step % 4 != 0, n);
    add_result("dstate", step % 3 != 0, sequences_now.dtype, a->sequences, 1, a->width - 1, n, REVERSED);
    add_result("dweight and dbias", below(4) != 0, lane_of(sequences_now.dtype), 1, 1, a->width + 1, n, 0);
    results[2].sum = 1;
    expect_results(run_conv_grad);
}

CHECK(conv_grad, run_conv_grad, 400)

FAMILY(conv, CONV_CASES, make_conv, sequences_now.dtype, NULL);

FAMILY(conv_grad, CONV_CASES, make_conv_grad, sequences_now.dtype, NULL);

/* The scan. */
static fa_scan_grad_args scan_now[2]; /* the second one with twins */

static void draw_scan(int number)
{
    fa_scan_grad_args *g = scan_now, *wide = scan_now + 1;
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
    const fa_array *tokens[] = {&a->x, &a->dt, &a->b, &a->c, &g->dout};
    const int64_t which = below(COUNT(tokens));
    if (sequences_now.spoiled) spoil_row(tokens[which], which == 2 || which == 3 ? states : n);
    *wide = *g;
    fa_scan_args *w = &wide->forward;
    twins((fa_array *const[]){&w->x, &w->b, &w->c, &w->dt, &w->state, &wide->dout, &wide->dstate_out}, 7);
    shared_lanes(1, n * states, below(4) ? -2 : -40, 0, &a->rates, &w->rates);
    shared_lanes((int)below(2), n, -1, 1, &a->skip, &w->skip);
    shared_lanes((int)below(2), n, 0, 0.5, &a->dt_bias, &w->dt_bias);
}

/* The second time the last task first and with the state in place. */
static int run_scan(const fa_kernels *kernels, int again, int wide)
{
    fa_scan_args a = scan_now[wide].forward;
    const int64_t tasks = kernels->channels->scan_tasks(&a);
    const size_t size = (size_t)kernels->channels->scan_scratch_bytes(&a);
    char *scratch = allocate(size);
    a.out = results[0].got[again], a.state_out = results[1].got[again];
    if (again && a.state.data)
        copy(&a.state, &a.state_out, a.sequences, 1, a.channels, a.states), a.state = a.state_out;
    FOR(task, tasks)
    { /* the first 8 bytes are 0 before a thread's first task, or once more */
        if (again || !task) memset(memset(scratch, 0x55, size), 0, 8);
        kernels->channels->scan_run(&a, again ? tasks - 1 - task : task, scratch);
    }
    return size % 64 == 0;
}

static void make_scan(int number)
{
    draw_scan(number);
    const fa_scan_args *a = &scan_now->forward;
    add_rows("out", 1, a->channels);
    add_result("state_out", 1, lane_of(sequences_now.dtype), a->sequences, 1, a->channels, a->states,
               sequences_now.layout);
    expect_results(run_scan);
}

CHECK(scan, run_scan, 400)

/* Likewise; some cases without some of the results. db and dc are sums of what each block of channels leaves. */
static int run_scan_grad(const fa_kernels *kernels, int again, int wide)
{
    fa_scan_grad_args g = scan_now[wide];
    const fa_scan_args *a = &g.forward;
    const int64_t tasks = kernels->channels->scan_tasks(a), blocks = tasks / larger(1, a->sequences);
    const size_t size = (size_t)kernels->channels->scan_grad_scratch_bytes(&g);
    char *scratch = allocate(size);
    fa_array of_blocks[2] = {{0}};
    FOR(i, 2)
    if (results[i].there) of_blocks[i] = new_floats(lane_of(a->x.dtype), 1, blocks, sequences_now.tokens, a->states, 0);
    g.db = of_blocks[0].data, g.dc = of_blocks[1].data;
    g.dx = results[2].got[again], g.ddt = results[3].got[again], g.dstate = results[4].got[again];
    g.drates = results[5].got[again], g.dskip = results[6].got[again], g.dbias = results[7].got[again];
    FOR(task, tasks) kernels->channels->scan_grad_run(&g, again ? tasks - 1 - task : task, memset(scratch, 0x55, size));
    FOR(i, 2) FOR(t, results[i].there ? sequences_now.tokens : 0) FOR(d, a->states)
    {
        double sum = 0;
        FOR(block, blocks) sum += get(of_blocks + i, 0, block, t, d);
        set(results[i].got + again, 0, 0, t, d, sum);
    }
    return size % 64 == 0;
}

static void make_scan_grad(int number)
{
    draw_scan(number);
    const fa_scan_args *a = &scan_now->forward;
    const fa_dtype lane = lane_of(sequences_now.dtype);
    const int64_t n = a->channels, tokens = sequences_now.tokens, without = below(2) ? (int64_t)random_bits() : 0;
    const int gap = sequences_now.layout & GAP;
    add_result("db", !(without & 1), lane, 1, 1, tokens, a->states, 0);
    add_result("dc", !(without & 2), lane, 1, 1, tokens, a->states, 0);
    add_rows("dx", !(without & 4), n);
    add_rows("ddt", !(without & 8), n);
    add_result("dstate", !(without & 16), lane, a->sequences, 1, n, a->states, gap);
    add_result("drates", !(without & 32), lane, a->sequences, 1, n, a->states, gap);
    add_result("dskip", !(without & 64), lane, a->sequences, 1, 1, n, gap);
    add_result("dbias", !(without & 128), lane, a->sequences, 1, 1, n, gap);
    expect_results(run_scan_grad);
}

CHECK(scan_grad, run_scan_grad, 400)

FAMILY(scan, SCAN_CASES, make_scan, sequences_now.dtype, NULL);

FAMILY(scan_grad, SCAN_CASES, make_scan_grad, sequences_now.dtype, NULL);

#endif

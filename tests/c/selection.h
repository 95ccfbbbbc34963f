/* Which keys have the largest scores. */
#ifndef SELECTION_H
#define SELECTION_H

#include "results.h"

enum { SELECTION_CASES = 4 * COUNT(shapes) * COUNT(dtypes) };

static struct {
    test_case c;
    fa_selection_args args;
    int exact;      /* scores are whole numbers: of equal ones the first is selected */
    fa_array given; /* these scores, or none */
} selection_now;

/* The score of a key; NaN counts as larger than all. */
static double score_of(int64_t b, int64_t h_kv, int64_t i, int64_t j)
{
    const fa_selection_args *r = &selection_now.args;
    const fa_attention_args *a = &r->attention;
    const int64_t group = a->heads_q / a->heads_kv;
    double sum = 0;
    for (int64_t h = h_kv * group; h < (h_kv + 1) * group; h++) {
        double s = 0;
        FOR(d, a->head_dim) s += get(&a->q, b, h, i, d) * get(&a->k, b, h_kv, j, d);
        sum += (r->weights.data ? get(&r->weights, b, h, i, 0) : 1) * (r->relu && s < 0 ? 0 : s);
    }
    return isnan(sum) ? INFINITY : sum;
}

/* The second time for many threads, from the last task to the first, with other garbage in the scratch memory. */
static int run_selection(const fa_kernels *kernels, int again, int wide)
{
    fa_selection_args call = selection_now.args;
    const fa_attention_args *a = &call.attention;
    const int64_t n_rows = a->heads_kv * a->len_q, lane = bytes_of(lane_of(a->q.dtype));
    fa_selection_plan p;
    call.selected = results->got[again], call.selected.col = 8, call.selected.dtype = FA_F64; /* as wide */
    call.scores = selection_now.given;
    kernels->selection->plan(&call, again ? 64 : 1, &p);
    char *scratch = allocate((size_t)p.scratch_bytes);
    if (again) memset(scratch, 0x55, (size_t)p.scratch_bytes);
    if (p.runs) {
        int64_t *begins = (int64_t *)allocate((size_t)a->batch * sizeof *begins);
        FOR(b, a->batch) begins[b] = b * n_rows * p.pitch * lane;
        call.scores.data = allocate((size_t)(a->batch * n_rows * p.pitch * lane));
        call.scores.batch = begins, call.scores.row = p.pitch * lane, call.scores.head = a->len_q * p.pitch * lane;
        for (int64_t task = p.n_tasks * p.runs; task-- > 0;) kernels->selection->score(&call, &p, task, scratch);
    }
    FOR(task, p.n_tasks) kernels->selection->run(&call, &p, again ? p.n_tasks - 1 - task : task, scratch);
    return p.scratch_bytes % 64 == 0 && !wide;
}

static void make_selection(int number)
{
    const int i = number / COUNT(dtypes);
    test_case c = {.number = number, .q = dtypes[number % COUNT(dtypes)][0], .kv = dtypes[number % COUNT(dtypes)][1]};
    fa_selection_args *r = &selection_now.args;
    fa_attention_args *a = &r->attention;
    seed = (uint64_t)number << 32 | 21;
    *r = (fa_selection_args){.relu = (int)below(2)};
    c.s = small_shape(i / 4);
    if (c.s.batch > 3) c.s.batch = 3;
    if (c.s.heads_q == c.s.heads_kv && below(2)) c.s.heads_q *= c.s.len_q > 30 ? 3 : 11;
    c.options = below(2) ? LAYOUT : 0;
    if (below(4) == 0) c.options |= NAN_KEYS;
    selection_now.c = c;
    *a = new_inputs(&c);
    const fa_dtype lane = lane_of(c.q);
    selection_now.exact = c.kv != FA_I8 && below(2);
    if (selection_now.exact) {
        EACH(a->heads_q, a->len_q, a->head_dim) set(&a->q, b, h, i, j, (double)(below(5) - 2));
        EACH(a->heads_kv, a->len_k, a->head_dim)
        if (!isnan(get(&a->k, b, h, i, j))) set(&a->k, b, h, i, j, (double)(below(5) - 2));
    }
    if (below(2)) {
        r->weights = new_floats(lane, a->batch, a->heads_q, a->len_q, 1, below(2) ? (int)below(8) | ODD : 0);
        EACH(a->heads_q, a->len_q, 1)
        set(&r->weights, b, h, i, j, selection_now.exact ? (double)(below(4) - 1) : uniform(-1, 2));
    }
    if (below(3)) {
        a->masks.row_end = new_array(8, a->batch, 1, a->len_q, 1, ONE_HEAD);
        const int64_t offset = below(2) ? a->len_k - a->len_q : below(a->len_k + 1);
        FOR(b, a->batch)
        FOR(i, a->len_q) set_int(&a->masks.row_end, b, 0, i, smaller(a->len_k, larger(0, offset + i + 1 - below(2))));
    }
    r->top_k = below(3) ? 1 + below(9) : 1 + below(a->len_k + 2);
    if (below(2)) r->first = below(r->top_k + 1), r->last = below(r->top_k + 1 - r->first);
    const int64_t groups = a->heads_kv;
    n_results = 0;
    result *selected = add_result("selected", 1, FA_I8, a->batch, groups, a->len_q, r->top_k * 8, GAP | ROWS_FIRST);
    selected->off = selection_now.exact ? 0 : INFINITY; /* where rounding decides, both runs agree */
    selection_now.given = (fa_array){0};
    expect_same(run_selection, lane);
    if (!selection_now.exact) return;
    selection_now.given = new_floats(lane, a->batch, groups, a->len_q, a->len_k, ODD | GAP);
    EACH(groups, a->len_q, a->len_k) set(&selection_now.given, b, h, i, j, score_of(b, h, i, j));
}

/* And, of exact scores, from these. */
static const char *check_selection(const fa_kernels *kernels)
{
    const fa_array given = selection_now.given;
    selection_now.given = (fa_array){0};
    const char *wrong = check_results(run_selection, kernels, 0, 0);
    selection_now.given = given;
    return wrong || !given.data ? wrong : check_results(run_selection, kernels, 0, 0);
}

FAMILY(selection, SELECTION_CASES, make_selection, selection_now.c.q, &selection_now.c);

#endif

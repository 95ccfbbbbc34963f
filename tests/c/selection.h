/* Which keys have the largest scores. */
#ifndef SELECTION_H
#define SELECTION_H

#include "results.h"

enum { SELECTION_CASES = 4 * COUNT(shapes) * COUNT(dtypes) };

/* A score, and the sum of its terms' absolute values. */
typedef struct {
    double value, size;
} score;

static struct {
    test_case c;
    fa_selection_args args;
    int exact; /* scores are whole numbers: of equal ones the first is selected */
    score *scores;
} selection_now;

/* The score of a key, whose size is 0 where it is exact; NaN counts as larger than all. */
static score selection_score_of(int64_t b, int64_t h_kv, int64_t i, int64_t j)
{
    const fa_selection_args *r = &selection_now.args;
    const fa_attention_args *a = &r->attention;
    const int64_t group = a->heads_q / a->heads_kv;
    score sum = {0, 0};
    for (int64_t h = h_kv * group; h < (h_kv + 1) * group; h++) {
        score s = {0, 0};
        FOR(d, a->head_dim)
        {
            const double x = get(&a->k, b, h_kv, j, d), scale = a->k_scale.data ? get(&a->k_scale, b, h_kv, j, 0) : 1;
            const double term = get(&a->q, b, h, i, d) * (a->k_scale.dtype == FA_F32 ? (float)(x * scale) : x * scale);
            s.value += term, s.size += fabs(term);
        }
        const double weight = r->weights.data ? get(&r->weights, b, h, i, 0) : 1;
        if (r->relu && s.value < 0) s.value = 0;
        sum.value += weight * s.value;
        sum.size += fabs(weight) * s.size;
    }
    if (isnan(sum.value)) sum = (score){INFINITY, 0};
    if (selection_now.exact) sum.size = 0;
    return sum;
}

static int64_t allowed_of(int64_t b, int64_t i)
{
    const fa_attention_args *a = &selection_now.args.attention;
    return a->masks.row_end.data ? get_int(&a->masks.row_end, b, 0, i) : a->len_k;
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
    score *s = calloc((size_t)(a->batch * a->heads_kv * a->len_q * a->len_k) + 1, sizeof *s);
    selection_now.scores = s;
    EACH(a->heads_kv, a->len_q, a->len_k) *s++ = selection_score_of(b, h, i, j);
}

/* What a query selected, of its `scores`. */
static const char *wrong_selection(const int64_t *got, int64_t allowed, const score *s)
{
    const fa_selection_args *r = &selection_now.args;
    const int64_t n = smaller(allowed, r->top_k);
    const double eps = eps_of(lane_of(r->attention.q.dtype));
    double least = INFINITY, most = -INFINITY, size = 0;
    int64_t place = -1, next = 0, worst = -1;
    FOR(i, r->top_k)
    {
        const int listed = got[i] >= 0 && got[i] < allowed && (!i || got[i] > got[i - 1]);
        if (i < n ? !listed : got[i] != -1) return "no list";
        if (i < smaller(n, r->first) && got[i] != i) return "not the first";
        if (i < n && i >= n - r->last && got[i] != allowed - n + i) return "not the last";
    }
    if (allowed <= r->top_k) return NULL;
    FOR(j, allowed)
    {
        const int chosen = next < n && got[next] == j, always = j < r->first || j >= allowed - r->last;
        next += chosen;
        size = fmax(size, s[j].size);
        if (chosen && !always && s[j].value <= least) least = s[j].value, worst = j;
        if (!chosen && s[j].value > most) most = s[j].value, place = j;
    }
    if (worst < 0 || place < 0) return NULL;
    if (most > least + eps * (8 + (double)r->attention.head_dim) * size) return "a better one is left";
    return selection_now.exact && most == least && place < worst ? "not the first of equal ones" : NULL;
}

/* Three times: of one thread; of many, from the last task to the first, with other garbage in the scratch memory; and, of
 * exact scores, from these. */
static const char *check_selection(const fa_kernels *kernels)
{
    const fa_attention_args *a = &selection_now.args.attention;
    const int64_t n_rows = a->heads_kv * a->len_q, lane = bytes_of(lane_of(a->q.dtype));
    const char *wrong = NULL;
    FOR(again, 2 + selection_now.exact)
    {
        fa_selection_args call = selection_now.args;
        fa_selection_plan p;
        call.selected = new_array(8, a->batch, a->heads_kv, a->len_q, call.top_k, again == 1 ? GAP | ROWS_FIRST : 0);
        call.selected.dtype = FA_F64; /* as wide */
        if (again == 2) {
            const score *s = selection_now.scores;
            call.scores = new_floats(lane_of(a->q.dtype), a->batch, a->heads_kv, a->len_q, a->len_k, ODD | GAP);
            EACH(a->heads_kv, a->len_q, a->len_k) set(&call.scores, b, h, i, j, s++->value);
        }
        kernels->selection_plan(&call, again ? 64 : 1, &p);
        if (p.scratch_bytes % 64) return UNALIGNED;
        char *scratch = allocate((size_t)p.scratch_bytes);
        if (again) memset(scratch, 0x55, (size_t)p.scratch_bytes);
        if (p.runs) {
            int64_t *begins = (int64_t *)allocate((size_t)a->batch * sizeof *begins);
            FOR(b, a->batch) begins[b] = b * n_rows * p.pitch * lane;
            call.scores.data = allocate((size_t)(a->batch * n_rows * p.pitch * lane));
            call.scores.batch = begins, call.scores.row = p.pitch * lane, call.scores.head = a->len_q * p.pitch * lane;
            for (int64_t task = p.n_tasks * p.runs; task-- > 0;) kernels->selection_score(&call, &p, task, scratch);
        }
        FOR(task, p.n_tasks) kernels->selection_run(&call, &p, again ? p.n_tasks - 1 - task : task, scratch);
        FOR(b, a->batch) FOR(h, a->heads_kv) FOR(i, a->len_q)
        {
            const score *s = selection_now.scores + ((b * a->heads_kv + h) * a->len_q + i) * a->len_k;
            int64_t *got = calloc((size_t)call.top_k, sizeof *got);
            FOR(j, call.top_k) memcpy(got + j, at(&call.selected, b, h, i, j), sizeof *got);
            if (!wrong) wrong = wrong_selection(got, allowed_of(b, i), s);
            free(got);
        }
        if (!wrong && again == 1 && !only_rows(&call.selected, a->batch, a->heads_kv, a->len_q, call.top_k))
            wrong = BETWEEN_ROWS;
    }
    return wrong;
}

static void drop_selection(void) { free(selection_now.scores); }

FAMILY(selection, SELECTION_CASES, make_selection, selection_now.c.q, NULL, drop_selection);

#endif

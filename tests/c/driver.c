/* Every compiled instruction set that this CPU runs, on several hundred small calls, against attention by its
 * definition.
 *
 *     driver [isa [case]]      all instruction sets and cases, or some; the exit status tells whether all passed
 *     driver ISA layers        only the layers' kernels, which come last: layers.h
 *
 * A call runs twice and must give the same bits: the second time in another order, planned for more threads, in splits
 * if there are any, and with other garbage in the scratch memory. */
#include "layers.h"

#include <signal.h>

/* What is running, for crashed(). */
static const char *running_isa;
static const test_case *running_case;

static void crashed(int signal)
{
    if (running_case) describe(running_isa, running_case, strsignal(signal));
    else printf("FAILED in the layers' kernels: %s\n", strsignal(signal));
    fflush(stdout);
    _exit(2);
}

/* All tasks, the first time or `again`. */
static void run(const fa_kernels *kernels, const fa_attention_args *a, const fa_plan *p, int again)
{
    const int mark = n_mappings;
    char *scratch = allocate((size_t)p->scratch_bytes);
    if (again) memset(scratch, 0x55, (size_t)p->scratch_bytes);
    if (again && p->split_k) {
        char *state = allocate((size_t)p->partial_bytes);
        char *partials = allocate((size_t)(p->n_splits * p->partial_bytes));
        FOR(head, p->n_tasks)
        {
            for (int64_t split = p->n_splits - 1; split >= 0; split--)
                kernels->run_split(a, p, head, split, partials + split * p->partial_bytes, scratch);
            FOR(split, p->n_splits) kernels->merge(a, p, head, split, state, partials + split * p->partial_bytes);
        }
    } else
        FOR(task, p->n_tasks) kernels->run(a, p, again ? p->n_tasks - 1 - task : task, scratch);
    release(mark);
}

/* What one instruction set did. */
typedef struct {
    int tile, tiles, bf16_dot, dot, splits;
    double elements, numbers; /* all, and those expected to be neither 0 nor NaN */
} counts;

/* One case on one instruction set; returns what is wrong, NULL if nothing is. */
static const char *check(const fa_kernels *kernels, const test_case *c, const fa_attention_args *inputs,
                         const expected *e, counts *n)
{
    static char wrong[200];
    fa_attention_args calls[2] = {*inputs, *inputs}, *a = calls;
    fa_plan p;
    FOR(again, 2)
    {
        fa_attention_args *call = calls + again;
        const int64_t rows = a->len_q;
        if (!(c->options & NO_LSE)) call->lse = new_floats(lane_of(c->q), a->batch, a->heads_q, rows, 1, c->out_layout);
        call->out = new_floats(c->q, a->batch, a->heads_q, rows, a->head_dim_v, c->out_layout);
        kernels->plan(call, again ? 64 : 1, &p);
        if (p.scratch_bytes % 64 || p.partial_bytes % 64) return "scratch sizes that do not keep memory aligned";
        run(kernels, call, &p, (int)again);
        n->tiles += p.tiles > 1;
    }
    n->tile += p.kind == FA_TILE;
    n->dot += p.kind == FA_DOT;
    n->bf16_dot += p.bf16_dot;
    n->splits += p.n_splits > 1;
    wrong[0] = 0;
    FOR(b, a->batch) FOR(h, a->heads_q) FOR(i, a->len_q)
    {
        FOR(d, a->head_dim_v + (a->lse.data != NULL))
        {
            const int in_out = d < a->head_dim_v;
            const double got = in_out ? get(&a->out, b, h, i, d) : get(&a->lse, b, h, i, 0);
            const double other = in_out ? get(&calls[1].out, b, h, i, d) : get(&calls[1].lse, b, h, i, 0);
            /* the bfloat16 dot product takes probabilities of 8 binary digits */
            const double want = e[d].value, tolerance = e[d].tolerance + (p.bf16_dot ? 0x1p-8 * e[d].blur : 0);
            const int right = isnan(want) ? isnan(got) : got == want || fabs(got - want) <= tolerance;
            const int same = isnan(got) ? isnan(other) : memcmp(&got, &other, sizeof got) == 0;
            if (!wrong[0] && !(right && same)) {
                const int at = snprintf(wrong, sizeof wrong, "%s[%d, %d, %d, %d] is ", in_out ? "out" : "lse", (int)b,
                                        (int)h, (int)i, (int)d);
                if (!right) snprintf(wrong + at, sizeof wrong - at, "%.9g, not %.9g within %.3g", got, want, tolerance);
                else snprintf(wrong + at, sizeof wrong - at, "%.17g, and %.17g the second time", got, other);
            }
            n->elements++;
            n->numbers += isfinite(want) && want != 0;
        }
        e += a->head_dim_v + 1;
        memset(at(&calls[1].out, b, h, i, 0), 0xff, (size_t)(a->head_dim_v * bytes_of(c->q)));
    }
    if (!wrong[0] && !is_blank()) return "something was written between the rows of out";
    return wrong[0] ? wrong : NULL;
}

int main(int argc, char **argv)
{
    const char *only_isa = argc > 1 ? argv[1] : NULL, *only_case = argc > 2 ? argv[2] : NULL;
    counts all[16] = {0};
    const int layers = only_case && strcmp(only_case, "layers") == 0;
    int passed = 0, failed = 0;
    signal(SIGSEGV, crashed);
    signal(SIGBUS, crashed);
    signal(SIGILL, crashed);
    FOR(number, layers ? 0 : N_CASES)
    {
        if (only_case && number != atoi(only_case)) continue;
        const test_case c = case_of((int)number);
        const fa_attention_args inputs = new_inputs(&c);
        expected *e = expect(&inputs);
        const int mark = n_mappings;
        protect();
        FOR(isa, fa_isa_count())
        {
            const char *name = fa_isa_name((int)isa);
            if (!fa_isa_available((int)isa) || (only_isa && strcmp(only_isa, name) != 0)) continue;
            running_isa = name;
            running_case = &c;
            const char *wrong = check(fa_isa_kernels((int)isa, lane_of(c.q)), &c, &inputs, e, all + isa);
            if (wrong) describe(name, &c, wrong);
            passed += !wrong;
            failed += wrong != NULL;
            release(mark);
        }
        release(0);
        free(e);
    }
    FOR(isa, fa_isa_count())
    {
        const counts *n = all + isa;
        printf("%s: ", fa_isa_name((int)isa));
        if (!fa_isa_available((int)isa)) puts("not on this CPU");
        else
            printf("tile kernel %d (several tiles a task %d, bfloat16 dot %d), dot kernel %d, several splits %d\n",
                   n->tile, n->tiles, n->bf16_dot, n->dot, n->splits);
        if (!only_case && 2 * n->numbers < n->elements) {
            printf("FAILED: most elements are 0 or NaN, so that the comparison says little\n");
            failed++;
        }
    }
    running_case = NULL;
    if (!only_case || layers) check_layers(only_isa, &passed, &failed);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0 || passed == 0;
}

/* The attention kernels. Every call runs twice and must give the same bits. The second time tasks run in another order,
 * planned for more threads, in splits if there are any, and with other garbage in the scratch memory. */
#ifndef ATTENTION_H
#define ATTENTION_H

#include "family.h"
#include "statistics.h"

/* Results of one instruction set. */
static struct {
    int tile, tiles, bf16_dot, few_rows, splits;
    double elements, numbers; /* all, and those expected to be neither 0 nor NaN */
} counts[16];

static struct {
    test_case c;
    fa_attention_args inputs;
    operands x;
    expected *want;
    expected_statistics statistics;
} attention_case;

static void make_attention(int number)
{
    attention_case.c = case_of(number);
    attention_case.inputs = new_inputs(&attention_case.c);
    attention_case.x = operands_of(&attention_case.inputs);
    attention_case.want = expect(&attention_case.inputs, &attention_case.x);
    if (attention_case.c.statistics)
        attention_case.statistics = expect_statistics(&attention_case.inputs, &attention_case.x);
}

static void drop_attention(void)
{
    drop_operands(&attention_case.x);
    free(attention_case.want);
    if (attention_case.c.statistics) drop_statistics(&attention_case.statistics);
}

/* Runs all tasks, for the first time or `again`. */
static void run_attention(const fa_kernels *kernels, const fa_attention_args *a, const fa_plan *p, int again)
{
    const int mark = n_mappings;
    char *scratch = allocate((size_t)p->scratch_bytes);
    if (again) memset(scratch, 0x55, (size_t)p->scratch_bytes);
    if (p->scratch_bytes) memset(scratch, 0, 8); /* no task has run */
    if (again && p->split_k) {
        char *state = allocate((size_t)p->partial_bytes);
        char *partials = allocate((size_t)(p->n_splits * p->partial_bytes));
        FOR(head, p->n_tasks)
        {
            int64_t first, last;
            kernels->splits(a, p, head, &first, &last);
            for (int64_t split = last - 1; split >= first; split--)
                kernels->run_split(a, p, head, split, partials + split * p->partial_bytes, scratch);
            for (int64_t split = first; split < last; split++)
                kernels->merge(a, p, head, split, state, partials + split * p->partial_bytes);
        }
    } else FOR(task, p->n_tasks) kernels->run(a, p, again ? p->n_tasks - 1 - task : task, scratch);
    release(mark);
}

/* Says what is wrong with a call that ran twice, or NULL. `blur` is 1 if the kernel rounds probabilities. The
 * memory of the second out is given back. */
static const char *wrong_out(const fa_attention_args calls[2], const expected *e, double blur)
{
    const fa_attention_args *a = calls;
    const char *wrong = NULL;
    FOR(b, a->batch) FOR(h, a->heads_q) FOR(i, a->len_q)
    {
        for (int64_t d = 0; d < a->head_dim_v && !wrong; d++)
            wrong = differs("out", &a->out, &calls[1].out, b, h, i, d,
                            (near){e[d].value, e[d].tolerance + (blur ? 0x1p-8 * e[d].blur : 0)});
        const near lse = {e[a->head_dim_v].value, e[a->head_dim_v].tolerance};
        if (a->lse.data && !wrong) wrong = differs("lse", &a->lse, &calls[1].lse, b, h, i, 0, lse);
        e += a->head_dim_v + 1;
    }
    if (wrong || only_rows(&calls[1].out, a->batch, a->heads_q, a->len_q, a->head_dim_v)) return wrong;
    return BETWEEN_ROWS;
}

/* Moves the rows of keys, of one KV head, to blocks with others between them, which are NaN. */
static void scatter_keys(int number, fa_attention_args *a)
{
    const uint64_t before = seed;
    seed = (uint64_t)number << 16 | 1;
    const int64_t size = below(2) ? 1 : 1 + below(100), n = (a->len_k + size - 1) / size;
    int32_t *blocks = (int32_t *)allocate((size_t)n * sizeof *blocks);
    FOR(i, n) blocks[i] = (int32_t)((i ? blocks[i - 1] + 1 : 0) + below(3));
    const int64_t rows = n ? (blocks[n - 1] + 1) * size : 0;
    fa_array *of_keys[] = {&a->k, &a->v, &a->k_scale, &a->v_scale};
    const int64_t width[] = {a->head_dim, a->head_dim_v, 1, 1};
    FOR(x, 4)
    {
        const fa_array from = *of_keys[x];
        if (!from.data) continue;
        fa_array to = new_floats(from.dtype, a->batch, 1, rows, width[x], below(2) ? GAP : 0);
        FOR(b, a->batch)
        FOR(j, a->len_k)
        memcpy(at(&to, b, 0, blocks[j / size] * size + j % size, 0), at(&from, b, 0, j, 0),
               (size_t)(width[x] * bytes_of(from.dtype)));
        to.blocks = blocks, to.block_size = size;
        *of_keys[x] = to;
    }
    seed = before;
}

static const char *check_attention(const fa_kernels *kernels)
{
    const test_case *c = &attention_case.c;
    fa_attention_args calls[2] = {attention_case.inputs, attention_case.inputs}, *a = calls;
    fa_plan p;
    if (a->heads_kv == 1 && c->number / COUNT(dtypes) % 3 == 0) FOR(again, 2) scatter_keys(c->number, calls + again);
    FOR(again, 2)
    {
        fa_attention_args *call = calls + again;
        if (!(c->options & NO_LSE))
            call->lse = new_floats(lane_of(c->q), a->batch, a->heads_q, a->len_q, 1, c->out_layout);
        call->out = new_floats(c->q, a->batch, a->heads_q, a->len_q, a->head_dim_v, c->out_layout);
        new_statistics(c, call);
        kernels->plan(call, again ? 64 : 1, &p);
        if (p.scratch_bytes % 64 || p.partial_bytes % 64) return UNALIGNED;
        run_attention(kernels, call, &p, (int)again);
        counts[running_number].tiles += p.tiles > 1;
        if (!call->stats.norm.data) continue;
        fa_plan second;
        call->stats.second_pass = 1;
        kernels->plan(call, again ? 64 : 1, &second);
        if (second.scratch_bytes % 64) return UNALIGNED;
        run_attention(kernels, call, &second, (int)again);
    }
    counts[running_number].tile += p.kind == FA_TILE;
    counts[running_number].few_rows += p.kind == FA_FEW_ROWS;
    counts[running_number].bf16_dot += p.bf16_dot;
    counts[running_number].splits += p.n_splits > 1;
    for (const expected *e = attention_case.want, *end = e + a->batch * a->heads_q * a->len_q * (a->head_dim_v + 1);
         e < end; e++) {
        counts[running_number].elements++;
        counts[running_number].numbers += isfinite(e->value) && e->value != 0;
    }
    const char *wrong = wrong_out(calls, attention_case.want, p.bf16_dot);
    return wrong || !c->statistics ? wrong : wrong_statistics(calls, &attention_case.x, &attention_case.statistics);
}

FAMILY(attention, N_CASES, make_attention, attention_case.c.q, &attention_case.c, drop_attention);

/* Prints what ran. Returns whether enough of the compared numbers were neither 0 nor NaN. */
static int report_attention(const char *only_isa)
{
    int told = 1;
    FOR(isa, fa_isa_count())
    {
        const char *name = fa_isa_name((int)isa);
        if (!fa_isa_available((int)isa) || (only_isa && strcmp(only_isa, name) != 0)) continue;
        printf("%s: tile kernel %d (several tiles a task %d, bfloat16 dot %d), few-row kernel %d, several splits %d\n",
               name, counts[isa].tile, counts[isa].tiles, counts[isa].bf16_dot, counts[isa].few_rows,
               counts[isa].splits);
        if (2 * counts[isa].numbers >= counts[isa].elements) continue;
        puts("FAILED: most elements are 0 or NaN, so that the comparison says little");
        told = 0;
    }
    return told;
}

#endif

/* The layers' kernels, on every instruction set. */
#ifndef LAYERS_H
#define LAYERS_H

#include "rows.h"

/* Whether the bfloat16 dot product runs: the plan of an attention call tells. */
static int has_dot(int isa)
{
    const fa_attention_args a = {.q.dtype = FA_BF16, .k.dtype = FA_BF16, .v.dtype = FA_BF16, .out.dtype = FA_BF16,
                                 .batch = 1, .heads_q = 1, .heads_kv = 1, .len_q = 100, .len_k = 100, .head_dim = 8,
                                 .head_dim_v = 8};
    fa_plan p;
    fa_isa_kernels(isa, FA_F32)->plan(&a, 1, &p);
    return p.bf16_dot;
}

/* All cases on all instruction sets, or on one. */
static void check_layers(const char *only_isa, int *passed, int *failed)
{
    FOR(number, LINEAR_CASES + ROWS_CASES)
    {
        const int linear = number < LINEAR_CASES;
        linear_case l = {0};
        rows_case r = {0};
        if (linear) l = linear_case_of((int)number);
        else r = rows_case_of((int)number - LINEAR_CASES);
        const fa_linear_args *a = &l.args;
        near *want[2] = {NULL, NULL};
        const int mark = n_mappings;
        protect();
        FOR(isa, fa_isa_count())
        {
            const char *name = fa_isa_name((int)isa), *wrong;
            if (!fa_isa_available((int)isa) || (only_isa && strcmp(only_isa, name) != 0)) continue;
            const fa_kernels *kernels = fa_isa_kernels((int)isa, lane_of(linear ? a->dtype : r.args.dtype));
            if (linear) {
                const int dot = a->weight == FA_BF16 && has_dot((int)isa);
                if (!want[dot]) want[dot] = expect_linears(&l, dot);
                wrong = check_linear(kernels, &l, want[dot]);
            } else wrong = check_rows(kernels, &r);
            release(mark);
            *passed += !wrong;
            *failed += wrong != NULL;
            if (wrong && linear)
                printf("FAILED %s linear %d: dtype %d, weight %d, (%d, %d, %d), gated %d, activation %d%s%s: %s\n",
                       name, (int)number, a->dtype, a->weight, (int)a->m, (int)a->n, (int)a->k, a->gated, a->activation,
                       a->bias ? ", bias" : "", a->residual ? ", residual" : "", wrong);
            else if (wrong)
                printf("FAILED %s rows %d: kind %d, dtype %d, n %d, activation %d%s%s: %s\n", name, (int)number,
                       r.args.kind, r.args.dtype, (int)r.args.n, r.args.activation,
                       r.args.residual ? ", residual" : "", r.args.up ? ", up" : "", wrong);
        }
        release(0);
        free(want[0]), free(want[1]), free(l.w);
    }
}

#endif

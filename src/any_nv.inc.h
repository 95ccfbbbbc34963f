/* Kernels of a block of keys, for variants of attention and for gradients: called, and for any nv. Attention's own loops
 * inline them, with every parameter a literal. Here they would be inlined in forty places, and be most of what the
 * compiler has to do; a call beside a block of keys costs nothing that can be measured.
 *
 * Exports   WITH_NV; any_outer, any_values, any_additive, any_modify, any_softmax; add_values. */
#pragma once
#include "attention.inc.h"

/* WITH_NV(nv, name, call): the call, in which `name` is nv, 1 or NV, as a literal. */
#define WITH_NV(nv, name, ...)                                                                                         \
    do {                                                                                                               \
        if ((nv) == 1) WITH_LITERAL(name, 1, __VA_ARGS__)                                                              \
        else WITH_LITERAL(name, NV, __VA_ARGS__)                                                                       \
    } while (0)

NOINLINE void any_outer(int nv, int64_t n, const outer_product *p)
{
    WITH_NV(nv, literal, block_outer(literal, 0, n, p, NULL));
}

NOINLINE void any_values(int nv, const value_product *p) { WITH_NV(nv, literal, block_values(literal, 0, p)); }

NOINLINE block_kind any_additive(const fa_attention_args *a, const tile_state *tile, int nv, key_run run,
                                 const tile_scratch *scratch)
{
    return load_additive(a, tile, nv, run, scratch);
}

NOINLINE void any_modify(const fa_attention_args *a, int nv, const modifiers *mods, const score_tile *scores)
{
    modify_tile(a, nv, mods, scores);
}

NOINLINE void any_softmax(int nv, lane *s, int64_t n, lane *row_max, lane *row_sum, lane *alpha)
{
    WITH_NV(nv, literal, softmax_update(literal, 0, s, n, row_max, row_sum, NULL, alpha));
}

/* ot += the weighted values of n keys. Nothing scales what was there before. */
static void add_values(const fa_attention_args *a, int nv, tile_state *tile, const char *v, int64_t v_row, int64_t n,
                       const lane *probs)
{
    value_product values = {.v = v, .v_row = v_row, .n = n, .n_low = n, .head_dim_v = a->head_dim_v, .probs = probs};
    values.mode = tile->fresh ? ACC_ZERO : ACC_KEEP, values.out = tile->ot, values.pitch = BLOCK_Q;
    any_values(nv, &values);
    tile->fresh = 0;
}

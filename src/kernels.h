/* The head of every family of kernels: families/<family>.c is compiled with the flags of a line of isa.inc,
 * -DFA_ISA_NAME=<isa>, and -DFA_LANE_F64 for double lanes. Everything in it is static but its table, which has the
 * kernels of that family alone. dispatch.c joins the tables of an instruction set.
 *
 * The code is in files that are compiled so, too: *.inc.h. Each includes those that it uses. Its head says which
 * parameters must be literals, and which names it exports: all that other files use.
 *
 * One name means one thing in all files of attention:
 *
 *     a           the arguments of the call            plan     how the call is cut into tasks
 *     rows        the query rows of a task or tile     r, id    a row's number among them; its query and head
 *     mods        modifiers of scores                  kind     what a block of keys is to a tile (block_kind)
 *     tile        rows with their state                scratch  a thread's memory
 *     block, run  a block of keys; some keys of it     part     a result over some of the keys
 *     s, probs    scores; probabilities                add      what is added to scores
 *     b h i j d   batch, head, query, key, dimension   j0, n    the first key of a run; how many there are
 *     u           a vector of a tile's row             p        the product that a micro-kernel computes
 *     nv          how many of these; a literal: 1 for at most LANES rows, or NV
 *     form        a literal: what products multiply (FORM_OF); lanes also where narrow numbers are widened
 *     bf16        a literal: the same, 1 where they are of bfloat16 pairs (takes_pairs) and 0 else */
#pragma once
#include "simd.h"

#pragma GCC diagnostic ignored "-Wunused-function" /* of other families */

#define TABLE_(isa, lane, family) fa_kernels_##isa##_##lane##_##family
#define TABLE(isa, lane, family) TABLE_(isa, lane, family)
#define FAMILY(name) const fa_##name##_kernels TABLE(FA_ISA_NAME, LANE_NAME, name)

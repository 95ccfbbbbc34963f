/* The C interface: arguments, plans and kernels of each family. Nothing allocates, starts threads or calls Python.
 *
 * A caller fills fa_attention_args, asks kernels->attention->plan() what to run, gives every thread plan.scratch_bytes
 * of 64-byte aligned memory, and runs tasks 0 .. plan.n_tasks - 1 in any order on any threads: the bits do not depend on it. */
#pragma once
#include "interface/attention.h"
#include "interface/linear.h"
#include "interface/outer.h"
#include "interface/pack.h"
#include "interface/rows.h"
#include "interface/channels.h"
#include "interface/deformable.h"
#include "interface/recurrent.h"
#include "interface/rowwise.h"
#include "interface/selection.h"
#include "interface/backward.h"
#include "interface/peak.h"

/* Those of one instruction set and lane type. A family that was not compiled is NULL. */
typedef struct {
    const fa_attention_kernels *attention;
    const fa_integers_kernels *integers; /* where they gain something */
    const fa_linear_kernels *linear;
    const fa_outer_kernels *outer;
    const fa_pack_kernels *pack;
    const fa_rows_kernels *rows;
    const fa_channels_kernels *channels;
    const fa_deformable_kernels *deformable;
    const fa_recurrent_kernels *recurrent;
    const fa_rowwise_kernels *rowwise;
    const fa_selection_kernels *selection;
    const fa_backward_kernels *backward;
    const fa_peak_kernels *peak;
} fa_kernels;

/* dispatch.c */
typedef struct {
    const char *name;
    int64_t least, most;
} fa_size;

int fa_size_count(void);
const fa_size *fa_size_at(int size);
int64_t *fa_size_in(fa_tuning *tuning, int size);
void fa_tune_for(int64_t level2); /* fa_tuned = the defaults for so many bytes of second-level cache; 0: 1 MB */

/* cpu.c. Bytes of a core's second-level cache, 0 if the system does not say; and whether dot products of bfloat16 pairs
 * take longer than converting and multiplying with float32. */
int64_t fa_level2_cache(void);
int fa_cpu_slow_pairs(void);
int fa_cpu_ask_tiles(void); /* asks the system for what `amx` needs; whether it is granted */

/* dispatch.c. The ISAs of this architecture, best first, index 0 .. fa_isa_count() - 1. */
int fa_isa_count(void);
const char *fa_isa_name(int isa);
int fa_isa_compiled(int isa);
int fa_isa_available(int isa);                            /* compiled, and this CPU (and system) runs it */
int fa_isa_default(int slow_pairs, int tiles);            /* the first one available, not slow; amx with tiles */
int fa_isa_best(int slow_pairs, int tiles);               /* the same, if all were compiled */
const fa_kernels *fa_isa_kernels(int isa, fa_dtype lane); /* FA_F32 or FA_F64 lanes */
extern const char *const fa_activation_names[];           /* from FA_NONE on, whose name is ""; NULL ends them */

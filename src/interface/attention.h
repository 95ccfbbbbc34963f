/* Attention, and DeBERTa's. */
#pragma once
#include "arrays.h"

/* Which keys a row attends: those that all of these allow. All are optional. */
typedef struct {
    fa_array mask;                    /* bool (batch, heads_q, len_q, len_k): nonzero attends */
    fa_array row_begin, row_end;      /* int64 (batch, heads_q, len_q): row i attends keys begin <= j < end */
    fa_array range_first, range_last; /* int64 (batch, heads_q, len_q), with ranges: of those, the keys in ranges
                                         first .. last - 1 */
    const int64_t
        *ranges; /* int64 (any): pairs (begin, end), in a row's list not empty, sorted, none touching the next */
} fa_masks;

/* What is done to scores, in this order. */
typedef struct {
    double scale, softcap; /* softcap 0: none */
    fa_array bias;         /* float (batch, heads_q, len_q, len_k); optional, as those that follow */
    fa_array alibi_slopes; /* lanes (batch, heads_q), with q_position */
    fa_array q_position;   /* int64 (batch): position of query row 0, where distances count */
} fa_modifiers;

/* Gradients of these that are sums over the rows of each head, to which they are added; those that are not wanted have
 * no data. */
typedef struct {
    fa_array dalibi_slopes, dsoftcap; /* float64 (batch, heads_q) */
} fa_modifier_gradients;

/* What is returned beside the output; optional. */
typedef struct {
    fa_array row_max, entropy; /* lanes (batch, heads_q, len_q): of each row's scores, and of its probabilities */
    fa_array top_weights;      /* lanes (batch, heads_q, len_q, n_top): the largest probabilities */
    fa_array top_keys;         /* int64 (batch, heads_q, len_q, n_top): their keys */
    fa_array norm;             /* lanes (batch, heads_q, len_q, 2): a probability is exp(score - norm[0]) * norm[1] */
    fa_array key_sums;         /* lanes (batch, heads_q, len_k): from the second pass, as mean_weights */
    fa_array mean_weights;     /* lanes (batch, 1, len_q, len_k) */
    int64_t n_top;             /* at most len_k */
    int second_pass; /* reads norm, which the first has written, and adds to key_sums and mean_weights, nothing else */
} fa_statistics;

typedef struct {
    fa_array q;                /* rows (batch, heads_q, len_q, head_dim) */
    fa_array k;                /* rows (batch, heads_kv, len_k, head_dim), or int8 with k_scale; or FA_I4, as v */
    fa_array v;                /* rows (batch, heads_kv, len_k, head_dim_v), or int8 with k_scale */
    fa_array out;              /* rows (batch, heads_q, len_q, head_dim_v), q's dtype */
    fa_array k_scale, v_scale; /* lanes (batch, heads_kv, len_k): what each row of k and v in FA_I8 is times */
    fa_array lse;              /* lanes (batch, heads_q, len_q); optional */
    fa_array sinks;            /* lanes (batch, heads_q); optional */
    int64_t first, batch;      /* items first .. first + batch - 1 of what the arrays hold */
    int64_t heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v;
    fa_masks masks;
    fa_modifiers mods;
    fa_statistics stats;
    int hadamard; /* rows of k were multiplied by a Hadamard matrix, as the kernel of `integers` multiplies those of q */
    int sigmoid;  /* sigmoid(score + sigmoid_bias) in place of the softmax: without lse, sinks, statistics, dropout */
    double sigmoid_bias;
    double dropout; /* below 1: the share of probabilities that become 0, the others times 1 / (1 - dropout); 0: none */
    uint64_t seed;  /* names the mask: philox.inc.h */
    const fa_watch *watch; /* optional */
} fa_attention_args;

typedef enum {
    FA_TILE,    /* queries on the lanes: attention.inc.h */
    FA_FEW_ROWS /* head_dim on the lanes, for few rows per KV head: few_rows.inc.h */
} fa_kernel_kind;

/* How a call is cut into tasks. What decides bits (kind, block sizes, split_k, n_splits) is a function of ISA, dtypes,
 * heads in a group, len_q and len_k alone, never of batch or thread count. FA_FEW_ROWS is for KV heads that attend more keys than there are queries.
 * Where len_k, which is that of the longest sequence, is one split, a tile takes run() alone: the bits of one partial.
 *
 * The rows of one KV head are its group * len_q (query, head in group) pairs, query-major. If they fill more than one
 * row block (split_k == 0), a task is a few row blocks against all their keys: run(). If not, the keys of the KV head
 * are cut at multiples of split_k. Each split becomes a partial (row maxima, sums, accumulators), and the partials are
 * merged in order. Either one thread does it all, run(); or any threads call run_split(), for the splits of each head
 * that splits() names, and merge() is called for one after the other: the same arithmetic in the same order.
 *
 * The first 8 bytes of a thread's scratch must be 0 before its first task: a task leaves there whose keys and values it
 * has copied.
 *
 * A task of the second pass is all rows, in order, against a run of keys. No other task adds to what it adds to. */
typedef struct {
    fa_kernel_kind kind;
    int block_q, block_k;       /* rows and keys of a tile */
    int tiles;                  /* row blocks of a task: as all scheduling, it depends on batch and threads */
    int ahead;                  /* prefetch distance in tasks; 0: none */
    int k_in_place, v_in_place; /* whole blocks of lanes are read where they are, whatever their stride */
    int keep_copy;              /* a thread keeps the copy of a head's keys and values from task to task */
    int in_turn;                /* tasks go through the KV heads in turn: scheduling */
    int bf16_dot;               /* the bfloat16 dot-product instruction runs */
    int64_t n_tasks;            /* for run() */
    int64_t split_k;            /* 0: run() only */
    int64_t n_splits;           /* ceil(len_k / split_k), at least 1 */
    int64_t run_k;              /* keys of a task of the second pass: scheduling */
    int64_t scratch_bytes;      /* per thread */
    int64_t partial_bytes;      /* per (KV head, split), a multiple of 64 */
    double flops;               /* of the whole call, as if nothing were masked: to judge whether threads pay */
} fa_plan;

/* DeBERTa's attention: disentangled.inc.h. Of `attention` q, k, v, out, their sizes, scale, ranges and watch; as many heads
 * and rows of q as of k. Tables are lanes, (heads, rows, head_dim), row r that of the distances i - j of query and key
 * for which row_of[i - j] is r; it grows with the distance. */
typedef struct {
    fa_attention_args attention;
    const void *keys, *queries; /* what queries, and what keys, have a product with; optional, but for one of them */
    const int64_t *row_of;      /* of distances 1 - len_k .. len_q - 1, each in [0, rows) */
    int64_t rows;
} fa_disentangled_args;

typedef struct {
    void (*plan)(const fa_attention_args *, int threads, fa_plan *);
    void (*run)(const fa_attention_args *, const fa_plan *, int64_t task, void *scratch);
    void (*splits)(const fa_attention_args *, const fa_plan *, int64_t head, int64_t *first, int64_t *last);
    void (*run_split)(const fa_attention_args *, const fa_plan *, int64_t head, int64_t split, void *partial,
                      void *scratch);
    void (*merge)(const fa_attention_args *, const fa_plan *, int64_t head, int64_t split, void *state,
                  const void *partial);
    int64_t (*disentangled_tasks)(const fa_disentangled_args *);
    int64_t (*disentangled_scratch_bytes)(const fa_disentangled_args *);
    void (*disentangled_run)(const fa_disentangled_args *, int64_t task, void *scratch);
} fa_attention_kernels;

/* Those with products of int8, of int8 keys and values with scales: FA_TILE alone, head_dim at most FA_MOST_BYTES, without
 * sigmoid and dropout, and all but disentangled. */
#define FA_MOST_BYTES 65536 /* times 128 * 127 is half of what 32 bits hold */
typedef fa_attention_kernels fa_integers_kernels;

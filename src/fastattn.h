/* The C interface: arguments, plans, the table of kernels. Nothing allocates, starts threads or calls Python.
 *
 * A caller fills fa_attention_args, asks kernels->plan() what to run, gives every thread plan.scratch_bytes of 64-byte
 * aligned memory, and runs tasks 0 .. plan.n_tasks - 1 in any order on any threads: the bits do not depend on it. */
#ifndef FASTATTN_H
#define FASTATTN_H

#include <stdint.h>

/* Sizes that are a matter of time alone. Whoever changes one does it while no plan is made. */
#define FA_SIZE(name, by_default, least, most) int64_t name;
typedef struct {
#include "tuning.inc"
} fa_tuning;
#undef FA_SIZE

typedef enum { FA_F32, FA_F64, FA_F16, FA_BF16, FA_I8, FA_I4, FA_Q8 } fa_dtype; /* I4, Q8: packed weights only */

/* A task that may last long asks now and then whether to give up. If so, nobody reads the results of the call. */
typedef struct {
    int (*gives_up)(void *caller); /* nonzero: yes; called in any thread, again and again */
    void *caller;
    void (*pause)(int64_t times); /* for a task that waits for another one, which has paused so often; optional */
} fa_watch;

/* A strided array with its batch dimensions flattened. Strides are in bytes; 0 broadcasts. */
typedef struct {
    char *data;           /* NULL: not given */
    const int64_t *batch; /* byte offset of every batch item */
    int64_t head, row, col;
    fa_dtype dtype; /* of q, k, v, out, bias; the others have the one type said below; FA_I8: of k and v alone */
    /* Of k, v and their scales, optional: key j of the call is row blocks[j / size] * size + j % size, size being
     * block_size. The array then has one KV head. */
    const int32_t *blocks;
    int64_t block_size;
} fa_array;

/* Which keys a row attends: those that all of these allow. Arrays are (batch, heads_q, len_q), int64, and optional. */
typedef struct {
    fa_array mask;                    /* (batch, heads_q, len_q, len_k), uint8: nonzero attends */
    fa_array row_begin, row_end;      /* row i attends keys begin <= j < end */
    fa_array range_first, range_last; /* and of those, the keys in ranges first .. last - 1 */
    const int64_t *ranges; /* pairs (begin, end), or NULL: in a row's list not empty, sorted, none touching the next */
} fa_masks;

/* What is done to scores, in this order. */
typedef struct {
    double scale, softcap; /* softcap 0: none */
    fa_array bias;         /* (batch, heads_q, len_q, len_k), of any dtype; optional, as those that follow */
    fa_array alibi_slopes; /* (batch, heads_q), lane type */
    fa_array q_position;   /* (batch), int64: position of query row 0, for ALiBi */
} fa_modifiers;

/* What is returned beside the output: (batch, heads_q, len_q), lane type; optional. */
typedef struct {
    fa_array row_max, entropy;       /* of each row's scores, and of its probabilities */
    fa_array top_weights, top_keys;  /* (..., n_top), lane type and int64: the largest probabilities */
    fa_array norm;                   /* (..., 2): a probability is exp(score - norm[0]) * norm[1] */
    fa_array key_sums, mean_weights; /* (batch, heads_q, len_k), (batch, 1, len_q, len_k): from the second pass */
    int64_t n_top;                   /* at most len_k */
    int second_pass; /* reads norm, which the first has written, and adds to key_sums and mean_weights, nothing else */
} fa_statistics;

typedef struct {
    fa_array q, k, v, out;     /* (batch, heads, length, head_dim), the last axis contiguous */
    fa_array k_scale, v_scale; /* (batch, heads_kv, len_k), lane type: what each row of k and v in FA_I8 is times */
    fa_array lse;              /* (batch, heads_q, len_q), lane type; optional */
    fa_array sinks;            /* (batch, heads_q), lane type; optional */
    int64_t first, batch;      /* items first .. first + batch - 1 of what the arrays hold */
    int64_t heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v;
    fa_masks masks;
    fa_modifiers mods;
    fa_statistics stats;
    int sigmoid; /* sigmoid(score + sigmoid_bias) in place of the softmax: without lse, sinks, statistics, dropout */
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

/* The layers' kernels. Strides of rows are in bytes; a row is contiguous. */

typedef int fa_activation; /* a constant of activations.h */

#define FA_PANEL_BYTES                                                                                                 \
    128 /* that a panel holds of each input feature: of two in bfloat16, 4 in int8 and Q8, 8 in 4 bits */

/* out (m, n) = activation(x (m, k) w^T + bias) + residual; gated: activation(gate) * up + residual. Transposed: x w in
 * place of x w^T, so that n counts what w has as input features, and x has the output features of one map or of two. */
typedef struct {
    const char *x, *residual;
    char *out;
    const char *panels;  /* n_panels x k x columns, as _args/packed.py says; gated: gate, up, gate, ... */
    const void *scales;  /* int8: lanes, (n_panels, columns); in blocks: float16, (n_panels, blocks, columns) */
    const void *minima;  /* in blocks: as scales, optional */
    const void *table;   /* 16 lanes: values of 4 bits; a weight is its value times the scale, plus the minimum */
    const int8_t *codes; /* the same as int8, times `unit` */
    const void *sums;    /* lanes, (n_panels, columns): of w's rows, as int8 multiplies them; read with x_int8 alone */
    double unit;
    const void *bias; /* lanes, (n), gated (2, n); optional, as residual */
    char *pre;        /* (m, n), gated (m, 2, n), optional: receives what the activation is applied to */
    int64_t x_row, residual_row, out_row, pre_row, m, n, k;
    fa_dtype dtype, out_dtype, weight; /* of x; of residual, out, pre; of the panels */
    int block;                         /* weights in blocks, 4 bits or Q8: features that share a scale, 16 or 32 */
    int gated, x_int8; /* x_int8: rows of x are rounded to int8, on their grids; weights are integers, too */
    int transposed;    /* the maps of w, 1 or 2; 0: not transposed. Then neither gated nor x_int8. */
    fa_activation activation;
    const fa_watch *watch; /* optional */
} fa_linear_args;

/* A task is some rows against some panels: a matter of scheduling alone. Input features are taken in `blocks` of
 * `features`. The first 8 bytes of a thread's scratch must be 0 before its first task: a task leaves there which rows
 * of x it has made ready. */
typedef struct {
    int rows, panels, widen;
    int64_t blocks, features;
    int64_t panel_tasks, n_tasks, scratch_bytes;
    double flops;
} fa_linear_plan;

/* out (n, k) = or += a (m, n)^T b (m, k), sums (n) = or += the sum of the rows of a: gradients of a linear map. Rows of a
 * and b are contiguous. */
typedef struct {
    const char *a, *b;
    char *out;  /* lanes; with k = 0 not written */
    void *sums; /* lanes; optional */
    int64_t a_row, b_row, out_row, m, n, k;
    fa_dtype a_dtype, b_dtype;
    int pairs;             /* round both to bfloat16 where there is a dot product of pairs */
    int more;              /* += */
    const fa_watch *watch; /* optional */
} fa_outer_args;

/* A task is some columns of a and some of b: a matter of scheduling alone. */
typedef struct {
    int64_t a_columns, b_columns, b_tasks, n_tasks, scratch_bytes;
    double flops;
} fa_outer_plan;

/* Integers in a block of a file: number i has `width` bits of byte at[i], from bit shift[i] up, and above these, if
 * high_width is not 0, so many of another one. Of 8 bits, they have a sign. */
typedef struct {
    uint8_t at[16], shift[16], high_at[16], high_shift[16];
    int width, high_width, add; /* add: to each number; to codes, what fa_pack_rows says */
} fa_bits;

/* A block of a file, as _args/coded.py has it: numbers are a unit times a scale times a code, plus a minimum. */
typedef struct {
    fa_bits codes; /* i counts runs of sixteen codes, whose bytes follow one another */
    fa_bits scales,
        minima; /* width 0: scales are the unit, minima the float16 at `minimum`; else its negative times these */
    int features, bytes; /* of a block; features of 32 or 256, a multiple of `shared` */
    int shared;          /* features that share a scale, 16 or 32 */
    int unit, minimum;   /* bytes where a float16 is; minimum: -1 if there is none */
    int window;          /* scales and minima count sixteen bytes from this one on */
    int exponent;        /* the unit is a byte e, and means 2^(e - 128) */
    int in_order;        /* the high bits of sixteen codes are two bytes, from the lowest bit up */
} fa_layout;

/* Rows of one of the maps that are packed: their output features are begin .. end - 1 of the map's. */
typedef struct {
    const char *data; /* (end - begin, k), or bytes of blocks, side by side in a row */
    int64_t row, col; /* strides in bytes */
    int64_t begin, end;
    fa_dtype dtype;          /* any floating one; of bytes FA_I8 */
    int map;                 /* a gated pair's gate is map 0, the other 1 */
    const fa_layout *layout; /* of blocks of a file, else NULL: all rows of a call are such, or none */
    const int8_t *table;     /* (16), optional: what codes become; else `add` is added */
    int add;
} fa_pack_rows;

/* Weights of one map or two, k input features each, into panels, as _args/packed.py says. Rows in no block are 0. Blocks
 * of a file keep their codes: FA_I4 or FA_Q8. */
typedef struct {
    const fa_pack_rows *blocks;
    unsigned char *bad;           /* (n_blocks), 0: those that have a magnitude of `beyond` or more, or NaN, become 1 */
    char *panels;                 /* at a cache line */
    void *scales, *minima, *sums; /* all as fa_linear_args has them; without features they are not written */
    const void *middles; /* 4 bits: sixteen lanes, the middles of the values of neighbouring codes, the last unused */
    const void *codes;   /* 4 bits: sixteen lanes, the integers that fa_linear_args has */
    double unit;         /* of these integers, as there; of int8 1 */
    double extreme;      /* 4 bits: what the element of largest magnitude becomes; 0: either sign's largest value, 1 */
    double beyond;
    int64_t n_blocks, k;
    fa_dtype weight;
    int maps;
    int block; /* features that share a scale, in blocks: 32; of a file also 16, where each layout's `shared` is a multiple */
    int zero;              /* blocks of a file in 4 bits: the code of rows in no block */
    const fa_watch *watch; /* optional */
} fa_pack_args;

/* out (m, n) = kind(x (m, n) + residual), row by row. */
typedef enum { FA_LAYER_NORM, FA_RMS_NORM, FA_SOFTMAX, FA_ACTIVATE } fa_rows_kind;

typedef struct {
    fa_rows_kind kind;
    fa_dtype dtype; /* of x, residual, up, total, out */
    fa_activation activation;
    const char *x, *residual, *up; /* the latter optional; up multiplies what FA_ACTIVATE gives, and FA_RMS_NORM's
                                      input (gate_first) or result is multiplied by activation(up) */
    char *total, *out;             /* total, optional, receives x + residual */
    const void *weight, *bias;     /* lanes, (n), optional: of the norms */
    int64_t x_row, residual_row, up_row, total_row, out_row, m, n;
    int64_t up_each; /* so many rows of up lie side by side, and up_row is the distance of the next ones */
    double eps;
    int gate_first;
    const fa_watch *watch; /* optional */
} fa_rows_args;

/* The gradient of one such pass: rows_grad.inc.h. Results are optional, and may lie where inputs do. */
typedef struct {
    fa_rows_kind kind;
    fa_dtype dtype; /* of all arrays (m, n) */
    fa_activation activation;
    const char *dout, *x;             /* x: of FA_SOFTMAX its result */
    const char *residual, *dsum, *up; /* optional: the norms' x is x + residual, and dsum is added to dx */
    char *dx, *dup;
    const void *weight; /* lanes, (n), optional: of the norms */
    int64_t dout_row, x_row, residual_row, dsum_row, up_row, dx_row, dup_row, m, n;
    int64_t up_each; /* of up and dup, as fa_rows_args has it; norms with up have no residual and no dsum */
    double eps;
    int gate_first;
    const fa_watch *watch; /* optional */
} fa_rows_grad_args;

/* Cross-entropy of logits (m, n), lanes, which become its gradient: logits.inc.h. */
typedef struct {
    char *logits;
    const int64_t *targets; /* (m), each in [0, n) */
    void *loss;             /* lanes, (m) */
    const void *factor;     /* lanes, (m): of each row's gradient; NULL: logits end up as anything */
    int64_t row, m, n;
    double label_smoothing;
    const fa_watch *watch; /* optional */
} fa_logits_args;

/* out (m, n) = x, each element 0 or times `scale`: dropout.inc.h. out may be x. */
typedef struct {
    const char *x;
    char *out;
    int64_t x_row, out_row, m, n;
    fa_dtype dtype;
    double rate, scale;
    uint64_t seed;
    int64_t stream;
    const fa_watch *watch; /* optional */
} fa_dropout_args;

/* Row places[p] of out += rows order[firsts[p]] .. order[firsts[p + 1] - 1] of x: scatter.inc.h. */
typedef struct {
    const char *x; /* rows of n elements */
    char *out;     /* lanes */
    const int64_t *order, *firsts, *places;
    int64_t x_row, out_row, n;
    fa_dtype dtype;        /* of x */
    const fa_watch *watch; /* optional */
} fa_scatter_args;

/* out = x, (batch, heads, length, head_dim), rotated by positions; may be x. Dimensions from 2 pairs on are copied. Of x in
 * float32 out may have 16 bits. Or out is int8: each row is rounded, and times its scale it is what it was, to scale / 2. */
typedef struct {
    fa_array x, out, cos, sin; /* cos, sin: (batch, 1, length, pairs), lanes */
    fa_array scale;            /* (batch, heads, length), lanes: of an out in FA_I8 */
    int64_t batch, heads, length, head_dim, pairs;
    int interleaved;
} fa_rope_args;

/* What an optimizer does to parameters: optimizer.inc.h. All arrays are lanes, side by side; no two of them overlap. */
#define FA_UPDATE_BLOCK 4096
typedef enum { FA_SQUARES, FA_SGD, FA_ADAMW } fa_update_kind; /* squares: of gradients, their sums by block */

typedef struct {
    void *param; /* (n), as all that follow; FA_SQUARES reads grad alone */
    const void *grad;
    void *first, *second; /* moments: second of FA_ADAMW; first of FA_SGD is optional */
    int64_t n, block;     /* block: how many blocks of FA_UPDATE_BLOCK the parameters before it have */
} fa_parameter;

typedef struct {
    fa_update_kind kind;
    const fa_parameter *parameters;
    double *sums; /* of FA_SQUARES, (blocks) */
    int64_t n_parameters;
    double scale;                                  /* of gradients */
    double lr, weight_decay, momentum, beta2, eps; /* momentum: beta1 of FA_ADAMW */
    double first_correction, second_correction;    /* of FA_ADAMW: 1 - beta1^t, and the root of 1 - beta2^t */
    int nesterov;
} fa_update_args;

/* Sequences end to end: tokens begins[s] .. begins[s + 1] - 1 of all are those of sequence s, and arrays of tokens have an
 * item of the batch for each sequence. Rows, of channels, have x's dtype and are contiguous. */

/* Causal depthwise convolution: conv.inc.h. */
#define FA_MOST_WIDTH 8
typedef struct {
    fa_array x;            /* rows of channels, of tokens; or its tokens lie side by side, and its channels apart */
    fa_array out, state;   /* such rows; state, optional: the width - 1 inputs before the first */
    const void *weight;    /* lanes, (channels, width) */
    const void *bias;      /* lanes, (channels); optional */
    const int64_t *begins; /* (sequences + 1), from 0 */
    int64_t sequences, channels;
    int width; /* 1 to FA_MOST_WIDTH */
    fa_activation activation;
    const fa_watch *watch; /* optional */
} fa_conv_args;

typedef struct {
    fa_conv_args forward; /* `out` plays no part */
    fa_array dout;        /* as out */
    fa_array dx, dstate;  /* as x and state; optional. A sequence without tokens leaves dstate as it is */
} fa_conv_grad_args;

/* The selective scan: scan.inc.h. */
typedef struct {
    fa_array x, dt, out;        /* rows of channels, of tokens */
    fa_array b, c;              /* rows of `states` numbers, of tokens, x's dtype */
    fa_array state, state_out;  /* lanes, rows of `states`, of channels; state optional, may be state_out */
    const void *rates;          /* lanes, (channels, states) */
    const void *skip, *dt_bias; /* lanes, (channels); optional */
    const int64_t *begins;      /* (sequences + 1), from 0 */
    int64_t sequences, channels, states, longest; /* longest: tokens of a sequence */
    int softplus;
    const fa_watch *watch; /* optional */
} fa_scan_args;

typedef struct {
    fa_scan_args forward;        /* `out` and `state_out` play no part */
    fa_array dout, dx, ddt;      /* as out; dx and ddt optional, as all that follow */
    fa_array dstate_out, dstate; /* as state_out */
    fa_array drates;             /* the same, of each sequence: whoever runs the tasks adds them */
    fa_array dskip, dbias;       /* lanes, (sequences, channels), likewise */
    void *db, *dc;               /* lanes, (blocks of SCAN_CHANNELS channels, tokens, states), likewise */
} fa_scan_grad_args;

/* Deformable attention: deformable.inc.h. Levels are grids of rows of v, one after the other. */
#define FA_DEFORMABLE_QUERIES 16 /* of a unit of work: of one head */
typedef struct {
    int64_t height, width; /* at most 2^24, which lanes hold */
    int64_t row;           /* the first row of v; row + height * width <= len_v */
    int64_t end;           /* the number of the first point that is of later levels */
} fa_level;

typedef struct {
    fa_array v, out;             /* (batch, heads, len_v or len_q, head_dim), rows contiguous */
    fa_array locations, weights; /* lanes, rows contiguous, (batch, heads, len_q, 2 * points or points) */
    const fa_level *levels;      /* (n_levels); the last one's `end` is `points` */
    int64_t batch, heads, len_q, head_dim, n_levels, points; /* points of a query, level after level */
    int discrete;
    const fa_watch *watch; /* optional */
} fa_deformable_args;

typedef struct {
    fa_deformable_args forward;    /* `out` plays no part */
    fa_array dout;                 /* as out */
    fa_array dv;                   /* as v, lanes; added to. Optional, as those that follow */
    fa_array dlocations, dweights; /* as locations and weights, written */
} fa_deformable_grad_args;

/* Linear attention, as recurrent_task.inc.h says. There are `heads` states; heads_k and heads_v divide them; heads_q
 * does, or is a multiple. Not causal, without decay and beta: every q reads the last state, and lengths may differ. */
typedef struct {
    fa_array q, k, v, out; /* (batch, heads of each, length, head_dim); out has those of q, at least `heads` */
    fa_array log_decay;    /* lanes, at most 0: (batch, heads, length), gated (..., head_dim); optional */
    fa_array beta;         /* lanes, (batch, heads, length): the delta rule; optional */
    fa_array strength;     /* lanes, (batch, heads, length): what v is times as it is written; optional, without beta */
    const void *skip;      /* lanes, (heads): out += skip v; optional. As strength of the forward pass alone */
    fa_array erase;        /* as k: what the delta rule reads the state by; optional, k without it */
    fa_array state, state_out; /* lanes, (batch, heads, head_dim, head_dim_v); state optional, may be state_out */
    fa_array norm, norm_out;   /* lanes, (batch, heads, head_dim), apart; norm_out: divide by q . norm + eps */
    /* (batch + 1): tokens of sequence b are begins[b] to begins[b + 1] of all, len_q = len_k is the longest one's number,
     * and batch tables lead to the first token of each. NULL: all have len_q and len_k. */
    const int64_t *begins;
    const int64_t *order; /* (batch): with begins, the numbers of the sequences, those of most tokens first */
    int64_t batch, heads, heads_q, heads_k, heads_v, len_q, len_k, head_dim, head_dim_v;
    int gated, causal;
    double scale, eps;
    const fa_watch *watch; /* optional */
} fa_recurrent_args;

/* A task is a state, or some panels of its columns: a matter of scheduling alone. */
typedef struct {
    int panels, steps; /* steps: token by token, all of its sequences; lengths and `causal` alone decide it */
    int64_t n_tasks, scratch_bytes;
    double flops;
} fa_recurrent_plan;

/* The gradient of linear attention: recurrent_backward.inc.h. Of `forward` the results are not touched, but norm_out.data
 * says that they were divided. Gradients are those of each state; the caller adds up what states share. */
typedef struct {
    fa_recurrent_args forward;
    fa_array dout;                  /* as out */
    fa_array dstate_out, dnorm_out; /* lanes, as state_out and norm_out; optional */
    fa_array dq, dk, dv;            /* (batch, heads, length, head_dim); dq with heads_q, if those are more; optional */
    fa_array dlog_decay, dbeta;     /* lanes, as log_decay and beta with nothing broadcast; optional */
    fa_array derase;                /* as dk, which then lacks what reading gives; optional, of calls with erase */
    fa_array dstate, dnorm;         /* lanes, as state_out and norm_out; optional */
    double dq_factor;               /* of dq: the scale, or 1 for the gradients of queries times the scale */
} fa_recurrent_backward_args;

/* A task is a state. Its scratch holds one state for every so many chunks of tokens. */
typedef struct {
    int64_t chunks, segments; /* of a segment; of the longest sequence */
    int64_t n_tasks, scratch_bytes;
    double flops;
} fa_recurrent_backward_plan;

/* Attention with another normaliser than softmax over all keys, or another score than a product: rowwise.inc.h and
 * talking.inc.h. Of `attention` neither lse nor sinks. Matrices are lanes, C-contiguous. */
typedef enum { FA_SPARSEMAX, FA_ENTMAX15, FA_TOP_K, FA_ADDITIVE, FA_TALKING_HEADS } fa_rowwise_kind;

typedef struct {
    fa_attention_args attention;
    fa_rowwise_kind kind;
    int64_t k_keys;         /* of FA_TOP_K, at least 1 */
    const void *weight;     /* (heads_q, head_dim), of FA_ADDITIVE */
    const void *pre, *post; /* (heads_q, heads_q), of FA_TALKING_HEADS, optional: head h's share of head g is [h][g] */
} fa_rowwise_args;

/* A task is a tile of rows against all keys. Scratch, except FA_TALKING_HEADS's, grows with the number of keys. */
typedef struct {
    int64_t n_tasks, scratch_bytes;
    double flops;
} fa_rowwise_plan;

/* The numbers of the rows of k that have the largest scores: selection.inc.h. Of `attention` q, k, k_scale, their sizes,
 * masks.row_end and watch: a query may select keys before row_end alone, which is (batch, 1, len_q). */
typedef struct {
    fa_attention_args attention;
    fa_array weights;           /* (batch, heads_q, len_q), lanes; optional */
    fa_array selected;          /* (batch, heads_kv, len_q, top_k), int64, the last axis contiguous */
    fa_array scores;            /* (batch, heads_kv, len_q, len_k), lanes, likewise: in place of q and k; optional */
    int64_t top_k, first, last; /* of top_k, at least 1: the first and the last that a query may select */
    int relu;
} fa_selection_args;

/* With `runs`, whoever runs the tasks gives `scores` memory, whose rows are `pitch` lanes; score() first, which has `runs`
 * tasks for each of run(): scheduling, which alone depends on batch and threads. */
typedef struct {
    int by_pairs; /* rows of a tile are (query, head) pairs, and not queries */
    int64_t queries, tiles;
    int64_t runs, run_k, pitch;
    int64_t n_tasks, scratch_bytes;
    double flops;
} fa_selection_plan;

typedef enum { FA_LANES, FA_WHOLE, FA_BITS } fa_nearest_kind; /* what rows hold: nearest.inc.h */

/* The rows of k nearest to each query. Elements of a row are side by side; q_dtype and k_dtype are lanes or what is widened
 * to them, and of FA_WHOLE and FA_BITS bytes. */
typedef struct {
    const char *q, *k; /* (len_q, depth), (len_k, depth) */
    int64_t q_row, k_row, len_q, len_k, depth;
    fa_dtype q_dtype, k_dtype;
    fa_nearest_kind kind;
    int by_length;     /* scores are divided by the length of k's row */
    int64_t top_k;     /* at most len_k */
    int64_t run, kept; /* rows of a run; the best of it that are kept: top_k, or all */
    void *run_scores;  /* (len_q, runs, kept), lanes; their rows likewise */
    int64_t *run_rows;
    void *scores; /* (len_q, top_k), lanes; in ascending order of `rows` */
    int64_t *rows;
    const fa_watch *watch;
} fa_nearest_args;

/* n_tasks of run(); then finish(), a task for each query. */
typedef struct {
    int64_t queries, runs, n_tasks, scratch_bytes;
    double flops;
} fa_nearest_plan;

/* The gradients of an attention call, of which `attention` has the results: out and lse. What is not given is not asked
 * for. dq, dk and dv are of lanes or of their input's dtype, and written; the others are added to. */
typedef struct {
    fa_attention_args attention;
    fa_array dout;            /* (batch, heads_q, len_q, head_dim_v), q's dtype, as out */
    fa_array dlse;            /* (batch, heads_q, len_q), lanes; optional */
    fa_array dq, dk, dv;      /* (batch, heads, length, head_dim), the last axis contiguous */
    double dq_factor;         /* what the sum over keys of dS K is multiplied by */
    fa_array dbias;           /* lanes, as the bias: a stride of 0 sums */
    int bias_shared;          /* several heads, or items of the batch, have one dbias */
    fa_array dbias_diagonals; /* lanes, (batch, heads_q, 1, len_q + len_k - 1), number j - i + len_q - 1 */
    fa_array dsinks, dalibi_slopes, dsoftcap; /* float64, (batch, heads_q) */
} fa_backward_args;

/* With `few`, sums() first, whose tasks are those of run(). The tasks of begin(), in any order; then those of run(); then
 * those of end(). Threads take run's in order of their numbers, since a task may wait for one with a lower number. begin()
 * and end() have a task for each head of q.
 * `shared` is memory of all threads, as large for a call whatever the threads are. */
typedef struct {
    int whole_heads; /* a task is a KV head, and waits for none; else a block of keys of one: scheduling */
    int few;         /* of queries: P is normalised again */
    int64_t n_heads, n_blocks, n_tasks;
    int64_t scratch_bytes, shared_bytes;
    double flops;
} fa_backward_plan;

/* Gradients of the same; those that are not wanted are NULL. Sums of a head's rows are double. */
typedef struct {
    fa_rowwise_args forward;          /* `attention.out` and `lse` play no part */
    fa_array dout;                    /* as `attention.out` */
    fa_array dq;                      /* as q, in its dtype or lanes */
    fa_array dk, dv;                  /* as k and v, lanes; added to, as all that follow */
    fa_array dbias;                   /* as the bias, lanes */
    fa_array dbias_diagonals;         /* (batch, heads_q, len_q + len_k - 1), lanes; j - i + len_q - 1 counts */
    double *dalibi_slopes, *dsoftcap; /* (batch, heads_q) */
    double *dweight;                  /* (batch, heads_q, head_dim) */
    double *dpre, *dpost;             /* (batch, heads_q, heads_q) */
    double dq_factor;                 /* of dq: the scale, or 1 */
    int batch_shares, heads_share;    /* several batch items, several KV heads, have the same elements of dbias */
    int64_t *turns;                   /* (n_turns), 0 before the first task: how many have passed each */
} fa_rowwise_backward_args;

/* A task is a tile of rows, or talking heads' of all heads. Threads take them in order of their numbers, since a task
 * may wait for one with a lower number. */
typedef struct {
    int64_t n_tasks, n_turns, scratch_bytes;
    int64_t units, owners; /* whatever adds to the same elements of dk and dv; and of dbias, too */
    double flops;
} fa_rowwise_backward_plan;

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
    void (*linear_plan)(const fa_linear_args *, int threads, fa_linear_plan *);
    void (*linear_run)(const fa_linear_args *, const fa_linear_plan *, int64_t task, void *scratch);
    /* What float32 may become where attention and products of int8 alone read it: bfloat16 where its dot product is. */
    fa_dtype (*linear_between)(void);
    void (*outer_plan)(const fa_outer_args *, int threads, fa_outer_plan *);
    void (*outer_run)(const fa_outer_args *, const fa_outer_plan *, int64_t task, void *scratch);
    int64_t (*pack_scratch_bytes)(const fa_pack_args *);
    void (*pack_run)(const fa_pack_args *, int64_t begin, int64_t end, void *scratch); /* panels of all maps */
    int64_t (*rows_scratch_bytes)(int64_t n);
    void (*rows_run)(const fa_rows_args *, int64_t begin, int64_t end, void *scratch);
    int64_t (*rows_grad_scratch_bytes)(int64_t n);
    void (*rows_grad_run)(const fa_rows_grad_args *, int64_t begin, int64_t end, void *sums, void *scratch);
    void (*rows_grad_add)(const void *sums, int64_t count, int64_t row, int64_t n, void *out);
    void (*logits_run)(const fa_logits_args *, int64_t begin, int64_t end);
    void (*dropout_run)(const fa_dropout_args *, int64_t begin, int64_t end);
    int64_t (*scatter_scratch_bytes)(int64_t n);
    void (*scatter_run)(const fa_scatter_args *, int64_t begin, int64_t end, void *scratch);
    void (*rope_run)(const fa_rope_args *, int64_t begin, int64_t end, void *scratch); /* rows of batch * length */
    void (*update_run)(const fa_update_args *, int64_t begin, int64_t end);            /* blocks of all parameters */
    int64_t (*conv_scratch_bytes)(const fa_conv_args *);
    void (*conv_run)(const fa_conv_args *, int64_t begin, int64_t end, void *scratch); /* tokens of all sequences */
    int64_t (*conv_grad_scratch_bytes)(const fa_conv_grad_args *);
    void (*conv_grad_run)(const fa_conv_grad_args *, int64_t begin, int64_t end, void *sums, void *scratch);
    int64_t (*scan_tasks)(const fa_scan_args *); /* scan_run's scratch begins with 8 bytes of 0, as linear_run's */
    int64_t (*scan_scratch_bytes)(const fa_scan_args *);
    void (*scan_run)(const fa_scan_args *, int64_t task, void *scratch);
    int64_t (*scan_grad_scratch_bytes)(const fa_scan_grad_args *);
    void (*scan_grad_run)(const fa_scan_grad_args *, int64_t task, void *scratch);
    int64_t (*deformable_scratch_bytes)(const fa_deformable_args *);
    void (*deformable_run)(const fa_deformable_args *, int64_t begin, int64_t end, void *scratch); /* units */
    int64_t (*deformable_grad_scratch_bytes)(const fa_deformable_grad_args *);
    void (*deformable_grad_run)(const fa_deformable_grad_args *, int64_t task, int64_t first_head, int64_t end_head,
                                void *scratch);
    void (*recurrent_plan)(const fa_recurrent_args *, int threads, fa_recurrent_plan *);
    void (*recurrent_run)(const fa_recurrent_args *, const fa_recurrent_plan *, int64_t task, void *scratch);
    void (*recurrent_backward_plan)(const fa_recurrent_backward_args *, fa_recurrent_backward_plan *);
    void (*recurrent_backward_run)(const fa_recurrent_backward_args *, const fa_recurrent_backward_plan *, int64_t task,
                                   void *scratch);
    void (*rowwise_plan)(const fa_rowwise_args *, fa_rowwise_plan *);
    void (*rowwise_run)(const fa_rowwise_args *, const fa_rowwise_plan *, int64_t task, void *scratch);
    void (*selection_plan)(const fa_selection_args *, int threads, fa_selection_plan *);
    void (*selection_score)(const fa_selection_args *, const fa_selection_plan *, int64_t task, void *scratch);
    void (*selection_run)(const fa_selection_args *, const fa_selection_plan *, int64_t task, void *scratch);
    void (*nearest_plan)(const fa_nearest_args *, fa_nearest_plan *);
    void (*nearest_run)(const fa_nearest_args *, const fa_nearest_plan *, int64_t task, void *scratch);
    void (*nearest_finish)(const fa_nearest_args *, const fa_nearest_plan *, int64_t query, void *scratch);
    void (*backward_plan)(const fa_backward_args *, int threads, fa_backward_plan *);
    void (*backward_sums)(const fa_backward_args *, const fa_backward_plan *, int64_t task, void *shared,
                          void *scratch);
    void (*backward_begin)(const fa_backward_args *, const fa_backward_plan *, int64_t task, void *shared,
                           void *scratch);
    void (*backward_run)(const fa_backward_args *, const fa_backward_plan *, int64_t task, void *shared, void *scratch);
    void (*backward_end)(const fa_backward_args *, const fa_backward_plan *, int64_t task, void *shared);
    void (*rowwise_backward_plan)(const fa_rowwise_backward_args *, fa_rowwise_backward_plan *);
    void (*rowwise_backward_run)(const fa_rowwise_backward_args *, const fa_rowwise_backward_plan *, int64_t task,
                                 void *scratch);
    /* Measurements of the machine: peak.inc.h. */
    double (*fma_rounds)(int64_t rounds, fa_dtype kind);
    double (*read_bytes)(const char *data, int64_t n);
} fa_kernels;

/* dispatch.c. What plans read; as for a second-level cache of 1 MB, until somebody sets it. */
extern fa_tuning fa_tuned;

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

#endif

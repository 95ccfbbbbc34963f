/* What goes along the tokens channel by channel, and its gradients. */
#pragma once
#include "arrays.h"

/* Sequences end to end: tokens begins[s] .. begins[s + 1] - 1 of all are those of sequence s, and arrays of tokens have an
 * item of the batch for each sequence. Rows have x's dtype, where they are not of lanes, and are contiguous. */

/* Causal depthwise convolution: conv.inc.h. */
#define FA_MOST_WIDTH 8
typedef struct {
    fa_array x;            /* tokens, of channels; or they lie side by side, and their channels apart */
    fa_array out;          /* tokens (channels) */
    fa_array state;        /* rows (sequences, width - 1, channels), optional: the inputs before the first */
    const void *weight;    /* lanes (channels, width) */
    const void *bias;      /* lanes (channels), optional */
    const int64_t *begins; /* (sequences + 1), from 0 */
    int64_t sequences, channels;
    int width; /* 1 to FA_MOST_WIDTH */
    fa_activation activation;
    const fa_watch *watch; /* optional */
} fa_conv_args;

typedef struct {
    fa_conv_args forward; /* `out` plays no part */
    fa_array dout, dx;    /* tokens (channels); dx optional */
    fa_array dstate;      /* rows (sequences, width - 1, channels), optional: without tokens it stays as it is */
} fa_conv_grad_args;

/* The selective scan: scan.inc.h. */
typedef struct {
    fa_array x, dt, out;        /* tokens (channels) */
    fa_array b, c;              /* tokens (states), x's dtype */
    fa_array state, state_out;  /* lanes (sequences, channels, states); state optional, may be state_out */
    const void *rates;          /* lanes (channels, states) */
    const void *skip, *dt_bias; /* lanes (channels), optional */
    const int64_t *begins;      /* (sequences + 1), from 0 */
    int64_t sequences, channels, states, longest; /* longest: tokens of a sequence */
    int softplus;
    const fa_watch *watch; /* optional */
} fa_scan_args;

typedef struct {
    fa_scan_args forward;        /* `out` and `state_out` play no part */
    fa_array dout, dx, ddt;      /* tokens (channels); dx and ddt optional, as all that follow */
    fa_array dstate_out, dstate; /* lanes (sequences, channels, states) */
    fa_array drates;             /* the same, of each sequence: whoever runs the tasks adds them */
    fa_array dskip, dbias;       /* lanes, (sequences, channels), likewise */
    void *db, *dc;               /* lanes, (blocks of SCAN_CHANNELS channels, tokens, states), likewise */
} fa_scan_grad_args;

typedef struct {
    int64_t (*conv_scratch_bytes)(const fa_conv_args *);
    void (*conv_run)(const fa_conv_args *, int64_t begin, int64_t end, void *scratch); /* tokens of all sequences */
    int64_t (*conv_grad_scratch_bytes)(const fa_conv_grad_args *);
    void (*conv_grad_run)(const fa_conv_grad_args *, int64_t begin, int64_t end, void *sums, void *scratch);
    int64_t (*scan_tasks)(const fa_scan_args *); /* scan_run's scratch begins with 8 bytes of 0, as linear_run's */
    int64_t (*scan_scratch_bytes)(const fa_scan_args *);
    void (*scan_run)(const fa_scan_args *, int64_t task, void *scratch);
    int64_t (*scan_grad_scratch_bytes)(const fa_scan_grad_args *);
    void (*scan_grad_run)(const fa_scan_grad_args *, int64_t task, void *scratch);
} fa_channels_kernels;

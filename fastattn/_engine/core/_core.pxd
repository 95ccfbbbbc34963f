"""The C interface, src/fastattn.h."""

from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint64_t

cdef extern from "fastattn.h" nogil:
    enum:
        FA_PANEL_BYTES
    ctypedef enum fa_dtype:
        FA_F32, FA_F64, FA_F16, FA_BF16, FA_I8, FA_I4, FA_Q8
    ctypedef enum fa_kernel_kind:
        FA_TILE, FA_DOT
    ctypedef struct fa_watch:
        int (*gives_up)(void *) noexcept nogil
        void *caller
        void (*pause)(int64_t) noexcept nogil
    ctypedef struct fa_array:
        char *data
        const int64_t *batch
        int64_t head, row, col
        fa_dtype dtype
        const int32_t *blocks
        int64_t block_size
    ctypedef struct fa_masks:
        fa_array mask, row_begin, row_end, range_first, range_last
        const int64_t *ranges
    ctypedef struct fa_modifiers:
        double scale, softcap
        fa_array bias, alibi_slopes, q_position
    ctypedef struct fa_statistics:
        fa_array row_max, entropy, top_weights, top_keys, norm, key_sums, mean_weights
        int64_t n_top
        int second_pass
    ctypedef struct fa_attention_args:
        fa_array q, k, v, k_scale, v_scale, out, lse, sinks
        int64_t first, batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v
        fa_masks masks
        fa_modifiers mods
        fa_statistics stats
        int sigmoid
        double sigmoid_bias, dropout
        uint64_t seed
        const fa_watch *watch
    ctypedef struct fa_plan:
        fa_kernel_kind kind
        int block_q, block_k, tiles, bf16_dot
        int64_t n_tasks, split_k, n_splits, scratch_bytes, partial_bytes
        double flops
    ctypedef int fa_activation
    ctypedef struct fa_linear_args:
        const char *x
        const char *residual
        char *out
        const char *panels
        const void *scales
        const void *minima
        const void *table
        const int8_t *codes
        const void *sums
        double unit
        const void *bias
        char *pre
        int64_t x_row, residual_row, out_row, pre_row, m, n, k
        fa_dtype dtype, out_dtype, weight
        int block, gated, x_int8, transposed
        fa_activation activation
        const fa_watch *watch
    ctypedef struct fa_linear_plan:
        int64_t n_tasks, scratch_bytes
        double flops
    ctypedef struct fa_outer_args:
        const char *a
        const char *b
        char *out
        void *sums
        int64_t a_row, b_row, out_row, m, n, k
        fa_dtype a_dtype, b_dtype
        int pairs, more
        const fa_watch *watch
    ctypedef struct fa_outer_plan:
        int64_t n_tasks, scratch_bytes
        double flops
    ctypedef struct fa_bits:
        uint8_t at[16]
        uint8_t shift[16]
        uint8_t high_at[16]
        uint8_t high_shift[16]
        int width, high_width, add
    ctypedef struct fa_layout:
        fa_bits codes, scales, minima
        int features, bytes, shared, unit, minimum, window, exponent, in_order
    ctypedef struct fa_pack_rows:
        const char *data
        int64_t row, col, begin, end
        fa_dtype dtype
        int map
        const fa_layout *layout
        const int8_t *table
        int add
    ctypedef struct fa_pack_args:
        const fa_pack_rows *blocks
        unsigned char *bad
        char *panels
        void *scales
        void *minima
        void *sums
        const void *middles
        const void *codes
        double unit, extreme, beyond
        int64_t n_blocks, k
        fa_dtype weight
        int maps, block, zero
        const fa_watch *watch
    ctypedef enum fa_rows_kind:
        FA_LAYER_NORM, FA_RMS_NORM, FA_SOFTMAX, FA_ACTIVATE
    ctypedef struct fa_rows_args:
        fa_rows_kind kind
        fa_dtype dtype
        fa_activation activation
        const char *x
        const char *residual
        const char *up
        char *total
        char *out
        const void *weight
        const void *bias
        int64_t x_row, residual_row, up_row, total_row, out_row, m, n, up_each
        double eps
        int gate_first
        const fa_watch *watch
    ctypedef struct fa_rows_grad_args:
        fa_rows_kind kind
        fa_dtype dtype
        fa_activation activation
        const char *dout
        const char *x
        const char *residual
        const char *dsum
        const char *up
        char *dx
        char *dup
        const void *weight
        int64_t dout_row, x_row, residual_row, dsum_row, up_row, dx_row, dup_row, m, n, up_each
        double eps
        int gate_first
        const fa_watch *watch
    ctypedef struct fa_logits_args:
        char *logits
        const int64_t *targets
        void *loss
        const void *factor
        int64_t row, m, n
        double label_smoothing
        const fa_watch *watch
    ctypedef struct fa_dropout_args:
        const char *x
        char *out
        int64_t x_row, out_row, m, n
        fa_dtype dtype
        double rate, scale
        uint64_t seed
        int64_t stream
        const fa_watch *watch
    ctypedef struct fa_scatter_args:
        const char *x
        char *out
        const int64_t *order
        const int64_t *firsts
        const int64_t *places
        int64_t x_row, out_row, n
        fa_dtype dtype
        const fa_watch *watch
    ctypedef struct fa_rope_args:
        fa_array x, out, cos, sin, scale
        int64_t batch, heads, length, head_dim, pairs
        int interleaved
    enum: FA_UPDATE_BLOCK
    ctypedef enum fa_update_kind:
        FA_SQUARES, FA_SGD, FA_ADAMW
    ctypedef struct fa_parameter:
        void *param
        const void *grad
        void *first
        void *second
        int64_t n, block
    ctypedef struct fa_update_args:
        fa_update_kind kind
        const fa_parameter *parameters
        double *sums
        int64_t n_parameters
        double scale, lr, weight_decay, momentum, beta2, eps, first_correction, second_correction
        int nesterov
    enum:
        FA_MOST_WIDTH
    ctypedef struct fa_conv_args:
        fa_array x, out, state
        const void *weight
        const void *bias
        const int64_t *begins
        int64_t sequences, channels
        int width
        fa_activation activation
        const fa_watch *watch
    ctypedef struct fa_conv_grad_args:
        fa_conv_args forward
        fa_array dout, dx, dstate
    ctypedef struct fa_scan_args:
        fa_array x, dt, out, b, c, state, state_out
        const void *rates
        const void *skip
        const void *dt_bias
        const int64_t *begins
        int64_t sequences, channels, states, longest
        int softplus
        const fa_watch *watch
    ctypedef struct fa_scan_grad_args:
        fa_scan_args forward
        fa_array dout, dx, ddt, dstate_out, dstate, drates, dskip, dbias
        void *db
        void *dc
    enum:
        FA_DEFORMABLE_QUERIES
    ctypedef struct fa_level:
        int64_t height, width, row, end
    ctypedef struct fa_deformable_args:
        fa_array v, out, locations, weights
        const fa_level *levels
        int64_t batch, heads, len_q, head_dim, n_levels, points
        int discrete
        const fa_watch *watch
    ctypedef struct fa_deformable_grad_args:
        fa_deformable_args forward
        fa_array dout, dv, dlocations, dweights
    ctypedef struct fa_recurrent_args:
        fa_array q, k, v, out, log_decay, beta, strength, erase, state, state_out, norm, norm_out
        const void *skip
        const int64_t *begins
        const int64_t *order
        int64_t batch, heads, heads_q, heads_k, heads_v, len_q, len_k, head_dim, head_dim_v
        int gated, causal
        double scale, eps
        const fa_watch *watch
    ctypedef struct fa_recurrent_plan:
        int steps
        int64_t n_tasks, scratch_bytes
        double flops
    ctypedef struct fa_recurrent_backward_args:
        fa_recurrent_args forward
        fa_array dout, dstate_out, dnorm_out, dq, dk, dv, dlog_decay, dbeta, derase, dstate, dnorm
        double dq_factor
    ctypedef struct fa_recurrent_backward_plan:
        int64_t n_tasks, scratch_bytes
        double flops
    ctypedef struct fa_disentangled_args:
        fa_attention_args attention
        const void *keys
        const void *queries
        const int64_t *row_of
        int64_t rows
    ctypedef enum fa_rowwise_kind:
        FA_SPARSEMAX, FA_ENTMAX15, FA_TOP_K, FA_ADDITIVE, FA_TALKING_HEADS
    ctypedef struct fa_rowwise_args:
        fa_attention_args attention
        fa_rowwise_kind kind
        int64_t k_keys
        const void *weight
        const void *pre
        const void *post
    ctypedef struct fa_rowwise_plan:
        int64_t n_tasks, scratch_bytes
        double flops
    ctypedef struct fa_selection_args:
        fa_attention_args attention
        fa_array weights, selected, scores
        int64_t top_k, first, last
        int relu
    ctypedef struct fa_selection_plan:
        int64_t runs, pitch, n_tasks, scratch_bytes
        double flops
    ctypedef enum fa_nearest_kind:
        FA_LANES, FA_WHOLE, FA_BITS
    ctypedef struct fa_nearest_args:
        const char *q
        const char *k
        int64_t q_row, k_row, len_q, len_k, depth
        fa_dtype q_dtype, k_dtype
        fa_nearest_kind kind
        int by_length
        int64_t top_k, run, kept
        void *run_scores
        int64_t *run_rows
        void *scores
        int64_t *rows
        const fa_watch *watch
    ctypedef struct fa_nearest_plan:
        int64_t runs, n_tasks, scratch_bytes
        double flops
    ctypedef struct fa_backward_args:
        fa_attention_args attention
        fa_array dout, dlse, dq, dk, dv, dbias, dbias_diagonals, dsinks, dalibi_slopes, dsoftcap
        double dq_factor
        int bias_shared
    ctypedef struct fa_backward_plan:
        int few
        int64_t n_tasks, scratch_bytes, shared_bytes
        double flops
    ctypedef struct fa_rowwise_backward_args:
        fa_rowwise_args forward
        fa_array dout, dq, dk, dv, dbias, dbias_diagonals
        double *dalibi_slopes
        double *dsoftcap
        double *dweight
        double *dpre
        double *dpost
        double dq_factor
        int batch_shares, heads_share
        int64_t *turns
    ctypedef struct fa_rowwise_backward_plan:
        int64_t n_tasks, n_turns, scratch_bytes
        double flops
    ctypedef struct fa_kernels:
        void (*plan)(const fa_attention_args *, int, fa_plan *) noexcept nogil
        void (*run)(const fa_attention_args *, const fa_plan *, int64_t, void *) noexcept nogil
        void (*splits)(const fa_attention_args *, const fa_plan *, int64_t, int64_t *, int64_t *) noexcept nogil
        void (*run_split)(const fa_attention_args *, const fa_plan *, int64_t, int64_t, void *, void *) noexcept nogil
        void (*merge)(const fa_attention_args *, const fa_plan *, int64_t, int64_t, void *, const void *) noexcept nogil
        int64_t (*disentangled_tasks)(const fa_disentangled_args *) noexcept nogil
        int64_t (*disentangled_scratch_bytes)(const fa_disentangled_args *) noexcept nogil
        void (*disentangled_run)(const fa_disentangled_args *, int64_t, void *) noexcept nogil
        void (*linear_plan)(const fa_linear_args *, int, fa_linear_plan *) noexcept nogil
        void (*linear_run)(const fa_linear_args *, const fa_linear_plan *, int64_t, void *) noexcept nogil
        fa_dtype (*linear_between)() noexcept nogil
        void (*outer_plan)(const fa_outer_args *, int, fa_outer_plan *) noexcept nogil
        void (*outer_run)(const fa_outer_args *, const fa_outer_plan *, int64_t, void *) noexcept nogil
        int64_t (*pack_scratch_bytes)(const fa_pack_args *) noexcept nogil
        void (*pack_run)(const fa_pack_args *, int64_t, int64_t, void *) noexcept nogil
        int64_t (*rows_scratch_bytes)(int64_t) noexcept nogil
        void (*rows_run)(const fa_rows_args *, int64_t, int64_t, void *) noexcept nogil
        int64_t (*rows_grad_scratch_bytes)(int64_t) noexcept nogil
        void (*rows_grad_run)(const fa_rows_grad_args *, int64_t, int64_t, void *, void *) noexcept nogil
        void (*rows_grad_add)(const void *, int64_t, int64_t, int64_t, void *) noexcept nogil
        void (*logits_run)(const fa_logits_args *, int64_t, int64_t) noexcept nogil
        void (*dropout_run)(const fa_dropout_args *, int64_t, int64_t) noexcept nogil
        int64_t (*scatter_scratch_bytes)(int64_t) noexcept nogil
        void (*scatter_run)(const fa_scatter_args *, int64_t, int64_t, void *) noexcept nogil
        void (*rope_run)(const fa_rope_args *, int64_t, int64_t, void *) noexcept nogil
        void (*update_run)(const fa_update_args *, int64_t, int64_t) noexcept nogil
        int64_t (*conv_scratch_bytes)(const fa_conv_args *) noexcept nogil
        void (*conv_run)(const fa_conv_args *, int64_t, int64_t, void *) noexcept nogil
        int64_t (*conv_grad_scratch_bytes)(const fa_conv_grad_args *) noexcept nogil
        void (*conv_grad_run)(const fa_conv_grad_args *, int64_t, int64_t, void *, void *) noexcept nogil
        int64_t (*scan_tasks)(const fa_scan_args *) noexcept nogil
        int64_t (*scan_scratch_bytes)(const fa_scan_args *) noexcept nogil
        void (*scan_run)(const fa_scan_args *, int64_t, void *) noexcept nogil
        int64_t (*scan_grad_scratch_bytes)(const fa_scan_grad_args *) noexcept nogil
        void (*scan_grad_run)(const fa_scan_grad_args *, int64_t, void *) noexcept nogil
        int64_t (*deformable_scratch_bytes)(const fa_deformable_args *) noexcept nogil
        void (*deformable_run)(const fa_deformable_args *, int64_t, int64_t, void *) noexcept nogil
        int64_t (*deformable_grad_scratch_bytes)(const fa_deformable_grad_args *) noexcept nogil
        void (*deformable_grad_run)(const fa_deformable_grad_args *, int64_t, int64_t, int64_t, void *) noexcept nogil
        void (*recurrent_plan)(const fa_recurrent_args *, int, fa_recurrent_plan *) noexcept nogil
        void (*recurrent_run)(const fa_recurrent_args *, const fa_recurrent_plan *, int64_t, void *) noexcept nogil
        void (*recurrent_backward_plan)(const fa_recurrent_backward_args *,
                                        fa_recurrent_backward_plan *) noexcept nogil
        void (*recurrent_backward_run)(const fa_recurrent_backward_args *, const fa_recurrent_backward_plan *, int64_t,
                                       void *) noexcept nogil
        void (*rowwise_plan)(const fa_rowwise_args *, fa_rowwise_plan *) noexcept nogil
        void (*rowwise_run)(const fa_rowwise_args *, const fa_rowwise_plan *, int64_t, void *) noexcept nogil
        void (*selection_plan)(const fa_selection_args *, int, fa_selection_plan *) noexcept nogil
        void (*selection_score)(const fa_selection_args *, const fa_selection_plan *, int64_t, void *) noexcept nogil
        void (*selection_run)(const fa_selection_args *, const fa_selection_plan *, int64_t, void *) noexcept nogil
        void (*nearest_plan)(const fa_nearest_args *, fa_nearest_plan *) noexcept nogil
        void (*nearest_run)(const fa_nearest_args *, const fa_nearest_plan *, int64_t, void *) noexcept nogil
        void (*nearest_finish)(const fa_nearest_args *, const fa_nearest_plan *, int64_t, void *) noexcept nogil
        void (*backward_plan)(const fa_backward_args *, int, fa_backward_plan *) noexcept nogil
        void (*backward_sums)(const fa_backward_args *, const fa_backward_plan *, int64_t, void *,
                              void *) noexcept nogil
        void (*backward_begin)(const fa_backward_args *, const fa_backward_plan *, int64_t, void *,
                               void *) noexcept nogil
        void (*backward_run)(const fa_backward_args *, const fa_backward_plan *, int64_t, void *, void *) noexcept nogil
        void (*backward_end)(const fa_backward_args *, const fa_backward_plan *, int64_t, void *) noexcept nogil
        void (*rowwise_backward_plan)(const fa_rowwise_backward_args *, fa_rowwise_backward_plan *) noexcept nogil
        void (*rowwise_backward_run)(const fa_rowwise_backward_args *, const fa_rowwise_backward_plan *, int64_t,
                                     void *) noexcept nogil
        double (*fma_rounds)(int64_t, fa_dtype) noexcept nogil
        double (*read_bytes)(const char *, int64_t) noexcept nogil
    ctypedef struct fa_tuning:
        int64_t parallel_flops, parallel_dot_flops, parallel_elements, row_task_elements, chain_rows, chain_bytes
    fa_tuning fa_tuned
    ctypedef struct fa_size:
        const char *name
        int64_t least, most
    int fa_size_count()
    const fa_size *fa_size_at(int)
    int64_t *fa_size_in(fa_tuning *, int)
    void fa_tune_for(int64_t)
    int64_t fa_level2_cache()
    int fa_isa_count()
    const char *fa_isa_name(int)
    int fa_isa_compiled(int)
    int fa_isa_available(int)
    int fa_isa_default(int slow_pairs, int tiles)
    int fa_isa_best(int slow_pairs, int tiles)
    int fa_cpu_slow_pairs()
    int fa_cpu_ask_tiles()
    const fa_kernels *fa_isa_kernels(int, fa_dtype)
    const char *fa_activation_names[]

cdef extern from "lists.h" nogil:
    enum:
        FA_LIST_ROWS
    ctypedef struct fa_lists_args:
        fa_array selected, row_begin, row_end
        int64_t len_k, n, block_size, group, first_item, first_query, queries
        int64_t *units
        int64_t *keys
        int64_t *begin
        int64_t *end
        int64_t *range_first
        int64_t *range_last
        int64_t *ranges
        int32_t *blocks
        const fa_watch *watch
    int64_t fa_lists_step(const fa_lists_args *)
    int64_t fa_lists_scratch_bytes(const fa_lists_args *)
    void fa_lists_run(const fa_lists_args *, int64_t task, void *scratch)

# Attention with other normalisers and other scores: a part of _core.pyx, which includes it.

cdef dict _ROWWISE = {"sparsemax": FA_SPARSEMAX, "entmax15": FA_ENTMAX15, "top_k": FA_TOP_K,
                      "additive": FA_ADDITIVE, "talking_heads": FA_TALKING_HEADS}


cdef void _rowwise_task(Loop *loop, int64_t task, void *scratch) noexcept nogil:
    loop.kernels.rowwise_run(<const fa_rowwise_args *>loop.args, <const fa_rowwise_plan *>loop.plan, task, scratch)


def rowwise(args):
    """Compute `args.attention.out`, of a RowwiseArgs."""
    cdef fa_rowwise_args r
    cdef fa_rowwise_plan plan
    cdef Loop loop
    cdef int threads = args.attention.num_threads
    cdef int lane
    memset(&r, 0, sizeof(r))
    cdef _Tables _tables = _set_args(&r.attention, args.attention, True)  # which must outlive the kernels
    cdef int64_t heads = r.attention.heads_q
    r.kind, r.k_keys = _ROWWISE[args.kind], args.top_k
    lane = _lane_type(r.attention.q.dtype)
    r.weight = _data("weight", args.weight, heads * r.attention.head_dim, lane)
    r.pre = _data("pre", args.pre, heads * heads, lane)
    r.post = _data("post", args.post, heads * heads, lane)
    r.attention.watch = &loop.watch
    loop.kernels, loop.args, loop.plan = _kernels(r.attention.q.dtype), &r, &plan
    loop.kernels.rowwise_plan(&r, &plan)
    _run(&loop, _rowwise_task, plan.n_tasks, threads if plan.flops >= fa_tuned.parallel_flops else 1,
         plan.scratch_bytes)

# Attention with other normalisers and other scores: a part of _core.pyx, which includes it.

cdef dict _ROWWISE = {"sparsemax": FA_SPARSEMAX, "entmax15": FA_ENTMAX15, "top_k": FA_TOP_K,
                      "additive": FA_ADDITIVE, "talking_heads": FA_TALKING_HEADS}


# What the tasks share.
cdef struct RowwiseCall:
    const fa_kernels *kernels
    const fa_rowwise_args *args
    fa_rowwise_plan plan


cdef void _rowwise_task(void *context, int64_t task, void *scratch) noexcept nogil:
    cdef RowwiseCall *c = <RowwiseCall *>context
    c.kernels.rowwise_run(c.args, &c.plan, task, scratch)


def rowwise(args):
    """Compute `args.attention.out`, of a RowwiseArgs."""
    cdef fa_rowwise_args r
    cdef RowwiseCall c
    cdef Loop loop
    cdef int threads = args.attention.num_threads if FA_OPENMP else 1
    cdef _Tables tables
    cdef int lane
    memset(&r, 0, sizeof(r))
    r.kind = _ROWWISE[args.kind]
    r.k_keys = args.top_k
    tables = _set_args(&r.attention, args.attention, True)
    lane = _lane_type(r.attention.q.dtype)
    if args.weight is not None:
        r.weight = _data("weight", args.weight, r.attention.heads_q * r.attention.head_dim, lane)
    if args.pre is not None:
        r.pre = _data("pre", args.pre, r.attention.heads_q * r.attention.heads_q, lane)
    if args.post is not None:
        r.post = _data("post", args.post, r.attention.heads_q * r.attention.heads_q, lane)
    r.attention.watch = &loop.watch
    c.kernels, c.args = fa_isa_kernels(_isa, r.attention.q.dtype), &r
    c.kernels.rowwise_plan(&r, &c.plan)
    if c.plan.flops < PARALLEL_TILE:
        threads = 1
    _run(&loop, _rowwise_task, &c, c.plan.n_tasks, threads, c.plan.scratch_bytes)

# Attention with other normalisers and other scores: a part of _core.pyx, which includes it.

cdef dict _ROWWISE = {"sparsemax": FA_SPARSEMAX, "entmax15": FA_ENTMAX15, "top_k": FA_TOP_K,
                      "additive": FA_ADDITIVE, "talking_heads": FA_TALKING_HEADS}


cdef void _rowwise_task(Loop *loop, const fa_rowwise_args *r, const fa_rowwise_plan *p, int64_t task,
                        int thread) noexcept nogil:
    if loop.stop:
        return
    loop.kernels.rowwise_run(r, p, task, loop.scratch + thread * p.scratch_bytes)
    if thread == 0:
        _look_for_signals(loop)


def rowwise(args):
    """Compute `args.attention.out`, of a RowwiseArgs."""
    cdef fa_rowwise_args r
    cdef fa_rowwise_plan p
    cdef Loop loop
    cdef int threads = args.attention.num_threads if FA_OPENMP else 1
    cdef int64_t task
    cdef Tables tables
    cdef int lane
    cdef void *memory
    cdef list errors = []
    memset(&r, 0, sizeof(r))
    r.kind = _ROWWISE[args.kind]
    r.k_keys = args.k_keys
    tables = _set_args(&r.attention, args.attention, True)
    lane = _lane_type(r.attention.q.dtype)
    if args.weight is not None:
        r.weight = _data("weight", args.weight, r.attention.heads_q * r.attention.head_dim, lane)
    if args.pre is not None:
        r.pre = _data("pre", args.pre, r.attention.heads_q * r.attention.heads_q, lane)
    if args.post is not None:
        r.post = _data("post", args.post, r.attention.heads_q * r.attention.heads_q, lane)
    loop.kernels = fa_isa_kernels(_isa, r.attention.q.dtype)
    loop.kernels.rowwise_plan(&r, &p)
    threads = 1 if p.flops < PARALLEL_TILE else max(1, min(threads, p.n_tasks))
    loop.scratch = _aligned_scratch(threads * p.scratch_bytes, &memory)
    _start_looking(&loop, errors)
    with nogil:
        if threads == 1:
            for task in range(p.n_tasks):
                _rowwise_task(&loop, &r, &p, task, 0)
        else:
            for task in prange(p.n_tasks, num_threads=threads, schedule="dynamic"):
                _rowwise_task(&loop, &r, &p, task, threadid())
    PyMem_RawFree(memory)
    if errors:
        raise errors[0]

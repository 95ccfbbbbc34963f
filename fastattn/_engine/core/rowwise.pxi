# Attention with other normalisers and other scores: a part of _core.pyx, which includes it.

cdef _Tables _set_rowwise(fa_rowwise_args *r, args):
    """Fill `r`, of a RowwiseArgs; returns the batch tables it points into."""
    memset(r, 0, sizeof(fa_rowwise_args))
    cdef _Tables tables = _set_args(&r.attention, args.attention, True)
    if r.attention.k.dtype == FA_I4:
        raise _misfit("k", args.attention.k, "floats, or int8 with scales")
    r.k_keys = args.top_k
    _fill_rowwise(r, args)
    return tables


def rowwise(args):
    """Compute `args.attention.out`, of a RowwiseArgs."""
    cdef fa_rowwise_args r
    cdef fa_rowwise_plan plan
    cdef Loop loop
    cdef int threads = args.attention.num_threads
    cdef _Tables _tables = _set_rowwise(&r, args)  # which must outlive the kernels
    _ready(&loop, r.attention.q.dtype, &r, &r.attention.watch, &plan)
    loop.kernels.rowwise.plan(&r, &plan)
    _run(&loop, _rowwise_task, plan.n_tasks, _if_pays(plan.flops, threads), plan.scratch_bytes)

# Gradients of attention with other normalisers and other scores: a part of _core.pyx, which includes it.

cdef bint _shares(cnp.ndarray array, int core, int64_t batch):
    """Whether several of so many batch items have the same elements of `array`, whose own axes are `core`."""
    cdef int i
    cdef int64_t own = 1
    for i in range(cnp.PyArray_NDIM(array) - core):
        own *= array.shape[i]
    return own != batch


def rowwise_backward(args):
    """Compute the gradients of a RowwiseBackwardArgs."""
    cdef fa_rowwise_backward_args r
    cdef fa_rowwise_backward_plan plan
    cdef Loop loop
    cdef int threads = args.attention.num_threads
    memset(&r, 0, sizeof(r))
    cdef _Tables _forward = _set_rowwise(&r.forward, args.rowwise)  # which must outlive the kernels
    cdef fa_attention_args *a = &r.forward.attention
    cdef _Tables tables = _Tables(args.attention.batch_shape, ROWWISE_BACKWARD_ARRAYS)
    _fill_rowwise_backward(&r, args, tables)
    for array, core in ((args.dbias, 3), (args.dbias_diagonals, 2)):
        if array is not None:
            r.batch_shares = r.batch_shares or _shares(array, core, a.batch)
            r.heads_share = r.heads_share or (a.heads_kv > 1 and array.shape[array.ndim - core] == 1)
    if r.dout.dtype != a.q.dtype:
        raise _misfit("dout", args.dout, f"the type of q, {args.attention.q.dtype}")
    _ready(&loop, a.q.dtype, &r, &a.watch, &plan)
    loop.kernels.rowwise.backward_plan(&r, &plan)
    _start(&loop, _rowwise_backward_task, plan.n_tasks, _if_pays(plan.flops, threads), plan.scratch_bytes,
           plan.n_turns * <int64_t>sizeof(int64_t))
    r.turns = <int64_t *>loop.shared
    memset(r.turns, 0, plan.n_turns * sizeof(int64_t))
    with nogil:
        _tasks(&loop, plan.n_tasks)
    _end(&loop)

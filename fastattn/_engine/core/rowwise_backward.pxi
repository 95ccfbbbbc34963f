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
    cdef int threads = args.attention.num_threads, lane, double = cnp.NPY_DOUBLE
    memset(&r, 0, sizeof(r))
    cdef _Tables _forward = _set_rowwise(&r.forward, args.rowwise)  # which must outlive the kernels
    cdef fa_attention_args *a = &r.forward.attention
    cdef _Tables tables = _Tables(args.attention.batch_shape, 6)
    cdef int64_t heads = a.heads_q, rows = a.batch * heads
    lane = _lane_type(a.q.dtype)
    tables.set_rows(&r.dout, "dout", args.dout, heads, a.len_q, a.head_dim_v)
    tables.set_rows(&r.dq, "dq", args.dq, heads, a.len_q, a.head_dim)
    tables.set(&r.dk, "dk", args.dk, lane, 3, a.heads_kv, a.len_k, a.head_dim, True)
    tables.set(&r.dv, "dv", args.dv, lane, 3, a.heads_kv, a.len_k, a.head_dim_v, True)
    tables.set(&r.dbias, "dbias", args.dbias, lane, 3, heads, a.len_q, a.len_k)
    tables.set(&r.dbias_diagonals, "dbias_diagonals", args.dbias_diagonals, lane, 2, heads, a.len_q + a.len_k - 1)
    for array, core in ((args.dbias, 3), (args.dbias_diagonals, 2)):
        if array is not None:
            r.batch_shares = r.batch_shares or _shares(array, core, a.batch)
            r.heads_share = r.heads_share or (a.heads_kv > 1 and array.shape[array.ndim - core] == 1)
    r.dalibi_slopes = <double *>_data("dalibi_slopes", args.dalibi_slopes, rows, double)
    r.dsoftcap = <double *>_data("dsoftcap", args.dsoftcap, rows, double)
    r.dweight = <double *>_data("dweight", args.dweight, rows * a.head_dim, double)
    r.dpre = <double *>_data("dpre", args.dpre, rows * heads, double)
    r.dpost = <double *>_data("dpost", args.dpost, rows * heads, double)
    r.dq_factor = args.dq_factor
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

# Linear attention: a part of _core.pyx, which includes it.

cdef int _set_recurrent(fa_recurrent_args *a, args, _Tables tables) except -1:
    """Fill `a`; returns the type of lanes."""
    cdef int lane
    a.batch = tables.batch
    _fill_recurrent(a, args, tables)
    lane = _lane_type(a.q.dtype)
    a.log_decay.dtype = a.beta.dtype = _dtype(args.state_out)
    _set_decays(&a.log_decay, "log_decay", args.log_decay, lane, a, tables)
    return lane


cdef int _set_decays(fa_array *x, name, array, int lane, const fa_recurrent_args *a, _Tables tables) except -1:
    """Point `x` at decays, scalar or vector ones."""
    if a.gated:
        tables.set(x, name, array, lane, 3, a.heads, a.len_k, a.head_dim, True)
    else:
        tables.set(x, name, array, lane, 2, a.heads, a.len_k)
    return 0


cdef int _begin_sequences(fa_recurrent_args *a, cnp.ndarray begins, _Tables tables, fa_array **arrays,
                          int n_arrays) except -1:
    """Let sequences end to end begin in `arrays`, which are set, if there are `begins`."""
    cdef int64_t i, longest = 0
    if begins is None:
        return 0
    a.begins = <const int64_t *>_data("begins", begins, tables.batch + 1, cnp.NPY_INT64)
    if a.len_q != a.len_k or not _fit(a.begins, tables.batch + 1, a.len_k):
        raise ValueError(f"fastattn: begins of sequences do not fit {a.len_q} queries and {a.len_k} keys")
    for i in range(tables.batch):
        longest = max(longest, a.begins[i + 1] - a.begins[i])
    a.len_q = a.len_k = longest
    tables.kept = np.argsort(-np.diff(begins), kind="stable")
    a.order = <const int64_t *>_data("order", tables.kept, tables.batch, cnp.NPY_INT64)
    for i in range(n_arrays):
        tables.begin(arrays[i], a.begins)
    return 0


cdef int _run_recurrent(fa_recurrent_args *a, int threads) except -1:
    cdef fa_recurrent_plan plan
    cdef Loop loop
    _ready(&loop, a.q.dtype, a, &a.watch, &plan)
    loop.kernels.recurrent.plan(a, threads, &plan)
    if plan.flops < (fa_tuned.parallel_few_flops if plan.steps else fa_tuned.parallel_flops):
        threads = 1
    return _run(&loop, _recurrent_task, plan.n_tasks, threads, plan.scratch_bytes)


def recurrent(args):
    """Compute `args.out` and the states, of a RecurrentArgs."""
    cdef fa_recurrent_args a
    cdef _Tables tables = _Tables(args.batch_shape, RECURRENT_ARRAYS)
    cdef fa_array **of_tokens = [&a.q, &a.k, &a.v, &a.out, &a.log_decay, &a.beta, &a.erase, &a.strength]
    memset(&a, 0, sizeof(a))
    _set_recurrent(&a, args, tables)
    _begin_sequences(&a, args.begins, tables, of_tokens, 8)
    _run_recurrent(&a, args.num_threads)


def recurrent_backward(args):
    """Compute the gradients of a RecurrentBackwardArgs that are not None."""
    cdef fa_recurrent_backward_args a
    cdef fa_recurrent_args *f = &a.forward
    cdef fa_recurrent_backward_plan plan
    cdef Loop loop
    cdef int threads = args.num_threads, lane
    cdef _Tables tables = _Tables(args.forward.batch_shape, RECURRENT_ARRAYS + RECURRENT_BACKWARD_ARRAYS)
    cdef fa_array **of_tokens = [&f.q, &f.k, &f.v, &f.log_decay, &f.beta, &f.erase, &a.dout, &a.dq, &a.dk, &a.dv,
                                 &a.dlog_decay, &a.dbeta, &a.derase]
    memset(&a, 0, sizeof(a))
    lane = _set_recurrent(f, args.forward, tables)
    _fill_recurrent_backward(&a, args, tables)
    _set_decays(&a.dlog_decay, "dlog_decay", args.dlog_decay, lane, f, tables)
    _begin_sequences(f, args.forward.begins, tables, of_tokens, 13)
    _ready(&loop, f.q.dtype, &a, &f.watch, &plan)
    loop.kernels.recurrent.backward_plan(&a, &plan)
    _run(&loop, _recurrent_backward_task, plan.n_tasks, _if_pays(plan.flops, threads), plan.scratch_bytes)

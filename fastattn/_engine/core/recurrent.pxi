# Linear attention: a part of _core.pyx, which includes it.

cdef void _recurrent_task(Loop *loop, int64_t task, void *scratch) noexcept nogil:
    cdef const fa_recurrent_plan *plan = <const fa_recurrent_plan *>loop.plan
    loop.kernels.recurrent_run(<const fa_recurrent_args *>loop.args, plan, task, scratch)


def recurrent(args):
    """Compute `args.out` and the states, of a RecurrentArgs."""
    cdef fa_recurrent_args a
    cdef fa_recurrent_plan plan
    cdef Loop loop
    cdef int threads = args.num_threads
    cdef _Tables tables = _Tables(args.batch_shape, 10)
    cdef int lane
    memset(&a, 0, sizeof(a))
    a.batch = tables.batch
    a.heads, a.heads_q, a.heads_k, a.heads_v = args.heads, args.heads_q, args.heads_k, args.heads_v
    a.len_q, a.len_k, a.head_dim, a.head_dim_v = args.len_q, args.len_k, args.head_dim, args.head_dim_v
    a.gated, a.causal = args.gated, args.causal
    a.scale, a.eps = args.scale, args.eps
    tables.set_rows(&a.q, "q", args.q, a.heads_q, a.len_q, a.head_dim)
    tables.set_rows(&a.k, "k", args.k, a.heads_k, a.len_k, a.head_dim)
    tables.set_rows(&a.v, "v", args.v, a.heads_v, a.len_k, a.head_dim_v)
    tables.set_rows(&a.out, "out", args.out, max(a.heads_q, a.heads), a.len_q, a.head_dim_v)
    lane = _lane_type(a.q.dtype)
    a.log_decay.dtype = a.beta.dtype = _dtype(args.state_out)
    tables.set(&a.state_out, "state_out", args.state_out, lane, 3, a.heads, a.head_dim, a.head_dim_v, True)
    tables.set(&a.state, "state", args.state, lane, 3, a.heads, a.head_dim, a.head_dim_v, True)
    if args.gated:
        tables.set(&a.log_decay, "log_decay", args.log_decay, lane, 3, a.heads, a.len_k, a.head_dim, True)
    else:
        tables.set(&a.log_decay, "log_decay", args.log_decay, lane, 2, a.heads, a.len_k)
    tables.set(&a.beta, "beta", args.beta, lane, 2, a.heads, a.len_k)
    tables.set(&a.norm_out, "norm_out", args.norm_out, lane, 2, a.heads, a.head_dim, 1, True)
    tables.set(&a.norm, "norm", args.norm, lane, 2, a.heads, a.head_dim, 1, True)
    a.watch = &loop.watch
    loop.kernels, loop.args, loop.plan = _kernels(a.q.dtype), &a, &plan
    loop.kernels.recurrent_plan(&a, threads, &plan)
    if plan.flops < (fa_tuned.parallel_dot_flops if plan.steps else fa_tuned.parallel_flops):
        threads = 1
    _run(&loop, _recurrent_task, plan.n_tasks, threads, plan.scratch_bytes)

# Linear attention: a part of _core.pyx, which includes it.

# Operands with a batch table.
cdef enum:
    N_RECURRENT = 10


cdef void _recurrent_task(Loop *loop, const fa_recurrent_args *a, const fa_recurrent_plan *p, int64_t task,
                          int thread) noexcept nogil:
    if loop.stop:
        return
    loop.kernels.recurrent_run(a, p, task, loop.scratch + thread * p.scratch_bytes)
    if thread == 0:
        _look_for_signals(loop)


def recurrent(args):
    """Compute `args.out` and the states, of a RecurrentArgs."""
    cdef fa_recurrent_args a
    cdef fa_recurrent_plan p
    cdef Loop loop
    cdef int threads = args.num_threads if FA_OPENMP else 1
    cdef Tables tables = Tables(args.batch_shape, N_RECURRENT)
    cdef int lane
    cdef int64_t task
    cdef void *memory
    cdef list errors = []
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
    if args.state is not None:
        tables.set(&a.state, "state", args.state, lane, 3, a.heads, a.head_dim, a.head_dim_v, True)
    if args.log_decay is not None:
        if args.gated:
            tables.set(&a.log_decay, "log_decay", args.log_decay, lane, 3, a.heads, a.len_k, a.head_dim, True)
        else:
            tables.set(&a.log_decay, "log_decay", args.log_decay, lane, 2, a.heads, a.len_k)
    if args.beta is not None:
        tables.set(&a.beta, "beta", args.beta, lane, 2, a.heads, a.len_k)
    if args.norm_out is not None:
        tables.set(&a.norm_out, "norm_out", args.norm_out, lane, 2, a.heads, a.head_dim, 1, True)
    if args.norm is not None:
        tables.set(&a.norm, "norm", args.norm, lane, 2, a.heads, a.head_dim, 1, True)
    loop.kernels = fa_isa_kernels(_isa, a.q.dtype)
    loop.kernels.recurrent_plan(&a, threads, &p)
    threads = 1 if p.flops < (PARALLEL_DOT if p.steps else PARALLEL_TILE) else max(1, min(threads, p.n_tasks))
    loop.scratch = _aligned_scratch(threads * p.scratch_bytes, &memory)
    _start_looking(&loop, errors)
    with nogil:
        if threads == 1:
            for task in range(p.n_tasks):
                _recurrent_task(&loop, &a, &p, task, 0)
        else:
            for task in prange(p.n_tasks, num_threads=threads, schedule="dynamic"):
                _recurrent_task(&loop, &a, &p, task, threadid())
    PyMem_RawFree(memory)
    if errors:
        raise errors[0]

# Linear attention: a part of _core.pyx, which includes it.

# Operands with a batch table.
cdef int N_RECURRENT = 10


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
    cdef tuple batch_shape = args.batch_shape
    cdef int64_t task, batch = _n_batch(batch_shape)
    cdef int64_t *tables
    cdef void *memory
    cdef list errors = []
    memset(&a, 0, sizeof(a))
    a.q.dtype, a.k.dtype, a.v.dtype, a.out.dtype = _dtype(args.q), _dtype(args.k), _dtype(args.v), _dtype(args.out)
    a.log_decay.dtype = a.beta.dtype = _dtype(args.state_out)
    a.batch = batch
    a.heads, a.heads_q, a.heads_k, a.heads_v = args.heads, args.heads_q, args.heads_k, args.heads_v
    a.len_q, a.len_k, a.head_dim, a.head_dim_v = args.len_q, args.len_k, args.head_dim, args.head_dim_v
    a.gated, a.causal = args.gated, args.causal
    a.scale, a.eps = args.scale, args.eps
    tables = <int64_t *>PyMem_RawMalloc(N_RECURRENT * (batch + 1) * sizeof(int64_t))
    if tables == NULL:
        raise MemoryError(f"linear_attention(): no memory for the tables of {batch} batch items")
    _set_array(&a.q, args.q, 3, batch_shape, batch, tables)
    _set_array(&a.k, args.k, 3, batch_shape, batch, tables + batch)
    _set_array(&a.v, args.v, 3, batch_shape, batch, tables + 2 * batch)
    _set_array(&a.out, args.out, 3, batch_shape, batch, tables + 3 * batch)
    _set_array(&a.state_out, args.state_out, 3, batch_shape, batch, tables + 4 * batch)
    if args.state is not None:
        _set_array(&a.state, args.state, 3, batch_shape, batch, tables + 5 * batch)
    if args.log_decay is not None:
        _set_array(&a.log_decay, args.log_decay, 3 if args.gated else 2, batch_shape, batch, tables + 6 * batch)
    if args.beta is not None:
        _set_array(&a.beta, args.beta, 2, batch_shape, batch, tables + 7 * batch)
    if args.norm_out is not None:
        _set_array(&a.norm_out, args.norm_out, 2, batch_shape, batch, tables + 8 * batch)
    if args.norm is not None:
        _set_array(&a.norm, args.norm, 2, batch_shape, batch, tables + 9 * batch)
    loop.kernels = fa_isa_kernels(_isa, a.q.dtype)
    loop.kernels.recurrent_plan(&a, threads, &p)
    threads = 1 if p.flops < (PARALLEL_DOT if p.steps else PARALLEL_TILE) else max(1, min(threads, p.n_tasks))
    try:
        loop.scratch = _aligned_scratch(threads * p.scratch_bytes, &memory)
    except MemoryError:
        PyMem_RawFree(tables)
        raise
    _start_looking(&loop, errors)
    with nogil:
        if threads == 1:
            for task in range(p.n_tasks):
                _recurrent_task(&loop, &a, &p, task, 0)
        else:
            for task in prange(p.n_tasks, num_threads=threads, schedule="dynamic"):
                _recurrent_task(&loop, &a, &p, task, threadid())
    PyMem_RawFree(memory)
    PyMem_RawFree(tables)
    if errors:
        raise errors[0]

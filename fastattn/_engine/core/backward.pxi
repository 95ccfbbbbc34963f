# The gradients of attention: a part of _core.pyx, which includes it.
#
# A call is one job, or one for each sequence, as in sequences.pxi. All begin, then all run, then all end. Before these,
# where some have few queries, come their sums.

cdef struct BackwardJob:
    const Job *of  # of a sequence: its number and its lengths; NULL: the call is one job
    int64_t tasks, heads  # how many tasks of run() there are in the jobs before, and of begin() and end()
    int64_t shared  # where its memory begins
    fa_backward_plan plan

cdef struct BackwardJobs:
    BackwardJob *jobs
    int64_t n


cdef const BackwardJob *_backward_job(Loop *loop, int64_t task, bint by_heads, fa_backward_args *own) noexcept nogil:
    """The job that a task is of; its arguments become `own`."""
    cdef const BackwardJobs *w = <const BackwardJobs *>loop.plan
    cdef int64_t low = 0, high = w.n, middle  # the job is one of low .. high - 1
    while high - low > 1:
        middle = (low + high) // 2
        if (w.jobs[middle].heads if by_heads else w.jobs[middle].tasks) <= task:
            low = middle
        else:
            high = middle
    _backward_args(<const fa_backward_args *>loop.args, w.jobs[low].of, own)
    return &w.jobs[low]


cdef void _backward_args(const fa_backward_args *all, const Job *job, fa_backward_args *own) noexcept nogil:
    own[0] = all[0]
    if job != NULL:
        own.attention.first, own.attention.batch = job.item, 1
        own.attention.len_q, own.attention.len_k = job.len_q, job.len_k


cdef void _backward_begin(Loop *loop, int64_t task, void *scratch) noexcept nogil:
    cdef fa_backward_args own
    cdef const BackwardJob *job = _backward_job(loop, task, True, &own)
    loop.kernels.backward.begin(&own, &job.plan, task - job.heads, loop.shared + job.shared, scratch)


cdef void _backward_sums(Loop *loop, int64_t task, void *scratch) noexcept nogil:
    cdef fa_backward_args own
    cdef const BackwardJob *job = _backward_job(loop, task, False, &own)
    loop.kernels.backward.sums(&own, &job.plan, task - job.tasks, loop.shared + job.shared, scratch)


cdef void _backward_task(Loop *loop, int64_t task, void *scratch) noexcept nogil:
    cdef fa_backward_args own
    cdef const BackwardJob *job = _backward_job(loop, task, False, &own)
    loop.kernels.backward.run(&own, &job.plan, task - job.tasks, loop.shared + job.shared, scratch)


cdef void _backward_end(Loop *loop, int64_t task, void *scratch) noexcept nogil:
    cdef fa_backward_args own
    cdef const BackwardJob *job = _backward_job(loop, task, True, &own)
    loop.kernels.backward.end(&own, &job.plan, task - job.heads, loop.shared + job.shared)


cdef int _run_backward(fa_backward_args *c, int threads, _Sequences sequences=None) except -1:
    cdef Loop loop
    cdef BackwardJob whole
    cdef BackwardJobs w
    cdef fa_backward_args own
    cdef BackwardJob *job
    cdef int64_t i, heads = 0, tasks = 0, shared = 0, scratch = 0
    cdef double flops = 0
    cdef bint few = False
    _ready(&loop, c.attention.q.dtype, c, &c.attention.watch, &w)
    w.jobs, w.n = &whole, 1
    if sequences is not None:
        w.n = sequences.n
        w.jobs = <BackwardJob *>PyMem_RawMalloc((w.n + 1) * sizeof(BackwardJob))
        if w.jobs == NULL:
            raise MemoryError(f"fastattn: no memory for the plans of {w.n} sequences")
    try:
        for i in range(w.n):
            job = &w.jobs[i]
            job.of = NULL if sequences is None else &sequences.jobs[i]
            _backward_args(c, job.of, &own)
            loop.kernels.backward.plan(&own, threads, &job.plan)
            job.tasks, job.heads, job.shared = tasks, heads, shared
            tasks += job.plan.n_tasks
            heads += own.attention.batch * own.attention.heads_q
            shared += job.plan.shared_bytes
            scratch = max(scratch, job.plan.scratch_bytes)
            flops += job.plan.flops
            few = few or job.plan.few
        _start(&loop, _backward_sums, max(heads, tasks), _if_pays(flops, threads), scratch, shared)
        with nogil:
            if few:
                _tasks(&loop, tasks)
            loop.run = _backward_begin
            if not fa_flag(&loop.stop):
                _tasks(&loop, heads)
            loop.run = _backward_task
            if not fa_flag(&loop.stop):
                _tasks(&loop, tasks)
            loop.run = _backward_end
            if not fa_flag(&loop.stop):
                _tasks(&loop, heads)
        return _end(&loop)
    finally:
        if sequences is not None:
            PyMem_RawFree(w.jobs)


cdef void _set_gradient(_Tables tables, fa_array *x, name, cnp.ndarray array, fa_dtype own, int lane, int64_t heads,
                        int64_t length, int64_t width) except *:
    """Like `set_rows`, for what is written: of the dtype `own` or of lanes."""
    if array is None:
        return
    tables.set_rows(x, name, array, heads, length, width)
    if x.dtype != own and cnp.PyArray_TYPE(array) != lane:
        raise _misfit(name, array, "the dtype of what it is the gradient of, or that of the accumulators")


def attention_backward(args):
    """Compute the gradients that `args`, a BackwardArgs, asks for."""
    cdef fa_backward_args c
    cdef fa_attention_args *a = &c.attention
    cdef _Sequences sequences = None
    cdef fa_array **of_queries = [&a.q, &a.out, &a.lse, &a.masks.row_begin, &a.masks.row_end, &c.dout, &c.dlse, &c.dq]
    cdef fa_array **of_keys = [&a.k, &a.v, &c.dk, &c.dv]
    cdef int lane, threads = args.attention.num_threads
    memset(&c, 0, sizeof(c))
    cdef _Tables _tables = _set_args(a, args.attention, True)  # which, as those below, must outlive the kernels
    if a.k.dtype >= FA_I8:
        raise _misfit("k", args.attention.k, "floats")
    cdef _Tables tables = _Tables(args.attention.batch_shape, BACKWARD_ARRAYS)
    cdef object dbias = args.dbias, wide = args.dbias
    lane = _lane_type(a.q.dtype)
    _fill_backward(&c, args, tables)
    if c.dout.dtype != a.q.dtype:
        raise _misfit("dout", args.dout, f"the dtype of q, {args.attention.q.dtype}")
    if dbias is not None:
        *_, rows, cols = dbias.shape
        if rows < a.len_q or cols < a.len_k:  # each head gets its own first, which is little; then they are summed
            wide = np.zeros((*args.attention.batch_shape, a.heads_q, rows, cols), dbias.dtype)
        c.bias_shared = wide.size < a.batch * a.heads_q * rows * cols
        tables.set(&c.dbias, "dbias", wide, lane, 3, a.heads_q, a.len_q, a.len_k)
    if args.dbias_diagonals is not None:
        tables.set(&c.dbias_diagonals, "dbias_diagonals", args.dbias_diagonals[..., None, :], lane, 3, a.heads_q, 1,
                   a.len_q + a.len_k - 1)
    if args.attention.begins is not None:
        sequences = _begun(a, args.attention.begins, tables, of_queries, 8, of_keys)
        for x in (args.dk, args.dv):
            if x is not None and sequences.n < sequences.count:
                x[...] = 0  # keys of sequences without queries
    _run_backward(&c, threads, sequences)
    if wide is not dbias:
        dbias += _summed(wide, dbias)


def _summed(x, to):
    """x, summed to the shape of `to`, which broadcasts to its."""
    x = x.sum(axis=tuple(range(x.ndim - to.ndim)))
    return x.sum(axis=tuple(i for i in range(to.ndim) if to.shape[i] == 1), keepdims=True)

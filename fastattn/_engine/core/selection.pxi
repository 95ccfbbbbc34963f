# The keys with the largest scores: a part of _core.pyx, which includes it.

def selection(args):
    """Compute `args.out`, of a SelectionArgs."""
    cdef fa_selection_args c
    cdef fa_attention_args *a = &c.attention
    cdef fa_selection_plan plan
    cdef Loop loop
    cdef object call = args.attention
    cdef int threads = call.num_threads
    cdef _Tables tables = _Tables(call.batch_shape, 5 + SELECTION_ARRAYS)  # and the table of scores
    cdef int64_t rows, b
    cdef int64_t *begins
    memset(&c, 0, sizeof(c))
    a.batch, a.heads_q, a.heads_kv = tables.batch, call.heads_q, call.heads_kv
    a.len_q, a.len_k, a.head_dim = call.len_q, call.len_k, call.head_dim
    tables.set_rows(&a.q, "q", call.q, a.heads_q, a.len_q, a.head_dim)
    tables.set_rows(&a.k, "k", call.k, a.heads_kv, a.len_k, a.head_dim, call.k_scale is not None)
    if a.k.dtype != FA_I8 and (a.q.dtype == FA_F64) != (a.k.dtype == FA_F64):
        raise _misfit("k", call.k, f"the type of q, {call.q.dtype}, to fit")
    cdef int lane = _lane_type(a.q.dtype)
    tables.set(&a.k_scale, "k_scale", call.k_scale, lane, 2, a.heads_kv, a.len_k)
    tables.set(&a.masks.row_end, "row_end", call.row_end, cnp.NPY_INT64, 2, 1, a.len_q)
    _fill_selection(&c, args, tables)
    tables.set(&c.selected, "out", args.out, cnp.NPY_INT64, 3, a.heads_kv, a.len_q, c.top_k, True)
    if args.out.shape != (*call.batch_shape, a.heads_kv, a.len_q, c.top_k):  # it is written, so nothing broadcasts
        raise _misfit("out", args.out, "an array of all that is selected")
    if c.top_k < 1 or c.first < 0 or c.last < 0 or c.first > c.top_k - c.last:
        raise ValueError(f"fastattn: first={c.first} and last={c.last} of top_k={c.top_k}")
    _ready(&loop, a.q.dtype, &c, &a.watch, &plan)
    loop.kernels.selection.plan(&c, threads, &plan)
    if plan.flops < fa_tuned.parallel_flops:
        threads = 1
        loop.kernels.selection.plan(&c, threads, &plan)
    if not plan.runs:
        _run(&loop, _selection_task, plan.n_tasks, threads, plan.scratch_bytes)
        return
    rows = a.heads_kv * a.len_q
    c.scores.row = plan.pitch * (8 if a.q.dtype == FA_F64 else 4)
    c.scores.head, begins = a.len_q * c.scores.row, tables.next()
    c.scores.batch = begins
    for b in range(tables.batch):
        begins[b] = b * rows * c.scores.row
    _start(&loop, _selection_score_task, plan.n_tasks * plan.runs, threads, plan.scratch_bytes,
           tables.batch * rows * c.scores.row)
    c.scores.data = loop.shared
    with nogil:
        _tasks(&loop, plan.n_tasks * plan.runs)
        if not _gives_up(&loop):
            loop.run = _selection_task
            _tasks(&loop, plan.n_tasks)
    _end(&loop)

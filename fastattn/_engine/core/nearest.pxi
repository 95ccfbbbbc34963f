# The rows nearest to each query: a part of _core.pyx, which includes it.

def nearest(args):
    """Compute `args.out` and `args.scores`, of a NearestArgs."""
    cdef fa_nearest_args a
    cdef fa_nearest_plan plan
    cdef Loop loop
    cdef cnp.ndarray queries = args.queries, corpus = args.corpus
    cdef int threads = args.num_threads
    cdef int64_t found
    cdef fa_dtype lane = _lane(_dtype(args.scores))
    memset(&a, 0, sizeof(a))
    a.kind, a.by_length = _KINDS[args.kind], args.by_length
    a.len_q, a.len_k, a.depth = len(queries), len(corpus), queries.shape[1]
    a.q_dtype = lane if a.kind == FA_LANES else FA_I8
    a.k_dtype = FA_I8 if cnp.PyArray_TYPE(corpus) == cnp.NPY_INT8 else _dtype(corpus)
    if (a.k_dtype == FA_F64) != (lane == FA_F64) and a.k_dtype != FA_I8 or a.kind != FA_LANES and lane == FA_F64:
        raise _misfit("corpus", corpus, f"what fits scores of {args.scores.dtype}")
    a.q = _rows("queries", queries, a.len_q, a.depth, a.q_dtype, &a.q_row)
    a.k = _rows("corpus", corpus, a.len_k, a.depth, a.k_dtype if a.kind == FA_LANES else FA_I8, &a.k_row)
    a.top_k, a.run = args.top_k, args.run
    if not (1 <= a.top_k <= a.len_k and 1 <= a.run <= 1 << 30):
        raise ValueError(f"fastattn: top_k={a.top_k} of {a.len_k} rows in runs of {a.run}")
    a.kept = min(a.top_k, a.run)
    a.rows = <int64_t *>_data("out", args.out, a.len_q * a.top_k, cnp.NPY_INT64)
    a.scores = _data("scores", args.scores, a.len_q * a.top_k, _lane_type(lane))
    _ready(&loop, lane, &a, &a.watch, &plan)
    loop.kernels.selection.nearest_plan(&a, &plan)
    found = a.len_q * plan.runs * a.kept
    _start(&loop, _selection_nearest_task, plan.n_tasks, _if_pays(plan.flops, threads), plan.scratch_bytes, found * 16)
    a.run_rows, a.run_scores = <int64_t *>loop.shared, loop.shared + found * 8
    with nogil:
        _tasks(&loop, plan.n_tasks)
        if not _gives_up(&loop):
            loop.run = _selection_nearest_finish_task
            _tasks(&loop, a.len_q)
    _end(&loop)

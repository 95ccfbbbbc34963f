# Gradients of the layers' operations: a part of _core.pyx, which includes it.


def outer(args):
    """Compute `args.out` and `args.sums`, those that are there, of an OuterArgs."""
    cdef fa_outer_args a
    cdef fa_outer_plan plan
    cdef Loop loop
    cdef fa_dtype lane
    memset(&a, 0, sizeof(a))
    a.m, a.n = args.a.shape[0], args.a.shape[1]
    a.a_dtype, a.b_dtype = _dtype(args.a), _dtype(args.b)
    lane = FA_F64 if a.a_dtype == FA_F64 else FA_F32
    if (a.b_dtype == FA_F64) != (lane == FA_F64):
        raise _misfit("b", args.b, f"the type of a, {args.a.dtype}, to fit")
    a.k = 0 if args.out is None else args.out.shape[1]
    _fill_outer(&a, args)
    _ready(&loop, lane, &a, &a.watch, &plan)
    loop.kernels.outer.plan(&a, args.num_threads, &plan)
    _run(&loop, _outer_task, plan.n_tasks, _if_pays(plan.flops, args.num_threads), plan.scratch_bytes)


# Rows whose sums are one partial result: few enough that these are small, and a function of m alone, so that
# the threads change no bit.
cdef enum:
    LEAST_ROWS_SUMMED = 16
    MOST_PARTIALS = 128


cdef void _rows_grad_task(Loop *loop, int64_t task, void *scratch) noexcept nogil:
    cdef const fa_rows_grad_args *a = <const fa_rows_grad_args *>loop.args
    cdef int64_t begin = task * loop.step, size = 8 if a.dtype == FA_F64 else 4
    loop.kernels.rows.grad_run(a, begin, min(loop.n, begin + loop.step),
                               loop.shared + task * 2 * a.n * size if loop.plan != NULL else NULL, scratch)


def rows_grad(args):
    """Compute `args.dx`, `args.dup`, `args.dweight` and `args.dbias`, those that are there, of a RowsGradArgs."""
    cdef fa_rows_grad_args a
    cdef Loop loop
    cdef int lane
    cdef int64_t n_tasks, size
    cdef void *dweight
    cdef void *dbias
    memset(&a, 0, sizeof(a))
    a.dtype = _dtype(args.x)
    a.m, a.n = args.x.shape[0], args.x.shape[1]
    a.up_each = _rows_of_up(args.up, a.m, a.n)
    _fill_rows_grad(&a, args)
    lane, size = _lane_type(a.dtype), 8 if a.dtype == FA_F64 else 4
    dweight, dbias = _data("dweight", args.dweight, a.n, lane), _data("dbias", args.dbias, a.n, lane)
    _ready(&loop, a.dtype, &a, &a.watch)
    if dweight == NULL and dbias == NULL:
        _run_rows_of(&loop, _rows_grad_task, a.m, a.n, args.num_threads, loop.kernels.rows.grad_scratch_bytes(a.n))
        return
    loop.plan = &a  # anything but NULL: there are sums
    loop.n, loop.step = a.m, max(LEAST_ROWS_SUMMED, (a.m + MOST_PARTIALS - 1) // MOST_PARTIALS)
    n_tasks = (a.m + loop.step - 1) // loop.step
    _start(&loop, _rows_grad_task, n_tasks, args.num_threads if a.m * a.n >= fa_tuned.parallel_elements else 1,
           loop.kernels.rows.grad_scratch_bytes(a.n), n_tasks * 2 * a.n * size)
    with nogil:
        _tasks(&loop, n_tasks)
        if dweight != NULL:
            loop.kernels.rows.grad_add(loop.shared, n_tasks, 2 * a.n, a.n, dweight)
        if dbias != NULL:
            loop.kernels.rows.grad_add(loop.shared + a.n * size, n_tasks, 2 * a.n, a.n, dbias)
    _end(&loop)


def logits(args):
    """Compute `args.loss`, and where there are factors the gradient in `args.logits`, of a LogitsArgs."""
    cdef fa_logits_args a
    cdef Loop loop
    cdef fa_dtype lane = _dtype(args.logits)
    memset(&a, 0, sizeof(a))
    a.m, a.n, a.label_smoothing = args.logits.shape[0], args.logits.shape[1], args.label_smoothing
    if lane != FA_F32 and lane != FA_F64:
        raise _misfit("logits", args.logits, "float32 or float64")
    a.logits = _rows("logits", args.logits, a.m, a.n, lane, &a.row)
    a.targets = <const int64_t *>_data("targets", args.targets, a.m, cnp.NPY_INT64)
    a.loss = _data("loss", args.loss, a.m, _lane_type(lane))
    a.factor = _data("factor", args.factor, a.m, _lane_type(lane))
    if a.m and not 0 <= args.targets.min() <= args.targets.max() < a.n:
        raise _misfit("targets", args.targets, f"numbers from 0 to {a.n - 1}")
    _ready(&loop, lane, &a, &a.watch)
    _run_rows_of(&loop, _rows_logits_task, a.m, a.n, args.num_threads, 0)


def dropout(args):
    """Compute `args.out`, of a DropoutArgs."""
    cdef fa_dropout_args a
    cdef Loop loop
    memset(&a, 0, sizeof(a))
    a.m, a.n, a.dtype = args.x.shape[0], args.x.shape[1], _dtype(args.x)
    _fill_dropout(&a, args)
    _ready(&loop, a.dtype, &a, &a.watch)
    _run_rows_of(&loop, _rows_dropout_task, a.m, a.n, args.num_threads, 0)


def scatter(args):
    """Add rows to `args.out`, of a ScatterArgs."""
    cdef fa_scatter_args a
    cdef Loop loop
    cdef int64_t m = args.x.shape[0], rows = args.out.shape[0], places = len(args.places), n_tasks
    memset(&a, 0, sizeof(a))
    a.dtype, a.n = _dtype(args.x), args.x.shape[1]
    _fill_scatter(&a, args, m, rows, places)
    bounds = (("order", args.order, m - 1), ("firsts", args.firsts, m), ("places", args.places, rows - 1))
    for name, numbers, most in bounds:
        if numbers.size and not 0 <= numbers.min() <= numbers.max() <= most:
            raise _misfit(name, numbers, f"numbers from 0 to {most}")
    _ready(&loop, a.dtype, &a, &a.watch)
    loop.n = places
    # Some places may get many rows, so that tasks are about as long only if they are few.
    loop.step = max(1, fa_tuned.row_task_elements * places // max(1, m * a.n))
    n_tasks = (places + loop.step - 1) // loop.step
    _run(&loop, _rows_scatter_task, n_tasks, args.num_threads if m * a.n >= fa_tuned.parallel_elements else 1,
         loop.kernels.rows.scatter_scratch_bytes(a.n))

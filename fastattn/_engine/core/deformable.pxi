# Deformable attention: a part of _core.pyx, which includes it.

cdef enum:
    MOST_SIDE = 1 << 24  # of a level: float32 holds all smaller integers


cdef _Tables _set_deformable(fa_deformable_args *a, args, int n_arrays):
    """Fill `a`, but for its result."""
    cdef _Tables tables = _Tables(args.batch_shape, n_arrays)
    cdef cnp.ndarray levels = args.levels
    cdef int64_t len_v = args.v.shape[args.v.ndim - 2], end = 0, i
    cdef int lane
    cdef const fa_level *level
    memset(a, 0, sizeof(fa_deformable_args))
    a.batch, a.heads, a.len_q = tables.batch, args.heads, args.out.shape[args.out.ndim - 2]
    a.head_dim, a.points = args.v.shape[args.v.ndim - 1], args.weights.shape[args.weights.ndim - 1]
    a.n_levels, a.discrete = levels.shape[0], args.discrete
    a.levels = <const fa_level *>_data("levels", levels, 4 * a.n_levels, cnp.NPY_INT64)
    for i in range(a.n_levels):
        level = a.levels + i
        if not (0 <= level.height <= MOST_SIDE and 0 <= level.width <= MOST_SIDE and 0 <= level.row <= len_v
                and level.height * level.width <= len_v - level.row and end <= level.end <= a.points):
            raise _misfit("levels", levels, "grids of the rows of v, in order")
        end = level.end
    if end != a.points:
        raise _misfit("levels", levels, f"the {a.points} points of weights")
    tables.set_rows(&a.v, "v", args.v, a.heads, len_v, a.head_dim)
    lane = _lane_type(a.v.dtype)
    tables.set(&a.locations, "locations", args.locations, lane, 3, a.heads, a.len_q, 2 * a.points, True)
    tables.set(&a.weights, "weights", args.weights, lane, 3, a.heads, a.len_q, a.points, True)
    return tables


def deformable(args):
    """Compute `args.out`, of a DeformableArgs."""
    cdef fa_deformable_args a
    cdef Loop loop
    cdef int threads = args.num_threads
    cdef _Tables tables = _set_deformable(&a, args, 4)
    tables.set_rows(&a.out, "out", args.out, a.heads, a.len_q, a.head_dim)
    if a.out.dtype != a.v.dtype:
        raise _misfit("out", args.out, "v's type")
    _ready(&loop, a.v.dtype, &a, &a.watch)
    if a.batch * a.heads * a.len_q * a.points * a.head_dim < fa_tuned.parallel_elements:
        threads = 1
    loop.n = a.batch * a.heads * ((a.len_q + FA_DEFORMABLE_QUERIES - 1) // FA_DEFORMABLE_QUERIES)
    loop.step = max(1, min(a.heads, loop.n // (8 * threads)))  # heads that take turns stay with a thread
    _run(&loop, _deformable_task, (loop.n + loop.step - 1) // loop.step, threads,
         loop.kernels.deformable.scratch_bytes(&a))


cdef void _deformable_grad_task(Loop *loop, int64_t task, void *scratch) noexcept nogil:
    cdef int64_t groups = (loop.n + loop.step - 1) // loop.step, first = task % groups * loop.step
    loop.kernels.deformable.grad_run(<const fa_deformable_grad_args *>loop.args, task // groups, first,
                                     min(loop.n, first + loop.step), scratch)


def deformable_grad(args):
    """Compute `args.dlocations` and `args.dweights`, and add to `args.dv`: those that are there."""
    cdef fa_deformable_grad_args a
    cdef fa_deformable_args *f = &a.forward
    cdef Loop loop
    cdef int lane, threads = args.forward.num_threads
    cdef object forward = args.forward
    memset(&a, 0, sizeof(a))
    cdef _Tables tables = _set_deformable(f, forward, 7)
    lane = _lane_type(f.v.dtype)
    tables.set_rows(&a.dout, "dout", args.dout, f.heads, f.len_q, f.head_dim)
    tables.set(&a.dv, "dv", args.dv, lane, 3, f.heads, forward.v.shape[forward.v.ndim - 2], f.head_dim, True)
    tables.set(&a.dlocations, "dlocations", args.dlocations, lane, 3, f.heads, f.len_q, 2 * f.points, True)
    tables.set(&a.dweights, "dweights", args.dweights, lane, 3, f.heads, f.len_q, f.points, True)
    if a.dout.dtype != f.v.dtype:
        raise _misfit("dout", args.dout, "v's type")
    _ready(&loop, f.v.dtype, &a, &f.watch)
    if f.batch * f.heads * f.len_q * f.points * f.head_dim < fa_tuned.parallel_elements:
        threads = 1
    loop.n = f.heads
    loop.step = max(1, min(f.heads, f.batch * f.heads * f.n_levels // (8 * threads)))
    _run(&loop, _deformable_grad_task, f.batch * f.n_levels * ((loop.n + loop.step - 1) // loop.step), threads,
         loop.kernels.deformable.grad_scratch_bytes(&a))

# Deformable attention: a part of _core.pyx, which includes it.

cdef enum:
    MOST_SIDE = 1 << 24  # of a level: float32 holds all smaller integers


cdef _Tables _set_deformable(fa_deformable_args *a, args, int n_more):
    """Fill `a`; returns the batch tables it points into, and room for more."""
    cdef _Tables tables = _Tables(args.batch_shape, DEFORMABLE_ARRAYS + n_more)
    cdef cnp.ndarray levels = args.levels
    cdef int64_t len_v = args.v.shape[args.v.ndim - 2], end = 0, i
    cdef const fa_level *level
    memset(a, 0, sizeof(fa_deformable_args))
    a.batch, a.len_q = tables.batch, args.out.shape[args.out.ndim - 2]
    a.head_dim, a.points = args.v.shape[args.v.ndim - 1], args.weights.shape[args.weights.ndim - 1]
    a.n_levels = levels.shape[0]
    a.levels = <const fa_level *>_data("levels", levels, 4 * a.n_levels, cnp.NPY_INT64)
    for i in range(a.n_levels):
        level = a.levels + i
        if not (0 <= level.height <= MOST_SIDE and 0 <= level.width <= MOST_SIDE and 0 <= level.row <= len_v
                and level.height * level.width <= len_v - level.row and end <= level.end <= a.points):
            raise _misfit("levels", levels, "grids of the rows of v, in order")
        end = level.end
    if end != a.points:
        raise _misfit("levels", levels, f"the {a.points} points of weights")
    _fill_deformable(a, args, tables, len_v)
    if a.out.dtype != a.v.dtype:
        raise _misfit("out", args.out, "v's type")
    return tables


def deformable(args):
    """Compute `args.out`, of a DeformableArgs."""
    cdef fa_deformable_args a
    cdef Loop loop
    cdef int threads = args.num_threads
    cdef _Tables _tables = _set_deformable(&a, args, 0)  # which must outlive the kernels
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
    cdef int threads = args.forward.num_threads
    cdef object forward = args.forward
    memset(&a, 0, sizeof(a))
    cdef _Tables tables = _set_deformable(f, forward, DEFORMABLE_GRAD_ARRAYS)
    _fill_deformable_grad(&a, args, tables, forward.v.shape[forward.v.ndim - 2])
    if a.dout.dtype != f.v.dtype:
        raise _misfit("dout", args.dout, "v's type")
    _ready(&loop, f.v.dtype, &a, &f.watch)
    if f.batch * f.heads * f.len_q * f.points * f.head_dim < fa_tuned.parallel_elements:
        threads = 1
    loop.n = f.heads
    loop.step = max(1, min(f.heads, f.batch * f.heads * f.n_levels // (8 * threads)))
    _run(&loop, _deformable_grad_task, f.batch * f.n_levels * ((loop.n + loop.step - 1) // loop.step), threads,
         loop.kernels.deformable.grad_scratch_bytes(&a))

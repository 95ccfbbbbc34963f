# What goes along the tokens channel by channel: a part of _core.pyx, which includes it.

cdef class _Channels:
    """The batch tables of one call on some sequences, and where their tokens begin."""

    cdef _Tables tables
    cdef const int64_t *begins
    cdef int64_t sequences, tokens, length, longest
    cdef bint ragged

    def __cinit__(self, args, int n_arrays):
        cdef int64_t s, size
        cdef cnp.ndarray begins = args.begins
        self.tables = _Tables(args.batch_shape, n_arrays)
        self.sequences, self.ragged = self.tables.batch, args.ragged
        self.begins = <const int64_t *>_data("begins", begins, self.sequences + 1, cnp.NPY_INT64)
        self.tokens, self.length = self.begins[self.sequences], args.x.shape[args.x.ndim - 2]
        if self.begins[0] != 0 or self.tokens != self.length * (1 if self.ragged else self.sequences):
            raise _misfit("begins", begins, "the tokens of x")
        for s in range(self.sequences):
            size = self.begins[s + 1] - self.begins[s]
            if size < 0 or (size != self.length and not self.ragged):
                raise _misfit("begins", begins, "the begins of the sequences of x, in order")
            self.longest = max(self.longest, size)

    cdef void set(self, fa_array *x, name, array, fa_dtype dtype, int64_t rows, int64_t width,
                  bint turned=False) except *:
        """Point `x` at (*batch, rows, width), its rows contiguous, or if `turned` its columns; None stays NULL."""
        if array is None:
            return
        if turned and rows > 1 and array.strides[array.ndim - 2] == array.itemsize:
            x.dtype = _dtype(array)
            self.tables.set(x, name, array[..., None, :, :], cnp.PyArray_TYPE(array), 3, 1, rows, width)
        else:
            self.tables.set_rows(x, name, array[..., None, :, :], 1, rows, width)
        if x.dtype != dtype:
            raise _misfit(name, array, "another type")

    cdef void set_tokens(self, fa_array *x, name, array, fa_dtype dtype, int64_t width, bint turned=False) except *:
        """Point `x` at (*batch, length, width), or at (tokens, width) if ragged; None stays NULL."""
        self.set(x, name, array, dtype, self.length, width, turned)
        if self.ragged:
            self.tables.begin(x, self.begins)


cdef _Channels _set_conv(fa_conv_args *a, args, int n_more):
    """Fill `a`; returns the batch tables it points into, and room for more."""
    cdef _Channels channels = _Channels(args, CONV_ARRAYS + n_more)
    memset(a, 0, sizeof(fa_conv_args))
    a.sequences, a.begins = channels.sequences, channels.begins
    a.channels, a.width = args.x.shape[args.x.ndim - 1], args.weight.shape[1]
    if not 1 <= a.width <= FA_MOST_WIDTH:
        raise _misfit("weight", args.weight, f"a width of 1 to {FA_MOST_WIDTH}")
    channels.set_tokens(&a.x, "x", args.x, _dtype(args.x), a.channels, True)
    _fill_conv(a, args, channels)
    return channels


cdef enum:
    LEAST_CONV_TOKENS = 8  # of a task: so many are computed at once
    MOST_CONV_TOKENS = 64  # a task transposes the weights first, which takes as long as two tokens


cdef int _run_conv(fa_conv_args *a, int64_t tokens, int threads) except -1:
    cdef Loop loop
    _ready(&loop, a.x.dtype, a, &a.watch)
    if tokens * a.channels < fa_tuned.parallel_elements:
        threads = 1
    loop.n = tokens
    loop.step = max(LEAST_CONV_TOKENS, min(MOST_CONV_TOKENS, loop.n // (4 * threads)))
    return _run(&loop, _channels_conv_task, (loop.n + loop.step - 1) // loop.step, threads,
                loop.kernels.channels.conv_scratch_bytes(a))


def conv(args):
    """Compute `args.out`, of a ConvArgs."""
    cdef fa_conv_args a
    cdef _Channels channels = _set_conv(&a, args, 0)
    _run_conv(&a, channels.tokens, args.num_threads)


cdef void _conv_grad_task(Loop *loop, int64_t task, void *scratch) noexcept nogil:
    cdef const fa_conv_grad_args *a = <const fa_conv_grad_args *>loop.args
    cdef int64_t begin = task * loop.step, size = 8 if a.forward.x.dtype == FA_F64 else 4
    cdef int64_t sums = (a.forward.width + 1) * a.forward.channels * size
    loop.kernels.channels.conv_grad_run(a, begin, min(loop.n, begin + loop.step),
                                        loop.shared + task * sums if loop.plan != NULL else NULL, scratch)


def conv_grad(args):
    """Compute `args.dx`, `args.dstate` and `args.sums`, those that are there, of a ConvGradArgs."""
    cdef fa_conv_grad_args a
    cdef fa_conv_args *f = &a.forward
    cdef Loop loop
    cdef int64_t n_tasks, n, size
    cdef void *sums
    memset(&a, 0, sizeof(a))
    cdef _Channels channels = _set_conv(f, args.forward, CONV_GRAD_ARRAYS)
    _fill_conv_grad(&a, args, channels)
    n, size = (f.width + 1) * f.channels, 8 if f.x.dtype == FA_F64 else 4
    sums = _data("sums", args.sums, n, _lane_type(f.x.dtype))
    _ready(&loop, f.x.dtype, &a, &f.watch, sums)
    loop.n, loop.step = channels.tokens, max(LEAST_ROWS_SUMMED, (channels.tokens + MOST_PARTIALS - 1) // MOST_PARTIALS)
    n_tasks = (loop.n + loop.step - 1) // loop.step
    _start(&loop, _conv_grad_task, n_tasks,
           args.forward.num_threads if loop.n * f.channels >= fa_tuned.parallel_elements else 1,
           loop.kernels.channels.conv_grad_scratch_bytes(&a), n_tasks * n * size if sums != NULL else 0)
    with nogil:
        _tasks(&loop, n_tasks)
        if sums != NULL:
            loop.kernels.rows.grad_add(loop.shared, n_tasks, n, n, sums)
    _end(&loop)


cdef _Channels _set_scan(fa_scan_args *a, args, int n_more):
    """Fill `a`; returns the batch tables it points into, and room for more."""
    cdef _Channels channels = _Channels(args, SCAN_ARRAYS + n_more)
    memset(a, 0, sizeof(fa_scan_args))
    a.sequences, a.begins, a.longest = channels.sequences, channels.begins, channels.longest
    a.channels, a.states = args.x.shape[args.x.ndim - 1], args.rates.shape[1]
    a.x.dtype = _dtype(args.x)
    _fill_scan(a, args, channels)
    return channels


cdef int _scan_threads(_Channels channels, const fa_scan_args *a, int threads):
    """Threads for a call: a number of a state takes about as long as 16 FLOP."""
    return threads if 16 * channels.tokens * a.channels * a.states >= fa_tuned.parallel_flops else 1


def scan(args):
    """Compute `args.out` and `args.state_out`, of a ScanArgs."""
    cdef fa_scan_args a
    cdef Loop loop
    cdef _Channels channels = _set_scan(&a, args, 0)
    _ready(&loop, a.x.dtype, &a, &a.watch)
    _run(&loop, _channels_scan_task, loop.kernels.channels.scan_tasks(&a),
         _scan_threads(channels, &a, args.num_threads), loop.kernels.channels.scan_scratch_bytes(&a))


def scan_grad(args):
    """Compute those gradients of a ScanGradArgs that are there."""
    cdef fa_scan_grad_args a
    cdef fa_scan_args *f = &a.forward
    cdef Loop loop
    cdef int64_t n_tasks
    cdef object batch = args.forward.batch_shape, real = args.forward.rates.dtype
    memset(&a, 0, sizeof(a))
    cdef _Channels channels = _set_scan(f, args.forward, SCAN_GRAD_ARRAYS)
    cdef fa_dtype lane = _lane(f.x.dtype)
    _fill_scan_grad(&a, args, channels)
    _ready(&loop, f.x.dtype, &a, &f.watch)
    n_tasks = loop.kernels.channels.scan_tasks(f)
    parts = {}  # sums of a task; they are added in order
    for name, shape in (("drates", (*batch, f.channels, f.states)), ("dskip", (*batch, 1, f.channels)),
                        ("dbias", (*batch, 1, f.channels))):
        parts[name] = None if getattr(args, name) is None else np.empty(shape, real)
    for name in ("db", "dc"):
        shape = (n_tasks // max(1, channels.sequences), channels.tokens, f.states)
        parts[name] = None if getattr(args, name) is None else np.empty(shape, real)
    channels.set(&a.drates, "drates", parts["drates"], lane, f.channels, f.states)
    channels.set(&a.dskip, "dskip", parts["dskip"], lane, 1, f.channels)
    channels.set(&a.dbias, "dbias", parts["dbias"], lane, 1, f.channels)
    a.db = NULL if parts["db"] is None else cnp.PyArray_DATA(parts["db"])
    a.dc = NULL if parts["dc"] is None else cnp.PyArray_DATA(parts["dc"])
    _run(&loop, _channels_scan_grad_task, n_tasks, _scan_threads(channels, f, args.forward.num_threads),
         loop.kernels.channels.scan_grad_scratch_bytes(&a))
    for name, part in parts.items():
        if part is not None:
            to = getattr(args, name)
            np.sum(part.reshape(-1, *((to.size,) if name in ("db", "dc") else to.shape)), axis=0,
                   out=to.reshape(-1) if name in ("db", "dc") else to)

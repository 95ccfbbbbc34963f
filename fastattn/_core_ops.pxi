# The layers' operations: a part of _core.pyx, which includes it.

# Elements for which a parallel region pays, and those of a task: a row operation spends about a nanosecond on four.
cdef int64_t PARALLEL_ELEMENTS = 1 << 16
cdef int64_t TASK_ELEMENTS = 1 << 14

cdef dict _ACTIVATIONS = {None: FA_NONE, "relu": FA_RELU, "gelu": FA_GELU, "gelu_tanh": FA_GELU_TANH,
                          "silu": FA_SILU, "sigmoid": FA_SIGMOID}
cdef dict _WEIGHTS = {"float32": FA_F32, "float64": FA_F64, "bfloat16": FA_BF16, "int8": FA_I8}
cdef dict _KINDS = {"layer_norm": FA_LAYER_NORM, "rms_norm": FA_RMS_NORM, "softmax": FA_SOFTMAX,
                    "activate": FA_ACTIVATE}


cdef char *_rows(cnp.ndarray array, int64_t *row):
    """The data of a 2-D array, and the distance of its rows."""
    row[0] = cnp.PyArray_STRIDES(array)[0]
    return <char *>cnp.PyArray_DATA(array)


cdef char *_aligned_scratch(int64_t n_bytes, void **memory) except NULL:
    """`n_bytes` at a cache line, in `memory`, which the caller frees."""
    memory[0] = PyMem_RawMalloc(n_bytes + 64)
    if memory[0] == NULL:
        raise MemoryError(f"fastattn: no memory for {n_bytes} bytes of scratch")
    return <char *>memory[0] + (-<uintptr_t>memory[0]) % 64


cdef int64_t *_new_tables(int64_t n, int64_t batch) except NULL:
    """Memory for n batch tables, which the caller frees."""
    cdef int64_t *tables = <int64_t *>PyMem_RawMalloc(n * (batch + 1) * sizeof(int64_t))
    if tables == NULL:
        raise MemoryError(f"fastattn: no memory for the tables of {batch} batch items")
    return tables


cdef void _set_linear(fa_linear_args *a, weight, cnp.ndarray bias, activation, fa_dtype dtype) except *:
    """All of `a` but what its rows are."""
    memset(a, 0, sizeof(fa_linear_args))
    if bias is not None:
        a.bias = cnp.PyArray_DATA(bias)
    if weight.scales is not None:
        a.scales = cnp.PyArray_DATA(weight.scales)
    a.panels = <const char *>cnp.PyArray_DATA(weight.panels)
    a.n, a.k = weight.out_features, weight.in_features
    a.dtype = dtype
    a.weight = _WEIGHTS[weight.dtype]
    a.gated = weight.gated
    a.activation = _ACTIVATIONS[activation]


cdef void _run_linear(fa_linear_args *a, int threads) except *:
    cdef fa_linear_plan p
    cdef const fa_kernels *kernels = fa_isa_kernels(_isa, a.dtype)
    cdef int64_t task
    cdef void *memory
    cdef char *scratch
    kernels.linear_plan(a, threads, &p)
    threads = 1 if p.flops < PARALLEL_TILE else max(1, min(threads, p.n_tasks))
    scratch = _aligned_scratch(threads * p.scratch_bytes, &memory)
    with nogil:
        if threads == 1:
            for task in range(p.n_tasks):
                kernels.linear_run(a, &p, task, scratch)
        else:
            for task in prange(p.n_tasks, num_threads=threads, schedule="dynamic"):
                kernels.linear_run(a, &p, task, scratch + threadid() * p.scratch_bytes)
    PyMem_RawFree(memory)


def linear(args):
    """Compute `args.out`, of a LinearArgs."""
    cdef fa_linear_args a
    _set_linear(&a, args.weight, args.bias, args.activation, _dtype(args.x))
    a.x = _rows(args.x, &a.x_row)
    a.out = _rows(args.out, &a.out_row)
    if args.residual is not None:
        a.residual = _rows(args.residual, &a.residual_row)
    a.m = args.out.shape[0]
    _run_linear(&a, args.num_threads if FA_OPENMP else 1)


cdef void _run_rows(fa_rows_args *a, int threads) except *:
    cdef const fa_kernels *kernels = fa_isa_kernels(_isa, a.dtype)
    cdef int64_t task, step, scratch_bytes
    cdef void *memory
    cdef char *scratch
    scratch_bytes = kernels.rows_scratch_bytes(a.n)
    scratch_bytes = (scratch_bytes + 63) // 64 * 64  # each thread's begins at a cache line
    step = max(1, TASK_ELEMENTS // max(1, a.n))
    threads = 1 if a.m * a.n < PARALLEL_ELEMENTS else max(1, min(threads, (a.m + step - 1) // step))
    scratch = _aligned_scratch(threads * scratch_bytes, &memory)
    with nogil:
        if threads == 1:
            kernels.rows_run(a, 0, a.m, scratch)
        else:
            for task in prange((a.m + step - 1) // step, num_threads=threads, schedule="dynamic"):
                kernels.rows_run(a, task * step, min(a.m, task * step + step), scratch + threadid() * scratch_bytes)
    PyMem_RawFree(memory)


def rows(args):
    """Compute `args.out`, and `args.total` where there is one, of a RowsArgs."""
    cdef fa_rows_args a
    memset(&a, 0, sizeof(a))
    a.kind = _KINDS[args.kind]
    a.dtype = _dtype(args.x)
    a.activation = _ACTIVATIONS[args.activation]
    a.m, a.n, a.eps = args.out.shape[0], args.out.shape[1], args.eps
    a.x = _rows(args.x, &a.x_row)
    a.out = _rows(args.out, &a.out_row)
    if args.residual is not None:
        a.residual = _rows(args.residual, &a.residual_row)
    if args.total is not None:
        a.total = _rows(args.total, &a.total_row)
    if args.up is not None:
        a.up = _rows(args.up, &a.up_row)
    if args.weight is not None:
        a.weight = cnp.PyArray_DATA(args.weight)
    if args.bias is not None:
        a.bias = cnp.PyArray_DATA(args.bias)
    _run_rows(&a, args.num_threads if FA_OPENMP else 1)


cdef void _run_rope(fa_rope_args *a, int threads) except *:
    cdef const fa_kernels *kernels = fa_isa_kernels(_isa, a.x.dtype)
    cdef int64_t task, n = a.batch * a.length, step, scratch_bytes
    cdef void *memory
    cdef char *scratch
    step = max(1, TASK_ELEMENTS // max(1, a.heads * a.head_dim))
    threads = 1 if n * a.heads * a.head_dim < PARALLEL_ELEMENTS else max(1, min(threads, (n + step - 1) // step))
    scratch_bytes = (a.head_dim * sizeof(double) + 127) // 64 * 64
    scratch = _aligned_scratch(threads * scratch_bytes, &memory)
    with nogil:
        if threads == 1:
            kernels.rope_run(a, 0, n, scratch)
        else:
            for task in prange((n + step - 1) // step, num_threads=threads, schedule="dynamic"):
                kernels.rope_run(a, task * step, min(n, task * step + step), scratch + threadid() * scratch_bytes)
    PyMem_RawFree(memory)


def rope(args):
    """Compute `args.out`, of a RopeArgs."""
    cdef fa_rope_args a
    cdef cnp.ndarray x = args.x, cos = args.cos
    cdef int core = cnp.PyArray_NDIM(x) - 3  # the first of the axes heads, length, head_dim
    cdef tuple batch_shape = args.x.shape[:core]
    cdef int64_t *tables
    memset(&a, 0, sizeof(a))
    a.x.dtype = a.out.dtype = _dtype(x)
    a.batch = _n_batch(batch_shape)
    a.heads, a.length, a.head_dim = x.shape[core], x.shape[core + 1], x.shape[core + 2]
    a.pairs = cos.shape[cnp.PyArray_NDIM(cos) - 1]
    a.interleaved = args.interleaved
    tables = _new_tables(4, a.batch)  # `out` has memory for each batch item, so nothing overflows
    try:
        _set_array(&a.x, x, 3, batch_shape, a.batch, tables)
        _set_array(&a.out, args.out, 3, batch_shape, a.batch, tables + a.batch)
        _set_array(&a.cos, cos, 3, batch_shape, a.batch, tables + 2 * a.batch)
        _set_array(&a.sin, args.sin, 3, batch_shape, a.batch, tables + 3 * a.batch)
        _run_rope(&a, args.num_threads if FA_OPENMP else 1)
    finally:
        PyMem_RawFree(tables)

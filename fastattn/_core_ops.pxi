# The layers' operations: a part of _core.pyx, which includes it.

# Elements for which a parallel region pays, and those of a task: a row operation spends about a nanosecond on four.
cdef int64_t PARALLEL_ELEMENTS = 1 << 16
cdef int64_t TASK_ELEMENTS = 1 << 14

cdef dict _ACTIVATIONS = {None: FA_NONE, "relu": FA_RELU, "gelu": FA_GELU, "gelu_tanh": FA_GELU_TANH,
                          "silu": FA_SILU, "sigmoid": FA_SIGMOID}
cdef dict _WEIGHTS = {"float32": FA_F32, "float64": FA_F64, "bfloat16": FA_BF16, "int8": FA_I8}
cdef dict _STORED = {FA_F32: cnp.NPY_FLOAT, FA_F64: cnp.NPY_DOUBLE, FA_BF16: cnp.NPY_UINT16, FA_I8: cnp.NPY_INT8}
cdef dict _KINDS = {"layer_norm": FA_LAYER_NORM, "rms_norm": FA_RMS_NORM, "softmax": FA_SOFTMAX,
                    "activate": FA_ACTIVATE}


cdef char *_rows(name, cnp.ndarray array, int64_t m, int64_t n, fa_dtype dtype, int64_t *row) except? NULL:
    """The data of an array (m, n) whose rows are contiguous, and their distance."""
    if (cnp.PyArray_NDIM(array) != 2 or cnp.PyArray_DIMS(array)[0] != m or cnp.PyArray_DIMS(array)[1] != n
            or (n > 1 and cnp.PyArray_STRIDES(array)[1] != cnp.PyArray_ITEMSIZE(array))
            or not cnp.PyArray_ISBEHAVED_RO(array) or _dtype(array) != dtype):
        raise _misfit(name, array, f"{(m, n)}, rows contiguous, of the dtype of the other rows")
    row[0] = cnp.PyArray_STRIDES(array)[0]
    return <char *>cnp.PyArray_DATA(array)


cdef char *_aligned_scratch(int64_t n_bytes, void **memory) except NULL:
    """`n_bytes` at a cache line, in `memory`, which the caller frees."""
    memory[0] = PyMem_RawMalloc(n_bytes + 64)
    if memory[0] == NULL:
        raise MemoryError(f"fastattn: no memory for {n_bytes} bytes of scratch")
    return <char *>memory[0] + (-<uintptr_t>memory[0]) % 64


cdef void _set_linear(fa_linear_args *a, weight, bias, activation, fa_dtype dtype) except *:
    """All of `a` but what its rows are."""
    cdef int64_t width, count
    cdef int n_maps = 2 if weight.gated else 1, lane = _lane_type(dtype)
    memset(a, 0, sizeof(fa_linear_args))
    a.n, a.k = weight.out_features, weight.in_features
    a.dtype = dtype
    a.weight = _WEIGHTS[weight.dtype]
    a.gated = weight.gated
    a.activation = _ACTIVATIONS[activation]
    if (a.weight == FA_F64) != (dtype == FA_F64):
        raise ValueError(f"fastattn: a weight in {weight.dtype} meets rows or a bias of another type")
    width = FA_PANEL_BYTES // (8 if dtype == FA_F64 else 4)
    count = n_maps * ((a.n + width - 1) // width)
    a.panels = <const char *>_data("panels", weight.panels, count * width * (2 * ((a.k + 1) // 2) if a.weight == FA_BF16
                                                                             else a.k), _STORED[a.weight])
    if a.weight == FA_I8:
        a.scales = _data("scales", weight.scales, count * width, lane)
    if bias is not None:
        a.bias = _data("bias", bias, n_maps * a.n, lane)


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
    a.m = len(args.out)
    a.x = _rows("x", args.x, a.m, a.k, a.dtype, &a.x_row)
    a.out = _rows("out", args.out, a.m, a.n, a.dtype, &a.out_row)
    if args.residual is not None:
        a.residual = _rows("residual", args.residual, a.m, a.n, a.dtype, &a.residual_row)
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
    a.x = _rows("x", args.x, a.m, a.n, a.dtype, &a.x_row)
    a.out = _rows("out", args.out, a.m, a.n, a.dtype, &a.out_row)
    if args.residual is not None:
        a.residual = _rows("residual", args.residual, a.m, a.n, a.dtype, &a.residual_row)
    if args.total is not None:
        a.total = _rows("total", args.total, a.m, a.n, a.dtype, &a.total_row)
    if args.up is not None:
        a.up = _rows("up", args.up, a.m, a.n, a.dtype, &a.up_row)
    if args.weight is not None:
        a.weight = _data("weight", args.weight, a.n, _lane_type(a.dtype))
    if args.bias is not None:
        a.bias = _data("bias", args.bias, a.n, _lane_type(a.dtype))
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
    cdef int core = cnp.PyArray_NDIM(x) - 3, lane  # core: the first of the axes heads, length, head_dim
    cdef Tables tables = Tables(args.x.shape[:core], 4)
    memset(&a, 0, sizeof(a))
    a.batch = tables.batch
    a.heads, a.length, a.head_dim = x.shape[core], x.shape[core + 1], x.shape[core + 2]
    a.pairs = cos.shape[cnp.PyArray_NDIM(cos) - 1]
    a.interleaved = args.interleaved
    if 2 * a.pairs > a.head_dim:
        raise _misfit("cos", cos, f"at most {a.head_dim // 2} pairs")
    tables.set_rows(&a.x, "x", x, a.heads, a.length, a.head_dim)
    tables.set_rows(&a.out, "out", args.out, a.heads, a.length, a.head_dim)
    lane = _lane_type(a.x.dtype)
    tables.set(&a.cos, "cos", cos, lane, 3, 1, a.length, a.pairs, True)
    tables.set(&a.sin, "sin", args.sin, lane, 3, 1, a.length, a.pairs, True)
    _run_rope(&a, args.num_threads if FA_OPENMP else 1)

# The layers' operations: a part of _core.pyx, which includes it.

# The names, in the order of src/activations.inc, and their numbers.
cdef dict _ACTIVATIONS = {None: 0}
while fa_activation_names[len(_ACTIVATIONS)] != NULL:
    _ACTIVATIONS[fa_activation_names[len(_ACTIVATIONS)].decode()] = len(_ACTIVATIONS)
ACTIVATIONS = tuple(_ACTIVATIONS)[1:]
# The types of weights; codes of a table of sixteen are all FA_I4.
cdef dict _WEIGHTS = {name: _DTYPES["int4" if stored.table else name] for name, stored in STORED.items()}


cdef char *_rows(name, cnp.ndarray array, int64_t m, int64_t n, fa_dtype dtype, int64_t *row) except? NULL:
    """The data of an array (m, n) whose rows are contiguous, and their distance; NULL for None."""
    if array is None:
        return NULL
    if (cnp.PyArray_NDIM(array) != 2 or cnp.PyArray_DIMS(array)[0] != m or cnp.PyArray_DIMS(array)[1] != n
            or (n > 1 and cnp.PyArray_STRIDES(array)[1] != cnp.PyArray_ITEMSIZE(array))
            or not cnp.PyArray_ISBEHAVED_RO(array)
            or (cnp.PyArray_TYPE(array) != cnp.NPY_INT8 if dtype == FA_I8 else _dtype(array) != dtype)):
        raise _misfit(name, array, f"{(m, n)}, rows contiguous, of the dtype of the other rows")
    row[0] = cnp.PyArray_STRIDES(array)[0]
    return <char *>cnp.PyArray_DATA(array)


cdef int64_t _rows_of_up(up, int64_t m, int64_t n) except -1:
    """How many rows of n elements lie side by side in `up`, so that there are m."""
    if up is None or not n:
        return 1
    cdef int64_t each = up.shape[1] // n
    if not each or m % each:
        raise _misfit("up", up, f"{m} rows of {n} elements, some side by side")
    return each


cdef int64_t _set_panels(char **panels, void **scales, void **minima, void **sums, cnp.ndarray array, of,
                         stored, fa_dtype weight, int64_t n, int64_t k, int maps, int block) except -1:
    """Point at packed weights of n output and k input features, `array` and what `of` has; returns their panels."""
    cdef int64_t word = 8 if weight == FA_F64 else 4, width = FA_PANEL_BYTES // word
    cdef int64_t count = maps * ((n + width - 1) // width), n_scales = count * width
    kind = np.dtype(stored.dtype)
    cdef int64_t each = word // <int>kind.itemsize  # numbers that a step holds of an output feature
    panels[0] = <char *>_data("panels", array, count * width * steps(k, of.dtype) * each, kind.num)
    if stored.scales == "row":
        scales[0] = _data("scales", of.scales, n_scales, cnp.NPY_FLOAT)
    elif stored.scales:  # whole blocks of BLOCK, each of one or two that share a scale
        n_scales *= ((k + BLOCK - 1) // BLOCK) * (BLOCK // block)
        scales[0] = _data("scales", of.scales, n_scales, cnp.NPY_FLOAT16)
        minima[0] = _data("minima", of.minima, n_scales, cnp.NPY_FLOAT16)
    sums[0] = _data("sums", of.sums, count * width, cnp.NPY_FLOAT)
    return count


cdef void _set_linear(fa_linear_args *a, weight, bias, activation, activations, fa_dtype dtype,
                      bint transposed=False) except *:
    """All of `a` but what its rows are."""
    cdef int n_maps = 2 if weight.gated else 1, lane = _lane_type(dtype)
    memset(a, 0, sizeof(fa_linear_args))
    a.n, a.k = weight.out_features, weight.in_features
    a.dtype = a.out_dtype = dtype
    a.weight = _WEIGHTS[weight.dtype]
    a.gated = weight.gated
    a.activation = _ACTIVATIONS[activation]
    a.x_int8 = activations is not None
    a.unit = 1
    if (a.weight == FA_F64) != (dtype == FA_F64):
        raise ValueError(f"fastattn: a weight in {weight.dtype} meets rows or a bias of another type")
    if a.x_int8 and weight.dtype not in INTEGERS:
        raise ValueError(f"fastattn: int8 activations meet a weight in {weight.dtype}")
    stored = STORED[weight.dtype]
    if stored.scales == "block":
        a.block = weight.block
    _set_panels(<char **>&a.panels, <void **>&a.scales, <void **>&a.minima, <void **>&a.sums, weight.panels, weight,
                stored, a.weight, a.n, a.k, n_maps, a.block)
    table = stored.table
    if table is not None:
        a.table = _data("values", table.values, 16, cnp.NPY_FLOAT)
        a.codes = <const int8_t *>_data("codes", table.codes, 16, cnp.NPY_INT8)
        a.unit = table.unit
    if transposed:
        if a.x_int8:
            raise ValueError("fastattn: int8 activations meet a transposed weight")
        a.transposed, a.gated = n_maps, False
        a.n, a.k = a.k, n_maps * a.n
    a.bias = _data("bias", bias, a.n * (1 + a.gated), lane)


cdef int _run_linear(fa_linear_args *a, int threads) except -1:
    cdef Loop loop
    cdef fa_linear_plan plan
    _ready(&loop, a.dtype, a, &a.watch, &plan)
    loop.kernels.linear.plan(a, threads, &plan)
    return _run(&loop, _linear_task, plan.n_tasks, _if_pays(plan.flops, threads), plan.scratch_bytes)


def linear(args):
    """Compute `args.out`, of a LinearArgs."""
    cdef fa_linear_args a
    _set_linear(&a, args.weight, args.bias, args.activation, args.activations, _dtype(args.x),
                args.transposed)
    a.m = len(args.out)
    a.x = _rows("x", args.x, a.m, a.k, a.dtype, &a.x_row)
    a.out = _rows("out", args.out, a.m, a.n, a.dtype, &a.out_row)
    a.residual = _rows("residual", args.residual, a.m, a.n, a.dtype, &a.residual_row)
    a.pre = _rows("pre", args.pre, a.m, a.n * (1 + a.gated), a.dtype, &a.pre_row)
    _run_linear(&a, args.num_threads)


cdef void _set_pack_rows(fa_pack_rows *to, block, int64_t n, int64_t k, table) except *:
    """Rows that are packed; of a file's blocks, what their codes become: `table`, or None."""
    cdef cnp.ndarray array = block.array
    cdef int64_t begin = block.first
    if (cnp.PyArray_NDIM(array) != 2 or begin < 0 or begin + cnp.PyArray_DIMS(array)[0] > n
            or not (block.layout is not None or cnp.PyArray_DIMS(array)[1] == k)
            or not cnp.PyArray_ISNOTSWAPPED(array)):
        raise _misfit(block.name, array, f"(at most {n - begin}, {k}), native")
    to.data = <const char *>cnp.PyArray_DATA(array)
    to.row, to.col = cnp.PyArray_STRIDES(array)[0], cnp.PyArray_STRIDES(array)[1]
    to.begin, to.end = begin, begin + cnp.PyArray_DIMS(array)[0]
    to.map, to.layout, to.table = block.map, NULL, NULL
    if block.layout is None:
        to.dtype = _dtype(array)
    else:
        to.dtype = FA_I8
        _set_file_blocks(to, block, table, k)


def pack(args):
    """Fill `args.out`, `args.scales`, `args.sums` and `args.bad`, of a PackArgs."""
    cdef fa_pack_args a
    cdef Loop loop
    cdef int64_t i, count
    blocks, stored, table = args.blocks, STORED[args.dtype], STORED[args.dtype].table
    memory = np.empty(len(blocks) * sizeof(fa_pack_rows), np.uint8)
    cdef fa_pack_rows *rows = <fa_pack_rows *>cnp.PyArray_DATA(memory)
    memset(&a, 0, sizeof(a))
    a.blocks, a.n_blocks, a.k, a.maps = rows, len(blocks), args.in_features, args.maps
    a.weight, a.beyond, a.unit, a.block = _WEIGHTS[args.dtype], args.beyond, 1, args.block
    of_files = [block.layout for block in blocks if block.layout is not None]
    if len(of_files) not in (0, len(blocks)):
        raise ValueError("fastattn: blocks of files meet rows of numbers")
    if a.block not in (16, BLOCK):
        raise ValueError(f"fastattn: blocks of {a.block} features; expected 16 or {BLOCK}")
    if of_files and args.dtype not in BLOCKED:
        raise ValueError(f"fastattn: blocks of files become {args.dtype}; expected 4 bits or q8")
    if a.block != BLOCK and not of_files:
        raise ValueError(f"fastattn: blocks of {a.block} features meet rows of numbers")
    tables = []  # kept until the end
    for i in range(a.n_blocks):
        tables.append(stored_codes(args.dtype, of_files[i]) if of_files else (0, None))
        _set_pack_rows(&rows[i], blocks[i], args.out_features, a.k, tables[i][1])
        rows[i].add = tables[i][0]
        if of_files and (rows[i].layout.shared % a.block or (rows[i].layout.minimum >= 0 and args.minima is None)):
            raise ValueError(f"fastattn: blocks of {rows[i].layout.shared} features meet those of {a.block}")
    count = _set_panels(&a.panels, &a.scales, &a.minima, &a.sums, args.out, args, stored, a.weight, args.out_features,
                        a.k, a.maps, a.block)
    if <uintptr_t>a.panels % 64:
        raise _misfit("panels", args.out, "panels that begin at a cache line")
    a.bad = <unsigned char *>_data("bad", args.bad, a.n_blocks, cnp.NPY_BOOL)
    a.extreme, a.by_magnitude = stored.extreme, stored.by_magnitude
    if table is not None:
        middles, codes = table.middles, table.codes.astype(np.float32)  # kept until the end
        a.middles, a.unit = _data("middles", middles, 16, cnp.NPY_FLOAT), table.unit
        a.codes = _data("codes", codes, 16, cnp.NPY_FLOAT)
        a.zero = table.numbers(np.zeros(1, np.int8))[0]
    _ready(&loop, _lane(a.weight), &a, &a.watch)
    _run_rows_of(&loop, _pack_task, count, FA_PANEL_BYTES // (8 if a.weight == FA_F64 else 4) * a.k, args.num_threads,
                 loop.kernels.pack.scratch_bytes(&a))


cdef int _run_rows(fa_rows_args *a, int threads) except -1:
    cdef Loop loop
    _ready(&loop, a.dtype, a, &a.watch)
    return _run_rows_of(&loop, _rows_task, a.m, a.n, threads, loop.kernels.rows.scratch_bytes(a.n))


def rows(args):
    """Compute `args.out`, and `args.total` where there is one, of a RowsArgs."""
    cdef fa_rows_args a
    memset(&a, 0, sizeof(a))
    a.dtype = _dtype(args.x)
    a.m, a.n = args.out.shape[0], args.out.shape[1]
    a.up_each = _rows_of_up(args.up, a.m, a.n)
    _fill_rows(&a, args)
    _run_rows(&a, args.num_threads)


cdef int _run_rope(fa_rope_args *a, int threads) except -1:
    """One row holds all heads."""
    cdef Loop loop
    loop.kernels, loop.args = _kernels(a.x.dtype), a
    return _run_rows_of(&loop, _rows_rope_task, a.batch * a.length, a.heads * a.head_dim, threads,
                        a.head_dim * sizeof(double) + 64)


def rope(args):
    """Compute `args.out`, of a RopeArgs."""
    cdef fa_rope_args a
    cdef cnp.ndarray x = args.x, cos = args.cos
    cdef int core = cnp.PyArray_NDIM(x) - 3  # the first of the axes heads, length, head_dim
    cdef _Tables tables = _Tables(args.x.shape[:core], ROPE_ARRAYS)
    memset(&a, 0, sizeof(a))
    a.batch = tables.batch
    a.heads, a.length, a.head_dim = x.shape[core], x.shape[core + 1], x.shape[core + 2]
    a.pairs = cos.shape[cnp.PyArray_NDIM(cos) - 1]
    if 2 * a.pairs > a.head_dim:
        raise _misfit("cos", cos, f"at most {a.head_dim // 2} pairs")
    _fill_rope(&a, args, tables)
    if a.out.dtype not in (a.x.dtype, FA_I4) and args.scale is None:
        raise _misfit("out", args.out, f"x's type, {x.dtype}")
    _run_rope(&a, args.num_threads)

# Steps whose rows each need one row of their buffers: a part of _core.pyx, which includes it.

# Such a step in a call, but for where its buffers are.
cdef struct Rowwise:
    bint product  # what computes it: `linear`, or else `rows`
    fa_linear_args linear
    fa_linear_plan plans[2]  # of a chain's blocks, and of the last one, which may have fewer rows
    fa_rows_args rows
    int x, out, other  # buffers; `other` is added or, with `multiplies`, multiplied with; -1: none
    bint multiplies
    int64_t begin, out_begin  # bytes of a row of x, and of out, before the step's features
    int64_t times, weight_bytes  # of a norm of several heads, each with separate weights


cdef class _RowwiseStep(_Step):
    cdef void bind(self, Call *c, Rowwise *step) except *:
        """Check the call's sizes, which `step` did not know, and fill all but where the rows are."""
        raise NotImplementedError

    cdef void run(self, Call *c, call) except *:
        cdef Rowwise step
        cdef fa_linear_args a
        cdef fa_rows_args r
        cdef int64_t i
        _bind(self, c, &step)
        if step.product:
            a = _linear_at(&step, c.buffers, c.m)
            _run_linear(&a, c.threads)
        for i in range(step.times):
            r = _rows_at(&step, c.buffers, c.m, i)
            _run_rows(&r, c.threads)


cdef void _bind(_RowwiseStep self, Call *c, Rowwise *step) except *:
    memset(step, 0, sizeof(step[0]))
    step.x, step.out, step.other = self.x, self.out, -1
    self.bind(c, step)
    if step.product:
        step.linear.dtype, step.linear.out_dtype = c.buffers[step.x].dtype, c.buffers[step.out].dtype
    else:
        step.times, step.rows.dtype = max(1, step.times), c.buffers[step.x].dtype
        self._require_one_dtype(c, step.x, step.out)
    self._require_one_dtype(c, step.out, step.other)


cdef fa_linear_args _linear_at(const Rowwise *step, const Buffer *buffers, int64_t m) noexcept nogil:
    """Arguments of a product of m rows, which begin where `buffers` say."""
    cdef fa_linear_args a = step.linear
    a.m, a.x, a.x_row = m, buffers[step.x].data, buffers[step.x].row
    a.out, a.out_row = buffers[step.out].data, buffers[step.out].row
    if step.other >= 0:
        a.residual, a.residual_row = buffers[step.other].data, buffers[step.other].row
    return a


cdef fa_rows_args _rows_at(const Rowwise *step, const Buffer *buffers, int64_t m, int64_t head) noexcept nogil:
    """Arguments of an operation on m rows, which begin where `buffers` say, for head number `head`."""
    cdef fa_rows_args r = step.rows
    cdef int64_t size = 8 if r.dtype == FA_F64 else 4 if r.dtype == FA_F32 else 2, at = head * r.n * size
    r.m, r.x, r.x_row = m, buffers[step.x].data + step.begin + at, buffers[step.x].row
    r.out, r.out_row = buffers[step.out].data + step.out_begin + at, buffers[step.out].row
    r.weight = <const char *>r.weight + head * step.weight_bytes
    if step.other >= 0 and step.multiplies:
        r.up, r.up_row, r.up_each = buffers[step.other].data, buffers[step.other].row, 1
    elif step.other >= 0:
        r.residual, r.residual_row = buffers[step.other].data, buffers[step.other].row
    return r


cdef class _LinearStep(_RowwiseStep):
    cdef fa_linear_args args
    cdef int residual  # -1: none

    cdef void _set(self, step, buffers) except *:
        self.doubles = step.weight.dtype == "float64"
        self.residual = -1 if step.residual is None else self._buffer(step.residual, buffers)
        _set_linear(&self.args, step.weight, step.bias, step.activation, step.activations,
                    FA_F64 if self.doubles else FA_F32)
        self._keep((step.weight.panels, step.weight.scales, step.weight.sums, step.bias))

    cdef void bind(self, Call *c, Rowwise *step) except *:
        cdef int64_t x = c.buffers[self.x].columns, out = c.buffers[self.out].columns
        self._require_type(c)
        if x != self.args.k or out != self.args.n or (
                self.residual >= 0 and c.buffers[self.residual].columns != self.args.n):
            raise ValueError(f"fastattn: step {self.number} maps {self.args.k} features to {self.args.n}; it has {x}"
                             f" and {out}")
        step.product, step.linear, step.other = True, self.args, self.residual


cdef class _NormStep(_RowwiseStep):
    cdef fa_rows_args args
    cdef int64_t heads, begin  # heads 0: the norm is of whole rows

    cdef void _set(self, step, buffers) except *:
        cdef int lane
        self.doubles = step.weight.dtype == np.float64
        lane = cnp.NPY_DOUBLE if self.doubles else cnp.NPY_FLOAT
        self.args.kind, self.args.eps, self.begin = _KINDS[step.kind], step.eps, step.begin
        self.args.weight = _data("weight", step.weight, step.weight.size, lane)
        if step.weight.ndim == 2:
            self.heads, self.args.n = step.weight.shape
        else:
            self.args.n = step.weight.size
        if step.bias is not None:
            self.args.bias = _data("bias", step.bias, self.args.n, lane)
        self._keep((step.weight, step.bias))

    cdef void bind(self, Call *c, Rowwise *step) except *:
        cdef int64_t x = c.buffers[self.x].columns, out = c.buffers[self.out].columns
        cdef int64_t width = max(1, self.heads) * self.args.n
        self._require_type(c)
        if out != x or self.begin < 0 or self.begin + width > x or (self.heads == 0 and width != x):
            raise ValueError(f"fastattn: step {self.number} is a norm of {width} features from {self.begin} on; it"
                             f" has {x} and {out}")
        step.rows, step.times = self.args, self.heads
        step.begin = step.out_begin = self.begin * c.buffers[self.x].size
        step.weight_bytes = self.args.n * (8 if self.doubles else 4)


cdef class _AddStep(_RowwiseStep):
    cdef int residual
    cdef int64_t features

    cdef void _set(self, step, buffers) except *:
        self.residual, self.features = self._buffer(step.residual, buffers), step.features

    cdef void bind(self, Call *c, Rowwise *step) except *:
        cdef int64_t x = c.buffers[self.x].columns, out = c.buffers[self.out].columns
        cdef int64_t residual = c.buffers[self.residual].columns
        if x != self.features or out != self.features or residual != self.features:
            raise ValueError(f"fastattn: step {self.number} adds {self.features} features; it has {x}, {residual} and"
                             f" {out}")
        step.rows.kind, step.rows.n, step.other = FA_ACTIVATE, self.features, self.residual  # with no activation


cdef class _GateStep(_RowwiseStep):
    cdef int gate
    cdef int64_t begin, features
    cdef fa_activation activation

    cdef void _set(self, step, buffers) except *:
        self.gate, self.begin, self.features = self._buffer(step.gate, buffers), step.begin, step.features
        self.activation = _ACTIVATIONS[step.activation]

    cdef void bind(self, Call *c, Rowwise *step) except *:
        cdef int64_t x = c.buffers[self.x].columns, out = c.buffers[self.out].columns
        cdef int64_t gate = c.buffers[self.gate].columns
        if x != self.features or out != self.features or self.begin < 0 or self.begin + self.features > gate:
            raise ValueError(f"fastattn: step {self.number} has a gate of {self.features} features from {self.begin}"
                             f" on; it has {x}, {gate} and {out}")
        step.rows.kind, step.rows.n, step.rows.activation = FA_ACTIVATE, self.features, self.activation
        step.x, step.begin = self.gate, self.begin * c.buffers[self.gate].size
        step.other, step.multiplies = self.x, True


cdef class _ScaleStep(_RowwiseStep):
    cdef cnp.ndarray weight

    cdef void _set(self, step, buffers) except *:
        self.weight = step.weight
        self._keep((step.weight,))

    cdef void bind(self, Call *c, Rowwise *step) except *:
        cdef int64_t x = c.buffers[self.x].columns, out = c.buffers[self.out].columns
        cdef int64_t n = cnp.PyArray_SIZE(self.weight)
        if x != n or out != n:
            raise ValueError(f"fastattn: step {self.number} scales {n} features; it has {x} and {out}")
        if _dtype(self.weight) != c.dtype:
            raise ValueError(f"fastattn: step {self.number} has a weight of another type than its rows")
        step.rows.kind, step.rows.n = FA_ACTIVATE, n
        step.rows.up = <const char *>_data("weight", self.weight, n, cnp.PyArray_TYPE(self.weight))
        step.rows.up_each = 1  # each row's is the same, a distance of 0

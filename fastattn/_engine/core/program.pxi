# Operations one after another over the same rows, in one call: a part of _core.pyx, which includes it.

cdef enum:
    MAX_BUFFERS = 8  # x, out, and the places in memory
    N_TABLES = 7  # of a call's batch: rotation, cache, starts, and where new tokens go

ctypedef enum StepKind:
    LINEAR_STEP, NORM_STEP, HEAD_NORM_STEP, ATTEND_STEP

# What of an operation is the same in every call. Buffers by their numbers, -1: none.
cdef struct Step:
    StepKind kind
    int x, out, residual
    bint doubles  # whether its parameters are float64
    fa_linear_args linear
    fa_rows_args norm
    int64_t heads  # that a norm is of
    fa_attention_args attend
    int64_t first_kv  # of the cache's heads
    int ranges

# Of one call: its buffers, and what a `fastattn._engine.program.Sequences` says of their rows.
cdef struct Call:
    char *data[MAX_BUFFERS]
    int64_t row[MAX_BUFFERS]
    int64_t columns[MAX_BUFFERS]
    fa_dtype dtype
    int64_t size, m, batch, length
    int threads
    fa_array cos, sin  # with `pairs`: 0 where nothing is rotated
    int64_t pairs
    fa_array k, v, new_k, new_v  # a cache, and where new tokens go there; no data: none
    int64_t len_k, heads_held, head_dim_held


cdef int _require(bint holds, message) except -1:
    if not holds:
        raise ValueError(f"fastattn: {message}")
    return 0


cdef class Program:
    """The steps of a `fastattn._engine.program.Program`, as C has them; it keeps their arrays alive."""

    cdef Step *steps
    cdef int n, n_places
    cdef list kept  # parameters that the steps point into: (array, where its data were, how many elements)
    cdef int64_t begins[MAX_BUFFERS]  # of the places in a call's memory, in features
    cdef int64_t widths[MAX_BUFFERS]

    def __cinit__(self, steps, places):
        cdef int i
        self.kept = []
        self.n, self.n_places = len(steps), len(places)
        _require(self.n_places <= MAX_BUFFERS - 2, f"{self.n_places} places; expected at most {MAX_BUFFERS - 2}")
        for i in range(self.n_places):
            self.begins[i], self.widths[i] = places[i]
            _require(self.begins[i] >= 0 and self.widths[i] >= 0, f"a place at {places[i]}")
        self.steps = <Step *>PyMem_RawMalloc(max(1, self.n) * sizeof(Step))
        if self.steps == NULL:
            raise MemoryError("fastattn: no memory for the steps of a model")
        for i in range(self.n):
            self._set_step(&self.steps[i], steps[i])

    def __dealloc__(self):
        PyMem_RawFree(self.steps)

    cdef void _set_step(self, Step *to, step) except *:
        memset(to, 0, sizeof(Step))
        to.x = step.x
        to.out = step.x if step.op == "head_norm" else step.out
        to.residual = -1
        for buffer in (to.x, to.out):
            _require(0 <= buffer < self.n_places + 2, f"a step has buffer {buffer} of {self.n_places + 2}")
        if step.op == "linear":
            to.kind = LINEAR_STEP
            to.doubles = step.weight.dtype == "float64"
            if step.residual is not None:
                to.residual = step.residual
                _require(0 <= to.residual < self.n_places + 2, f"a step has buffer {to.residual}")
            _set_linear(&to.linear, step.weight, step.bias, step.activation, FA_F64 if to.doubles else FA_F32)
            self._keep(step.weight.panels, step.weight.scales, step.bias)
        elif step.op == "attend":
            to.kind = ATTEND_STEP
            to.attend.heads_q, to.attend.heads_kv = step.heads, step.heads_kv
            to.attend.head_dim = to.attend.head_dim_v = step.head_dim
            to.attend.mods.scale = step.scale
            to.first_kv = step.layer * step.heads_kv
            to.ranges = step.ranges
            _require(step.heads_kv > 0 and step.heads % step.heads_kv == 0 and step.head_dim > 0 and step.layer >= 0,
                     f"attention of {step.heads} heads over {step.heads_kv} of {step.head_dim}")
        else:
            to.doubles = step.weight.dtype == np.float64
            lane = cnp.NPY_DOUBLE if to.doubles else cnp.NPY_FLOAT
            to.norm.weight = _data("weight", step.weight, step.weight.size, lane)
            to.norm.eps = step.eps
            if step.op == "head_norm":
                to.kind = HEAD_NORM_STEP
                to.norm.kind = FA_RMS_NORM
                to.heads, to.norm.n = step.weight.shape
                self._keep(step.weight)
            else:
                to.kind = NORM_STEP
                to.norm.kind = _KINDS[step.kind]
                to.norm.n = step.weight.size
                if step.bias is not None:
                    to.norm.bias = _data("bias", step.bias, to.norm.n, lane)
                self._keep(step.weight, step.bias)

    def _keep(self, *arrays):
        self.kept += [(x, <uintptr_t>cnp.PyArray_DATA(x), cnp.PyArray_SIZE(x)) for x in arrays if x is not None]

    cdef void _require_kept(self) except *:
        """Raise if a parameter's memory has moved or shrunk: the steps would read what is no longer there."""
        for array, data, size in self.kept:
            if <uintptr_t>cnp.PyArray_DATA(array) != data or cnp.PyArray_SIZE(array) != size:
                raise _misfit("a parameter", array, "that of the layer's construction: it was changed in place")

    def run(self, cnp.ndarray x, cnp.ndarray out, cnp.ndarray memory, call, int num_threads):
        """Run the steps on rows x and out, (batch * length, features); `call` is a Sequences."""
        cdef Call c
        cdef int i
        cdef _Tables tables
        memset(&c, 0, sizeof(c))
        self._require_kept()
        c.dtype, c.size = _dtype(x), cnp.PyArray_ITEMSIZE(x)
        c.batch, c.m = call.batch, len(x)
        if c.batch <= 0 or c.m % c.batch:
            raise ValueError(f"fastattn: {c.m} rows of {c.batch} sequences of one length")
        c.length = c.m // c.batch
        c.threads = num_threads if FA_OPENMP else 1
        c.columns[0], c.columns[1] = x.shape[1], out.shape[1]
        c.data[0] = _rows("x", x, c.m, c.columns[0], c.dtype, &c.row[0])
        c.data[1] = _rows("out", out, c.m, c.columns[1], c.dtype, &c.row[1])
        for i in range(self.n_places):
            c.data[2 + i] = <char *>cnp.PyArray_DATA(memory) + c.m * self.begins[i] * c.size
            c.columns[2 + i] = self.widths[i]
            c.row[2 + i] = self.widths[i] * c.size
            if c.m * (self.begins[i] + self.widths[i]) * c.size > cnp.PyArray_NBYTES(memory):
                raise ValueError(f"fastattn: {memory.nbytes} bytes of memory are too few for {c.m} rows")
        tables = _Tables((c.batch,), N_TABLES)
        _set_sequences(&c, call, tables)
        for i in range(self.n):
            self._step(i, &c, call)
            PyErr_CheckSignals()

    cdef void _step(self, int i, Call *c, call) except *:
        cdef Step step = self.steps[i]  # a copy: several threads may run one program
        cdef int64_t h, width = c.columns[step.x]
        if step.kind == ATTEND_STEP:
            _run_attend(&step, c, call)
            return
        if step.doubles != (c.dtype == FA_F64):
            raise ValueError(f"fastattn: step {i} has parameters of another type than its rows")
        if step.kind == LINEAR_STEP:
            if (width != step.linear.k or c.columns[step.out] != step.linear.n
                    or (step.residual >= 0 and c.columns[step.residual] != step.linear.n)):
                raise ValueError(f"fastattn: step {i} maps {step.linear.k} features to {step.linear.n}; it has {width}"
                                 f" and {c.columns[step.out]}")
            step.linear.dtype = c.dtype
            step.linear.m = c.m
            step.linear.x, step.linear.x_row = c.data[step.x], c.row[step.x]
            step.linear.out, step.linear.out_row = c.data[step.out], c.row[step.out]
            if step.residual >= 0:
                step.linear.residual, step.linear.residual_row = c.data[step.residual], c.row[step.residual]
            _run_linear(&step.linear, c.threads)
            return
        step.norm.dtype = c.dtype
        step.norm.m = c.m
        step.norm.x, step.norm.x_row = c.data[step.x], c.row[step.x]
        step.norm.out, step.norm.out_row = c.data[step.out], c.row[step.out]
        if step.kind == NORM_STEP:
            if width != step.norm.n or c.columns[step.out] != width:
                raise ValueError(f"fastattn: step {i} is a norm of {step.norm.n} features; it has {width}")
            _run_rows(&step.norm, c.threads)
            return
        if step.heads * step.norm.n > width:
            raise ValueError(f"fastattn: step {i} is a norm of {step.heads} heads of {step.norm.n} in {width} features")
        for h in range(step.heads):
            _run_rows(&step.norm, c.threads)
            step.norm.x += step.norm.n * c.size
            step.norm.out += step.norm.n * c.size
            step.norm.weight = <const char *>step.norm.weight + step.norm.n * (8 if step.doubles else 4)


cdef void _set_sequences(Call *c, call, _Tables tables) except *:
    """Fill what all steps share."""
    cdef cnp.ndarray cos, sin
    cdef fa_array start
    cdef int64_t b, at, capacity, lane = _lane_type(c.dtype)
    cdef int64_t *new_k
    cdef int64_t *new_v
    if call.rotation is not None:
        cos, sin = call.rotation
        c.pairs = cos.shape[cnp.PyArray_NDIM(cos) - 1]
        tables.set(&c.cos, "cos", cos, lane, 3, 1, c.length, c.pairs, True)
        tables.set(&c.sin, "sin", sin, lane, 3, 1, c.length, c.pairs, True)
    if call.slots is not None:
        _, c.heads_held, capacity, c.head_dim_held = call.slots.k.shape
        tables.set_rows(&c.k, "k", call.slots.k, c.heads_held, capacity, c.head_dim_held)
        tables.set_rows(&c.v, "v", call.slots.v, c.heads_held, capacity, c.head_dim_held)
        if c.k.dtype != c.dtype or c.v.dtype != c.dtype:
            raise ValueError("fastattn: the cache is of another type than the rows")
        tables.set(&start, "starts", np.asarray(call.slots.starts), cnp.NPY_INT64, 0)
        c.len_k = call.slots.length
        c.new_k, c.new_v = c.k, c.v
        new_k, new_v = tables.next(), tables.next()
        for b in range(c.batch):
            at = (<int64_t *>(start.data + start.batch[b]))[0]
            if at < 0 or at + c.length > capacity or c.len_k > capacity:
                raise ValueError(f"fastattn: tokens {at} to {at + c.length} of a cache for {capacity}")
            new_k[b] = c.k.batch[b] + at * c.k.row
            new_v[b] = c.v.batch[b] + at * c.v.row
        c.new_k.batch, c.new_v.batch = new_k, new_v


cdef void _move_heads(Call *c, fa_array *x, int64_t heads, int64_t head_dim, int64_t pairs, fa_array *out) except *:
    """Copy new tokens' heads from x to out, which may be x, with their first `pairs` pairs rotated."""
    cdef fa_rope_args r
    memset(&r, 0, sizeof(r))
    r.x, r.out = x[0], out[0]
    r.x.dtype = r.out.dtype = c.dtype
    r.cos = r.sin = x[0]  # which nothing is read from
    if pairs:
        r.cos, r.sin = c.cos, c.sin
    r.batch, r.length, r.heads, r.head_dim, r.pairs = c.batch, c.length, heads, head_dim, pairs
    _run_rope(&r, c.threads)


cdef void _run_attend(Step *step, Call *c, call) except *:
    """Queries, keys and values lie side by side in a row of x, head after head."""
    cdef fa_attention_args *a = &step.attend
    cdef _Tables tables = _Tables((c.batch,), 4)  # of x, out and the ranges
    cdef int64_t *x_table = tables.next()
    cdef int64_t *out_table = tables.next()
    cdef fa_array new
    cdef int64_t b
    if ((a.heads_q + 2 * a.heads_kv) * a.head_dim > c.columns[step.x]
            or a.heads_q * a.head_dim > c.columns[step.out] or 2 * c.pairs > a.head_dim):
        raise ValueError(f"fastattn: attention of {a.heads_q} heads over {a.heads_kv} of {a.head_dim} has"
                         f" {c.columns[step.x]} features for queries, keys and values, {c.columns[step.out]} for the"
                         f" result, {c.pairs} pairs to rotate")
    for b in range(c.batch):
        x_table[b] = b * c.length * c.row[step.x]
        out_table[b] = b * c.length * c.row[step.out]
    a.batch, a.len_q, a.len_k = c.batch, c.length, c.length
    a.q.dtype = a.k.dtype = a.v.dtype = a.out.dtype = c.dtype
    a.q.batch = a.k.batch = a.v.batch = x_table
    a.q.head = a.k.head = a.v.head = a.out.head = a.head_dim * c.size
    a.q.row = a.k.row = a.v.row = c.row[step.x]
    a.q.col = a.k.col = a.v.col = a.out.col = c.size
    a.q.data = c.data[step.x]
    a.k.data = a.q.data + a.heads_q * a.q.head
    a.v.data = a.k.data + a.heads_kv * a.k.head
    a.out.data, a.out.batch, a.out.row = c.data[step.out], out_table, c.row[step.out]
    if c.k.data == NULL:
        if c.pairs:
            _move_heads(c, &a.q, a.heads_q + a.heads_kv, a.head_dim, c.pairs, &a.q)
    else:
        if step.first_kv + a.heads_kv > c.heads_held or a.head_dim != c.head_dim_held:
            raise ValueError(f"fastattn: {step.first_kv + a.heads_kv} heads of {a.head_dim}; the cache holds"
                             f" {c.heads_held} of {c.head_dim_held}")
        if c.pairs:
            _move_heads(c, &a.q, a.heads_q, a.head_dim, c.pairs, &a.q)
        new = c.new_k
        new.data += step.first_kv * new.head
        _move_heads(c, &a.k, a.heads_kv, a.head_dim, c.pairs, &new)
        new = c.new_v
        new.data += step.first_kv * new.head
        _move_heads(c, &a.v, a.heads_kv, a.head_dim, 0, &new)
        a.len_k, a.k, a.v = c.len_k, c.k, c.v
        a.k.dtype = a.v.dtype = c.dtype
        a.k.data += step.first_kv * a.k.head
        a.v.data += step.first_kv * a.v.head
    begin, end = call.ranges[step.ranges]
    if begin is not None:
        tables.set(&a.masks.row_begin, "row_begin", begin, cnp.NPY_INT64, 2, 1, c.length)
    if end is not None:
        tables.set(&a.masks.row_end, "row_end", end, cnp.NPY_INT64, 2, 1, c.length)
    _run_attention(a, c.threads)

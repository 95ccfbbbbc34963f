# Operations one after another over the same rows, in one call: a part of _core.pyx, which includes it.

cdef enum:
    MAX_BUFFERS = 8  # x, out, and the places in memory
    N_TABLES = 11  # of batch offsets, in a call

ctypedef enum StepKind:
    LINEAR_STEP, NORM_STEP, HEAD_NORM_STEP, ATTEND_STEP

# What of an operation is the same in every call. Buffers by their numbers, -1: none.
cdef struct Step:
    StepKind kind
    int x, out, residual
    fa_linear_args linear
    fa_rows_args norm
    int64_t heads  # that a norm is of
    fa_attention_args attend
    int64_t first_kv  # of the cache's heads
    int ranges

# Of one call: its buffers, and what a `fastattn._program.Sequences` says of their rows.
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
    int64_t len_k
    int64_t *x_table  # batch tables that each step fills, as the next three
    int64_t *out_table
    int64_t *begin_table
    int64_t *end_table


cdef class Program:
    """The steps of a `fastattn._program.Program`, as C has them; it keeps their arrays alive."""

    cdef Step *steps
    cdef int n, n_places
    cdef object alive
    cdef int64_t begins[MAX_BUFFERS]  # of the places in a call's memory, in features
    cdef int64_t widths[MAX_BUFFERS]

    def __cinit__(self, steps, places):
        cdef Step *to
        cdef int i
        self.alive = steps
        self.n = len(steps)
        self.steps = <Step *>PyMem_RawMalloc(max(1, self.n) * sizeof(Step))
        if self.steps == NULL:
            raise MemoryError("fastattn: no memory for the steps of a model")
        self.n_places = len(places)
        for i in range(self.n_places):
            self.begins[i], self.widths[i] = places[i]
        for i in range(self.n):
            step, to = steps[i], &self.steps[i]
            memset(to, 0, sizeof(Step))
            to.x = step.x
            to.out = step.x if step.op == "head_norm" else step.out
            to.residual = -1
            if step.op == "linear":
                to.kind = LINEAR_STEP
                to.residual = -1 if step.residual is None else step.residual
                _set_linear(&to.linear, step.weight, step.bias, step.activation, FA_F32)
            elif step.op == "norm":
                to.kind = NORM_STEP
                to.norm.kind = _KINDS[step.kind]
                to.norm.eps = step.eps
                to.norm.weight = cnp.PyArray_DATA(step.weight)
                if step.bias is not None:
                    to.norm.bias = cnp.PyArray_DATA(step.bias)
            elif step.op == "head_norm":
                to.kind = HEAD_NORM_STEP
                to.norm.kind, to.norm.eps = FA_RMS_NORM, step.eps
                to.norm.weight = cnp.PyArray_DATA(step.weight)
                to.heads, to.norm.n = step.weight.shape
            else:
                to.kind = ATTEND_STEP
                to.attend.heads_q, to.attend.heads_kv = step.heads, step.heads_kv
                to.attend.head_dim = to.attend.head_dim_v = step.head_dim
                to.attend.scale = step.scale
                to.first_kv = step.layer * step.heads_kv
                to.ranges = step.ranges

    def __dealloc__(self):
        PyMem_RawFree(self.steps)

    def run(self, cnp.ndarray x, cnp.ndarray out, cnp.ndarray memory, call, int num_threads):
        """Run the steps on rows x and out, (batch * length, features); `call` is a Sequences."""
        cdef Call c
        cdef int i
        cdef int64_t *tables
        memset(&c, 0, sizeof(c))
        c.dtype, c.size = _dtype(x), cnp.PyArray_ITEMSIZE(x)
        c.batch, c.m = call.batch, cnp.PyArray_DIMS(x)[0]
        c.length = c.m // c.batch
        c.threads = num_threads if FA_OPENMP else 1
        c.data[0], c.columns[0] = _rows(x, &c.row[0]), cnp.PyArray_DIMS(x)[1]
        c.data[1], c.columns[1] = _rows(out, &c.row[1]), cnp.PyArray_DIMS(out)[1]
        for i in range(self.n_places):
            c.data[2 + i] = <char *>cnp.PyArray_DATA(memory) + c.m * self.begins[i] * c.size
            c.columns[2 + i] = self.widths[i]
            c.row[2 + i] = self.widths[i] * c.size
        tables = _new_tables(N_TABLES, c.batch)
        try:
            _set_sequences(&c, call, tables)
            for i in range(self.n):
                self._step(i, &c, call)
                PyErr_CheckSignals()
        finally:
            PyMem_RawFree(tables)

    cdef void _step(self, int i, Call *c, call) except *:
        cdef Step step = self.steps[i]  # a copy: several threads may run one program
        cdef int64_t h
        if step.kind == LINEAR_STEP:
            step.linear.dtype = c.dtype
            step.linear.m = c.m
            step.linear.x, step.linear.x_row = c.data[step.x], c.row[step.x]
            step.linear.out, step.linear.out_row = c.data[step.out], c.row[step.out]
            if step.residual >= 0:
                step.linear.residual, step.linear.residual_row = c.data[step.residual], c.row[step.residual]
            _run_linear(&step.linear, c.threads)
        elif step.kind == ATTEND_STEP:
            _run_attend(&step, c, call)
        else:
            step.norm.dtype = c.dtype
            step.norm.m = c.m
            step.norm.x, step.norm.x_row = c.data[step.x], c.row[step.x]
            step.norm.out, step.norm.out_row = c.data[step.out], c.row[step.out]
            if step.kind == NORM_STEP:
                step.norm.n = c.columns[step.x]
                _run_rows(&step.norm, c.threads)
                return
            for h in range(step.heads):
                _run_rows(&step.norm, c.threads)
                step.norm.x += step.norm.n * c.size
                step.norm.out += step.norm.n * c.size
                step.norm.weight = <const char *>step.norm.weight + step.norm.n * (8 if c.dtype == FA_F64 else 4)


cdef void _set_sequences(Call *c, call, int64_t *tables) except *:
    """Fill what all steps share; `tables` has room for N_TABLES."""
    cdef tuple batch_shape = (c.batch,)
    cdef cnp.ndarray cos, sin, starts
    cdef fa_array start
    cdef int64_t b, at, n = c.batch
    c.x_table, c.out_table, c.begin_table, c.end_table = tables, tables + n, tables + 2 * n, tables + 3 * n
    if call.rotation is not None:
        cos, sin = call.rotation
        c.pairs = cnp.PyArray_DIMS(cos)[cnp.PyArray_NDIM(cos) - 1]
        _set_array(&c.cos, cos, 3, batch_shape, n, tables + 4 * n)
        _set_array(&c.sin, sin, 3, batch_shape, n, tables + 5 * n)
    if call.slots is not None:
        _set_array(&c.k, call.slots.k, 3, batch_shape, n, tables + 6 * n)
        _set_array(&c.v, call.slots.v, 3, batch_shape, n, tables + 7 * n)
        starts = np.asarray(call.slots.starts)
        _set_array(&start, starts, 0, batch_shape, n, tables + 8 * n)
        c.len_k = call.slots.length
        c.new_k, c.new_v = c.k, c.v
        c.new_k.batch, c.new_v.batch = tables + 9 * n, tables + 10 * n
        for b in range(n):
            at = (<int64_t *>(start.data + start.batch[b]))[0]
            tables[9 * n + b] = c.k.batch[b] + at * c.k.row
            tables[10 * n + b] = c.v.batch[b] + at * c.v.row


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
    cdef tuple batch_shape = (c.batch,)
    cdef fa_array new
    cdef int64_t b
    for b in range(c.batch):
        c.x_table[b] = b * c.length * c.row[step.x]
        c.out_table[b] = b * c.length * c.row[step.out]
    a.batch, a.len_q, a.len_k = c.batch, c.length, c.length
    a.q.dtype = a.k.dtype = a.v.dtype = a.out.dtype = c.dtype
    a.q.batch = a.k.batch = a.v.batch = c.x_table
    a.q.head = a.k.head = a.v.head = a.out.head = a.head_dim * c.size
    a.q.row = a.k.row = a.v.row = c.row[step.x]
    a.q.col = a.k.col = a.v.col = a.out.col = c.size
    a.q.data = c.data[step.x]
    a.k.data = a.q.data + a.heads_q * a.q.head
    a.v.data = a.k.data + a.heads_kv * a.k.head
    a.out.data, a.out.batch, a.out.row = c.data[step.out], c.out_table, c.row[step.out]
    if c.k.data == NULL:
        if c.pairs:
            _move_heads(c, &a.q, a.heads_q + a.heads_kv, a.head_dim, c.pairs, &a.q)
    else:
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
        _set_array(&a.row_begin, begin, 2, batch_shape, c.batch, c.begin_table)
    if end is not None:
        _set_array(&a.row_end, end, 2, batch_shape, c.batch, c.end_table)
    _run_attention(a, c.threads)

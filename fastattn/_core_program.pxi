# Operations one after another over the same rows, in one call: a part of _core.pyx, which includes it.

cdef enum:
    MAX_BUFFERS = 8  # x, out, and the places in memory

ctypedef enum StepKind:
    LINEAR_STEP, NORM_STEP, ATTEND_STEP

# What of an operation is the same in every call. Buffers by their numbers, -1: none.
cdef struct Step:
    StepKind kind
    int x, out, residual
    fa_linear_args linear
    fa_rows_args norm
    fa_attention_args attend


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
            to.x, to.out = step.x, step.out
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
            else:
                to.kind = ATTEND_STEP
                to.attend.heads_q, to.attend.heads_kv = step.heads, step.heads_kv
                to.attend.head_dim = to.attend.head_dim_v = step.head_dim
                to.attend.scale = step.head_dim**-0.5

    def __dealloc__(self):
        PyMem_RawFree(self.steps)

    def run(self, cnp.ndarray x, cnp.ndarray out, cnp.ndarray memory, int64_t batch, cnp.ndarray lengths,
            int num_threads):
        """Run the steps on rows x and out, (batch * length, features); the first lengths (batch) keys count."""
        cdef char *data[MAX_BUFFERS]
        cdef int64_t row[MAX_BUFFERS]
        cdef int64_t columns[MAX_BUFFERS]
        cdef fa_dtype dtype = _dtype(x)
        cdef int64_t m = cnp.PyArray_DIMS(x)[0], size = cnp.PyArray_ITEMSIZE(x)
        cdef int threads = num_threads if FA_OPENMP else 1, i
        cdef int64_t *tables
        data[0], columns[0] = _rows(x, &row[0]), cnp.PyArray_DIMS(x)[1]
        data[1], columns[1] = _rows(out, &row[1]), cnp.PyArray_DIMS(out)[1]
        for i in range(self.n_places):
            data[2 + i] = <char *>cnp.PyArray_DATA(memory) + m * self.begins[i] * size
            columns[2 + i] = self.widths[i]
            row[2 + i] = self.widths[i] * size
        tables = <int64_t *>PyMem_RawMalloc(3 * (batch + 1) * sizeof(int64_t))
        if tables == NULL:
            raise MemoryError(f"fastattn: no memory for the tables of {batch} batch items")
        try:
            for i in range(self.n):
                self._step(i, data, row, columns, m, batch, lengths, dtype, threads, tables)
        finally:
            PyMem_RawFree(tables)

    cdef void _step(self, int i, char **data, int64_t *row, int64_t *columns, int64_t m, int64_t batch,
                    cnp.ndarray lengths, fa_dtype dtype, int threads, int64_t *tables) except *:
        cdef Step step = self.steps[i]  # a copy: several threads may run one program
        cdef int64_t b, length = m // batch, size = row[step.x] // columns[step.x]
        cdef fa_attention_args *a = &step.attend
        if step.kind == LINEAR_STEP:
            step.linear.dtype = dtype
            step.linear.m = m
            step.linear.x, step.linear.x_row = data[step.x], row[step.x]
            step.linear.out, step.linear.out_row = data[step.out], row[step.out]
            if step.residual >= 0:
                step.linear.residual, step.linear.residual_row = data[step.residual], row[step.residual]
            _run_linear(&step.linear, threads)
        elif step.kind == NORM_STEP:
            step.norm.dtype = dtype
            step.norm.m, step.norm.n = m, columns[step.x]
            step.norm.x, step.norm.x_row = data[step.x], row[step.x]
            step.norm.out, step.norm.out_row = data[step.out], row[step.out]
            _run_rows(&step.norm, threads)
        else:  # queries, keys and values lie side by side in a row of x, head after head
            a.batch, a.len_q, a.len_k = batch, length, length
            for b in range(batch):
                tables[b] = b * length * row[step.x]
                tables[batch + b] = b * length * row[step.out]
                tables[2 * batch + b] = b * <int64_t>sizeof(int64_t)
            a.q.dtype = a.k.dtype = a.v.dtype = a.out.dtype = dtype
            a.q.batch = a.k.batch = a.v.batch = tables
            a.q.head = a.k.head = a.v.head = a.out.head = a.head_dim * size
            a.q.row = a.k.row = a.v.row = row[step.x]
            a.q.col = a.k.col = a.v.col = a.out.col = size
            a.q.data = data[step.x]
            a.k.data = a.q.data + a.heads_q * a.q.head
            a.v.data = a.k.data + a.heads_kv * a.k.head
            a.out.data, a.out.batch, a.out.row = data[step.out], tables + batch, row[step.out]
            if lengths is not None:
                a.row_end.data, a.row_end.batch = <char *>cnp.PyArray_DATA(lengths), tables + 2 * batch
            _run_attention(a, threads)

# Operations one after another over the same rows, in one call: a part of _core.pyx, which includes it.
# `fastattn._engine.steps` describes them. A new kind is a class here and its line in _STEPS.

cdef enum:
    MAX_BUFFERS = 24  # x, out, inputs and the places in memory
    FIRST_PLACE = 3
    MAX_ROTATIONS = 4
    MAX_SIZES = 4
    CHAIN_LEAST_ROWS = 24  # of a task: two passes of the products with most rows a pass
    # Of a call's batch: rotations; and for each size of heads the cache, starts, and where new tokens go.
    N_TABLES = 9 * MAX_SIZES + 2 * MAX_ROTATIONS

# (batch * length, columns) of `size` bytes; `row` bytes lie between the beginnings of two rows.
cdef struct Buffer:
    char *data
    int64_t row, columns, size
    fa_dtype dtype

# A cache of heads of one size, and where new tokens go there; without a cache their data is NULL.
cdef struct Held:
    fa_array k, v, new_k, new_v
    fa_array k_scale, v_scale, new_k_scale, new_v_scale  # of a cache in int8
    int64_t heads, head_dim, len_k

# What the steps of one call share: its buffers, and what a `fastattn._engine.steps.Sequences` says of their rows.
cdef struct Call:
    Buffer buffers[MAX_BUFFERS]
    fa_dtype dtype, between  # of the caller's rows, and of buffers that may be shorter
    int64_t size, m, batch  # size: bytes of `dtype`
    int64_t length  # of each sequence, or of a ragged batch the rows of all
    void *sequences  # a _Sequences; NULL: all have one length
    int threads
    int64_t chain_rows
    fa_array cos[MAX_ROTATIONS]
    fa_array sin[MAX_ROTATIONS]
    int64_t pairs[MAX_ROTATIONS]
    int rotations
    Held held[MAX_SIZES]
    int sizes


# A step whose rows each need one row of its buffers, in a call; but for where these are.
cdef struct Rowwise:
    bint product  # what computes it: `linear`, or else `rows`
    fa_linear_args linear
    fa_linear_plan plans[2]  # of a chain's blocks, and of the last one, which may have fewer rows
    fa_rows_args rows
    int x, out, other  # buffers; `other` is added or, with `multiplies`, multiplied with; -1: none
    bint multiplies
    int64_t begin, out_begin  # bytes of a row of x, and of out, before the step's features
    int64_t times, weight_bytes  # of the norm of several heads: one after the other, each with weights of its own

# Such steps, one after another over the same block of rows, as one task. A thread's `own` buffers serve only them.
cdef struct Chain:
    const Rowwise *steps
    int n
    Buffer buffers[MAX_BUFFERS]
    int64_t own[MAX_BUFFERS]  # where in a thread's scratch; 0: the buffer is the call's
    int64_t m, rows  # of the call, of a task


cdef class _Step:
    """One step: what is the same in every call. Several threads may run it, so `run` changes only copies."""

    cdef int number, x, out
    cdef bint doubles  # whether its parameters are float64
    cdef list kept  # parameters that C points into: (array, where its data were, how many elements)

    def __init__(self, int number, step, buffers):
        self.number, self.kept = number, []
        self.x, self.out = self._buffer(step.x, buffers), self._buffer(step.out, buffers)
        self._set(step, buffers)

    cdef int _buffer(self, name, buffers) except -1:
        """The number of the buffer `name`."""
        if name not in buffers:
            raise ValueError(f"fastattn: step {self.number} has buffer {name!r} of {', '.join(buffers)}")
        return buffers[name]

    cdef void _keep(self, tuple arrays) except *:
        self.kept += [(x, <uintptr_t>cnp.PyArray_DATA(x), cnp.PyArray_SIZE(x)) for x in arrays if x is not None]

    cdef void require_kept(self) except *:
        """Raise if a parameter's memory has moved or shrunk: C would read what is no longer there."""
        for array, data, size in self.kept:
            if <uintptr_t>cnp.PyArray_DATA(array) != data or cnp.PyArray_SIZE(array) != size:
                raise _misfit("a parameter", array, "that of the layer's construction: it was changed in place")

    cdef void _require_one_dtype(self, Call *c, int one, int other) except *:
        """Raise if two buffers, -1 for none, differ where the kernel takes one dtype for both."""
        if other >= 0 and c.buffers[one].dtype != c.buffers[other].dtype:
            raise ValueError(f"fastattn: step {self.number} has buffers of two dtypes")

    cdef void _require_type(self, Call *c) except *:
        if self.doubles != (c.dtype == FA_F64):
            raise ValueError(f"fastattn: step {self.number} has parameters of another type than its rows")

    cdef void _set(self, step, buffers) except *:
        """Take over and check what `step` says."""
        raise NotImplementedError

    cdef void run(self, Call *c, call) except *:
        """Check the call's sizes, which `step` did not know, and compute."""
        raise NotImplementedError


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


cdef class _AttendStep(_Step):
    cdef fa_attention_args args
    cdef int64_t first_kv, keys_begin  # the layer's first head in a cache; or its first feature in `keys`
    cdef int size, ranges, rotation, query_rotation, bias  # which of the call's; -1: none
    cdef int keys  # the buffer of another step's keys; -1: its own, which follow the queries in x
    cdef cnp.ndarray sinks  # (heads,), lane type, or None

    cdef void _set(self, step, buffers) except *:
        self.args.heads_q, self.args.heads_kv = step.heads, step.heads_kv
        self.args.mods.scale, self.args.mods.softcap = step.scale, step.softcap
        self.args.head_dim = self.args.head_dim_v = step.head_dim
        self.first_kv, self.size, self.ranges = step.first_kv, step.size, step.ranges
        self.keys = -1 if step.keys is None else self._buffer(step.keys, buffers)
        self.keys_begin = step.heads * step.head_dim if step.keys is None else step.keys_begin
        self.rotation = -1 if step.rotation is None else step.rotation
        self.query_rotation = self.rotation if step.query_rotation is None else step.query_rotation
        self.bias = -1 if step.bias is None else step.bias
        self.sinks = step.sinks
        if (step.heads_kv <= 0 or step.heads % step.heads_kv or step.head_dim <= 0 or step.first_kv < 0
                or step.size < 0 or self.keys_begin < 0):
            raise ValueError(f"fastattn: attention of {step.heads} heads over {step.heads_kv} of {step.head_dim}")

    cdef void run(self, Call *c, call) except *:
        cdef fa_attention_args a = self.args
        cdef Buffer x = c.buffers[self.x], out = c.buffers[self.out]
        cdef Buffer keys = c.buffers[self.x if self.keys < 0 else self.keys]
        cdef _Tables tables = _Tables((c.batch,), 7)  # of x, keys, out, the ranges, the bias and sinks
        cdef int64_t *x_table = tables.next()
        cdef int64_t *keys_table = tables.next()
        cdef int64_t *out_table = tables.next()
        cdef _Sequences sequences = None if c.sequences == NULL else <_Sequences>c.sequences
        cdef int64_t b, row, pairs
        if max(self.rotation, self.query_rotation) >= c.rotations:
            raise ValueError(f"fastattn: rotation {max(self.rotation, self.query_rotation)} of {c.rotations}")
        pairs = max(_pairs(c, self.rotation), _pairs(c, self.query_rotation))
        if (a.heads_q * a.head_dim > x.columns or self.keys_begin + 2 * a.heads_kv * a.head_dim > keys.columns
                or a.heads_q * a.head_dim > out.columns or 2 * pairs > a.head_dim):
            raise ValueError(f"fastattn: attention of {a.heads_q} heads over {a.heads_kv} of {a.head_dim} has"
                             f" {x.columns} features for queries, {keys.columns} for keys and values from"
                             f" {self.keys_begin} on, {out.columns} for the result, {pairs} pairs to rotate")
        self._require_one_dtype(c, self.x, self.keys)
        self._require_one_dtype(c, self.x, self.out)
        for b in range(c.batch):
            row = b * c.length if sequences is None else sequences.q[b]
            x_table[b], keys_table[b], out_table[b] = row * x.row, row * keys.row, row * out.row
        a.batch, a.len_q, a.len_k = c.batch, c.length, c.length
        # In a row of x, the heads of the queries come first, then those of the keys, then those of the values.
        a.q.dtype, a.q.data, a.q.batch, a.q.row = x.dtype, x.data, x_table, x.row
        a.q.head, a.q.col = a.head_dim * x.size, x.size
        a.k = a.v = a.out = a.q
        a.k.data = keys.data + self.keys_begin * x.size
        a.v.data = a.k.data + a.heads_kv * a.k.head
        a.k.batch = a.v.batch = keys_table
        a.k.row = a.v.row = keys.row
        a.out.data, a.out.batch, a.out.row = out.data, out_table, out.row
        if c.sizes:
            self._append(c, &a)
        else:
            self._turn(c, &a, self.keys < 0)
        begin, end = call.ranges[self.ranges]
        if begin is not None:
            tables.set(&a.masks.row_begin, "row_begin", begin, cnp.NPY_INT64, 2, 1, c.length)
        if end is not None:
            tables.set(&a.masks.row_end, "row_end", end, cnp.NPY_INT64, 2, 1, c.length)
        if self.bias >= 0:
            if self.bias >= len(call.biases):
                raise ValueError(f"fastattn: bias {self.bias} of {len(call.biases)}")
            self._add_bias(c, &a, call.biases[self.bias], tables)
        tables.set(&a.sinks, "sinks", self.sinks, _lane_type(c.dtype), 1, a.heads_q)
        if sequences is not None:
            tables.begin(&a.masks.row_begin, sequences.q)
            tables.begin(&a.masks.row_end, sequences.q)
        self._attend(&a, c.threads, sequences)

    cdef void _attend(self, fa_attention_args *a, int threads, _Sequences sequences) except *:
        """Compute what `run` has checked."""
        _run_attention(a, threads, sequences)

    cdef void _add_bias(self, Call *c, fa_attention_args *a, cnp.ndarray bias, _Tables tables) except *:
        """Let `a` add `bias` (heads, 2 n - 1): for query i and key j what is at j - i from its middle."""
        cdef int64_t longest = a.len_q if c.sequences == NULL else (<_Sequences>c.sequences).longest
        cdef int64_t size = cnp.PyArray_ITEMSIZE(bias), n = (cnp.PyArray_DIM(bias, 1) + 1) // 2
        if longest > n or a.len_k != a.len_q:
            raise ValueError(f"fastattn: a bias of {n - 1} distances to either side for {longest} tokens")
        a.mods.bias.dtype = FA_F64 if c.dtype == FA_F64 else FA_F32
        tables.set(&a.mods.bias, "bias", bias, _lane_type(c.dtype), 2, a.heads_q, 2 * n - 1, 1, True)
        a.mods.bias.data += (n - 1) * size
        a.mods.bias.row, a.mods.bias.col = -size, size

    cdef void _turn(self, Call *c, fa_attention_args *a, bint keys) except *:
        """Rotate queries in place, and `keys`: in one go where both have the same rotation."""
        if self.rotation == self.query_rotation:
            if self.rotation >= 0:
                self._move(c, &a.q, a.heads_q + (a.heads_kv if keys else 0), self.rotation, &a.q)
            return
        self._move(c, &a.q, a.heads_q, self.query_rotation, &a.q)
        if keys:
            self._move(c, &a.k, a.heads_kv, self.rotation, &a.k)

    cdef void _append(self, Call *c, fa_attention_args *a) except *:
        """Rotate; move new keys and values to the cache; let `a` attend to all that it then holds."""
        cdef fa_array new_k, new_v, new_k_scale, new_v_scale
        cdef Held *held = &c.held[self.size]
        cdef bint int8
        if self.size >= c.sizes:
            raise ValueError(f"fastattn: size {self.size} of heads; the cache holds {c.sizes}")
        int8 = held.k.dtype == FA_I8
        if self.first_kv + a.heads_kv > held.heads or a.head_dim != held.head_dim:
            raise ValueError(f"fastattn: {self.first_kv + a.heads_kv} heads of {a.head_dim}; the cache holds"
                             f" {held.heads} of {held.head_dim}")
        # Keys that will be int8: as KVCache.append does, which rounds keys of the call's type.
        self._turn(c, a, int8 and self.keys < 0)
        if self.keys < 0:
            new_k, new_v = self._own(&held.new_k), self._own(&held.new_v)
            new_k_scale, new_v_scale = self._own(&held.new_k_scale), self._own(&held.new_v_scale)
            self._move(c, &a.k, a.heads_kv, -1 if int8 else self.rotation, &new_k, &new_k_scale)
            self._move(c, &a.v, a.heads_kv, -1, &new_v, &new_v_scale)
        a.len_k, a.k, a.v = held.len_k, self._own(&held.k), self._own(&held.v)
        a.k_scale, a.v_scale = self._own(&held.k_scale), self._own(&held.v_scale)

    cdef fa_array _own(self, const fa_array *held):
        """The layer's heads of an array of the cache."""
        cdef fa_array own = held[0]
        if own.data != NULL:
            own.data += self.first_kv * own.head
        return own

    cdef void _move(self, Call *c, fa_array *x, int64_t heads, int rotation, fa_array *out,
                    fa_array *scale=NULL) except *:
        """Copy new tokens' heads from x to out, which may be x, and rotate them; -1: as they are.

        If out is int8, they are rounded, and `scale` receives their scales.
        """
        cdef _Sequences sequences = None if c.sequences == NULL else <_Sequences>c.sequences
        cdef fa_rope_args r
        cdef int64_t b, pairs = _pairs(c, rotation)
        memset(&r, 0, sizeof(r))
        r.x, r.out = x[0], out[0]
        if scale != NULL:
            r.scale = scale[0]
        r.cos = r.sin = x[0]  # nothing is read from them without pairs
        if pairs:
            r.cos, r.sin = c.cos[rotation], c.sin[rotation]
        r.batch = c.batch if sequences is None else 1
        r.length, r.heads, r.head_dim, r.pairs = c.length, heads, self.args.head_dim, pairs
        if sequences is None or out == x:  # if in place, the rows of all are those of one
            _run_rope(&r, c.threads)
            return
        for b in range(c.batch):
            r.length = sequences.q[b + 1] - sequences.q[b]
            _run_rope(&r, c.threads)
            r.x.batch, r.out.batch, r.scale.batch = r.x.batch + 1, r.out.batch + 1, r.scale.batch + 1
            if pairs:
                r.cos.data += r.length * r.cos.row
                r.sin.data += r.length * r.sin.row


cdef int64_t _pairs(Call *c, int rotation) noexcept:
    """Pairs that a rotation of the call turns; none of -1."""
    return 0 if rotation < 0 else c.pairs[rotation]


cdef dict _STEPS = {"linear": _LinearStep, "norm": _NormStep, "add": _AddStep, "gate": _GateStep,
                    "scale": _ScaleStep, "attend": _AttendStep}


cdef void _chain_task(Loop *loop, int64_t task, void *scratch) noexcept nogil:
    """All steps of a chain over one block of rows, which stay in the thread's caches."""
    cdef const Chain *chain = <const Chain *>loop.args
    cdef Buffer here[MAX_BUFFERS]
    cdef const fa_linear_plan *plan
    cdef fa_linear_args a
    cdef fa_rows_args r
    cdef int64_t i, j, first = task * chain.rows, m = min(chain.rows, chain.m - first)
    for i in range(MAX_BUFFERS):
        here[i] = chain.buffers[i]
        if chain.own[i]:
            here[i].data = <char *>scratch + chain.own[i]
        elif here[i].data != NULL:  # another chain's own buffer, or no inputs
            here[i].data += first * here[i].row
    for i in range(chain.n):
        if fa_flag(&loop.stop):
            return
        if chain.steps[i].product:
            a = _linear_at(&chain.steps[i], here, m)
            plan = <fa_linear_plan *>chain.steps[i].plans + (m < chain.rows)
            (<int64_t *>scratch)[0] = 0  # see fa_linear_plan
            for j in range(plan.n_tasks):
                loop.kernels.linear_run(&a, plan, j, scratch)
        for j in range(chain.steps[i].times):
            r = _rows_at(&chain.steps[i], here, m, j)
            loop.kernels.rows_run(&r, 0, m, scratch)


def chain_rows(int64_t n, int64_t row_bytes, int64_t weights, int threads):
    """Rows of a task of chains of n rows; 0: their steps go one by one.

    A row takes `row_bytes` of a chain's own buffers, and a chain has weights of so many bytes, at most.
    """
    cdef int64_t tasks, most
    if n < threads * CHAIN_LEAST_ROWS:
        return 0
    _kernels(FA_F32)
    most = min(fa_tuned.chain_rows, fa_tuned.chain_bytes // max(1, row_bytes))
    if most < min(fa_tuned.chain_rows, 2 * CHAIN_LEAST_ROWS) or most == 0 or weights > 16 * fa_tuned.chain_bytes:
        return 0
    tasks = (n + most - 1) // most
    tasks = (tasks + threads - 1) // threads * threads
    return (n + tasks - 1) // tasks


cdef class _Chain(_Step):
    """Steps that run one after another over a block of rows; `own`, (width, is between), are buffers of only them."""

    cdef tuple steps, own
    cdef int first  # of these buffers

    def __init__(self, tuple steps, tuple own, int first):
        self.steps, self.own, self.first, self.kept = steps, own, first, []

    cdef void require_kept(self) except *:
        cdef _Step step
        for step in self.steps:
            step.require_kept()

    cdef void run(self, Call *c, call) except *:
        cdef Chain chain
        cdef Loop loop
        cdef Rowwise *steps
        cdef fa_linear_args a
        cdef int64_t i, j, kernels_bytes = 0, bytes = 0
        cdef double flops = 0
        chain.n, chain.m, chain.rows = len(self.steps), c.m, c.chain_rows if c.chain_rows > 0 else c.m
        loop.kernels, loop.args = _kernels(c.dtype), &chain
        steps = <Rowwise *>PyMem_RawMalloc(chain.n * sizeof(Rowwise))
        if steps == NULL:
            raise MemoryError(f"fastattn: no memory for {chain.n} steps")
        try:
            chain.steps = steps
            for i, (width, between) in enumerate(self.own):
                _set_dtype(&c.buffers[self.first + i], width, c.between if between else c.dtype)
                c.buffers[self.first + i].row = _row_apart(c.buffers[self.first + i].row)
            for i in range(chain.n):
                _bind(self.steps[i], c, &steps[i])
                steps[i].linear.watch = steps[i].rows.watch = &loop.watch
                if not steps[i].product:
                    kernels_bytes = max(kernels_bytes, loop.kernels.rows_scratch_bytes(steps[i].rows.n))
                    continue
                for j in range(2):
                    a = _linear_at(&steps[i], c.buffers, (c.m - 1) % chain.rows + 1 if j else chain.rows)
                    loop.kernels.linear_plan(&a, 1, &steps[i].plans[j])
                    kernels_bytes = max(kernels_bytes, steps[i].plans[j].scratch_bytes)
                flops += steps[i].plans[0].flops * c.m / chain.rows
            chain.buffers, bytes = c.buffers, (kernels_bytes + 63) // 64 * 64
            memset(chain.own, 0, sizeof(chain.own))
            for i in range(self.first, self.first + len(self.own)):
                chain.own[i] = bytes
                bytes += chain.rows * chain.buffers[i].row
            _run(&loop, _chain_task, (c.m + chain.rows - 1) // chain.rows, _if_pays(flops, c.threads), bytes)
        finally:
            PyMem_RawFree(steps)


cdef int64_t _row_apart(int64_t n) noexcept:
    """Bytes from row to row of n: whole cache lines, but no multiple of 4 KB, which would meet in the same sets."""
    n = (n + 63) // 64 * 64
    return n if n % 4096 else n + 64


cdef class Program:
    """The steps of a `fastattn._engine.program.Program`, as C has them; it keeps their arrays alive.

    `chains` are steps that go together, (begin, end, {name: width} of buffers that only they need). The buffers
    `between` int8 products and attention are of the type that kernels of float32 say, where there is no cache.
    """

    cdef tuple steps
    cdef int n_places
    cdef bint between[MAX_BUFFERS]
    cdef int64_t begins[MAX_BUFFERS]  # of the places in a call's memory, in features
    cdef int64_t widths[MAX_BUFFERS]

    def __cinit__(self, steps, places, chains=(), between=()):
        self.n_places = len(places)
        if self.n_places + max([len(own) for *_, own in chains], default=0) > MAX_BUFFERS - FIRST_PLACE:
            raise ValueError(f"fastattn: {self.n_places} places; expected at most {MAX_BUFFERS - FIRST_PLACE}")
        for i, (name, place) in enumerate(places.items()):
            self.begins[i], self.widths[i] = place
            self.between[i] = name in between
            if self.begins[i] < 0 or self.widths[i] < 0:
                raise ValueError(f"fastattn: a place at {place}")
        names = {name: i for i, name in enumerate(["x", "out", "inputs", *places])}
        made, done = [], 0
        for begin, end, own in [*chains, (len(steps), len(steps), {})]:
            made += [_STEPS[steps[i].op](i, steps[i], names) for i in range(done, begin)]
            here = names | {name: len(names) + i for i, name in enumerate(own)}
            chain = tuple([_STEPS[steps[i].op](i, steps[i], here) for i in range(begin, end)])
            if chain:
                own_buffers = tuple([(width, name in between) for name, width in own.items()])
                made.append(_Chain(chain, own_buffers, len(names)))
            done = end
        self.steps = tuple(made)

    def run(self, cnp.ndarray x, cnp.ndarray out, cnp.ndarray memory, call, int num_threads, int64_t chain_rows=0):
        """Run the steps on rows x and out, (batch * length, features); `call` is a Sequences.

        Chains go through `chain_rows` rows at a time; 0: all.
        """
        cdef Call c
        cdef int i
        cdef _Step step
        cdef _Tables tables
        cdef _Sequences sequences
        memset(&c, 0, sizeof(c))
        for step in self.steps:
            step.require_kept()
        c.dtype, c.between, c.size = _dtype(x), _dtype(x), cnp.PyArray_ITEMSIZE(x)
        if c.dtype == FA_F32 and not call.slots:
            c.between = _kernels(c.dtype).linear_between()
        c.batch, c.m = call.batch, len(x)
        if call.begins is not None:
            begins = call.begins
            if call.slots:  # the keys of each: those in the cache, and the new ones
                begins = np.append(0, np.cumsum(np.diff(begins) + call.slots[0].starts))
            sequences = _Sequences(call.begins, begins, c.m, begins.max())
            if sequences.count != c.batch:
                raise ValueError(f"fastattn: begins of {sequences.count} sequences for {c.batch}")
            c.sequences, c.length = <void *>sequences, c.m
        elif c.batch <= 0 or c.m % c.batch:
            raise ValueError(f"fastattn: {c.m} rows of {c.batch} sequences of one length")
        else:
            c.length = c.m // c.batch
        c.threads, c.chain_rows = num_threads, chain_rows
        _set_buffer(&c.buffers[0], "x", x, &c)
        _set_buffer(&c.buffers[1], "out", out, &c)
        if call.inputs is not None:
            _set_buffer(&c.buffers[2], "inputs", call.inputs, &c)
        for i in range(self.n_places):
            if c.m * (self.begins[i] + self.widths[i]) * c.size > cnp.PyArray_NBYTES(memory):
                raise ValueError(f"fastattn: {memory.nbytes} bytes of memory are too few for {c.m} rows")
            _set_dtype(&c.buffers[FIRST_PLACE + i], self.widths[i], c.between if self.between[i] else c.dtype)
            c.buffers[FIRST_PLACE + i].data = <char *>cnp.PyArray_DATA(memory) + c.m * self.begins[i] * c.size
        tables = _Tables((c.batch,), N_TABLES)
        _set_sequences(&c, call, tables)
        for step in self.steps:
            step.run(&c, call)
            PyErr_CheckSignals()


cdef void _set_buffer(Buffer *buffer, name, cnp.ndarray array, Call *c) except *:
    """One of the caller's arrays."""
    _set_dtype(buffer, array.shape[1], c.dtype)
    buffer.data = _rows(name, array, c.m, buffer.columns, c.dtype, &buffer.row)


cdef void _set_dtype(Buffer *buffer, int64_t columns, fa_dtype dtype) noexcept:
    """Let rows of so many elements follow each other."""
    buffer.size = 8 if dtype == FA_F64 else 4 if dtype == FA_F32 else 2
    buffer.columns, buffer.row, buffer.dtype = columns, columns * buffer.size, dtype


cdef void _set_sequences(Call *c, call, _Tables tables) except *:
    """Fill what `call` says: rotations, and places in the cache."""
    cdef cnp.ndarray cos, sin
    cdef int64_t i, lane = _lane_type(c.dtype)
    c.rotations = len(call.rotations)
    if c.rotations > MAX_ROTATIONS:
        raise ValueError(f"fastattn: {c.rotations} rotations; expected at most {MAX_ROTATIONS}")
    for i in range(c.rotations):
        cos, sin = call.rotations[i]
        c.pairs[i] = cos.shape[cnp.PyArray_NDIM(cos) - 1]
        tables.set(&c.cos[i], "cos", cos, lane, 3, 1, c.length, c.pairs[i], True)
        tables.set(&c.sin[i], "sin", sin, lane, 3, 1, c.length, c.pairs[i], True)
    c.sizes = len(call.slots)
    if c.sizes > MAX_SIZES:
        raise ValueError(f"fastattn: a cache of {c.sizes} sizes of heads; expected at most {MAX_SIZES}")
    for i in range(c.sizes):
        _set_slots(c, call.slots[i], &c.held[i], tables)
        # Of sequences of different lengths, the numbers of keys are those of the first size.
        if c.sequences != NULL and (c.held[i].len_k != c.held[0].len_k or not np.array_equal(
                call.slots[i].starts, call.slots[0].starts)):
            raise ValueError("fastattn: caches of two sizes of heads have other lengths")


cdef void _set_slots(Call *c, slots, Held *held, _Tables tables) except *:
    """Fill what the call says of heads of one size."""
    cdef fa_array start
    cdef _Sequences sequences = None if c.sequences == NULL else <_Sequences>c.sequences
    cdef int64_t b, at, capacity, length = c.length, lane = _lane_type(c.dtype)
    cdef int64_t *new_k
    cdef int64_t *new_v
    cdef int64_t *new_k_scale
    cdef int64_t *new_v_scale
    cdef bint int8
    scales = slots.k_scale, slots.v_scale
    _, held.heads, capacity, held.head_dim = slots.k.shape
    int8 = scales[0] is not None
    tables.set_rows(&held.k, "k", slots.k, held.heads, capacity, held.head_dim, int8)
    tables.set_rows(&held.v, "v", slots.v, held.heads, capacity, held.head_dim, int8)
    tables.set(&held.k_scale, "k_scale", scales[0], lane, 2, held.heads, capacity)
    tables.set(&held.v_scale, "v_scale", scales[1], lane, 2, held.heads, capacity)
    if (int8 != (scales[1] is not None)) or held.k.dtype != held.v.dtype or not (
            int8 or held.k.dtype == c.dtype or (c.dtype == FA_F32 and held.k.dtype in (FA_F16, FA_BF16))):
        raise ValueError("fastattn: the cache is of another type than the rows")
    tables.kept = np.asarray(slots.starts)
    tables.set(&start, "starts", tables.kept, cnp.NPY_INT64, 0)
    held.len_k = slots.length
    held.new_k, held.new_v, held.new_k_scale, held.new_v_scale = held.k, held.v, held.k_scale, held.v_scale
    new_k, new_v, new_k_scale, new_v_scale = tables.next(), tables.next(), tables.next(), tables.next()
    for b in range(c.batch):
        at = (<int64_t *>(start.data + start.batch[b]))[0]
        if sequences is not None:
            length = sequences.q[b + 1] - sequences.q[b]
        if at < 0 or at + length > capacity or held.len_k > capacity:
            raise ValueError(f"fastattn: tokens {at} to {at + length} of a cache for {capacity}")
        new_k[b] = held.k.batch[b] + at * held.k.row
        new_v[b] = held.v.batch[b] + at * held.v.row
        if int8:
            new_k_scale[b] = held.k_scale.batch[b] + at * held.k_scale.row
            new_v_scale[b] = held.v_scale.batch[b] + at * held.v_scale.row
    held.new_k.batch, held.new_v.batch = new_k, new_v
    held.new_k_scale.batch, held.new_v_scale.batch = new_k_scale, new_v_scale

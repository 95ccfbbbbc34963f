# Operations one after another over the same rows, in one call: a part of _core.pyx, which includes it.
# `fastattn._engine.steps` describes them. A new kind is a class in row_steps.pxi or attend_step.pxi, and its line in
# _STEPS.

cdef enum:
    MAX_BUFFERS = 24  # x, out, inputs and the places in memory
    FIRST_PLACE = 3
    MAX_ROTATIONS = 4

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
    Held *held  # one for each of `Sequences.slots`
    int sizes


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
            c.between = _kernels(c.dtype).linear.between()
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
        # Of a call's batch: rotations; and of each of the slots the cache, starts, and where new tokens go.
        tables = _Tables((c.batch,), 2 * MAX_ROTATIONS + 9 * len(call.slots))
        held = bytearray(len(call.slots) * sizeof(Held))
        c.held = <Held *>PyByteArray_AS_STRING(held)
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
    _, held.heads, capacity, held.head_dim = shape_of(slots.k)
    int8 = scales[0] is not None
    tables.set_rows(&held.k, "k", slots.k, held.heads, capacity, held.head_dim, int8, True)
    tables.set_rows(&held.v, "v", slots.v, held.heads, capacity, held.head_dim, int8, True)
    tables.set(&held.k_scale, "k_scale", scales[0], lane, 2, held.heads, capacity)
    tables.set(&held.v_scale, "v_scale", scales[1], lane, 2, held.heads, capacity)
    if (int8 != (scales[1] is not None)) or held.k.dtype != held.v.dtype or not (
            held.k.dtype in (FA_I8, FA_I4, c.dtype) or (c.dtype == FA_F32 and held.k.dtype in (FA_F16, FA_BF16))):
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

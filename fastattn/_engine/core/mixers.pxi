# Mixers of recurrent layers as steps of a program: a part of _core.pyx, which includes it.
# `fastattn.layers._mixers` says what each computes.

cdef enum:
    N_MIXED = 16  # tables of a call of a mixer


cdef class _Carried:
    """The sequences of one call: where each begins among the rows, and a layer's states."""

    cdef _Tables tables
    cdef const int64_t *begins  # (batch + 1)
    cdef int64_t batch, longest
    cdef bint ragged
    cdef object before, after  # of the convolution and of the recurrence; None: no states

    cdef void rows(self, fa_array *x, const Buffer *buffer, int64_t column, int64_t width, Call *c) except *:
        """Point `x` at heads of `width` features of a buffer, side by side in each row from `column` on."""
        cdef int64_t b
        cdef int64_t *table = self.tables.next()
        for b in range(self.batch):
            table[b] = self.begins[b] * buffer.row
        x.data, x.batch, x.dtype = buffer.data + column * c.size, table, c.dtype
        x.head, x.row, x.col = width * c.size, buffer.row, c.size

    cdef void state(self, fa_array *x, name, cnp.ndarray array, fa_dtype dtype, int64_t heads, int64_t rows,
                    int64_t columns) except *:
        """Point `x` at states (batch, heads, rows, columns); None stays NULL."""
        cdef int64_t b, size
        cdef int64_t *table
        if array is None:
            return
        if _dtype(array) != dtype:
            raise _misfit(name, array, "another type")
        if name == "out_state" and not array.flags.writeable:
            raise _misfit(name, array, "a writable array")
        x.data = <char *>_data(name, array, self.batch * heads * rows * columns, cnp.PyArray_TYPE(array))
        table, size = self.tables.next(), cnp.PyArray_ITEMSIZE(array)
        x.dtype, x.batch, x.head, x.row, x.col = dtype, table, rows * columns * size, columns * size, size
        for b in range(self.batch):
            table[b] = b * heads * x.head


cdef _Carried _carried(Call *c, call, int64_t layer):
    """The sequences of a call, and the states of a layer."""
    cdef _Carried carried = _Carried()
    cdef _Sequences sequences = None if c.sequences == NULL else <_Sequences>c.sequences
    cdef int64_t b
    cdef int64_t *begins
    carried.tables, carried.batch, carried.ragged = _Tables((c.batch + 1,), N_MIXED), c.batch, sequences is not None
    if sequences is not None:
        carried.begins, carried.longest = sequences.q, sequences.longest
    else:
        begins = carried.tables.next()
        for b in range(c.batch + 1):
            begins[b] = b * c.length
        carried.begins, carried.longest = begins, c.length
    if call.states is None:
        carried.before = carried.after = (None, None)
    else:
        if not 0 <= layer < len(call.states) or not call.states[layer]:
            raise ValueError(f"fastattn: states of {len(call.states)} layers; expected some of layer {layer}")
        carried.before = [each.get("state") for each in call.states[layer]]
        carried.after = [each.get("out_state") for each in call.states[layer]]
    return carried


cdef void _keep_inputs(const fa_conv_args *a, const fa_array *after, int64_t size) noexcept:
    """Write the last inputs of each sequence to `after`, which may be the state."""
    cdef int64_t s, i, new, many = a.width - 1, bytes = a.channels * size
    cdef char *to
    for s in range(a.sequences):
        new = min(many, a.begins[s + 1] - a.begins[s])
        to = after.data + after.batch[s]
        if a.state.data == NULL:
            memset(to, 0, (many - new) * bytes)
        elif new < many:
            memmove(to, a.state.data + a.state.batch[s] + new * bytes, (many - new) * bytes)
        for i in range(new):
            memcpy(to + (many - new + i) * bytes, a.x.data + (a.begins[s + 1] - new + i) * a.x.row, bytes)


cdef void _run_heads(fa_rows_args a, int64_t heads, int64_t size, int threads) except *:
    """Run rows that lie side by side in each of the m rows of `a`, whichever makes fewer calls."""
    cdef int64_t i, width = a.n * size, calls = min(a.m, heads)
    cdef bint by_token = a.m < heads
    cdef int64_t x = a.x_row if by_token else width, up = a.up_row if by_token else width
    cdef int64_t out = a.out_row if by_token else width
    if by_token:
        a.m, a.x_row, a.up_row, a.out_row = heads, width, width, width
    for i in range(calls):
        _run_rows(&a, threads)
        a.x += x
        a.out += out
        if a.up != NULL:
            a.up += up


cdef class _MixStep(_Step):
    """A mixer: a convolution of some columns of the rows, and what is said below."""

    cdef fa_conv_args conv
    cdef int held  # buffer of what the convolution gives
    cdef int64_t layer

    cdef void _set(self, step, buffers) except *:
        cdef cnp.ndarray weight = step.mixer.conv_weight
        self.doubles = weight.dtype == np.float64
        if cnp.PyArray_NDIM(weight) != 3 or weight.shape[1] != 1:
            raise _misfit("conv_weight", weight, "(channels, 1, width)")
        self.conv.channels, self.conv.width = weight.shape[0], weight.shape[2]
        if not 1 <= self.conv.width <= FA_MOST_WIDTH:
            raise _misfit("conv_weight", weight, f"a width of 1 to {FA_MOST_WIDTH}")
        self.conv.weight = self._parameter("conv_weight", weight, weight.size)
        self.conv.bias = self._parameter("conv_bias", step.mixer.conv_bias, self.conv.channels)
        self.layer = step.layer
        self.held = self._buffer("convolved" if step.scratch else step.out, buffers)
        self._set_mixer(step.mixer)

    cdef void _set_mixer(self, mixer) except *:
        """Take over and check what is beside the convolution."""

    cdef const void *_parameter(self, name, cnp.ndarray array, int64_t size) except? NULL:
        """The data of a parameter, of the lane type; NULL for None."""
        self._keep((array,))
        return _data(name, array, size, cnp.NPY_DOUBLE if self.doubles else cnp.NPY_FLOAT)

    cdef void _require_columns(self, Call *c, int64_t x, int64_t held, int64_t out) except *:
        self._require_type(c)
        cdef int64_t *found = [c.buffers[self.x].columns, c.buffers[self.held].columns, c.buffers[self.out].columns]
        if found[0] != x or found[1] < held or found[2] != out:
            raise ValueError(f"fastattn: step {self.number} mixes {x} features to {out}; it has {found[0]} and"
                             f" {found[2]}, and {found[1]} between them")

    cdef _Carried _convolve(self, Call *c, call, int64_t column):
        """Convolve the columns of x from that one on, and keep the last inputs."""
        cdef fa_conv_args a = self.conv
        cdef fa_array after
        cdef _Carried carried = _carried(c, call, self.layer)
        a.sequences, a.begins = c.batch, carried.begins
        carried.rows(&a.x, &c.buffers[self.x], column, a.channels, c)
        carried.rows(&a.out, &c.buffers[self.held], 0, a.channels, c)
        carried.state(&a.state, "state", carried.before[0], c.dtype, 1, a.width - 1, a.channels)
        _run_conv(&a, c.m, c.threads)
        if carried.after[0] is not None:
            carried.state(&after, "out_state", carried.after[0], c.dtype, 1, a.width - 1, a.channels)
            _keep_inputs(&a, &after, c.size)
        return carried


cdef class _ConvolutionStep(_MixStep):
    """``C * conv(B * x)`` of rows B, C, x."""

    cdef void run(self, Call *c, call) except *:
        cdef int64_t d = self.conv.channels
        cdef Buffer x = c.buffers[self.x], out = c.buffers[self.out]
        cdef fa_rows_args a
        self._require_columns(c, 3 * d, d, d)
        memset(&a, 0, sizeof(a))
        a.kind, a.dtype, a.m, a.n, a.up_each = FA_ACTIVATE, c.dtype, c.m, d, 1  # with no activation
        a.x, a.x_row, a.up, a.up_row, a.out, a.out_row = x.data, x.row, x.data + 2 * d * c.size, x.row, x.data, x.row
        _run_rows(&a, c.threads)
        self._convolve(c, call, 0)
        a.x, a.up, a.up_row, a.out, a.out_row = x.data + d * c.size, out.data, out.row, out.data, out.row
        _run_rows(&a, c.threads)


cdef class _RecurrentStep(_MixStep):
    """A recurrence after the convolution, of `heads` states (dim, dim_v), with a gated norm after it."""

    cdef int64_t heads, groups, dim, dim_v
    cdef object mixer  # which makes decays
    cdef fa_recurrent_args args
    cdef fa_rows_args norm  # after the recurrence

    cdef void _set_heads(self, mixer, int64_t groups) except *:
        """Take over the sizes of states, and parameters of heads; queries and keys have so many heads."""
        ((self.heads, self.dim, self.dim_v),) = mixer.recurrences
        self.groups = groups
        if min(self.heads, groups, self.dim, self.dim_v) <= 0 or self.heads % groups:
            raise ValueError(f"fastattn: {self.heads} states of {self.dim} by {self.dim_v} for {groups} keys")
        self.conv.activation = _ACTIVATIONS["silu"]
        self.mixer, self.args.heads, self.args.heads_v = mixer, self.heads, self.heads
        self.args.heads_q = self.args.heads_k = groups
        self.args.head_dim, self.args.head_dim_v, self.args.causal = self.dim, self.dim_v, True
        self.norm.kind, self.norm.eps, self.norm.up_each = FA_RMS_NORM, mixer.eps, 1
        self.norm.activation = _ACTIVATIONS["silu"]

    cdef void _recur(self, Call *c, _Carried carried, int64_t q, int64_t k, int64_t v, int64_t a, int64_t b) except *:
        """Run the recurrence of what is convolved: q, k and v are its columns there, a and b those of x.

        Of a the mixer makes decays; of b the sigmoid is beta, or if that is -1 there is none.
        """
        cdef fa_recurrent_args r = self.args
        cdef Buffer *held = &c.buffers[self.held]
        cdef fa_dtype lane = _lane(c.dtype)
        cdef cnp.ndarray after
        if len(carried.after) != 2:
            raise ValueError(f"fastattn: {len(carried.after)} states of layer {self.layer}; expected two")
        after = carried.after[1]
        real = np.float64 if lane == FA_F64 else np.float32
        decays, strengths = self.mixer.decays(self._columns(c, a))
        if b >= 0:
            strengths = self._columns(c, b, True)
            strengths = (strengths * strengths.dtype.type(self.mixer.beta_scale)).astype(real, copy=False)
        carried.rows(&r.q, held, q, self.dim, c)
        carried.rows(&r.k, held, k, self.dim, c)
        carried.rows(&r.v, held, v, self.dim_v, c)
        carried.rows(&r.out, &c.buffers[self.out], 0, self.dim_v, c)
        self._per_token(&r.log_decay, "decays", decays, carried, c)
        self._per_token(&r.strength if b < 0 else &r.beta, "strengths", strengths, carried, c)
        carried.state(&r.state, "state", carried.before[1], lane, self.heads, self.dim, self.dim_v)
        if after is None:
            after = np.empty((c.batch, self.heads, self.dim, self.dim_v), real)
        carried.state(&r.state_out, "out_state", after, lane, self.heads, self.dim, self.dim_v)
        r.batch, r.len_q, r.len_k = c.batch, carried.longest, carried.longest
        if carried.ragged:
            lengths = [carried.begins[i + 1] - carried.begins[i] for i in range(c.batch)]
            order = np.argsort(np.negative(lengths), kind="stable")
            r.begins, r.order = carried.begins, <const int64_t *>_data("order", order, c.batch, cnp.NPY_INT64)
        _run_recurrent(&r, c.threads)

    cdef cnp.ndarray _columns(self, Call *c, int64_t column, bint sigmoid=False):
        """A number of each head (tokens, heads), of the rows of x from that column on, or its sigmoid."""
        cdef Buffer x = c.buffers[self.x]
        cdef fa_rows_args a
        cdef cnp.npy_intp *shape = [c.m, self.heads]
        cdef cnp.ndarray found = cnp.PyArray_EMPTY(2, shape, _type(c.dtype), 0)
        memset(&a, 0, sizeof(a))
        a.kind, a.dtype, a.m, a.n = FA_ACTIVATE, c.dtype, c.m, self.heads
        a.activation = _ACTIVATIONS["sigmoid"] if sigmoid else _ACTIVATIONS[None]
        a.x, a.x_row = x.data + column * c.size, x.row
        a.out, a.out_row = <char *>cnp.PyArray_DATA(found), self.heads * c.size
        _run_rows(&a, c.threads)
        return found

    cdef void _per_token(self, fa_array *x, name, cnp.ndarray numbers, _Carried carried, Call *c) except *:
        """Point `x` at numbers (tokens, heads) of the lane type."""
        cdef int64_t b, size = cnp.PyArray_ITEMSIZE(numbers)
        cdef int64_t *table = carried.tables.next()
        x.data = <char *>_data(name, numbers, c.m * self.heads, _lane_type(c.dtype))
        x.dtype, x.head, x.row, x.batch = _lane(c.dtype), size, self.heads * size, table
        for b in range(carried.batch):
            table[b] = carried.begins[b] * x.row


cdef class _DeltaStep(_RecurrentStep):
    """Rows have what is convolved, queries, keys and values; then z, b and a."""

    cdef fa_rows_args unit  # of queries and keys, which are divided by their lengths

    cdef void _set_mixer(self, mixer) except *:
        self._set_heads(mixer, mixer.key_heads)
        if self.conv.channels != 2 * self.groups * self.dim + self.heads * self.dim_v:
            raise _misfit("conv_weight", mixer.conv_weight, "the channels of queries, keys and values")
        scale = mixer.head_dim**-0.5
        self.args.scale = scale
        one = np.full(self.dim, scale, np.float64 if self.doubles else np.float32)
        self.unit.kind, self.unit.eps, self.unit.n = FA_RMS_NORM, 1e-6 / self.dim, self.dim
        self.unit.weight = self._parameter("unit", one, self.dim)
        self.norm.n = self.dim_v
        self.norm.weight = self._parameter("norm_weight", mixer.norm_weight, self.dim_v)

    cdef void run(self, Call *c, call) except *:
        cdef int64_t keys = self.groups * self.dim, inner = self.heads * self.dim_v, all = 2 * keys + inner
        cdef Buffer x = c.buffers[self.x], held = c.buffers[self.held], out = c.buffers[self.out]
        cdef fa_rows_args a = self.unit
        self._require_columns(c, all + inner + 2 * self.heads, all, inner)
        carried = self._convolve(c, call, 0)
        a.dtype, a.m, a.x, a.x_row, a.out, a.out_row = c.dtype, c.m, held.data, held.row, held.data, held.row
        _run_heads(a, 2 * self.groups, c.size, c.threads)
        self._recur(c, carried, 0, keys, 2 * keys, all + inner + self.heads, all + inner)
        a = self.norm
        a.dtype, a.m, a.x, a.x_row, a.out, a.out_row = c.dtype, c.m, out.data, out.row, out.data, out.row
        a.up, a.up_row = x.data + all * c.size, x.row
        _run_heads(a, self.heads, c.size, c.threads)


cdef class _Mamba2Step(_RecurrentStep):
    """Rows have z; x, B and C, which are convolved; then dt."""

    cdef int64_t parts  # of a row that are normed

    cdef void _set_mixer(self, mixer) except *:
        self._set_heads(mixer, mixer.groups)
        self.parts, self.norm.n = mixer.norm_weights.shape
        cdef int64_t inner = self.heads * self.dim_v
        if self.conv.channels != 2 * self.groups * self.dim + inner or self.parts * self.norm.n != inner:
            raise _misfit("conv_weight", mixer.conv_weight, "the channels of x, B and C, and x those of the norm")
        self.args.scale = 1
        self.args.skip = self._parameter("D", mixer.D, self.heads)
        self.norm.gate_first = True
        self.norm.weight = self._parameter("norm_weights", mixer.norm_weights, inner)

    cdef void run(self, Call *c, call) except *:
        cdef int64_t states = self.groups * self.dim, inner = self.heads * self.dim_v, all = inner + 2 * states, i
        cdef Buffer x = c.buffers[self.x], out = c.buffers[self.out]
        cdef fa_rows_args a = self.norm
        self._require_columns(c, inner + all + self.heads, all, inner)
        carried = self._convolve(c, call, inner)
        self._recur(c, carried, inner + states, inner, 0, inner + all, -1)
        a.dtype, a.m, a.x, a.x_row, a.out, a.out_row = c.dtype, c.m, out.data, out.row, out.data, out.row
        a.up, a.up_row = x.data, x.row
        for i in range(self.parts):
            _run_rows(&a, c.threads)
            a.x, a.out, a.up = a.x + a.n * c.size, a.out + a.n * c.size, a.up + a.n * c.size
            a.weight = <const char *>a.weight + a.n * (8 if self.doubles else 4)


cdef dict _MIXERS = {"convolution": _ConvolutionStep, "delta": _DeltaStep, "mamba2": _Mamba2Step}
_STEPS["mix"] = lambda number, step, buffers: _MIXERS[step.mixer.kind](number, step, buffers)

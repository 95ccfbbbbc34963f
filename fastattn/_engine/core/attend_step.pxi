# The step of attention, with its cache and rotations: a part of _core.pyx, which includes it.

cdef class _AttendStep(_Step):
    cdef fa_attention_args args
    cdef int64_t first_kv, keys_begin  # the layer's first head in a cache; or its first feature in `keys`
    cdef int size, ranges, rotation, query_rotation, bias  # which of the call's; -1: none
    cdef int keys  # the buffer of another step's keys; -1: its own, which follow the queries in x
    cdef cnp.ndarray sinks  # (heads,), lane type, or None

    cdef void _set(self, step, buffers) except *:
        self.args.heads_q, self.args.heads_kv = step.heads, step.heads_kv
        _fill_modifiers(&self.args.mods, step.modifiers)
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
        # A row of x holds the heads of queries, then of keys, then of values.
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
        cdef bint rounds
        if self.size >= c.sizes:
            raise ValueError(f"fastattn: size {self.size} of heads; the cache holds {c.sizes}")
        rounds = held.k.dtype >= FA_I8
        if self.first_kv + a.heads_kv > held.heads or a.head_dim != held.head_dim:
            raise ValueError(f"fastattn: {self.first_kv + a.heads_kv} heads of {a.head_dim}; the cache holds"
                             f" {held.heads} of {held.head_dim}")
        # Keys that are rounded: as KVCache.append does, which rounds keys of the call's type.
        self._turn(c, a, rounds and self.keys < 0)
        if self.keys < 0:
            new_k, new_v = self._own(&held.new_k), self._own(&held.new_v)
            new_k_scale, new_v_scale = self._own(&held.new_k_scale), self._own(&held.new_v_scale)
            self._move(c, &a.k, a.heads_kv, -1 if rounds else self.rotation, &new_k, &new_k_scale)
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

        If out is int8 or int4, they are rounded; `scale` receives the scales of int8.
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
        if sequences is None or out == x:  # in place, all sequences rotate as one
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
